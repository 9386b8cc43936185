"""A whole run on several processes is the run on one: its losses and its exported bytes; a checkpoint goes on on
another mapping; on the same one a resume is bitwise the run that never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import sweeps
from tests.parallel.ranks import run
from tests.parallel.runs import on_rank, stopped_on_rank
from tests.parity import tiny
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from training import export
from training.cli.prepare import main as prepare
from training.observe.metrics import read as read_metrics

# four sequences at a time on any mesh, two times a step
WORDS = [
    "data.sequence=32", "batch=8", "micro_batch=4", "log_every=1", "schedule.warmup=2", "schedule.peak=1e-3", "model.dtype=float32",
    "model.expert_backend=reference", "checkpoint.every=0", "balance.bias_rate=0.01", "balance.z_weight=1e-3", "data.seed=3", "steps=4", "device=cpu",
]  # fmt: skip
MUON = ["optim.name=muon"]
# so that a checkpoint after step 2 lies between two lines, and has to hold what the routers did since the first
RARELY = "log_every=3"
UPCYCLE = {
    "target": "glm4_moe", "experts": 4, "granularity": 2, "top_k": 2, "method": "virtual_group", "router": {"score": "sigmoid"},
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("run"), num_hidden_layers=3)


def folder_of(folder: Path, **changed: Any) -> Path:
    """A tiny dense model, data to train on and to validate with."""
    tiny.make("qwen3", folder / "dense", vocab_size=400, num_key_value_heads=4, **changed)
    (folder / "tokenizer").mkdir()
    tokenizer = make_tokenizer(folder / "tokenizer", bos=False)
    for name, seed, count in (("data", 0, 60), ("valid", 1, 20)):
        source = jsonl(folder / f"{name}.jsonl", texts(count, seed))
        assert prepare([str(folder / name), f"tokenizer={tokenizer}", f"sources=[{source}]"]) == 0
    return folder


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    return on_rank(0, 1, words(place, place / "alone", f"export={place / 'alone-out'}"))


@pytest.fixture(scope="module")
def alone_rarely(place: Path) -> Path:
    return on_rank(0, 1, words(place, place / "rarely", f"export={place / 'rarely-out'}", RARELY))


@pytest.fixture(scope="module")
def alone_muon(place: Path) -> Path:
    return on_rank(0, 1, words(place, place / "muon", f"export={place / 'muon-out'}", RARELY, *MUON))


def words(place: Path, output: Path, *more: str) -> list[str]:
    upcycle = json.dumps({"source": str(place / "dense"), **UPCYCLE})
    data = [f"data.train=[{place / 'data'}]", f"data.valid=[{place / 'valid'}]"]
    return [f"output={output}", f"model.upcycle={upcycle}", *data, *WORDS, *more]


def rows(folder: Path) -> list[dict[str, Any]]:
    kept = ("step", "loss", "loss/teacher", "grad_norm", "skipped", "tokens", "lr")
    return [
        {k: v for k, v in row.items() if k in kept or "valid" in k or "balance" in k} for row in read_metrics(folder)
    ]


def same_run(folder: Path, other: Path) -> None:
    same_rows(rows(folder), rows(other))


def same_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for have, want in zip(found, expected, strict=True):
        assert have == pytest.approx(want, rel=2e-5, abs=1e-6)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


MAPPINGS = [
    (2, ["micro_batch=2", "mesh.ep=2", "mesh.reshard=false"]),
    (2, ["micro_batch=4", "mesh.pp=2"]),
    (4, ["micro_batch=4", "mesh.tp=2", "mesh.cp=2", "mesh.ep=2", "mesh.etp=2"]),
    (4, ["micro_batch=1", "mesh.dp_replicate=2", "mesh.ep=2", "mesh.dispatcher=nvlink", "model.recompute=full"]),
]


@pytest.mark.parametrize(("world", "more"), MAPPINGS, ids=lambda x: str(x))
def test_a_run_on_any_mesh_is_the_run_on_one_process(
    place: Path, alone: Path, tmp_path: Path, world: int, more: list[str]
) -> None:
    run(world, on_rank, words(place, tmp_path / "run", f"export={tmp_path / 'out'}", *more))
    same_run(tmp_path / "run", alone)
    assert rows(alone)[-1]["loss"] < rows(alone)[1]["loss"] - 0.05, "nothing was learned"
    have, want = exported(tmp_path / "out"), exported(place / "alone-out")
    assert have.keys() == want.keys()
    for name in want:
        assert torch.allclose(have[name].float(), want[name].float(), rtol=0, atol=2e-4), name


@pytest.mark.parametrize("more", [["micro_batch=2", "mesh.ep=2"], ["mesh.pp=2"]], ids=lambda x: x[-1])
def test_slices_are_used_alike_on_two_ranks_and_on_one(place: Path, tmp_path: Path, more: list[str]) -> None:
    """Their copies are on several ranks, and what is validated and exported is pulled to their mean."""
    sliced = ["model.upcycle.target=upcycled", "model.upcycle.router.choice=each-slice"]
    own = [*sliced, "valid_every=2", "optim.shrink=0.5", "steps=3"]
    for name, world, extra in (("one", 1, []), ("two", 2, more)):
        run(world, on_rank, words(place, tmp_path / name, f"export={tmp_path / name / 'out'}", *own, *extra))
    same_run(tmp_path / "two", tmp_path / "one")
    have, want = (exported(tmp_path / name / "out") for name in ("two", "one"))
    assert have.keys() == want.keys()
    for name in want:
        assert torch.allclose(have[name].float(), want[name].float(), rtol=0, atol=2e-4), name
    export(tmp_path / "one", tmp_path / "again")
    export(tmp_path / "two", tmp_path / "from-two")
    for folder, before in (("again", want), ("from-two", have)):
        assert all(torch.equal(tensor, before[name]) for name, tensor in exported(tmp_path / folder).items())


def test_padding_to_the_capacity_changes_no_bit(place: Path, tmp_path: Path) -> None:
    for name, more in {"rows": [], "padded": ["balance.pad_to_capacity=true"]}.items():
        dropping = ["micro_batch=2", "mesh.ep=2", "balance.capacity_factor=1", "valid_every=2", *more]
        run(2, on_rank, words(place, tmp_path / name, f"export={tmp_path / name / 'out'}", *dropping))
    assert rows(tmp_path / "rows") == rows(tmp_path / "padded")
    have, want = (exported(tmp_path / name / "out") for name in ("rows", "padded"))
    assert have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)


def test_rows_that_found_no_memory_end_the_run(place: Path, tmp_path: Path) -> None:
    short = ["micro_batch=2", "mesh.ep=2", "mesh.dispatcher=nvlink", "mesh.arrivals=1"]
    with pytest.raises(
        RuntimeError, match=r"rows came to a rank's experts, .*mesh\.arrivals=1 has memory for fewer|another rank lost"
    ):
        run(2, on_rank, words(place, tmp_path / "run", *short, "valid_every=2"))
    assert [row["skipped"] for row in rows(tmp_path / "run") if row["step"]] == [1], (
        "the step that lost rows taught nothing"
    )


FROZEN = (
    "optim.groups=[{match: layers.0.ffn, lr: 0}, {match: experts.down, lr: 0}, {match: '*norm', lr: 0.5, decay: 0.1}]"
)


def chat_of(place: Path, made: Path) -> list[str]:
    """Conversations of which now this and now that rank has nearly all that is learned in a step."""
    folder = made / "chat-tokenizer"
    shutil.copytree(place / "tokenizer", folder)
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}{{ eos_token }}{% endif %}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, seed in (("chat", 2), ("chat-valid", 3)):
        rows = [{"prompt": t[:40], "completion": "a" if i % 3 else t[:150]} for i, t in enumerate(texts(60, seed))]
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = [f"sources=[{made / name}.jsonl]", "kind=chat", "sequence=32"]
        assert prepare([str(made / name), f"tokenizer={folder}", *source]) == 0
    return [f"data.train=[{made / 'chat'}]", f"data.valid=[{made / 'chat-valid'}]"]


TAUGHT = ["teacher.weight=2", "teacher.final=1", "teacher.temperature=2"]


@pytest.mark.parametrize(("world", "more"), sweeps.swept([(2, [])], [(4, ["mesh.tp=2"])]))
def test_frozen_parts_answers_and_a_teacher_are_the_same_on_any_mesh(
    world: int, more: list[str], place: Path, tmp_path: Path
) -> None:
    more = ["micro_batch=2", "mesh.ep=2", *more, "model.recompute=full"]
    learned = [FROZEN, *chat_of(place, tmp_path), *TAUGHT]
    on_rank(0, 1, words(place, tmp_path / "one", f"export={tmp_path / 'one-out'}", *learned))
    run(world, on_rank, words(place, tmp_path / "run", f"export={tmp_path / 'out'}", *learned, *more))
    same_run(tmp_path / "run", tmp_path / "one")
    assert [row["loss/teacher"] > 1e-4 for row in rows(tmp_path / "one") if row["step"]] == [False, True, True, True]
    have, want = exported(tmp_path / "out"), exported(tmp_path / "one-out")
    for name in want:
        still = name.startswith("model.layers.0.mlp") or (name.endswith("down_proj.weight") and ".experts." in name)
        if still and not name.endswith("correction_bias"):
            assert torch.equal(have[name], want[name]), name
        assert torch.allclose(have[name].float(), want[name].float(), rtol=0, atol=2e-4), name


def test_adapters_learn_and_are_merged_alike_on_any_mesh(place: Path, tmp_path: Path) -> None:
    """In two stages, of which the first adapts routers alone; with frozen weights in bfloat16 on two ranks, of which
    attention's units are frozen at first. And it goes on where one stage has ended: bitwise, and on any other mapping."""
    more = ["lora.rank=2", "steps=3", "schedule.peak=1e-2", "data.valid=[]", "model.upcycle.dtype=bfloat16"]
    router = "optim: {groups: [{match: '*', lr: 0}, {match: router}]}, schedule: {warmup: 0}"
    more += [
        f"stages=[{{steps: 1, {router}}}, {{steps: 2, batch: 4, data: {{sequence: 64}}, schedule: {{warmup: 1}}}}]"
    ]
    meshes = {"one": [], "slices": ["mesh.tp=2", "mesh.etp=2"], "stages": ["mesh.pp=2", "mesh.schedule=gpipe"]}
    for name, mesh in (meshes | {"run": ["micro_batch=2", "mesh.ep=2", "model.frozen=bfloat16"]}).items():
        alone = [f"export={tmp_path / name / 'out'}", f"lora.export={tmp_path / name / 'peft'}"]
        arguments = words(place, tmp_path / name, *more, *alone, *mesh)
        run(2, on_rank, arguments) if mesh else on_rank(0, 1, arguments)
    for name in ("run", "slices", "stages"):
        same_run(tmp_path / name, tmp_path / "one")
    elsewhere = {"heads": meshes["slices"], "stage": meshes["stages"], "alone": []}
    for name, mesh in ({"again": ["micro_batch=2", "mesh.ep=2", "model.frozen=bfloat16"]} | elsewhere).items():
        shutil.copytree(tmp_path / "run", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000003")
        shutil.rmtree(tmp_path / name / "out"), shutil.rmtree(tmp_path / name / "peft")
        alone = [f"export={tmp_path / name / 'out'}", f"lora.export={tmp_path / name / 'peft'}"]
        arguments = words(place, tmp_path / name, *more, *alone, *mesh)
        run(2, on_rank, arguments) if mesh else on_rank(0, 1, arguments)
    assert rows(tmp_path / "again") == rows(tmp_path / "run")
    whole, parts = (exported(tmp_path / name / "out") for name in ("run", "again"))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    for name in elsewhere:
        same_run(tmp_path / name, tmp_path / "one")
    # the export is bfloat16, where a difference in the last bits may move a number to its neighbour
    for file, step in {"out/model.safetensors": 2**-7, "peft/adapter_model.safetensors": 0.0}.items():
        want = load_file(tmp_path / "one" / file)
        for folder in ("run", "slices", "stages", *elsewhere):
            have = load_file(tmp_path / folder / file)
            assert have.keys() == want.keys() and len(have) > 20
            for name in want:
                assert torch.allclose(have[name].float(), want[name].float(), rtol=step, atol=2e-4), (folder, name)


ALIKE = ["micro_batch=2", "mesh.ep=2"]
MORE_ALIKE = [*ALIKE, "mesh.tp=2"]
RESUMES = {
    "the same mapping": (2, ALIKE, 2, ALIKE),
    "the same mapping of four": (4, MORE_ALIKE, 4, MORE_ALIKE),
    "experts of four sharded otherwise": (4, ["micro_batch=1", "mesh.ep=4"], 4, ["micro_batch=1", "mesh.ep=2"]),
    "experts sharded otherwise": (2, ["micro_batch=2", "mesh.ep=2"], 2, ["micro_batch=2"]),
    "stages to one rank": (2, ["micro_batch=4", "mesh.pp=2", *MUON], 1, ["micro_batch=4", *MUON]),
    "one rank to heads and neurons": (
        1,
        ["micro_batch=4", *MUON],
        2,
        ["micro_batch=4", "mesh.tp=2", "mesh.etp=2", *MUON],
    ),
}


def across(folder: Path) -> list[dict[str, Any]]:
    """The rows, without the means over the line that the checkpoint lies in: a resumed run's are of the steps since."""
    means = ("loss", "grad_norm", "skipped")
    return [{k: v for k, v in row.items() if row["step"] != 3 or k not in means} for row in rows(folder)]


@pytest.mark.parametrize("name", RESUMES if sweeps.ALL else [name for name in RESUMES if "four" not in name])
def test_a_checkpoint_goes_on_on_any_mapping(
    place: Path, alone_rarely: Path, alone_muon: Path, tmp_path: Path, name: str
) -> None:
    world, mesh, other_world, other_mesh = RESUMES[name]
    parts = words(place, tmp_path / "parts", "checkpoint.every=2", "checkpoint.asynchronous=false", RARELY)
    run(world, stopped_on_rank, [*parts, *mesh], 4)
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step-00000002"]
    run(other_world, on_rank, [*parts, *other_mesh, f"export={tmp_path / 'parts-out'}"])
    whole = alone_muon if mesh[-1] in MUON else alone_rarely
    if mesh == other_mesh:
        whole = tmp_path / "whole"
        run(world, on_rank, words(place, whole, RARELY, *mesh, f"export={whole}-out"))
        assert across(tmp_path / "parts") == across(whole)
    same_rows(across(tmp_path / "parts"), across(whole))
    assert [row["step"] for row in across(whole) if "balance/max_over_mean" in row] == [3, 4]
    have, want = exported(tmp_path / "parts-out"), exported(whole.with_name(f"{whole.name}-out"))
    for key in want:
        if mesh == other_mesh:
            assert torch.equal(have[key], want[key]), key
        assert torch.allclose(have[key].float(), want[key].float(), rtol=0, atol=2e-4), key
