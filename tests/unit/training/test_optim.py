"""Optimiser, spike guard, learning-rate schedule and FLOPs: against naive ones, and bit for bit where that is promised."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.ranks import forked
from training.checkpoint.state import Checkpoints, TrainState
from training.kernels import updates
from training.observe.flops import model_flops, peak_tflops, throughput
from training.optim.config import OptimConfig
from training.optim.guard import SpikeGuard, global_norm
from training.optim.muon import muon_update, orthogonalize
from training.optim.optimizer import Optimizer
from training.optim.schedule import SHAPES, ScheduleConfig, schedule
from training.optim.slots import Slot
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.reading import build

SHAPES_OF = {
    "embed.weight": (11, 6),
    "layers.0.attn_norm.weight": (6,),
    "layers.0.attention.q.weight": (8, 6),
    "layers.0.attention.q.bias": (8,),
    "layers.0.attention.q_norm.weight": (4,),
    "layers.0.ffn.router.weight": (3, 6),
    "layers.0.ffn.experts.up": (3, 2, 5, 6),
    "layers.0.ffn.experts.down": (3, 6, 5),
    "layers.0.ffn.experts.down_bias": (3, 6),
    "layers.0.ffn.shared.up.weight": (5, 6),
    "layers.0.ffn.shared_gate.weight": (1, 6),
    "final_norm.weight": (6,),
    "head.weight": (11, 6),
}
MATRICES = {"attention.q.weight", "experts.up", "experts.down", "shared.up.weight"}


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES_OF.items()}


def give_gradients(parameters: dict[str, nn.Parameter], step: int, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in parameters.values():
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def run(parameters: dict[str, nn.Parameter], optimiser: Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(parameters, step)
        optimiser.clip()
        optimiser.step(1e-2 / (step + 1))


def everything(parameters: dict[str, nn.Parameter], optimiser: Optimizer) -> dict[str, Tensor]:
    state = {f"{slot.name} {kind}": t.clone() for slot in optimiser.slots for kind, t in slot.state.items()}
    return {n: p.detach().clone() for n, p in parameters.items()} | state


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_name_says_how_a_parameter_is_updated() -> None:
    config = OptimConfig(name="muon", weight_decay=0.3, router_lr=0.5, expert_lr=2.0, embed_lr=0.25)
    slots = {s.name.removeprefix("layers.0.").removeprefix("ffn."): s for s in Optimizer(config, model().items()).slots}
    assert {n for n, s in slots.items() if s.rule == "muon"} == MATRICES
    undecayed = {n for n, s in slots.items() if s.decay == 0}
    assert undecayed == {n for n in slots if "norm" in n or n.endswith("bias")} | {"router.weight"}
    assert slots["embed.weight"].decay == slots["experts.up"].decay == 0.3
    assert {n: s.multiplier for n, s in slots.items() if s.multiplier != 1} == {
        "embed.weight": 0.25,
        "head.weight": 0.25,
        "router.weight": 0.5,
        "experts.up": 2.0,
        "experts.down": 2.0,
        "experts.down_bias": 2.0,
    }
    with_decay = Optimizer(OptimConfig(router_decay=True), model().items())
    assert next(s for s in with_decay.slots if "router" in s.name).decay == 0.1
    assert all(s.rule == "adamw" for s in with_decay.slots)


def adamw_by_hand(w: Tensor, gradients: list[Tensor], rates: list[float], decay: float, config: OptimConfig) -> Tensor:
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        w = w * (1 - lr * decay)
        w = w - lr * (m / (1 - config.beta1**t)) / ((v / (1 - config.beta2**t)).sqrt() + config.eps)
    return w


def test_adamw_is_the_formula() -> None:
    config = OptimConfig(expert_lr=3.0)
    parameters = model(torch.float64)
    start = {n: p.detach().clone() for n, p in parameters.items()}
    optimiser = Optimizer(config, parameters.items())
    gradients: dict[str, list[Tensor]] = {n: [] for n in parameters}
    rates = [0.1, 0.05, 0.02]
    for step, rate in enumerate(rates):
        give_gradients(parameters, step)
        for n, p in parameters.items():
            assert p.grad is not None
            gradients[n].append(p.grad.clone())
        optimiser.step(rate)
    for slot in optimiser.slots:
        own = [rate * (3.0 if "experts" in slot.name else 1.0) for rate in rates]
        want = adamw_by_hand(start[slot.name], gradients[slot.name], own, slot.decay, config)
        torch.testing.assert_close(slot.parameter.detach(), want, rtol=0, atol=1e-10)


def test_newton_schulz_is_its_polynomial_of_the_singular_values() -> None:
    x = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / (x.norm() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalize(x), u @ s.diag() @ vh, rtol=0, atol=1e-10)
    assert (orthogonalize(x) - u @ (s * 1.001).diag() @ vh).abs().max() > 1e-6


def test_muon_treats_each_expert_and_each_of_its_matrices_by_itself() -> None:
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x[1] *= 100  # an expert with large gradients must not make the others' updates small
    got = muon_update(x)
    want = torch.stack([torch.stack([muon_update(half) for half in expert]) for expert in x])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert (got.flatten(1, 2) - muon_update(x.flatten(1, 2))).abs().max() > 0.05  # gate and up as one matrix
    padded = torch.cat([x, torch.zeros(3, 2, 4, 6, dtype=x.dtype)], 2)
    assert not muon_update(padded)[:, :, 5:].any()  # the neurons that pad an uneven expert stay zero
    assert not muon_update(torch.zeros_like(x)).any()  # an expert that no token chose


def test_muon_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.optim.muon.PIECE", 2 * 60)  # three experts in two goes
    parameters = model(torch.float64)
    name = "layers.0.ffn.experts.up"
    w, momentum = parameters[name].detach().clone(), torch.zeros(SHAPES_OF[name], dtype=torch.float64)
    optimiser = Optimizer(OptimConfig(name="muon", weight_decay=0.2), parameters.items())
    for step in range(3):
        give_gradients(parameters, step)
        g = parameters[name].grad
        assert g is not None
        momentum = 0.95 * momentum + g
        w = w * (1 - 0.1 * 0.2) - 0.1 * muon_update(g + 0.95 * momentum)
        optimiser.step(0.1)
    torch.testing.assert_close(parameters[name].detach(), w, rtol=0, atol=1e-10)


CONFIGS = {
    "adamw": OptimConfig(),
    "muon": OptimConfig(name="muon"),
    "adamw-bf16-moments": OptimConfig(moments="bfloat16"),
    "muon-bf16-moments": OptimConfig(name="muon", moments="bfloat16"),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_skipped_step_leaves_every_bit_alone(name: str, dtype: torch.dtype) -> None:
    parameters = model(dtype)
    optimiser = Optimizer(CONFIGS[name], parameters.items())
    run(parameters, optimiser, range(2))
    before = everything(parameters, optimiser)
    for bad in (math.nan, math.inf):
        give_gradients(parameters, 2)
        gradient = parameters["layers.0.ffn.experts.up"].grad
        assert gradient is not None
        gradient[0, 0, 0] = bad
        norm = optimiser.clip()
        optimiser.step(1e-2, ~norm.isfinite())
    assert optimiser.skipped == 2 and same_bits(before, everything(parameters, optimiser))
    run(parameters, optimiser, range(2, 3))  # and the next step is the one that would have come
    twin = model(dtype)
    never = Optimizer(CONFIGS[name], twin.items())
    run(twin, never, range(3))
    assert all(torch.equal(parameters[n], twin[n]) for n in parameters)
    optimiser.step(1e-2, torch.tensor(False))  # not skipped: something changes
    assert not same_bits(everything(twin, never), everything(parameters, optimiser))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_resume_is_bitwise_through_a_checkpoint(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, dict[str, nn.Parameter], Optimizer]:
        root, parameters = nn.Module(), model(dtype, seed)
        for role, parameter in parameters.items():
            *path, last = role.split(".")
            owner = root
            for word in path:
                owner.add_module(word, owner._modules.get(word) or nn.Module())
                owner = owner.get_submodule(word)
            owner.register_parameter(last, parameter)
        return root, parameters, Optimizer(CONFIGS[name], parameters.items())

    (_, whole, never_stopped), (root, part, stopped), (other, again, resumed) = (made(seed) for seed in (0, 0, 7))
    run(whole, never_stopped, range(5))
    run(part, stopped, range(2))
    stopped.skipped.add_(3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, TrainState(root, [stopped], step=2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.load(TrainState(other, [resumed]))
    run(again, resumed, range(2, 5))
    assert resumed.skipped == 3
    assert same_bits(everything(whole, never_stopped), everything(again, resumed))
    anew = Optimizer(CONFIGS[name], part.items())  # twin: the weights, but a fresh optimiser
    run(part, anew, range(2, 5))
    assert not same_bits(everything(whole, never_stopped), everything(part, anew))


def test_bf16_parameters_are_their_float32_masters_rounded() -> None:
    low, full = model(torch.bfloat16), model(torch.float32)
    with torch.no_grad():
        for n in full:
            full[n].copy_(low[n].float())
    config = OptimConfig(clip=0)
    optimisers = [Optimizer(config, p.items()) for p in (low, full)]
    for step in range(20):
        give_gradients(low, step)
        for n in full:
            full[n].grad = low[n].grad.float()  # type: ignore[union-attr]
        for optimiser in optimisers:
            optimiser.step(1e-5)  # too small for bf16 to see
    assert all(torch.equal(low[n], full[n].bfloat16()) for n in low)
    assert all(torch.equal(s.state["master"], full[s.name]) for s in optimisers[0].slots)
    kept_in_bf16 = model(torch.bfloat16)  # twin: what plain bf16 AdamW would do
    torch_adamw = torch.optim.AdamW(kept_in_bf16.values(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(20):
        give_gradients(kept_in_bf16, step)
        torch_adamw.step()
    assert any(not torch.equal(low[n], kept_in_bf16[n]) for n in low)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_kept_in_bf16_is_stepped_in_float32_and_rounded(name: str) -> None:
    parameters = model(torch.bfloat16)
    start = {n: p.detach().clone() for n, p in parameters.items()}
    optimiser = Optimizer(CONFIGS[name], parameters.items())
    give_gradients(parameters, 0)
    optimiser.step(0.1)
    for slot in optimiser.slots:
        assert torch.equal(slot.parameter, slot.state["master"].bfloat16())
        assert not torch.equal(slot.parameter, start[slot.name])
        g = slot.gradient.float()
        first = slot.state["momentum"] if slot.rule == "muon" else slot.state["exp_avg"]
        want = g if slot.rule == "muon" else (1 - CONFIGS[name].beta1) * g
        assert first.dtype == (torch.bfloat16 if "bf16" in name else torch.float32)
        torch.testing.assert_close(first, want.to(first.dtype), rtol=2**-7 if "bf16" in name else 1e-6, atol=0)
        if slot.rule == "adamw":
            second = slot.state["exp_avg_sq"]
            assert second.dtype == first.dtype and second.any() and slot.state["step"] == 1


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_is_of_all_gradients_together_and_clipping_keeps_directions(name: str, dtype: torch.dtype) -> None:
    parameters = model(dtype)
    config = OptimConfig(name=name, clip=0.5)
    optimiser = Optimizer(config, parameters.items())
    give_gradients(parameters, 0)
    before = {n: p.grad.clone() for n, p in parameters.items()}  # type: ignore[union-attr]
    want = torch.cat([g.flatten().double() for g in before.values()]).norm()
    exact = 1e-12 if dtype == torch.float64 else 1e-6
    norm = optimiser.clip()
    torch.testing.assert_close(norm.double(), want, rtol=exact, atol=0)
    optimiser.step(0.1)

    def seen(slot: Slot) -> Tensor:  # the gradient that the step worked with, not rounded to the parameter's dtype
        first = slot.state["momentum"] if slot.rule == "muon" else slot.state["exp_avg"] / (1 - config.beta1)
        return first.double()

    for slot in optimiser.slots:
        torch.testing.assert_close(
            seen(slot), before[slot.name].double() * (0.5 / (want + 1e-6)), rtol=exact * 2, atol=1e-12
        )
    apart = {n: g.double() * min(1.0, float(0.5 / g.double().norm())) for n, g in before.items()}  # each by itself
    assert any((seen(slot) - apart[slot.name]).abs().max() > 1e-6 for slot in optimiser.slots)
    # gradients that are small enough are taken as they are; and a clip is for one step
    unclipped = Optimizer(OptimConfig(name=name, clip=100), model(dtype).items())
    give_gradients({slot.name: slot.parameter for slot in unclipped.slots}, 0)
    unclipped.clip()
    unclipped.step(0.1)
    for slot in unclipped.slots:
        torch.testing.assert_close(seen(slot), before[slot.name].double(), rtol=exact * 2, atol=1e-12)
    clipped = {slot.name: seen(slot) for slot in optimiser.slots}
    give_gradients(parameters, 0)
    optimiser.step(0.1)
    for slot in optimiser.slots:
        if slot.rule == "adamw":
            mean = config.beta1 * (1 - config.beta1) * clipped[slot.name]
            both = mean + (1 - config.beta1) * before[slot.name].double()
            torch.testing.assert_close(
                seen(slot) * (1 - config.beta1), both, rtol=exact * 10, atol=1e-12 if exact < 1e-9 else 1e-7
            )
    other_stage = global_norm([torch.full((4,), 3.0)], reduce=lambda squares: squares + 64)
    assert other_stage == 10


def test_a_parameter_without_gradient_is_named() -> None:
    parameters = model()
    optimiser = Optimizer(OptimConfig(), parameters.items())
    give_gradients(parameters, 0)
    parameters["head.weight"].grad = None
    with pytest.raises(ValueError, match=r"head\.weight has no gradient"):
        optimiser.step(0.1)
    frozen = model()
    frozen["head.weight"].requires_grad_(False)
    optimiser = Optimizer(OptimConfig(), frozen.items())
    before = frozen["head.weight"].clone()
    run(frozen, optimiser, range(1))
    assert torch.equal(frozen["head.weight"], before)


def sharded(rank: int, world: int, store: str) -> None:
    """On one of `world` ranks: whole and sharded parameters take the same steps."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh, expert_mesh = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world))
    for name in ("adamw", "muon"):
        whole = model(torch.float64)
        parts: dict[str, nn.Parameter] = {}
        for n, p in whole.items():
            if n.endswith("experts.down"):  # other mesh, sharded inside its matrices
                part = distribute_tensor(p.detach(), expert_mesh, [Replicate(), Shard(1)])
            else:  # the router stays whole on every rank, and must not be counted twice
                part = distribute_tensor(p.detach(), mesh, [Replicate() if "router" in n else Shard(0)])
            parts[n] = nn.Parameter(part)
        optimisers = [Optimizer(CONFIGS[name], p.items()) for p in (whole, parts)]
        for step in range(3):
            give_gradients(whole, step)
            for n, p in parts.items():
                gradient = whole[n].grad
                assert isinstance(p.data, DTensor) and gradient is not None
                p.grad = distribute_tensor(gradient.clone(), p.data.device_mesh, p.data.placements)
            norms = [optimiser.clip() for optimiser in optimisers]
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)
            for optimiser in optimisers:
                optimiser.step(1e-2, torch.tensor(step == 1))
        gathered = {n: p.data.full_tensor() for n, p in parts.items()}  # type: ignore[attr-defined]
        worst = max(float((gathered[n] - whole[n].detach()).abs().max()) for n in whole)
        assert worst < 1e-10, (name, worst)
        start = model(torch.float64)
        assert min(float((gathered[n] - start[n].detach()).abs().max()) for n in start) > 1e-3  # all of them moved
    dist.destroy_process_group()


def test_sharded_parameters_take_the_same_steps(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = forked()
    ranks = [context.Process(target=sharded, args=(rank, 2, str(tmp_path / "store"))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]


def test_a_spike_is_flagged_and_only_a_spike() -> None:
    config = OptimConfig(spike_sigma=6, spike_window=16)
    guard, off = SpikeGuard(config), SpikeGuard(OptimConfig(spike_window=16))
    generator = torch.Generator().manual_seed(0)
    values = 2 + 0.1 * torch.rand(60, 2, generator=generator, dtype=torch.float64)
    values[5] = 50  # too early to know
    values[40, 0] = 9  # a loss
    values[41, 1] = 9  # a gradient norm
    values[50, 0] = math.nan  # not ours: the norm says it
    values[55] = -9  # downwards is no spike
    flags = []
    history: list[list[float]] = []
    for i, (loss, norm) in enumerate(values):
        recent = torch.tensor(history[-16:], dtype=torch.float64)
        flag = bool(guard.spike(loss, norm))
        assert not off.spike(loss, norm) and guard.values.isfinite().all()
        new = torch.stack([loss, norm])
        if len(history) >= 8 and new.isfinite().all():
            assert flag == bool((new > recent.mean(0) + 6 * recent.std(0, correction=0)).any()), i
        if new.isfinite().all():
            history.append(new.tolist())
        flags += [i] if flag else []
    assert flags == [40, 41] or flags == [40]  # the first spike may widen the window for the second


def test_a_spike_guard_resumes_and_gets_used_to_a_new_level() -> None:
    config = OptimConfig(spike_sigma=6, spike_window=8)
    one = torch.tensor(1.0)
    guard = SpikeGuard(config)
    for _ in range(8):
        assert not guard.spike(one, one)
    resumed, fresh = SpikeGuard(config), SpikeGuard(config)
    resumed.load_state_dict({n: t.clone() for n, t in guard.state_dict().items()})
    assert [bool(g.spike(2 * one, one)) for g in (guard, resumed, fresh)] == [True, True, False]
    assert same_bits(guard.state_dict(), resumed.state_dict())
    assert not any(bool(guard.spike(2 * one, one)) for _ in range(8))


# ---- schedule


@settings(max_examples=150, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    decay_shape=st.sampled_from(["sqrt", "linear"]),
    steps=st.integers(2, 400),
    warmup=st.integers(0, 100),
    decay=st.floats(0.01, 1),
    ratio=st.floats(0, 1),
)
def test_a_schedule_rises_to_its_peak_then_never_rises(
    shape: str, decay_shape: str, steps: int, warmup: int, decay: float, ratio: float
) -> None:
    warmup = min(warmup, steps - 2)
    config = ScheduleConfig(
        shape=shape, peak=2e-4, final=ratio * 2e-4, warmup=warmup, decay=decay, decay_shape=decay_shape
    )
    rate = schedule(config, steps)
    rates = [rate(step) for step in range(steps + 5)]
    assert rates == [schedule(config, steps)(step) for step in range(steps + 5)]
    assert all(0 < a < b for a, b in pairwise(rates[:warmup]))
    assert math.isclose(rates[max(warmup - 1, 0)], 2e-4)
    after = rates[max(warmup - 1, 0) :]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(after))
    last = 2e-4 if shape == "constant" else config.final
    assert all(math.isclose(r, last, abs_tol=1e-18) for r in rates[steps - 1 :])


def test_schedules_at_known_points() -> None:
    def at(steps: int, *points: int, **values: object) -> list[float]:
        rate: Callable[[int], float] = schedule(build(ScheduleConfig, {"peak": 1.0, "final": 0.0, **values}), steps)
        return [round(rate(point), 6) for point in points]

    assert at(101, 0, 25, 50, 100, shape="cosine", warmup=0) == [1, 0.853553, 0.5, 0]
    assert at(101, 0, 25, 50, 100, shape="linear", warmup=0) == [1, 0.75, 0.5, 0]
    assert at(101, 0, 5, 9, 10, 100, shape="constant", warmup=10) == [0.1, 0.6, 1, 1, 1]
    wsd = {"shape": "wsd", "warmup": 10, "decay": 0.2}
    assert at(101, 9, 80, 81, 86, 100, **wsd, decay_shape="linear") == [1, 1, 0.95, 0.7, 0]
    assert at(101, 9, 80, 81, 86, 100, **wsd, decay_shape="sqrt") == [1, 1, 0.776393, 0.452277, 0]
    assert at(101, 50, shape="linear", warmup=0) != at(101, 50, shape="wsd", warmup=0)


# ---- configs


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        (OptimConfig, {"name": "adam"}, "optim.name is 'adam'; it must be one of adamw, muon"),
        (OptimConfig, {"weight_decy": 0.1}, "unknown key 'weight_decy'; did you mean 'weight_decay'"),
        (OptimConfig, {"moments": "bfloat16", "beta2": 0.999}, "cannot decay moments in bfloat16"),
        (OptimConfig, {"moments": "fp8"}, "it must be one of float32, bfloat16"),
        (OptimConfig, {"clip": -1}, "optim.clip is -1"),
        (OptimConfig, {"eps": math.nan}, "optim.eps is nan"),
        (OptimConfig, {"beta1": 1.0}, "at least 0 and below 1"),
        (OptimConfig, {"beta1": "x"}, "it must be a number"),
        (OptimConfig, {"spike_window": 1}, "at least 2"),
        (OptimConfig, {"average": 1.5}, "optim.average is 1.5; it must be a share of the steps"),
        (OptimConfig, {"share": math.nan}, "optim.share is nan; it must be a number from 0 to 1"),
        (ScheduleConfig, {"shape": "step"}, "one of constant, linear, cosine, wsd"),
        (ScheduleConfig, {"decay_shape": "exp"}, "one of sqrt, linear"),
        (ScheduleConfig, {"peak": 0}, "above 0"),
        (ScheduleConfig, {"final": 1.0}, "between 0 and peak"),
        (ScheduleConfig, {"warmup": -1}, "0 for none"),
        (ScheduleConfig, {"decay": 0}, "share of the steps"),
    ],
)
def test_a_bad_config_is_one_sentence(kind: type[object], values: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        build(kind, values)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert build(kind, {}) == kind()


def test_a_warmup_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="set a smaller warmup"):
        schedule(ScheduleConfig(warmup=100), 100)
    assert schedule(ScheduleConfig(warmup=99), 100)(98) == 2e-4


# ---- FLOPs


def test_flops_and_mfu_are_the_published_ones() -> None:
    dense = DenseSpec("qwen3", 48, 2048, 6144, 32, 4, 128, 151936, 40960)
    qwen3_30b = MoESpec(dense, tuple(range(48)), (768,) * 128, top_k=8, copies=16)
    assert round(model_flops(qwen3_30b, 4096) / 1e9, 3) == 23.006
    assert model_flops(qwen3_30b, 4096, gated=False) < model_flops(qwen3_30b, 4096)
    llama_70b = DenseSpec("llama", 80, 8192, 28672, 64, 8, 128, 128256, 8192)
    assert round(model_flops(llama_70b, 8192) / 1e9, 2) == 449.22
    row = throughput(model_flops(qwen3_30b, 4096), 12040, "NVIDIA H100 80GB HBM3")
    assert round(row.tflops, 1) == 277.0 and row.mfu is not None and round(row.mfu, 3) == 0.28


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H20", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_an_unknown_card_has_no_peak(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak
    assert (throughput(1e9, 1e3, device).mfu is None) == (peak is None)


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_an_update_of_mixed_dtypes_asks_the_device_for_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the number of a tensor that a whole list is to be added: on a GPU, the host would wait there."""
    monkeypatch.setattr(updates, "on_kernel", lambda *tensors: True)
    monkeypatch.setattr(updates, "adamw_", lambda *tensors, **settings: None)  # the kernel's own lines have a test
    parameters = {n: torch.nn.Parameter(torch.ones(3, 3)) for n in ("layers.0.q.weight", "layers.0.o.weight")}
    optimizer = Optimizer(OptimConfig(), parameters.items())
    for p in parameters.values():
        p.grad_dtype = None
        p.grad = torch.ones(3, 3, dtype=torch.bfloat16)
    with Called() as called:
        optimizer.step(0.1, optimizer.clip() < 0)
    assert not {name for name in called.names if "foreach" in name and name.endswith(".Tensor")}, called.names
    assert not {name for name in called.names if "_local_scalar" in name or ".item" in name}
    assert [float(slot.state["step"]) for slot in optimizer.slots] == [1.0, 1.0]


def test_the_norm_counts_gradients_of_every_dtype() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([12.0], dtype=torch.bfloat16), torch.tensor([4.0])]
    assert float(global_norm(gradients)) == 13
