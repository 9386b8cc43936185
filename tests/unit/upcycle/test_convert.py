"""The converter as a program: restarts, kills, shared jobs, slices, and failures of the disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity import tiny
from upcycle.__main__ import main
from upcycle.config.reading import read
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import convert as converting
from upcycle.converting.convert import convert
from upcycle.converting.make import Maker
from upcycle.io import disk, job
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.job import Worker
from upcycle.planning.plan import UpcyclePlan, build

WORDS = ["method.name=drop", "granularity=2", "experts=4", "top_k=4", "max_shard=60KB", "dtype=bfloat16"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.make("llama", tmp_path_factory.mktemp("dense") / "llama")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def reference(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """sha256 of every file of an undisturbed conversion."""
    return digests(run(llama, tmp_path_factory.mktemp("reference") / "moe"))


def load(llama: Path, output: Path, *words: str) -> tuple[UpcyclePlan, list[Checkpoint]]:
    checkpoint = Checkpoint.open(llama)
    config = read(UpcycleConfig, "", [f"source={llama}", f"output={output}", *(words or WORDS)])
    return build(config, [checkpoint]), [checkpoint]


def run(llama: Path, output: Path, *words: str) -> Path:
    return convert(*load(llama, output, *words), quiet=True)


def digests(folder: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.name != "upcycle.json"
    } | {"weights": str(json.loads((folder / "upcycle.json").read_text())["files"])}


def command(llama: Path, output: Path) -> list[str]:
    return [sys.executable, "-m", "upcycle", "convert", f"source={llama}", f"output={output}", *WORDS]


def test_a_converted_folder_has_everything_a_loader_wants(llama: Path, tmp_path: Path) -> None:
    folder = run(llama, tmp_path / "moe")
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors.index.json", "README.md", "upcycle.json"} <= names
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names
    assert not {n for n in names if n.endswith((".part", ".tmp", ".lock")) or n == ".upcycle"}
    manifest = json.loads((folder / "upcycle.json").read_text())
    assert len(manifest["plan"]) == 64
    assert manifest["seed"] == 0
    for name, line in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == line["sha256"]
        if name.endswith(".safetensors"):
            assert all(t.dtype == torch.bfloat16 for t in load_file(folder / name).values())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {name for name in manifest["files"] if name.endswith(".safetensors")}
    assert set(manifest["files"]) == names - {"README.md", "upcycle.json"}
    assert {"torch", "transformers", "safetensors", "upcycle"} <= set(manifest["versions"])
    assert len(manifest["files"]) > 5
    assert not (tmp_path / "moe.partial").exists()


def test_shard_size_changes_the_files_and_not_the_tensors(llama: Path, tmp_path: Path) -> None:
    one = run(llama, tmp_path / "one", *WORDS[:-2], "dtype=bfloat16")
    assert {p.name for p in one.glob("*.safetensors")} == {"model.safetensors"}
    many = run(llama, tmp_path / "many")
    whole = load_file(one / "model.safetensors")
    parts = {k: v for path in many.glob("*.safetensors") for k, v in load_file(path).items()}
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    for path in many.glob("*.safetensors"):
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 60_000 or len(tensors) == 1


def test_several_processes_share_one_job(llama: Path, reference: dict[str, str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "upcycle"]
    done = subprocess.run([*torchrun, *command(llama, tmp_path / "moe")[3:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert digests(tmp_path / "moe") == reference


def test_any_slice_of_any_tensor_is_bit_identical_to_the_file(llama: Path, tmp_path: Path) -> None:
    for words in (
        WORDS,
        ["method.name=virtual_group", "granularity=3", "top_k=3", "target=granitemoe"],
        ["method.name=noise", "shared=0.25", "target=qwen2_moe"],
    ):
        plan, checkpoints = load(llama, tmp_path / words[0] / words[-1], *words)
        folder = convert(plan, checkpoints, quiet=True)
        files = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
        chance = random.Random(1)
        maker = Maker(plan, checkpoints)
        for name, whole in files.items():
            assert torch.equal(maker.tensor(name), whole), name
            index = []
            for size in whole.shape:
                start = chance.randrange(size)
                index.append(slice(start, chance.randint(start, size)))
            piece = Maker(plan, checkpoints).slice(name, tuple(index))
            assert piece.shape == whole[tuple(index)].shape
            assert torch.equal(piece, whole[tuple(index)]), (name, index)
            assert torch.equal(maker.slice(name, (slice(0, 1),)), whole[:1])


def test_output_that_exists_is_left_alone(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "moe"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    assert main(command(llama, output)[3:]) == 2
    assert "exists already; remove it or choose another output" in capsys.readouterr().err
    assert (output / "notes.txt").read_text() == "mine"
    shutil.rmtree(output)
    output.mkdir()
    (output / "upcycle.json").write_text("[]")
    assert main(command(llama, output)[3:]) == 2
    shutil.rmtree(output)
    output.mkdir()  # an empty folder is no obstacle
    run(llama, output)
    with pytest.raises(ValueError, match="result of another plan"):
        run(llama, output, *WORDS, "seed=1")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file exists already|cannot be written"):
        run(llama, tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be written"):
        run(llama, tmp_path / "file" / "below")


def test_an_unfinished_job_of_another_plan_is_not_mixed_in(llama: Path, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    plan, checkpoints = load(llama, tmp_path / "moe")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(converting, "finish", stop)
        convert(plan, checkpoints, quiet=True)
    with pytest.raises(ValueError, match="unfinished conversion with another plan"):
        run(llama, tmp_path / "moe", *WORDS, "seed=1")
    assert len(list((tmp_path / "moe.partial").glob("*.safetensors"))) == len(plan.shards)


def test_two_processes_of_one_rank_do_not_write_at_once(llama: Path, tmp_path: Path) -> None:
    plan, checkpoints = load(llama, tmp_path / "moe")
    identity = {"plan": plan.hash, "source": [c.fingerprint() for c in checkpoints]}
    with (
        job.job(tmp_path / "moe.partial", identity, Worker(), lambda: None),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        convert(plan, checkpoints, quiet=True)


def test_a_full_disk_is_one_sentence_and_loses_nothing(
    llama: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"needs .* GB and .* has 0\.0 GB free"):
        usage = shutil.disk_usage(tmp_path)._replace(free=10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: usage)
            run(llama, tmp_path / "moe")
    assert not (tmp_path / "moe.partial" / "job.json").exists()
    real, room = os.write, [150_000]

    def small_disk(fd: int, data: memoryview) -> int:
        if room[0] < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= len(data)
        return real(fd, data)

    monkeypatch.setattr(os, "write", small_disk)
    with pytest.raises(ValueError, match=r"no space left .* run the same command again"):
        run(llama, tmp_path / "moe")
    monkeypatch.setattr(os, "write", real)
    kept = len(list((tmp_path / "moe.partial").glob("*.safetensors")))
    assert kept >= 1
    assert digests(run(llama, tmp_path / "moe")) == reference


@pytest.mark.parametrize("nth", [1, 2], ids=["when it is written", "when the manifest is written"])
def test_a_shards_record_that_the_disk_cannot_read_is_an_error(
    llama: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The manifest was written without that shard, and nothing said so."""
    first = min(name for name in reference if name.startswith("model-0")).removesuffix(".safetensors") + ".json"
    real, left = converting.read_json, [nth]

    def unreadable(path: Path) -> object:
        left[0] -= path.name == first
        if left[0] == 0 and path.name == first:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(converting, "read_json", unreadable)
    with pytest.raises(ValueError, match=r"model-00001.* cannot be written \(Input"):
        run(llama, tmp_path / "moe")
    run(llama, tmp_path / "moe")
    assert digests(tmp_path / "moe") == reference


@pytest.mark.parametrize(
    ("value", "words", "said"),
    [
        (float("nan"), WORDS, r"down_proj\.weight'? .*has 1 values that are NaN"),
        (1e6, ["dtype=float16"], "down_proj.* beyond float16"),
        (1.0, WORDS, "result of another plan or of an earlier state of the source"),  # than what the folder was made of
    ],
)
def test_a_source_that_cannot_be_converted_to_this_folder_is_named(
    llama: Path, tmp_path: Path, value: float, words: list[str], said: str
) -> None:
    folder = shutil.copytree(llama, tmp_path / "source")
    if value == 1.0:
        run(folder, tmp_path / "moe")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        run(folder, tmp_path / "moe", *words)
    assert (tmp_path / "moe").exists() == (value == 1.0)


def wide(folder: Path) -> Path:
    """A model whose matrices are longer than the samples of a fingerprint."""
    source = tiny.make("llama", folder, vocab_size=2048)
    (source / "tokenizer.json").write_text("{}")
    return source


def change_rows(source: Path, name: str = "model.embed_tokens.weight") -> None:
    """Change 400 rows that no sample of the fingerprint has."""
    tensors = load_file(source / "model.safetensors")
    tensors[name][300:700] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


def test_a_source_that_changed_between_the_samples_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = wide(tmp_path / "source"), tmp_path / "moe"
    words = ["convert", f"source={source}", f"output={output}", "experts=2"]
    assert main(words) == 0
    weights = source / "model.safetensors"
    os.utime(weights, (1, 1))
    assert main(words) == 0  # another time, the same bytes
    assert main(["inspect", str(output), "check=true"]) == 0
    assert "and so is the source" in capsys.readouterr().out
    before = Checkpoint.open(source).fingerprint()
    change_rows(source)
    assert Checkpoint.open(source).fingerprint() == before
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "model.embed_tokens.weight" in said and "has changed since" in said and said.count("\n") == 1
    assert main(["inspect", str(output), "check=true"]) == 1
    assert "model.embed_tokens.weight" in capsys.readouterr().err
    assert main(["verify", str(source), str(output), "tokens=32"]) == 1
    shutil.rmtree(output)
    assert main(words) == 0
    (source / "tokenizer.json").write_text("[]")
    assert main(words) == 2
    assert "tokenizer.json has changed since" in capsys.readouterr().err


def test_finished_shards_of_a_source_that_changed_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = wide(tmp_path / "source")
    words = ["experts=2", "max_shard=300KB"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(converting, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run(source, tmp_path / "moe", *words)
    change_rows(source)
    real, again = converting.write_shard, []

    def note(maker: Maker, partial: Path, name: str, *rest: object) -> None:
        again.append(name)
        real(maker, partial, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(converting, "write_shard", note)
    folder = run(source, tmp_path / "moe", *words)
    changed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert again == [changed["model.embed_tokens.weight"]]
    assert digests(folder) == digests(run(source, tmp_path / "fresh", *words))


@pytest.mark.parametrize("name", ["read", "files"])
def test_a_manifest_that_does_not_say_what_was_read_is_one_sentence(llama: Path, tmp_path: Path, name: str) -> None:
    folder = run(llama, tmp_path / "moe")
    manifest = json.loads((folder / "upcycle.json").read_text())
    (folder / "upcycle.json").write_text(json.dumps(manifest | {"sources": [], name: None}))
    with pytest.raises(ValueError, match=r"does not (record the sources|list its files)"):
        run(llama, tmp_path / "moe")


def test_the_cards_recipe_runs_and_names_no_place(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(llama, tmp_path / "moe", "method.name=drop", "router.init.std=1e-5", "scale=1.0e-5")
    text = (folder / "README.md").read_text()
    assert str(tmp_path.parent) not in text and str(llama.parent) not in text
    recipe = next(word for word in text.split("`") if word.startswith("upcycle plan "))
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main([*recipe.split()[1:], "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == json.loads(Path("upcycle.json").read_text())["plan"]


@pytest.mark.parametrize("sizes", [[4096], [4096, 4096 * 3000, 5], [7, 4096 * 2100, 1], [1], [0, 3, 4096]])
def test_a_stream_writes_and_hashes_what_it_is_given_aligned_or_not(tmp_path: Path, sizes: list[int]) -> None:
    whole = b""
    with disk.Stream(tmp_path / "file") as stream:
        for number, size in enumerate(sizes):
            generator = torch.Generator().manual_seed(number)
            piece = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
            stream.write(piece)
            whole += piece.numpy().tobytes()
            piece.zero_()  # the stream must not read the piece any more
    assert (tmp_path / "file").read_bytes() == whole
    assert stream.bytes == len(whole)
    assert stream.sha256 == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize("name", [".", "/", "a" * 300])
def test_an_output_that_cannot_be_named_is_one_sentence(
    llama: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["convert", f"source={llama}", f"output={name}"]) == 2
    assert "empty name" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "how"),
    [
        ("dense", "is the same as"), ("dense/", "is the same as"), ("./x/../dense", "is the same as"),
        ("link", "is the same as"), ("{here}/dense", "is the same as"), ("dense/moe", "lies in"), ("link/moe", "lies in"),
        ("../here", "contains"), ("{here}", "contains"),
    ],
)  # fmt: skip
def test_an_output_that_is_the_source_is_never_to_be_removed(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
    how: str,
) -> None:
    here = tmp_path / "here"
    source = shutil.copytree(llama, here / "dense")
    (here / "link").symlink_to("dense")
    (here / "x").mkdir()
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    monkeypatch.chdir(here)
    assert main(["convert", "source=dense", f"output={output.format(here=here)}"]) == 2
    said = capsys.readouterr().err
    assert (
        f"{how} the input dense; write another folder, for instance output=dense-moe" in said and "remove" not in said
    )
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert sorted(path.name for path in here.iterdir()) == ["dense", "link", "x"]
    assert main(["convert", "source=link", "output=dense-moe", "experts=2"]) == 0
    assert main(["convert", "source=dense-moe", "output=dense-moe", "experts=2", "top_k=4"]) == 2  # to be grown
    assert "is the same as the input dense-moe" in capsys.readouterr().err
