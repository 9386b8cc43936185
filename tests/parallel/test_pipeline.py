"""Stages of a model on different ranks: loss and every gradient as in one process, exact in float64."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from tests.parallel import models, ranks, test_run, tiny
from tests.sweeps import swept
from training.config.schema import ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.estimating import memory
from training.optim.balance import Balance, BalanceConfig
from training.parallel import pipeline as module
from training.parallel.collectives import all_reduce, local
from training.parallel.context import split
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.pipeline import SINGLE, SPLIT, Pipeline, can_split, check, cut, stages
from training.parallel.shard import parallelize, reshard
from training.run.build import learner
from training.run.parts import stages_of_rank
from training.run.step import gradients, validate
from upcycle.arch.spec import DenseSpec, MoESpec

LENGTH, SEQUENCES, MICRO_BATCHES = 16, 8, 4
SPECS: dict[str, DenseSpec | MoESpec] = {
    "uneven": tiny.dense(layers=9),
    "tied": tiny.dense(layers=8, tied=True, window=5, window_layers=(2,)),
    # frequencies depend on the length of the whole sequence, which is more than this context
    "moe": tiny.moe((0, 2, 3, 7), layers=8, context=8, rope={"rope_type": "dynamic", "rope_theta": 1e2, "factor": 2.0}),
}
BALANCE = BalanceConfig(aux_weight=0.1, z_weight=0.01)
SCHEDULES = [name for name in module.SCHEDULES if can_split() or name not in SPLIT]
TWO_STAGES = [name for name in SCHEDULES if name not in SINGLE]
Found = tuple[Tensor, Tensor, dict[str, Tensor]]  # loss, of evaluation, gradients


@cache
def of_one(name: str) -> Found:
    spec = SPECS[name]
    model, batch = tiny.model(spec), tiny.batch(SEQUENCES, LENGTH, documents=True)
    Balance(BALANCE, model, scale=1 / MICRO_BATCHES)
    scored, total = batch.scored.sum(), torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(SEQUENCES).chunk(MICRO_BATCHES):
        piece = batch.each(lambda x, rows=rows: x[rows])
        loss = model.loss(piece.tokens, piece.labels, piece.positions, piece.documents) / scored
        loss.backward()
        total += loss.detach()
    return total, total, tiny.gradients(model)


def of_ranks(
    config: MeshConfig, spec: DenseSpec | MoESpec, *, recomputed: str = "none", swapped: bool = False
) -> Found:
    mesh = ParallelMesh(config)
    layers = cut(spec, config.pp, config.schedule)
    parts = [tiny.model(spec, layers[stage]) for stage in stages(config.pp, config.schedule)[mesh.index("pp")]]
    for part in parts:
        parallelize(part, mesh, recomputed=recomputed)
    if swapped:  # the last layer is computed first
        parts[0].layers = nn.ModuleDict(reversed(list(parts[0].layers.items())))
    reduce = partial(all_reduce, group=mesh.tokens_group())
    Balance(BALANCE, nn.ModuleList(parts), scale=1 / MICRO_BATCHES / mesh.dp / config.cp, reduce=reduce)
    pipeline = Pipeline(parts, mesh, config.schedule, MICRO_BATCHES)
    batch = tiny.batch(SEQUENCES, LENGTH, documents=True)
    scored = batch.scored.sum()
    rows = torch.arange(SEQUENCES).view(MICRO_BATCHES, mesh.dp, -1)[:, mesh.index("dp_shard")].flatten()
    batch = split(batch.each(lambda x: x[rows]), mesh.index("cp"), config.cp)
    whole = reduce(pipeline.evaluate(batch, LENGTH) / scored)
    loss = reduce(pipeline.step(batch, scored, LENGTH))
    found = tiny.gradients(*parts)
    # fewer sequences than micro-batches, and not a multiple of them
    parted = sum(
        reduce(pipeline.evaluate(batch.each(lambda x, of=of: x[of]), LENGTH) / scored)
        for of in (slice(1), slice(1, None))
    )
    for part in parts:
        reshard(part)
    assert abs(float(whole - parted)) < 1e-10
    return loss, whole, found


def worst(config: MeshConfig, name: str, **special: Any) -> float:
    loss, evaluated, gradients = of_ranks(config, SPECS[name], **special)
    expected_loss, _, expected = of_one(name)
    errors = [abs(float(loss - expected_loss)), abs(float(evaluated - expected_loss))]
    return max(*errors, tiny.worst(gradients, expected))


def every_case(rank: int, world: int, cases: list[tuple[MeshConfig, str]]) -> dict[str, float]:
    return {str(case): worst(*case) for case in cases}


def exact(world: int, cases: list[tuple[MeshConfig, str]]) -> None:
    for found in ranks.run(world, every_case, cases):
        assert len(found) == len(cases)
        assert {case: error for case, error in found.items() if not error < 1e-10} == {}


@pytest.mark.parametrize(("pp", "specs"), [(2, list(SPECS)), (4, swept(["uneven"], ["tied", "moe"]))], ids=["2", "4"])
def test_a_pipeline_has_the_loss_and_gradients_of_one_process(pp: int, specs: list[str]) -> None:
    exact(pp, [(MeshConfig(pp=pp, schedule=schedule), name) for schedule in SCHEDULES for name in specs])


def test_stages_that_are_sharded_and_see_parts_of_sequences() -> None:
    """FSDP around each stage: weights are gathered and freed, and gradients summed, when the schedule says so."""
    cases = []
    for schedule in TWO_STAGES:
        cases += [
            (MeshConfig(pp=2, cp=2, schedule=schedule), "moe"),
            (MeshConfig(pp=2, reshard=False, schedule=schedule), "moe"),
            (MeshConfig(pp=2, schedule=schedule), "tied"),
        ]
    exact(4, cases)


def recomputed(rank: int, world: int) -> float:
    return worst(MeshConfig(pp=2, schedule="interleaved"), "moe", recomputed="full")


def swapped(rank: int, world: int) -> float:
    return worst(MeshConfig(pp=2), "uneven", swapped=True)


def test_recomputation_in_a_pipeline() -> None:
    assert max(ranks.run(2, recomputed)) < 1e-10


def test_a_wrong_order_of_layers_is_seen() -> None:
    assert min(ranks.run(2, swapped)) > 1e-3


@dataclass(frozen=True)
class Held:
    """The most bytes at once, after any backward of a stage's micro-batches but before gradients are summed."""

    gradients: int = 0
    gathered: int = 0
    unit: int = 0  # gradients of one unit, which are copied to be summed


def held_now(parts: Sequence[nn.Module]) -> Held:
    gradients = gathered = largest = 0
    sharded = set()
    for each in (each for part in parts for each in part.modules()):
        for group in each._get_fsdp_state()._fsdp_param_groups if isinstance(each, FSDPModule) else ():
            unit = 0
            for parameter in group.fsdp_params:
                grad = parameter.unsharded_accumulated_grad
                grad = parameter._unsharded_param.grad if grad is None else grad
                unit += 0 if grad is None else local(grad).nbytes
                gathered += sum(out.untyped_storage().nbytes() for out in parameter.all_gather_outputs)
                sharded.update((parameter.sharded_param, parameter._unsharded_param))
            gradients, largest = gradients + unit, max(largest, unit)
    alone = (p for part in parts for p in part.parameters() if p not in sharded and p.grad is not None)
    return Held(gradients + sum(local(p.grad).nbytes for p in alone), gathered, largest)


def held_in_a_step(rank: int, world: int) -> tuple[Held, memory.Memory]:
    """A stage of bfloat16 activations and float32 weights on two ranks, and what the plan says of it."""
    mesh, spec = ParallelMesh(MeshConfig(pp=2)), models.SPECS["moe"]
    config = TrainConfig(
        model=ModelConfig(source="none"),
        data=DataConfig(sequence=models.SEQUENCE, mask_documents=False),
        mesh=mesh.config,
        batch=8,
        micro_batch=1,
    )
    layers = stages_of_rank(spec, mesh)
    parts = [models.make("moe", torch.float32, part=part, experts="grouped", compute=torch.bfloat16) for part in layers]
    documents: list[Any] = []
    for part in parts:
        parallelize(part, mesh)
        part.register_forward_pre_hook(
            lambda _, inputs, named: documents.append(inputs[2] if len(inputs) > 2 else named.get("documents_BS")),
            with_kwargs=True,
        )
    run, seen = learner(config, parts, mesh, torch.device("cpu"), learns=False), []
    plain = PipelineStage.backward_maybe_with_nosync

    def backward(self: PipelineStage, *inputs: Any, **named: Any) -> Any:
        found = plain(self, *inputs, **named)
        seen.append(held_now(parts))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineStage, "backward_maybe_with_nosync", backward)
        batches = [models.batch(1, 10 * micro + mesh.index("dp_shard")) for micro in range(run.micro_batches)]
        gradients(run, batches)
    assert len(seen) == run.micro_batches == len(documents) == 4
    valid = SimpleNamespace(name="of", rounds=lambda *_: 1, batches=lambda *_: [models.batch(2)], bits_per_byte=float)
    assert validate(run, [valid], lambda: None)["valid/of/loss"] > 0  # type: ignore[list-item]
    assert documents == [None] * 6, "without mask_documents no stage sees documents, in training or in validation"
    most = Held(*(max(getattr(held, name) for held in seen) for name in ("gradients", "gathered", "unit")))
    return most, memory.by_place(spec, config, world)[mesh.index("pp")]


def test_the_plan_counts_what_a_sharded_stage_holds_in_a_step() -> None:
    """All its gradients and gathered weights are whole until its last backward, and are then summed unit by unit."""
    for most, planned in ranks.run(4, held_in_a_step):
        assert most.gradients == planned.gradients > planned.weights
        assert most.gathered + most.unit == planned.gathered


def test_layers_are_cut_evenly() -> None:
    def sizes(layers: int, pp: int, schedule: str = "1f1b") -> list[int]:
        found = cut(tiny.dense(layers=layers), pp, schedule)
        assert [layer for part in found for layer in part] == list(range(layers))
        return [len(part) for part in found]

    # the ends have the embedding and the head besides
    assert sizes(6, 2) == [3, 3]
    assert sizes(6, 4) == [1, 2, 2, 1]
    assert sizes(4, 4) == [1, 1, 1, 1]
    assert sizes(30, 4) == [7, 8, 8, 7]
    assert sizes(10, 2, "zbv") == [2, 3, 3, 2]
    assert stages(2, "interleaved") == [[0, 2], [1, 3]] and stages(2, "zbv") == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "more", "words"),
    [
        ("1f1b", 3, {}, "needs 4 micro-batches a step, got 3; make batch"),
        ("interleaved", 9, {}, "needs a multiple of 4 micro-batches a step, got 9; try 8"),
        ("zbv", 8, {"recomputed": "full"}, "which model.recompute=full does not go with"),
        ("zero_bubble", 8, {"compiled": True}, "which model.compile=true does not go with"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, schedule: str, micro_batches: int, more: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(module, "can_split", lambda: True)
    with pytest.raises(ValueError, match=re.escape(words)):
        check(MeshConfig(pp=4, schedule=schedule), micro_batches, **more)
    check(MeshConfig(pp=4, schedule=schedule), 8)
    check(MeshConfig(schedule=schedule), micro_batches, **more)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("makes 8 stages, and the model has 6 layers; try mesh.pp=3")):
        cut(tiny.dense(layers=6), 4, "zbv")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What test_run.py starts from, with tied embeddings and layers for four stages."""
    return test_run.folder_of(tmp_path_factory.mktemp("run"), num_hidden_layers=4, tie_word_embeddings=True)


def test_tied_embeddings_are_trained_as_one_matrix(place: Path, tmp_path: Path) -> None:
    """Loaded, stepped, clipped, validated and exported once, whether one rank has both stages or two have one each."""

    def words(name: str, *more: str) -> list[str]:
        # a target that ties, as test_run.py's does not; its scores know no bias
        tied = {"source": str(place / "dense"), "target": "qwen3_moe", "experts": 4, "granularity": 2, "top_k": 2}
        model = f"model.upcycle={json.dumps(tied | {'method': 'virtual_group'})}"
        plain = [
            w for w in test_run.words(place, tmp_path / name) if not w.startswith(("model.upcycle", "balance.bias"))
        ]
        return [*plain, model, f"export={tmp_path / name}-out", *more]

    alone = test_run.on_rank(0, 1, words("alone"))
    want = test_run.exported(tmp_path / "alone-out")
    assert "model.embed_tokens.weight" in want and "lm_head.weight" not in want, "nothing is tied"
    for schedule in ("1f1b", "zbv")[: 1 + can_split()]:
        ranks.run(2, test_run.on_rank, words(schedule, "micro_batch=4", "mesh.pp=2", f"mesh.schedule={schedule}"))
        test_run.same_run(tmp_path / schedule, alone)
        have = test_run.exported(tmp_path / f"{schedule}-out")
        assert have.keys() == want.keys()
        for name in want:
            assert torch.allclose(have[name].float(), want[name].float(), rtol=0, atol=2e-4), name


def test_a_torch_that_splits_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_split", lambda: False)
    with pytest.raises(ValueError, match=re.escape("mesh.schedule=zbv needs torch 2.13, and this is")):
        check(MeshConfig(pp=2, schedule="zbv"), 4)
    check(MeshConfig(pp=2, schedule="interleaved"), 4)
