"""Frozen experts of 4 bits: their codes, that a run computes with what they stand for, and how little it holds."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from evaluation.ask import load
from evaluation.judge.experts import routing
from tests.parallel import models
from tests.unit.training.test_bench import SMALL
from tests.unit.training.test_frozen import first_batches
from tests.unit.training.test_held import bytes_of
from tests.unit.training.test_train import Stopped, config, losses, stops_before
from tests.unit.training.test_train import place as place
from training import export
from training.checkpoint import layout
from training.checkpoint.export import Weights
from training.config.schema import TrainConfig
from training.estimating.bench import BenchConfig, bench, spec_of
from training.estimating.memory import SPARE, Model, memory
from training.model import nf4
from training.model.decoder import Decoder
from training.model.lora import LoraConfig, attach, is_adapter
from training.model.moe import Experts
from training.model.nf4 import LEVELS, Codes, decode
from training.model.recompute import recompute
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.run import step as step_module
from training.run.build import begin, start
from training.run.loop import train
from training.run.preflight import preflight
from training.run.saving import checkpoints_of
from training.run.step import gradients
from upcycle.config.reading import read
from upcycle.config.ready import TRAIN

WORDS = ["model.frozen=nf4", "lora.rank=3", "lora.alpha=5", "schedule.peak=1e-2", "data.valid=[]"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- codes


def test_the_levels_are_qloras() -> None:
    """Its algorithm: quantiles at 8 places from 0.9677083 to a half, and at 7 on the other side of an exact zero."""
    above, below = (torch.special.ndtri(torch.linspace(0.9677083, 0.5, n, dtype=torch.float64))[:-1] for n in (9, 8))
    want = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    torch.testing.assert_close(torch.tensor(LEVELS, dtype=torch.float64), want / want.abs().max(), rtol=0, atol=2e-7)


@pytest.mark.parametrize("shape", [(2, 2, 96, 128), (3, 1, 5, 7), (2, 64), (4, 20, 1024)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_is_the_nearest_level_of_its_block(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "CHUNK", 3 * 20 * 1024)  # of the last shape's matrices three at a time, then one
    wide = (random(*shape) * torch.linspace(0.1, 3, shape[-1], dtype=torch.float64)).to(dtype)
    wide[0].flatten()[:64] = 0
    codes = Codes(wide)
    codes.encode(wide)
    found = codes.decode(torch.float32).double()
    want, numbers = wide.double().flatten(1), wide[0].numel()
    blocks = -(-numbers // 64)
    padded = torch.nn.functional.pad(want, (0, blocks * 64 - numbers)).view(len(wide), blocks, 64)
    largest = padded.abs().amax(2)
    scale = nf4.scales(codes.bounds, codes.step).double()
    for group in range(0, blocks, 256):  # the root, to half of 255 steps between the least and the largest
        root, part = scale[:, group : group + 256].sqrt(), largest[:, group : group + 256].sqrt()
        room = (part.amax(1) - part.amin(1)) / 510
        assert bool(((root - part).abs() <= room[:, None] * (1 + 1e-4) + 1e-6).all())
    levels = torch.tensor(LEVELS, dtype=torch.float64) * scale[:, :, None, None]
    nearest = (levels - padded[..., None]).abs().amin(3).flatten(1)[:, :numbers]
    assert bool(((found - want).abs() <= nearest + 1e-6 * float(largest.max())).all())
    assert (not found[0][:64].any() and found[0][:64].numel() == 64) or numbers < 64
    assert float((found - want).norm() / want.norm()) < 0.11
    assert torch.equal(codes.decode(torch.bfloat16), codes.decode(torch.float32).bfloat16()), "it is rounded once"


def test_a_byte_holds_two_codes_the_first_in_its_upper_half() -> None:
    """As bitsandbytes packs them; and 33 bytes hold a block, of which 256 share 8."""
    wide = torch.zeros(1, 64)
    wide[0, :2] = torch.tensor([1.0, -1.0])
    codes = Codes(wide)
    codes.encode(wide)
    assert codes.code[0, 0, :2].tolist() == [15 << 4 | 0, 7 << 4 | 7] and LEVELS[7] == 0
    large = Codes(torch.empty(2, 256 * 64, device="meta"))
    assert sum(p.nbytes for p in large.parameters()) == 2 * (256 * 33 + 8)


def test_copies_of_an_expert_have_the_same_codes() -> None:
    wide = random(1, 3, 41, 11).float().repeat(4, 1, 1, 1)
    codes = Codes(wide)
    codes.encode(wide)
    assert all(torch.equal(part, part[:1].expand_as(part)) for part in codes.parameters())


# ---- the model


def adapted(name: str, experts: str, mode: str, *, coded: bool) -> Decoder:
    """A model of tests/parallel/models.py with adapters, none of them zero, and experts that are codes or decoded."""
    model = models.make(name, torch.float32, experts=experts)
    attach(model, LoraConfig(rank=3, alpha=5.0))
    draw = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        if is_adapter(key):
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=draw)
        parameter.requires_grad_(is_adapter(key))
    for module in model.modules():
        if isinstance(module, Experts):
            up, down = module.up.detach(), module.down.detach()
            module.encode()
            with module.wide():
                module.up.copy_(up)
                module.down.copy_(down)
            if not coded:
                module.decode()
    recompute(model, mode)
    return model


@pytest.mark.parametrize("mode", ["none", "attention", "experts", "full"])
@pytest.mark.parametrize("name", ["moe", "odd", "slices"])
@pytest.mark.parametrize("experts", ["reference", "grouped"])
def test_codes_compute_as_their_matrices_and_only_a_layer_is_decoded(
    name: str, experts: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients bit for bit; and no decoded matrix outlives its layer, in forward and in backward."""
    alive: list[weakref.ref[Tensor]] = []
    most = [0]

    def watched(*inputs: Any) -> Tensor:
        made = decode(*inputs)
        alive.append(weakref.ref(made.untyped_storage()))
        most[0] = max(most[0], sum(each() is not None for each in alive))
        return made

    found = []
    for coded in (False, True):
        model, part = adapted(name, experts, mode, coded=coded), models.batch(2)
        monkeypatch.setattr(nf4, "decode", watched)
        loss = model.loss(part.tokens, part.labels, part.positions, part.documents)
        if coded:
            assert len(alive) == 2 * sum(isinstance(module, Experts) for module in model.modules())
            assert not any(each() is not None for each in alive), "nothing is kept for the backward"
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
        monkeypatch.undo()
    assert 0 < most[0] <= 2, "up and down of one layer"
    (want, slopes), (have, same) = found
    assert torch.equal(want, have) and len(slopes) == len(same) and all(map(torch.equal, slopes, same))


# ---- a run


def test_a_run_is_resumed_bitwise_and_exported_as_it_computes(place: Path, tmp_path: Path) -> None:
    """The export is the decoded matrices with adapters merged, of a run and of its checkpoint; and evaluation and
    measures of routing load the run."""
    more = ["log_every=1"]
    whole = train(config(place, tmp_path / "whole", *WORDS, *more, f"export={tmp_path / 'a'}", steps=4))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(4))
        train(config(place, tmp_path / "parts", *WORDS, *more, steps=4))
    parts = train(config(place, tmp_path / "parts", *WORDS, *more, f"export={tmp_path / 'b'}", steps=4))
    assert losses(whole) == losses(parts) and losses(whole)[-1][1] < losses(whole)[1][1]
    export(whole, tmp_path / "c")
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) and torch.equal(a[name], c[name]) for name in a)
    with start(config(place, tmp_path / "whole", *WORDS, steps=4), torch.device("cpu")) as run:
        checkpoints_of(run).load(run.state)
        batch = first_batches(run)[0]
        have = float(run.model.loss(batch.tokens, batch.labels).detach())
    with layout.opened(tmp_path / "a") as origin:
        want = float(layout.load(Decoder(origin.spec), origin).loss(batch.tokens, batch.labels).detach())
    assert have == pytest.approx(want, rel=1e-6)
    mesh = ParallelMesh(MeshConfig(), device_type="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load_tokenizer", lambda *_: ())
        patch.setattr(load, "tokenizer_folder", lambda *_: place / "tokenizer")
        asked = load.opened(str(whole), "float32", mesh, torch.device("cpu"))
    with torch.no_grad():
        assert float(asked.model.loss(batch.tokens, batch.labels)) == pytest.approx(have, rel=1e-6)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "batches", lambda *_: batch.tokens)
        for folder in (whole, tmp_path / "a"):
            found.append(routing.measure(routing.RoutingConfig(str(folder), texts=("some.txt",), granularity=2)))
    for one, other in zip(*(each["layers"] for each in found), strict=True):
        assert one["saliency"] == pytest.approx(other["saliency"], rel=1e-4)
        assert one["spread"] == pytest.approx(other["spread"], rel=1e-4) and max(one["spread"]) > 1e-4


@pytest.mark.parametrize("more", [[], ["model.random=true"], ["lora.match=[attention]"]], ids=str)
def test_one_layer_at_a_time_is_wide_while_weights_are_read(
    place: Path, tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is encoded are the weights that any other run would begin with."""
    rooms: list[int] = []
    there: list[int] = []
    alive: dict[int, weakref.ref[Any]] = {}
    real = layout.copy

    def copied(*inputs: Any) -> None:
        wide = [module for module in stacks if not module.up.is_meta]
        for tensor in (part for module in wide for part in (module.up, module.down)):
            alive[tensor.data_ptr()] = weakref.ref(tensor.untyped_storage())
        rooms.append(len(wide))
        there.append(sum(each() is not None for each in alive.values()))
        real(*inputs)

    with start(config(place, tmp_path / "x", *WORDS[1:], *more), torch.device("cpu")) as run:
        begin(run)
        want = {name: part.clone() for name, part in layout.views(run.model).items()}
    with start(config(place, tmp_path / "x", *WORDS, *more), torch.device("cpu")) as run:
        stacks = [module for module in run.model.modules() if isinstance(module, Experts)]
        monkeypatch.setattr(layout, "copy", copied)
        begin(run)
        weights = Weights(run.model)
        assert len(stacks) == 2 and all(module.up.is_meta and module.down.is_meta for module in stacks)
        assert max(rooms, default=1) == 1
        assert max(there, default=2) <= 3 and not any(each() is not None for each in alive.values())
        for name, part in want.items():
            have = weights.role(name)
            if ".experts." in name:
                assert 0 < float((have - part).norm() / part.norm()) < 0.11, name
            else:
                assert torch.equal(have, part), name


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_plan_counts_what_is_held(place: Path, tmp_path: Path, mode: str) -> None:
    settings = config(place, tmp_path / "run", *WORDS, f"model.recompute={mode}", "model.upcycle.dtype=bfloat16")
    settings = replace(settings, model=replace(settings.model, dtype="float32"))
    with start(settings, torch.device("cpu")) as run:
        begin(run)
        spec = run.origin.spec
        planned = memory(spec, settings, 1, Model(spec, settings))
        assert planned.weights == bytes_of(run.model.parameters())
        gradients(run, first_batches(run))
        assert planned.gradients == bytes_of(p.grad for p in run.model.parameters())
        plain = memory(spec, replace(settings, model=replace(settings.model, frozen="float32")), 1)
        sizes = [
            module.up.numel() + module.down.numel() for module in run.model.modules() if isinstance(module, Experts)
        ]
        assert planned.gathered - plain.gathered == 4 * max(sizes), "a layer's matrices in float32"
        codes = bytes_of(p for name, p in run.model.named_parameters() if "_codes." in name)
        assert plain.weights - planned.weights == 4 * sum(sizes) - codes
        assert planned.activations <= plain.activations and (planned.activations == plain.activations) == (
            mode == "full"
        )


def qwen3(*words: str) -> tuple[Any, TrainConfig]:
    more = ["lora.rank=16", "model.recompute=full", "data.sequence=2048", "batch=4", *words]
    row = read(BenchConfig, "bench-qwen3-30b", more, TRAIN)
    return spec_of(row), row.run(1)


def test_qwen3_30b_trains_on_a_card_of_24_gb() -> None:
    """With adapters of attention; those of all experts need more."""
    spec, settings = qwen3("model.frozen=nf4", "lora.match=[attention]")
    assert memory(spec, settings, 1).total + SPARE < 24 * 2**30
    assert memory(spec, qwen3("model.frozen=nf4")[1], 1).total + SPARE > 24 * 2**30
    assert memory(spec, qwen3("model.frozen=bfloat16", "lora.match=[attention]")[1], 1).total > 60e9


def test_the_bench_counts_parameters_not_codes() -> None:
    if torch.cuda.is_available():
        pytest.skip("these sizes are for a CPU")
    lora = replace(SMALL, lora=LoraConfig(rank=2), optimizer=True)
    rows = [bench(replace(lora, model=replace(SMALL.model, frozen=frozen))) for frozen in ("", "nf4")]
    assert rows[0]["parameters"] == rows[1]["parameters"]


def test_a_resume_with_other_weights_is_refused(place: Path, tmp_path: Path) -> None:
    train(config(place, tmp_path / "run", *WORDS, steps=3))
    with pytest.raises(ValueError, match="resume with the config that made the checkpoint"):
        train(config(place, tmp_path / "run", *WORDS[1:], steps=4))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lora.rank=0"], "model.frozen=nf4 needs adapters, because codes of 4 bits cannot learn; write lora.rank=16"),
        (["mesh.ep=2", "batch=8"], "model.frozen=nf4 keeps all experts on one GPU, and there are 2 processes; use one"),
        (
            ["model.upcycle=", "model.source={}/dense"],
            "model.frozen=nf4 is for routed experts, and this model has none",
        ),
        (["model.frozen=nf5"], "model.frozen is 'nf5'; it must be one of bfloat16, float32, nf4, or left out"),
    ],
)
def test_what_codes_do_not_go_with_is_a_sentence(
    place: Path, tmp_path: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "mesh.ep=2" in words:
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=re.escape(says)):
        preflight(config(place, tmp_path / "run", *WORDS, *(word.format(place) for word in words)))
