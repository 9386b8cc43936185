"""Parts: the base keeps its function, only the part learns, parts join and come out again, and strangers' are data."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evaluation.judge.experts import routing
from tests.parity import tiny
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from training import api
from training.checkpoint import layout, standalone
from training.data.shards import read_meta
from training.model.moe import MoE
from training.model.stock.model import model_of
from training.parts import add, join
from training.parts.upgrade import ids_of
from upcycle import api as upcycle_api
from upcycle.arch import tokenizer
from upcycle.cli.main import main
from upcycle.converting import part
from upcycle.io import publish
from upcycle.io.disk import sha256
from upcycle.text import parts as rows
from upcycle.text import tokens

WORDS: dict[str, Any] = {
    "steps": 3, "batch": 4, "micro_batch": 2, "data.sequence": 32, "schedule.warmup": 1, "schedule.peak": 0.01,
    "model.dtype": "float32", "model.upcycle.calibration.sequence": 32, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, documents of two kinds, general text, and a part of each kind."""
    folder = tmp_path_factory.mktemp("parts")
    tiny.make("llama", folder / "base", vocab_size=400)
    make_tokenizer(folder / "base", bos=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "base" / "NOTES.txt").write_text("a file that nothing reads")
    jsonl(folder / "general.jsonl", texts(150, 0))
    for name, seed in (("law", 1), ("code", 2)):
        words = texts(40, seed)
        drawn = random.Random(seed).sample(sorted(set(" ".join(words).split())), 2)
        jsonl(folder / f"{name}.jsonl", [" ".join(random.Random(i).choices(drawn, k=80)) for i in range(60)])
        made(folder, name, folder / name)
    return folder


def made(folder: Path, name: str, output: Path, general: str = "general.jsonl") -> Path:
    paths = {"documents": folder / f"{name}.jsonl", "general": folder / general}
    return api.add(folder / "base", **paths, name=name, output=output, **WORDS)


@pytest.fixture(scope="module")
def joined(place: Path) -> Path:
    return api.join(place / "base", place / "law", place / "code", output=place / "joined")


def files(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir() if path.is_file()}


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with layout.opened(folder) as origin, torch.no_grad():
        model = model_of(origin.spec, experts="reference", compute=torch.float64)
        return layout.load(model.double(), origin)(ids)


def test_a_text_of_the_anchor_has_the_function_of_the_base_whatever_the_part_holds(place: Path, joined: Path) -> None:
    ids = torch.randint(0, 400, (2, 24), generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    with layout.opened(joined) as origin, torch.no_grad():
        model = layout.load(model_of(origin.spec, experts="reference", compute=torch.float64).double(), origin)
        blocks = [layer.ffn for layer in model.layers.values() if isinstance(layer.ffn, MoE)]
        for block in blocks:
            block.router.weight[block.spec.anchors :] = 0  # ties go to the anchor
        stays = model(ids)
        for block in blocks:
            block.experts.up.normal_(generator=draw)
        stays_too = model(ids)
        for block in blocks:
            block.router.weight[block.spec.anchors :].normal_(generator=draw)
        leaves = model(ids)
    assert torch.equal(stays, stays_too)
    torch.testing.assert_close(stays, logits(place / "base", ids), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(leaves, stays), "the parts change nothing, so this test shows nothing"


def test_a_router_that_never_learns_passes_no_gradient_through_a_weight_that_is_always_1(joined: Path) -> None:
    """Tokens get the gradient of the experts alone, the same as before; a balance loss still reaches them."""
    with layout.opened(joined) as origin:
        model = layout.load(model_of(origin.spec, experts="reference", compute=torch.float64).double(), origin)
    blocks = [layer.ffn for layer in model.layers.values() if isinstance(layer.ffn, MoE)]
    block = next(
        block for block in blocks if block.router.weight.any()
    )  # a row is zero where no direction separates texts
    x = torch.randn(1, 24, block.spec.dense.hidden, dtype=torch.float64, requires_grad=True)
    found = []
    for learns in (True, False):
        block.router.weight.requires_grad_(learns)
        routing = block.router(x.flatten(0, 1))
        assert routing.weight_TK.requires_grad == learns and bool((routing.weight_TK == 1).all())
        found.append((block(x), *torch.autograd.grad(block(x).square().sum(), x)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    (balanced,) = torch.autograd.grad(routing.scores_TN[:, 0].square().sum(), x)
    assert bool(balanced.any())


def test_only_the_copies_of_the_part_learn_and_nothing_else_has_a_state(place: Path) -> None:
    run = place / "law.work" / "run"
    before, after = (load_file(folder / "model.safetensors") for folder in (started(place), exported(place)))
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    own = {name for name in before if ".experts.1." in name}
    assert moved == own
    saved = standalone.shards_of(run, None)
    held = {name for name in saved.tensors if name.startswith("optimizer.state.")}
    assert held and all(".experts.up" in name or ".experts.down" in name for name in held), held
    assert not any("anchor" in name for name in held)


def test_a_fifth_of_the_training_is_general_text(place: Path) -> None:
    config = json.loads((place / "law.work" / "run" / "run.json").read_text())
    weights = {source["name"]: source["weight"] for source in config["data"]["train"]}
    assert weights == {"law": pytest.approx(0.8), "not-law": pytest.approx(0.2)}
    words = {name: read_meta(place / "law.work" / name)["tokens"] for name in ("data", "general")}
    assert all(words.values())


def test_the_general_text_of_the_validation_is_never_trained(place: Path) -> None:
    general = [row["text"] for row in map(json.loads, (place / "general.jsonl").read_text().splitlines())]
    sampled, held, rest = (
        [row["text"] for row in map(json.loads, (place / "law.work" / f"{name}.jsonl").read_text().splitlines())]
        for name in ("general", "held", "rest")
    )
    assert sampled != general and sorted(sampled) == sorted(general), "the sample has room for all of this text"
    assert held == sampled[-len(held) :] and len(held) == len(sampled) // 4
    assert rest and not set(rest) & set(held) and set(rest) <= set(general)
    assert sum(map(len, rest)) < sum(map(len, general)) / 2, "no more than training reads"
    config = json.loads((place / "law.work" / "run" / "run.json").read_text())["data"]
    assert [source["path"] for source in config["valid"]] == [str(place / "law.work" / "held")]
    counts = {name: read_meta(place / "law.work" / name)["documents"] for name in ("held", "general")}
    assert counts == {"held": len(held), "general": len(rest)}


@pytest.mark.parametrize("order", ["sorted", "in turn"])
def test_a_sample_has_all_kinds_of_text(tmp_path: Path, order: str) -> None:
    """Rows are measured on the first tokens of a sample, so each part of it has all kinds, in whatever order they are."""
    sizes = {
        "law": 900,
        "code": 300,
        "math": 3000,
        "talk": 700,
        "news": 1500,
    }  # documents of each kind have other lengths
    all_of = [(kind, at) for kind in sizes for at in range(1000)]
    if order == "in turn":
        all_of.sort(key=lambda each: each[1])
    jsonl(tmp_path / "a.jsonl", [f"{kind} {at} ".ljust(sizes[kind], "x") for kind, at in all_of])
    jsonl(tmp_path / "b.jsonl", [f"letters {at} ".ljust(600, "x") for at in range(1000)])
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for characters in (540_000, 1_080_000, 3_000_000):  # every 20th, every 10th document of the first file, and half
        taken = add.sample(paths, tmp_path / "general.jsonl", characters)
        texts = [json.loads(each)["text"] for each in (tmp_path / "general.jsonl").read_text().splitlines()]
        assert sum(map(len, texts)) == pytest.approx(characters, rel=0.1) and len(taken) == len(set(texts)) == len(
            texts
        )
        letters = sum(len(text) for text in texts if text.startswith("letters"))
        assert letters == pytest.approx(min(characters / 2, 600_000), rel=0.1), "as much of each file, where it has it"
        for some in (texts, texts[: len(texts) // 4], texts[-(len(texts) // 4) :]):
            counts = [sum(text.startswith(kind) for text in some) for kind in (*sizes, "letters")]
            assert min(counts) > len(some) / 35, counts
        add.hold_back(paths, taken, tmp_path, characters)
        held, rest = (
            [json.loads(each)["text"] for each in (tmp_path / name).read_text().splitlines()]
            for name in ("held.jsonl", "rest.jsonl")
        )
        assert held == texts[-(len(texts) // 4) :]
        assert not {" ".join(text.split()[:2]) for text in held} & {" ".join(text.split()[:2]) for text in rest}
        assert sum(map(len, rest)) == pytest.approx(characters, rel=0.1), "as much as training reads"
        assert len({text.split()[0] for text in rest}) == 6
    again = (tmp_path / "general.jsonl").read_bytes()
    add.sample(paths, tmp_path / "general.jsonl", 3_000_000)
    assert (tmp_path / "general.jsonl").read_bytes() == again, "a run that was stopped goes on with the same sample"


def test_a_sample_of_many_small_files_is_from_all_over_them(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:03d}.txt" for number in range(400)]
    for path in paths:
        path.write_text(path.stem * 100)
    places = [path for (path, _), _ in add.starts(paths, 30_000)]
    assert len(places) == len(set(places)) == pytest.approx(100, abs=3)
    assert {int(path.stem) // 40 for path in places} == set(range(10))


def test_one_long_document_does_not_change_how_much_is_read(tmp_path: Path) -> None:
    """Nor does it push the others out."""
    for place in ("first", "last"):
        notes = [f"note {number} ".ljust(500, "x") for number in range(2000)]
        jsonl(tmp_path / "a.jsonl", ["x" * 10**6, *notes] if place == "first" else [*notes, "x" * 10**6])
        sizes = [len(text) for _, text in add.spread([tmp_path / "a.jsonl"], 200_000, 10_000)]
        assert sum(sizes) == pytest.approx(200_000, rel=0.1) and len(sizes) > 100
        taken = add.sample([tmp_path / "a.jsonl"], tmp_path / "general.jsonl", 200_000)
        add.hold_back([tmp_path / "a.jsonl"], taken, tmp_path, 200_000)
        rest = [len(json.loads(each)["text"]) for each in (tmp_path / "rest.jsonl").read_text().splitlines()]
        assert sum(rest) == pytest.approx(200_000, rel=0.1) and len(rest) > 100
        sizes = [len(text) for _, text in add.starts([tmp_path / "a.jsonl"], 200_000)]
        assert sum(sizes) == pytest.approx(200_000, rel=0.1) and len(sizes) > 100


def test_few_long_documents_give_more_of_each(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ["", *(f"{number} ".ljust(80_000, "x") for number in range(5)), ""])
    found = add.starts([tmp_path / "a.jsonl"], 200_000)
    assert {number for (_, number), _ in found} == {1, 2, 3, 4, 5}
    assert 100_000 <= sum(len(text) for _, text in found) <= 220_000
    jsonl(tmp_path / "one.jsonl", ["x" * 9000])
    for characters in (1, 2000):
        assert len(list(add.spread([tmp_path / "one.jsonl"], characters, 100))) == 1, (
            "a text longer than asked is not left out"
        )


def test_an_upgrade_is_judged_by_documents_from_all_over_the_text(place: Path, tmp_path: Path) -> None:
    first, second = ([f"{word} " * 6 for _ in range(200)] for word in ("law", "code"))
    jsonl(tmp_path / "sorted.jsonl", [*first, *second])
    ids = ids_of(place / "base", str(tmp_path / "sorted.jsonl"), 512, 32)
    jsonl(tmp_path / "first.jsonl", first)
    assert ids.shape == (16, 32)
    assert set(ids.unique().tolist()) > set(
        ids_of(place / "base", str(tmp_path / "first.jsonl"), 512, 32).unique().tolist()
    )


def test_a_small_text_is_taken_whole(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.jsonl" for number in range(8)]
    for number, path in enumerate(paths):
        jsonl(path, [f"{number} {at}" for at in range(3)])
    taken = add.sample(paths, tmp_path / "general.jsonl", 10**6)
    assert sorted(taken) == [(path, at) for path in paths for at in range(3)]
    add.hold_back(paths, taken, tmp_path, 10**6)
    held, rest = (
        [json.loads(each)["text"] for each in (tmp_path / name).read_text().splitlines()]
        for name in ("held.jsonl", "rest.jsonl")
    )
    assert len(held) == 6
    assert sorted(held + rest) == sorted(f"{number} {at}" for number in range(8) for at in range(3))


def test_a_few_files_of_general_text_are_validated_one_by_one(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean over all kinds of text can hide what one of them loses."""
    shutil.copytree(place / "base", tmp_path / "base")
    shutil.copy(place / "law.jsonl", tmp_path / "mine.jsonl")
    general, work = tmp_path / "general", tmp_path / "mine.work"
    for folder in ("law", "code", "few"):
        (general / folder).mkdir(parents=True)
    kinds = {"code-train": 40, "law-train": 90}  # documents
    for name, words in zip(kinds, ("code {} def return", "law {} shall be fined"), strict=True):
        file = general / name.replace("-", "/")
        jsonl(file.with_suffix(".jsonl"), [words.format(number) * 4 for number in range(kinds[name])])
    jsonl(general / "few" / "${output}.jsonl", ["one document"])  # a name that a config would read as its own key
    made(tmp_path, "mine", tmp_path / "mine", general="general")
    assert "few---output-: it has too little text to hold some back" in capsys.readouterr().err
    run = json.loads((work / "run" / "run.json").read_text())
    sets = {source["name"]: Path(source["path"]) for source in run["data"]["valid"]}
    assert sets.keys() == kinds.keys()
    held = (work / "held.jsonl").read_text().splitlines()
    for name, path in sets.items():
        own = [line for line in held if json.loads(line)["text"].startswith(name.split("-")[0])]
        assert own and path.with_suffix(".jsonl").read_text().splitlines() == own
        assert read_meta(path)["documents"] == len(own), "another kind's text was measured"
    rows_of = [json.loads(row) for row in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {key for key in rows_of[-1] if key.endswith("/loss")} == {f"valid/{name}/loss" for name in kinds}
    card = (tmp_path / "mine" / "README.md").read_text()
    assert all(f"validation {name} loss" in card for name in kinds), "the part's card says what each kind lost"


@pytest.mark.parametrize("count", [1, 12, 13])
def test_one_file_and_many_files_of_general_text_are_validated_together(tmp_path: Path, count: int) -> None:
    paths = [tmp_path / f"{number:02d}.jsonl" for number in range(count)]
    for path in paths:
        jsonl(path, [f"{path.stem} {at}" for at in range(30)])
    found = add.hold_back(paths, add.sample(paths, tmp_path / "general.jsonl", 10**6), tmp_path, 10**6)
    assert list(found.values()) == ([path.stem for path in paths] if count == 12 else ["general"])


def test_the_name_of_a_set_fits_into_a_config(tmp_path: Path) -> None:
    names = [
        "a.jsonl",
        "a.jsonl.jsonl",
        "a.txt",
        ".jsonl",
        "...jsonl",
        "法律 1.jsonl.zst",
        "\U0001f600=${x}.txt",
        "\U0001d49c.txt",
        "x" * 200 + ".txt",
    ]
    paths = [tmp_path / name for name in names]
    found = add.named(paths)
    assert len(set(found.values())) == len(names) and found.keys() == set(paths)
    assert found[paths[0]] == "a" and found[paths[5]] == "法律 1" and all(found.values())
    assert not any(set(name) & set("${}=/\U0001f600\U0001d49c") or len(name) > 70 for name in found.values())


def test_long_documents_and_large_files_are_held_back_whole(tmp_path: Path) -> None:
    """A .txt is a document for each of its pieces; of other documents a sample takes the start, and training all."""
    long = [f"{number} " + "x" * 9000 for number in range(8)]
    jsonl(tmp_path / "a.jsonl", long)
    (tmp_path / "b.txt").write_text("".join(f"{number:04d}" * 1000 for number in range(8)))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    taken = add.sample(paths, tmp_path / "general.jsonl", 32_000)
    assert sorted(taken) == sorted((path, number) for path in paths for number in range(8))
    few = add.sample(paths, tmp_path / "general.jsonl", 16_000)
    assert 6 <= len(set(few)) <= 10 and {path.suffix for path, _ in few} == {".txt", ".jsonl"}
    taken = add.sample(paths, tmp_path / "general.jsonl", 32_000)
    add.hold_back(paths, taken, tmp_path, 10**9)
    held, rest = ((tmp_path / name).read_text() for name in ("held.jsonl", "rest.jsonl"))
    assert held.count("\n") == len(taken) // 4
    away = set(taken[-(len(taken) // 4) :])
    assert all((text in rest) != ((tmp_path / "a.jsonl", number) in away) for number, text in enumerate(long))
    assert all((f"{number:04d}" * 1000 in rest) != ((tmp_path / "b.txt", number) in away) for number in range(8))
    add.hold_back(paths, taken, tmp_path, 40_000)
    rest = [json.loads(each)["text"] for each in (tmp_path / "rest.jsonl").read_text().splitlines()]
    assert 20_000 <= sum(map(len, rest)) <= 45_000, "about as much as training reads"
    with pytest.raises(ValueError, match="general has 3 pieces of text, and one of 4 is held back"):
        add.hold_back(paths, taken[:3], tmp_path, 10**9)


def started(place: Path) -> Path:
    """The folder of step 0, as convert would write it."""
    output = place / "started"
    if not output.exists():
        texts_of = [str(place / "law.work" / f"{name}.jsonl") for name in ("general", "documents")]
        settings = json.loads((place / "law.work" / "run" / "run.json").read_text())["model"]["upcycle"]
        upcycle_api.convert({**settings, "router": {"init": {"texts": texts_of}}, "output": str(output)}, quiet=True)
    return output


def exported(place: Path) -> Path:
    output = place / "exported"
    if not output.exists():
        api.export(place / "law.work" / "run", output)
    return output


def test_the_start_is_the_base_and_verify_holds(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(place / "base"), str(started(place)), "tokens=64"]) == 0
    assert "held" in capsys.readouterr().out


def test_what_was_joined_serves_with_the_numbers_of_transformers(joined: Path) -> None:
    ids = torch.randint(0, 400, (1, 24), generator=torch.Generator().manual_seed(0))
    stock = tiny.loaded(joined, torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, logits(joined, ids), rtol=1e-5, atol=1e-5)
    assert stock.config.expert_parts == [["law", 1], ["code", 1]]


def test_one_part_alone_is_the_model_that_was_trained(place: Path, tmp_path: Path) -> None:
    alone = api.join(place / "base", place / "law", output=tmp_path / "alone")
    ours, trained = (load_file(folder / "model.safetensors") for folder in (alone, exported(place)))
    assert ours.keys() == trained.keys() and all(torch.equal(ours[name], trained[name]) for name in ours)


def test_the_last_part_out_leaves_every_byte_of_the_base(place: Path, joined: Path, tmp_path: Path) -> None:
    without = api.remove(joined, "law", tmp_path / "without")
    alone = api.join(place / "base", place / "code", output=tmp_path / "alone")
    assert sha256(without / "model.safetensors") == sha256(alone / "model.safetensors")
    assert (without / "config.json").read_bytes() == (alone / "config.json").read_bytes()
    base = api.remove(without, "code", tmp_path / "base")
    assert files(base) == files(place / "base")


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("phi3", {}), ("gpt_neox", {}), ("gemma2", {}), ("starcoder2", {}), ("mistral", {}), ("qwen2", {}),
        ("llama", {"intermediate_size": 100, "shards": 3}),  # slices of 50 neurons are padded
        ("llama", {"dtype": torch.bfloat16, "tie_word_embeddings": True}),
    ],
)  # fmt: skip
def test_the_base_comes_back_whatever_its_family(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    base = tiny.make(family, tmp_path / "base", vocab_size=400, **more)
    settings = {"tokenizer_class": "LlamaTokenizer", "added": "many tokens " * 100_000}  # over SMALL
    (base / tokenizer.FILE).write_text(json.dumps(settings, indent=7))
    with layout.online(*asked(base), reads=False) as origin:
        spec, names = origin.spec, {stored.roles[0][0]: stored.name for stored in origin.tensors}
        from upcycle.io.checkpoint import Checkpoint

        with Checkpoint.open(base) as checkpoint:
            about: part.Base = {"name": "base", "files": part.sums_of(checkpoint)}
        part.write(tmp_path / "law", spec, "law", lambda role: origin.read(names[role]), about, [{"steps": 1}], [], {})  # type: ignore[arg-type]
    joined = api.join(base, tmp_path / "law", output=tmp_path / "joined")
    named = json.loads((joined / tokenizer.FILE).read_text())["tokenizer_class"]
    assert named == tokenizer.CLASSES.get(family, "LlamaTokenizer")
    assert files(api.remove(joined, "law", tmp_path / "again")) == files(base)


def test_the_base_of_two_parts_comes_back_with_the_class_of_its_tokenizer(place: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(place / "base", base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": None}))
    (base / tokenizer.FILE).write_text('{"tokenizer_class":"LlamaTokenizer" , "eos_token":"<eos>"}')
    parts = []
    for name in ("law", "code"):
        folder = Path(shutil.copytree(place / name, tmp_path / name))
        record = json.loads((folder / "part.json").read_text())
        del record["sum"]
        record["base"]["files"]["config.json"] = sha256(base / "config.json")
        (folder / "part.json").write_bytes(publish.signed(record))
        parts.append(folder)
    joined = api.join(base, *parts, output=tmp_path / "joined")
    less = api.remove(joined, "law", tmp_path / "less")
    alone = api.join(base, parts[1], output=tmp_path / "alone")
    want = b'{"tokenizer_class":"PreTrainedTokenizerFast" , "eos_token":"<eos>"}'
    assert {(each / tokenizer.FILE).read_bytes() for each in (joined, less, alone)} == {want}
    assert files(api.remove(less, "code", tmp_path / "again")) == files(base)


def asked(base: Path) -> tuple[Any, Any]:
    from upcycle.config.reading import build
    from upcycle.config.schema import UpcycleConfig

    settings = {
        "source": str(base),
        "target": "upcycled",
        "method": {"name": "part", "part": "law"},
        "granularity": 2,
        "top_k": 2,
    }
    zeros = lambda plan, _: {f"layers.{i}.rows": torch.zeros(2, plan.dense.hidden) for i in plan.moe.layers}  # noqa: E731
    return build(UpcycleConfig, settings), zeros


# ---- strangers


def changed(place: Path, tmp_path: Path, **values: Any) -> Path:
    """A copy of the part whose record says something else, with a sum that is right."""
    folder = tmp_path / "stranger"
    shutil.copytree(place / "law", folder)
    record = json.loads((folder / "part.json").read_text()) | values
    del record["sum"]
    (folder / "part.json").write_bytes(publish.signed(record))
    return folder


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": "../law"}, "a name has 1 to 40 letters"),
        ({"name": "<script>"}, "a name has 1 to 40 letters"),
        ({"format": 2}, "install a newer upcycle"),
        ({"copies": 2}, "has shape"),
        ({"copies": 10**9}, "names no copies"),
        ({"granularity": 2}, "has shape"),
        ({"layers": [1]}, "wants"),
        ({"layers": [1, 0]}, "names no copies, no layers"),
        ({"layers": [0, 77]}, "layers"),
        ({"dtype": "float16"}, "holds 'float16'"),
        ({"base": {"name": "b", "files": {"config.json": "0"}}}, "give the base that it was made for"),
        ({"trained": []}, "no training"),
        ({"trained": [{"steps": "x"}]}, "steps"),
        ({"files": {"../../x": {"bytes": 1, "sha256": ""}}}, "a part has part.safetensors alone"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_in_a_sentence(
    values: dict[str, Any], says: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(place, tmp_path, **values)
    assert main(["join", str(place / "base"), str(folder), f"output={tmp_path / 'joined'}"]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1, said
    assert not (tmp_path / "joined").exists()


def test_bytes_that_changed_are_found(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "part"
    shutil.copytree(place / "law", folder)
    assert main(["verify", str(folder)]) == 0
    assert main(["verify", str(folder), "dtype=bfloat16"]) == 2 and "leave it out" in capsys.readouterr().err
    with (folder / "part.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x01")
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 1
    assert "its sha256 differs" in capsys.readouterr().out
    assert main(["join", str(place / "base"), str(folder), f"output={tmp_path / 'joined'}"]) == 2
    assert "its sha256 differs" in capsys.readouterr().err and not (tmp_path / "joined").exists()


def test_a_part_and_a_joined_model_say_what_they_are(place: Path, joined: Path) -> None:
    said = upcycle_api.inspect(place / "law", tensors=True)
    assert (
        "part                 law" in said and "leave the anchor" in said and "layers.0.router.weight  [1, 64]" in said
    )
    assert "the base's own FFN, law (1), code (1)" in upcycle_api.inspect(joined)
    assert main(["inspect", str(joined), "check=true"]) == main(["verify", str(joined)]) == 0
    assert main(["inspect", str(place / "law"), "check=true"]) == 0


def test_routing_says_which_part_takes_which_text(place: Path, joined: Path, tmp_path: Path) -> None:
    texts_of = [str(place / f"{name}.jsonl") for name in ("law", "code", "general")]
    found = routing.measure(routing.RoutingConfig(str(joined), tuple(texts_of), tokens=512, sequence=32))
    assert found["parts"].keys() == {"law", "code", "general"}
    for shares in found["parts"].values():
        assert sum(shares.values()) == pytest.approx(1, abs=1e-3) and list(shares) == ["(base)", "law", "code"]
    assert found["parts"]["law"]["law"] > 5 * found["parts"]["general"]["law"]
    assert found["parts"]["code"]["code"] > 5 * found["parts"]["general"]["code"]
    assert "law goes to (base)" in routing.table(found)


def test_a_report_colours_a_text_by_its_parts_and_runs_nothing_of_it(place: Path, joined: Path, tmp_path: Path) -> None:
    law = json.loads((place / "law.jsonl").read_text().split("\n")[0])["text"]
    hostile = jsonl(tmp_path / "hostile.jsonl", [f'<script>alert("x")</script> {law}'])
    words = [str(joined), str(hostile), "tokens=64", "sequence=32", f"output={tmp_path / 'routing.json'}"]
    assert main(["routing", *words]) == 0
    assert main(["report", str(tmp_path / "routing.json"), f"output={tmp_path / 'report.html'}"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "which part takes which text" in page and 'class="tokens"' in page and "color-mix(" in page
    assert "<script>alert" not in page and "&lt;" in page


def test_numbers_that_are_not_finite_are_refused(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "part"
    shutil.copytree(place / "law", folder)
    tensors = load_file(folder / "part.safetensors")
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, folder / "part.safetensors")
    record = json.loads((folder / "part.json").read_text())
    del record["sum"]
    record["files"] = publish.listed([folder / "part.safetensors"])
    (folder / "part.json").write_bytes(publish.signed(record))
    with pytest.raises(ValueError, match="not finite"):
        api.join(place / "base", folder, output=tmp_path / "joined")


def test_another_base_is_refused(place: Path, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path / "other", vocab_size=400, seed=5)
    with pytest.raises(ValueError, match="give the base that it was made for"):
        api.join(tmp_path / "other", place / "law", output=tmp_path / "joined")


def test_a_name_that_is_there_twice_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two parts are called law"):
        api.join(place / "base", place / "law", place / "law", output=tmp_path / "joined")


def test_a_join_warns_of_parts_of_alike_documents_alone(place: Path, tmp_path: Path) -> None:
    folder = changed(place, tmp_path, name="statutes")
    with pytest.warns(UserWarning, match="law and statutes look for alike tokens: .* a cosine of 1.00") as said:
        api.join(place / "base", place / "law", place / "code", folder, output=tmp_path / "joined")
    assert sum("look for alike" in str(each.message) for each in said) == 1, [str(each.message) for each in said]


def at(cosine: float, size: float = 1.0) -> torch.Tensor:
    """Return a row with this cosine to the first direction."""
    return size * torch.tensor([cosine, (1 - cosine**2) ** 0.5, 0.0], dtype=torch.float64)


NONE = torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("layers", "warns"),
    [
        ([[at(0.55)], [at(0.55)]], False),
        ([[at(0.65)], [at(0.65)]], True),
        ([[at(-1)], [at(-1)]], False),
        ([[at(1)], [NONE]], False),  # a row of zeros takes no token: alike in half of the layers
        ([[NONE], [NONE]], False),
        ([[at(1)], None], True),  # the other layer's rows are zeros in both
        ([[at(-0.9), at(0.9)], [at(0.0), at(0.9)]], True),  # one copy of two is alike
        ([[at(0.9, 1e-200)], [at(0.9, 1e200)]], True),  # a row's length decides nothing
    ],
)
def test_parts_are_alike_by_the_direction_of_their_rows(layers: list[list[torch.Tensor] | None], warns: bool) -> None:
    def stub(name: str, rows: list[torch.Tensor]) -> Any:
        kept = {f"layers.{layer}.router.weight": row for layer, row in zip((1, 4), rows, strict=True)}
        return SimpleNamespace(name=name, record={"layers": [1, 4]}, read=kept.__getitem__)

    one = stub("one", [at(1)[None] if rows else NONE[None] for rows in layers])
    other = stub("other", [torch.stack(rows or [NONE]) for rows in layers])
    with pytest.warns(UserWarning, match="alike tokens") if warns else nullcontext(), warnings.catch_warnings():
        if not warns:
            warnings.simplefilter("error")
        join.warn_of_alike([one, other])


def test_a_part_that_is_not_there_is_refused(joined: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no part 'math'; it has law, code"):
        api.remove(joined, "math", tmp_path / "x")


# ---- rows


def test_a_row_sends_a_parts_tokens_to_it_and_leaves_general_ones(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    shift = 3 * torch.randn(32, generator=draw)
    general, new = (torch.randn(2048, 32, generator=draw) + shift for _ in range(2))
    own = torch.randn(2048, 32, generator=draw) + shift + 1.0
    for dtype in (torch.float32, torch.bfloat16):
        row, left = rows.row(general, own, general[:64], dtype)
        assert torch.equal(row, row.to(dtype).float())
        assert left[0] <= 0.03 and left[1] > 0.9  # docs/parts.md promises 3 %
        assert float((new @ row > 0).double().mean()) < 3 * rows.MARGIN


def test_a_row_that_cannot_keep_its_margin_is_zero_and_sends_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    general, own = torch.randn(2048, 8, generator=draw), torch.randn(2048, 8, generator=draw) + 0.1  # no common mean
    row, left = rows.row(general, own, general[:64], torch.float32)
    assert left == (0.0, 0.0) and not row.any()


def test_the_first_token_of_a_text_stays_even_if_it_looks_like_the_part() -> None:
    draw = torch.Generator().manual_seed(0)
    shift, like, other = torch.randn(3, 32, generator=draw)
    general, own = torch.randn(2, 4096, 32, generator=draw) + 3 * shift
    own = own + like + other
    first = 30 * like + torch.randn(64, 32, generator=draw)
    row, left = rows.row(general, own, first, torch.bfloat16)
    assert not bool((first @ row > 0).any()) and left[1] > 0.9
    unaware, _ = rows.row(general, own, general[:64], torch.bfloat16)
    assert bool((first @ unaware > 0).all()), "a row that knows no first token keeps them too, so this shows nothing"


def test_a_row_is_the_discriminant_of_all_tokens_of_both_texts() -> None:
    """Texts of other lengths count by their tokens; written once more, with all tokens in one matrix."""
    draw = torch.Generator().manual_seed(0)
    common = 3 * torch.randn(16, generator=draw, dtype=torch.float64)
    spread = torch.diag(torch.rand(16, generator=draw, dtype=torch.float64) + 0.1)
    general, own = (torch.randn(n, 16, generator=draw, dtype=torch.float64) + common for n in (4096, 1024))
    own = own @ spread + 0.5
    first = 5 + torch.randn(64, 16, generator=draw, dtype=torch.float64)
    row, _ = rows.row(general, own, first, torch.float64)

    def solved(moments: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(moments + rows.RIDGE * moments.diagonal().mean() * torch.eye(len(right)), right)

    seen = [text[: -len(text) // rows.HELD] for text in (general, own)]
    apart, whole = torch.cat([text - text.mean(0) for text in seen]), torch.cat(seen)
    moved = first - seen[0].mean(0)
    away = solved(apart.T @ apart / len(apart) + moved.T @ moved / len(moved), seen[1].mean(0) - seen[0].mean(0))
    one = solved(whole.T @ whole / len(whole) + first.T @ first / len(first), whole.mean(0) + first.mean(0))
    away /= (seen[0] @ away).std()
    price = (away - row.double()) @ one / (one @ one)
    torch.testing.assert_close(row.double(), away - price * one, rtol=1e-5, atol=1e-6)


def test_no_first_token_of_the_general_text_that_was_measured_leaves(place: Path) -> None:
    with layout.opened(started(place)) as origin, torch.no_grad():
        model = layout.load(model_of(origin.spec, experts="reference", compute=torch.float32), origin)
        left: list[torch.Tensor] = []
        for layer in model.layers.values():
            if isinstance(layer.ffn, MoE):
                layer.ffn.router.register_forward_hook(lambda _, given, made: left.append(made.expert_TK > 0))
        text = (place / "law.work" / "general.jsonl",)
        ids = tokens.token_batches(place / "base", text, 2048, 32, 400)
        model(ids)
        first, rest = (torch.cat([each.view(len(ids), -1)[:, at] for each in left]) for at in (0, slice(1, None)))
    assert not first.any() and rest.any()


def test_a_part_that_would_get_no_token_is_refused(place: Path, tmp_path: Path) -> None:
    same = {"documents": place / "general.jsonl", "general": place / "general.jsonl"}
    with pytest.raises(ValueError, match="no layer tells"):
        api.add(place / "base", **same, name="law", output=tmp_path / "law", **WORDS)


def test_general_text_is_asked_for(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"documents={place / 'law.jsonl'}", "name=law", f"output={tmp_path / 'law'}"]
    assert main(["add", str(place / "base"), *words]) == 2
    assert "write general=FOLDER" in capsys.readouterr().err and not list(tmp_path.iterdir())


# ---- a base that went on training


def newer(place: Path, output: Path, noise: float) -> Path:
    """The base after changes of this size, relative to each weight's deviation."""
    shutil.copytree(place / "base", output)
    tensors, draw = load_file(output / "model.safetensors"), torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=draw)
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return output


def test_a_part_moves_to_a_newer_base_while_it_helps(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = newer(place, tmp_path / "newer", 1e-3)
    words = [str(place / "law"), str(place / "base"), str(base), f"documents={place / 'law.jsonl'}"]
    assert main(["upgrade", *words, f"output={tmp_path / 'law'}"]) == 0
    assert "nats a token" in capsys.readouterr().out
    moved = api.join(base, tmp_path / "law", output=tmp_path / "joined")
    want, have = load_file(base / "model.safetensors"), load_file(moved / "model.safetensors")
    old, own = (load_file(place / name) for name in ("base/model.safetensors", "law/part.safetensors"))
    name = "model.layers.0.mlp.up_proj.weight"
    learned = own["layers.0.experts.0.up.weight"] - old[name]
    torch.testing.assert_close(have["model.layers.0.mlp.experts.1.up_proj.weight"], want[name] + learned)
    again = api.remove(moved, "law", tmp_path / "again")
    assert files(again) == files(base)


def test_a_part_that_breaks_on_a_newer_base_is_refused_with_its_losses(place: Path, tmp_path: Path) -> None:
    base = newer(place, tmp_path / "newer", 3.0)
    with pytest.raises(ValueError, match=r"breaks on .*old base \d.*with the part \d.*new base \d.* nats a token"):
        api.upgrade(place / "law", place / "base", base, documents=place / "law.jsonl", output=tmp_path / "law")
    assert not (tmp_path / "law").exists()
