"""FLOPs and bytes of every target, as we plan them, against what torch counts and what a real optimizer holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import test_siblings
import tiny
import torch
from test_targets_parity import TARGETS, first_variant, moe_of, spec_of_variant, target_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.unit.upcycle.plans import load
from training.checkpoint.layout import opened
from training.config.schema import ModelConfig, TrainConfig
from training.estimating.memory import memory
from training.experts import SPECIFICATION
from training.model.stock.model import dense_of, model_of
from training.optim.config import OptimConfig
from training.optim.optimizer import Optimizer
from upcycle.arch import siblings
from upcycle.arch.abilities import refusals
from upcycle.arch.registry import target
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.cli.plan import as_json
from upcycle.config.schema import UpcycleConfig
from upcycle.converting.card import table
from upcycle.converting.convert import convert
from upcycle.planning import size
from upcycle.planning.choice import choose_target
from upcycle.planning.plan import UpcyclePlan

LENGTH = 32
OPTIMISERS = {
    "adamw": OptimConfig(),
    "adamw bfloat16": OptimConfig(moments="bfloat16"),
    "muon": OptimConfig(name="muon"),
    "muon bfloat16, mean": OptimConfig(name="muon", moments="bfloat16", average=0.5),
}


def made(target: str, folder: Path) -> tuple[UpcyclePlan, Path]:
    """Convert a tiny dense model to 4 copies, top-2, of a target; return the plan and the dense folder."""
    pair = siblings.MOE.get(target)
    dense = folder / "dense"
    if pair:
        test_siblings.made(pair.dense, dense)
        sigmoid = "softmax" not in pair.can.scores
    else:
        tiny.make_variant("llama" if target == "upcycled" else first_variant(target), dense)
        sigmoid = "softmax" not in target_of(target).can.scores
    score = f"router.score={'sigmoid' if sigmoid else 'softmax'}"
    plan, sources = load(
        f"source={dense}", f"target={target}", "experts=4", score, f"output={folder / 'moe'}", "sequence=32"
    )
    convert(plan, sources, quiet=True)
    return plan, dense


@torch.no_grad()
def counted(folder: Path) -> float:
    """Return the FLOPs per token that torch counts in a forward pass; it does not count attention's on a CPU."""
    kind = json.loads((folder / "config.json").read_text())
    auto = AutoModelForImageTextToText if "vision_config" in kind else AutoModelForCausalLM
    eager = {"attn_implementation": "sdpa", "experts_implementation": "eager"}  # torch does not count grouped products
    model = auto.from_pretrained(folder, trust_remote_code="auto_map" in kind, **eager).eval()
    with FlopCounterMode(display=False) as counter:
        model(tiny.tokens(1, LENGTH), use_cache=False)
    return counter.get_total_flops() / LENGTH


def held(spec: DenseSpec | MoESpec, config: TrainConfig) -> tuple[int, int]:
    """Return the bytes of a model's weights, and of its optimizer's state after one step."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = model_of(spec, part=range(dense_of(spec).layers), experts=SPECIFICATION)
    for parameter in model.to_empty(device="cpu").parameters():
        parameter.data.normal_()
        parameter.grad = torch.randn_like(parameter)
    optimizer = Optimizer(config.optim, model.named_parameters(), spec if isinstance(spec, MoESpec) else None)
    optimizer.step(1e-3)
    state = [t for each in optimizer.state.values() for kind, t in each.items() if kind != "step"]
    return tuple(sum(t.numel() * t.element_size() for t in ts) for ts in (model.parameters(), state))  # type: ignore[return-value]


@pytest.mark.parametrize("name", [*TARGETS, "upcycled", *siblings.MOE])
def test_the_plan_counts_the_flops_and_bytes_of_every_target(name: str, tmp_path: Path) -> None:
    plan, dense = made(name, tmp_path)
    flops, zeros = plan.flops()
    moe = plan.moe
    gates = any("shared_expert_gate" in output.name for output in plan.outputs)
    small = 2 * moe.dense.hidden * len(moe.layers) * (moe.experts + gates)  # routers: the convention leaves them out
    mine = (flops - size.flops_per_token(moe.dense, 0, LENGTH)) / 3 + small
    theirs = counted(tmp_path / "moe")
    if moe.dense.carried is not None:  # our count of the part that is copied is not exact; the difference is
        theirs -= counted(dense)
        mine = (flops - size.dense_flops(moe.dense, LENGTH)) / 3 + small
    print(f"{name:18} {mine / 1e3:9.1f} {theirs / 1e3:9.1f} kFLOP, {zeros / 3e3:.1f} of them zeros")
    assert mine == theirs
    assert bool(zeros) == any("always computes a shared expert" in note for note in plan.notes)
    said = next(line for line in table(plan).splitlines() if line.startswith("FLOPs/token"))
    assert bool(zeros) == ("of them are zeros" in said)
    assert as_json(plan, tensors=False)["flops_per_token"]["zeros"] == zeros
    if moe.dense.carried is not None and siblings.MOE[name].wrapped:
        return  # training does not support it
    with opened(tmp_path / "moe") as origin:
        spec = origin.spec
    same_bytes(name, spec)


def test_no_target_with_a_whole_expert_of_zeros_is_chosen_if_another_one_holds_the_model() -> None:
    """A Qwen2-MoE has 64 neurons of zeros, which real models do not notice; a GLM-4-MoE has a whole routed width."""
    for variant in tiny.VARIANTS:
        spec = spec_of_variant(variant)
        for score in ("softmax", "sigmoid") if spec else ():
            assert spec is not None
            moe = replace(moe_of(replace(spec, ffn=4096), "mixtral"), score=score)
            chosen = choose_target(UpcycleConfig(source="dense"), moe)[0]
            cheap = [name for name in TARGETS if not refusals(target_of(name).can, moe)]
            cheap = [name for name in cheap if target_of(name).forced(moe) < moe.width]
            assert target(chosen).forced(moe) < moe.width or not cheap, (variant, score, chosen, cheap)
            if target(chosen).forced(moe):
                assert not refusals(target("upcycled").can, moe), "the note names it as the way out"


def same_bytes(target: str, spec: DenseSpec | MoESpec) -> None:
    for name, optim in OPTIMISERS.items():
        config = TrainConfig(model=ModelConfig(source="here"), optim=optim)
        planned, real = memory(spec, config, 1), held(spec, config)
        print(f"{target:18} {name:20} {planned.moments:9} bytes of moments planned, {real[1]:9} held")
        assert (planned.weights, planned.moments) == real, name


def test_the_plan_counts_the_bytes_of_every_optimiser(tmp_path: Path) -> None:
    dense = tiny.make_variant("llama", tmp_path / "dense")
    copies = load(f"source={dense}", "experts=4")[0]
    slices = load(f"source={dense}", "method.name=virtual_group", "granularity=2", "experts=4", "top_k=2")[0]
    for name, spec in {"dense": copies.dense, "copies": copies.moe, "slices": slices.moe}.items():
        same_bytes(name, spec)
