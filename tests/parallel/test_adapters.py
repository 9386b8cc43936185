"""Adapters on matrices that are divided have the loss and the gradients of one process, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.parallel import models
from tests.parallel.ranks import run
from tests.parallel.test_shard import BATCH, MICRO, Case, config_of
from training.model.decoder import Decoder
from training.model.lora import LoraConfig, attach, is_adapter
from training.model.moe import MoE
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.pipeline import can_split
from training.parallel.shard import parallelize
from training.run.build import data_rank, learner
from training.run.parts import stages_of_rank
from training.run.step import gradients
from upcycle.planning import rng

LORA = LoraConfig(rank=3, alpha=5.0)
CASES = [
    Case(2, MeshConfig(tp=2)),
    Case(2, MeshConfig(tp=2, etp=2), "odd"),
    Case(2, MeshConfig(tp=2, ep=2), "latent"),
    Case(2, MeshConfig(etp=2), "parallel", recompute="full"),
    Case(2, MeshConfig(tp=2), "dense"),
    Case(2, MeshConfig(pp=2), "odd"),
    Case(2, MeshConfig(pp=2, schedule="interleaved"), "slices4"),
    Case(2, MeshConfig(pp=2, schedule="zero_bubble"), "slices4"),
    Case(2, MeshConfig(cp=2)),
]
models.SPECS["slices4"] = replace(models.SPECS["slices"], layers=(0, 1, 2, 3), dense=replace(models.DENSE, layers=4))  # type: ignore[arg-type]
Result = tuple[float, dict[str, Tensor]]


def adapted(case: Case, layers: range | None) -> Decoder:
    """A model of frozen weights, and adapters none of which are zero but those of the padding of uneven experts."""
    part = models.make(case.model, part=layers, experts="grouped")
    attach(part, LORA)
    part.double()
    for name, parameter in part.named_parameters():
        if is_adapter(name):
            parameter.data = 0.2 * rng.normal(tuple(parameter.shape), 0, name).double()
        parameter.requires_grad_(is_adapter(name))
    for layer in part.layers.values():
        if isinstance(layer.ffn, MoE):
            padding = torch.arange(8)[None] >= torch.tensor(layer.ffn.spec.widths)[:, None]
            layer.ffn.experts.down_lora_a.data[padding] = 0
            layer.ffn.experts.up_lora_b.data[padding.repeat(1, 2 if layer.ffn.experts.gated else 1)] = 0
    return part


def learned(case: Case) -> Result:
    mesh = ParallelMesh(case.mesh, device_type="cpu")
    parts = [adapted(case, layers) for layers in stages_of_rank(models.SPECS[case.model], mesh)]
    for part in parts:
        parallelize(part, mesh, recomputed=case.recompute)
    size, data = BATCH // MICRO // mesh.dp, models.batch(BATCH)
    learns = learner(config_of(case, size), parts, mesh, torch.device("cpu"), learns=False)
    firsts = [(micro * mesh.dp + data_rank(mesh)) * size for micro in range(MICRO)]
    loss = gradients(learns, [data.each(lambda tensor, at=at: tensor[at : at + size]) for at in firsts])
    slopes = {name: models.whole(p.grad) for name, p in learns.model.named_parameters() if p.grad is not None}
    return float(loss), slopes


def on_ranks(rank: int, world: int, cases: list[Case]) -> list[Result]:
    return [learned(case) for case in cases]


@pytest.fixture(scope="module")
def divided() -> dict[Case, list[Result]]:
    cases = [case for case in CASES if can_split() or case.mesh.schedule != "zero_bubble"]
    found = run(2, on_ranks, cases)
    return {case: [of_rank[i] for of_rank in found] for i, case in enumerate(cases)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapters_of_divided_matrices_learn_as_on_one_process(case: Case, divided: dict[Case, list[Result]]) -> None:
    if case not in divided:
        pytest.skip("this torch cannot split backward")
    loss, want = learned(replace(case, mesh=MeshConfig()))
    slopes: dict[str, Tensor] = {}
    for found, here in divided[case]:
        assert found == pytest.approx(loss, rel=1e-10)
        assert here and all(map(is_adapter, here))
        assert case.mesh.pp > 1 or here.keys() == want.keys(), "every rank has all"
        for name in here:
            error = float((here[name] - want[name]).abs().max() / want[name].abs().max())
            assert error < 1e-10, (name, error)
        slopes |= here
    assert slopes.keys() == want.keys() and all(bool(slope.any()) for slope in slopes.values())
