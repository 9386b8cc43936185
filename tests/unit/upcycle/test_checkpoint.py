"""The reader returns what the safetensors package wrote, reads only the tensors requested, and notices changed files."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tests.unit.shapes import llama_shapes, make_shaped
from upcycle.io import checkpoint
from upcycle.io.checkpoint import DTYPES, INDEX, Checkpoint, count_non_finite, read_header

READABLE = sorted(name for name, bits in DTYPES.values() if isinstance(getattr(torch, name, None), torch.dtype))
FLOATS = [name for name in READABLE if getattr(torch, name).is_floating_point]
WITH_INFINITY = ["bfloat16", "float16", "float32", "float64", "float8_e5m2"]


def save(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    (folder / "config.json").write_text('{"model_type": "llama", "pad_token_id": -1}')
    return folder


def save_two(folder: Path) -> Path:
    """Save two files and an index; b is in the second."""
    save(folder, {"a": torch.arange(6.0).reshape(3, 2)}, "model-1.safetensors")
    save(folder, {"b": torch.arange(6.0, 9.0)}, "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    # total_size is wrong, which must not matter
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": -5}, "weight_map": weight_map}))
    return folder


def poke(file: Path, at: int, data: bytes) -> None:
    """Overwrite bytes of a file and restore its times, so that only the content shows the change."""
    status = os.stat(file)
    with open(file, "r+b") as handle:
        handle.seek(at)
        handle.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ---- round trips


@pytest.mark.parametrize("dtype", READABLE)
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: str) -> None:
    kind, rng = getattr(torch, dtype), torch.Generator().manual_seed(0)
    tensors = {}
    for i, shape in enumerate([(), (0,), (3, 0, 2), (1,), (5,), (4, 3), (2, 1, 3, 2)]):
        size = prod(shape) * kind.itemsize
        data = torch.randint(2 if dtype == "bool" else 256, (size,), generator=rng, dtype=torch.uint8)
        tensors[f"t{i}"] = data.view(kind).reshape(shape)
    with Checkpoint.open(save(tmp_path, tensors)) as ours:
        assert ours.entries.keys() == tensors.keys()
        for name, want in tensors.items():
            got = ours.read(name, check=False)
            assert (got.dtype, got.shape, as_bytes(got)) == (want.dtype, want.shape, as_bytes(want))
            entry = ours.entries[name]
            assert (entry.dtype, entry.shape) == (dtype, tuple(want.shape))
            assert entry.file.read_bytes()[entry.start : entry.stop] == as_bytes(want)


def test_types_below_a_byte_are_listed_and_not_read(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"xx")
    (tmp_path / "config.json").write_text("{}")
    with (
        Checkpoint.open(tmp_path) as ours,
        pytest.raises(ValueError, match=r"'a' .* is F4, which torch has no type for"),
    ):
        assert ours.entries["a"].shape == (4,)
        ours.read("a")


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from([(), (3,), (2, 5), (0,)]))
def test_rows_are_a_slice(
    tmp_path_factory: pytest.TempPathFactory, first: int, last: int, rest: tuple[int, ...]
) -> None:
    whole = torch.arange(9 * prod(rest), dtype=torch.float32).reshape(9, *rest)
    with Checkpoint.open(save(tmp_path_factory.getbasetemp() / "rows", {"pad": torch.ones(3), "w": whole})) as ours:
        if first > last:
            with pytest.raises(ValueError, match=f"no rows {first} to {last}"):
                ours.read("w", (first, last))
            return
        got = ours.read("w", (first, last))
        assert got.shape == whole[first:last].shape and torch.equal(got, whole[first:last])
        assert got.untyped_storage().nbytes() == got.nbytes  # nothing else was read or kept


@pytest.mark.parametrize("rows", [(-1, 1), (0, 10), (3, 2)])
def test_rows_that_do_not_exist(tmp_path: Path, rows: tuple[int, int]) -> None:
    with Checkpoint.open(save(tmp_path, {"w": torch.ones(9, 2), "scalar": torch.ones(())})) as ours:
        for name in ("w", "scalar"):
            with pytest.raises(ValueError, match="has no rows"):
                ours.read(name, rows)
        with pytest.raises(ValueError, match=r"no tensor 'x' among its 2"):
            ours.read("x")


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((5000,), float(i)) for i in range(20)}
    with Checkpoint.open(save(tmp_path, tensors)) as ours, ThreadPoolExecutor(8) as pool:
        for name, got in zip(list(tensors) * 5, pool.map(ours.read, list(tensors) * 5), strict=True):
            assert torch.equal(got, tensors[name])


# ---- values


@pytest.mark.parametrize("dtype", WITH_INFINITY)
@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf"])
def test_a_value_that_is_not_finite_is_refused_by_name_and_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, value: str
) -> None:
    monkeypatch.setattr(checkpoint, "BLOCK", 64)  # so that the bad values lie in different blocks
    kind = getattr(torch, dtype)
    values = torch.linspace(-50000.0, 50000.0, 400).to(kind).reshape(40, 10)
    broken = values.clone()
    bad = torch.tensor(float(value.lstrip("-"))) * (-1 if value[0] == "-" else 1)
    for row in (0, 17, 39):
        broken[row, 9] = bad.to(kind)
    with Checkpoint.open(save(tmp_path, {"good": values, "bad": broken})) as ours:
        assert torch.equal(ours.read("good").view(torch.uint8), values.view(torch.uint8))
        with pytest.raises(ValueError, match=r"tensor 'bad' .* 3 values that are NaN or infinite among 400;"):
            ours.read("bad")
        with pytest.raises(ValueError, match="1 values that are NaN or infinite among 10;"):
            ours.read("bad", (17, 18))
        assert ours.read("bad", (1, 17)).isfinite().all()  # bad values in other rows do not matter
        assert as_bytes(ours.read("bad", check=False)) == as_bytes(broken)


@pytest.mark.parametrize("dtype", [name for name in FLOATS if getattr(torch, name).itemsize <= 2])
def test_every_bit_pattern_is_judged_right(dtype: str) -> None:
    kind = getattr(torch, dtype)
    patterns = np.arange(2 ** (8 * kind.itemsize), dtype=f"u{kind.itemsize}")
    finite = torch.from_numpy(patterns.view(np.uint8)).view(kind).float().isfinite()
    found = [count_non_finite(p.view(np.uint8), kind) for p in np.split(patterns, len(patterns))]
    assert found == (~finite).int().tolist()
    assert count_non_finite(patterns.view(np.uint8), kind) == sum(found)


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8), st.sampled_from(["float32", "float64", "complex64"])
)
def test_wide_bit_patterns_are_judged_right(patterns: list[int], dtype: str) -> None:
    edges = [0x7F7FFFFF7F800000, 0xFF8000007F7FFFFF, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFEFFFFFFFFFFFFF]
    for values in (patterns, *([*patterns, edge] for edge in edges)):
        data = np.array(values, dtype=np.uint64).view(np.uint8)
        want = ~torch.from_numpy(data).view(getattr(torch, dtype)).isfinite()
        assert count_non_finite(data, getattr(torch, dtype)) == want.sum()


# ---- folders


def test_an_index_and_its_files(tmp_path: Path) -> None:
    save(save_two(tmp_path), {"c": torch.ones(1)}, "consolidated.safetensors")  # not in the index: not of this model
    with Checkpoint.open(str(tmp_path)) as ours:
        assert [file.name for file in ours.files] == ["model-1.safetensors", "model-2.safetensors"]
        assert ours.config == {"model_type": "llama", "pad_token_id": -1} and ours.folder == tmp_path
        assert ours.read("a").tolist() == [[0, 1], [2, 3], [4, 5]] and ours.read("b").tolist() == [6, 7, 8]
        assert ours.entries["b"] == read_header(tmp_path / "model-2.safetensors")["b"]


def test_one_file_of_any_name(tmp_path: Path) -> None:
    with Checkpoint.open(save(tmp_path, {"w": torch.ones(2)}, "weights.safetensors")) as ours:
        assert ours.read("w").tolist() == [1, 1]


def test_the_hub_cache_is_made_of_links(tmp_path: Path) -> None:
    save_two(tmp_path / "real")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    for i, file in enumerate(sorted((tmp_path / "real").iterdir())):
        file.rename(tmp_path / "blobs" / str(i))
        (tmp_path / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/{i}")
    with Checkpoint.open(tmp_path / "snapshots" / "abc") as ours:
        assert ours.read("b").tolist() == [6, 7, 8]


def test_a_hub_id_is_downloaded_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(repo=repo, revision=revision, patterns=allow_patterns)
        return str(save_two(tmp_path / "got"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for source, revision in (("org/some-model.v1", None), ("org/some-model.v1@refs/pr/3", "refs/pr/3")):
        with Checkpoint.open(source) as ours:
            assert ours.read("b").tolist() == [6, 7, 8]
        assert (asked["repo"], asked["revision"]) == ("org/some-model.v1", revision)
    files = {"model-1.safetensors", INDEX, "config.json", "tokenizer.model", "merges.txt", "chat_template.jinja"}
    files |= {"pytorch_model.bin", "modeling_x.py", "model.gguf", "training_args.pt"}
    chosen = set(huggingface_hub.utils.filter_repo_objects(files, allow_patterns=asked["patterns"]))
    assert files - chosen == {"pytorch_model.bin", "modeling_x.py", "model.gguf", "training_args.pt"}


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no route to host\nand 40 more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ValueError, match=r"^org/model is not a local folder and cannot be downloaded from the Hub: no route to host$"
    ):
        Checkpoint.open("org/model")


@pytest.mark.parametrize(
    "source", ["", "model", "./org/model", "/org/model", "org/../model", "a/b/c", "org/m@", Path("org/model")]
)
def test_what_is_neither_a_folder_nor_a_hub_id(
    source: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=r"not a folder or a hub id.*hf download org/name"):
        Checkpoint.open(source)


def test_copied_files(tmp_path: Path) -> None:
    kept = [
        "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "merges.txt",
        "preprocessor_config.json", "qwen.tiktoken", "special_tokens_map.json", "spiece.model", "tekken.json",
        "tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "tokenizer_config.json", "vocab.json", "vocab.txt",
    ]  # fmt: skip
    left = [
        "README.md", "modeling_x.py", "tokenization_x.py", "tokenizer.py", "tokenizer.pkl", "training_args.bin",
        "pytorch_model.bin", "other.safetensors.index.json", "optimizer.pt", ".hidden.model", "adapter_config.json",
        "trainer_state.json",
    ]  # fmt: skip
    save_two(tmp_path)
    for name in (*kept, *left):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.model").mkdir()
    with Checkpoint.open(tmp_path) as ours:
        assert [file.name for file in ours.copied_files()] == sorted(kept)


# ---- files that change while open


def test_a_file_that_changes_under_us_is_noticed(tmp_path: Path) -> None:
    file = save(tmp_path, {"w": torch.ones(5000)}) / "model.safetensors"
    with Checkpoint.open(tmp_path) as ours:
        ours.read("w")
        os.utime(file, ns=(1, 1))
        for again in (lambda: ours.read("w"), ours.fingerprint):
            with pytest.raises(ValueError, match=r"model.safetensors changed while it was open here"):
                again()
    with Checkpoint.open(tmp_path) as ours:
        os.truncate(file, file.stat().st_size - 10)
        with pytest.raises(ValueError, match=r"model.safetensors shrank while it was open here"):
            ours.read("w")
        with pytest.raises(ValueError, match="changed while it was open"):
            ours.read("w", (0, 10))  # the bytes are still there, but the file has changed


def test_a_file_that_is_replaced_stays_readable_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(3)})
    with Checkpoint.open(tmp_path) as ours:
        save(tmp_path, {"w": torch.zeros(3)}, "new")
        (tmp_path / "new").rename(tmp_path / "model.safetensors")
        assert ours.read("w").tolist() == [1, 1, 1]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_close_closes_and_a_refusal_leaves_nothing_open(tmp_path: Path) -> None:
    save_two(tmp_path)
    before = open_descriptors()
    ours = Checkpoint.open(tmp_path)
    assert open_descriptors() == before + 2
    ours.close()
    ours.close()
    assert open_descriptors() == before
    for late in (lambda: ours.read("a"), ours.fingerprint):
        with pytest.raises(ValueError, match="was closed"):
            late()
    os.truncate(tmp_path / "model-2.safetensors", 5)
    with pytest.raises(ValueError, match="model-2") as caught:
        Checkpoint.open(tmp_path)
    assert open_descriptors() == before, caught


# ---- fingerprint


def fingerprint(folder: Path) -> str:
    with Checkpoint.open(folder) as ours:
        return ours.fingerprint()


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first = save(tmp_path / "first", {"small": torch.ones(100), "w": torch.zeros(50_000)})
    want = fingerprint(first)
    assert len(want) == 64 and fingerprint(first) == want
    shutil.copytree(first, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "tokenizer.json").write_text("{}")
    assert fingerprint(tmp_path / "elsewhere") == want

    entries = read_header(first / "model.safetensors")
    start, stop = entries["w"].start, entries["w"].stop
    seen = {want}
    for at in (entries["small"].start + 50, start, start + 4095, (start + stop) // 2, stop - 4096, stop - 1):
        other = shutil.copytree(first, tmp_path / str(at))
        poke(other / "model.safetensors", at, b"\x7e")
        seen.add(fingerprint(other))
    assert len(seen) == 7
    for change in ("config", "name", "metadata"):
        other = shutil.copytree(first, tmp_path / change)
        if change == "config":
            (other / "config.json").write_text("{}")
        elif change == "name":
            (other / "model.safetensors").rename(other / "other.safetensors")
        else:
            save_file({"small": torch.ones(100), "w": torch.zeros(50_000)}, other / "model.safetensors", {"a": "b"})
        seen.add(fingerprint(other))
    assert len(seen) == 10

    # the documented limit of a fingerprint: a change between the samples goes unseen
    poke(first / "model.safetensors", start + 4096, b"\x7e")
    assert fingerprint(first) == want


# ---- size


def test_a_70b_checkpoint_costs_nothing_to_open(tmp_path: Path) -> None:
    shapes = llama_shapes(80, 8192, 28672, 64, 8, 128256)
    make_shaped(tmp_path, {"model_type": "llama"}, shapes, shards=30)
    tracemalloc.start()
    with Checkpoint.open(tmp_path) as ours:
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
        tracemalloc.stop()
        assert len(ours.files) == 30 and {n: e.shape for n, e in ours.entries.items()} == shapes
        assert sum(e.stop - e.start for e in ours.entries.values()) == 2 * 70_553_706_496
        assert sum(file.stat().st_blocks * 512 for file in ours.files) < 2_000_000  # the test takes no disk either
        got = ours.read("model.layers.79.mlp.up_proj.weight", (28000, 28004))
        assert got.shape == (4, 8192) and got.untyped_storage().nbytes() == 4 * 8192 * 2 and not got.any()
        assert len(ours.fingerprint()) == 64
