"""Recomputation changes what is kept, and nothing else: not a gradient, not a count, not a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sweeps import swept
from tests.unit.training.test_experts import with_quack
from training.checkpoint import layout
from training.dispatch import create
from training.experts import backend, grouped, quack
from training.model.decoder import Decoder, Layer
from training.model.moe import Experts, MoE
from training.model.recompute import MODES, again, recompute
from training.optim.balance import Balance, BalanceConfig
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.shard import LocalExperts, moe_blocks, one_step, parallelize
from upcycle.arch.spec import DenseSpec, MoESpec

__all__ = ["with_quack"]
DENSE = DenseSpec(
    "llama", layers=2, hidden=16, ffn=24, heads=4, kv_heads=2, head_dim=4, vocab=50, context=64, init_std=0.3
)
SHAPES: dict[str, DenseSpec | MoESpec] = {
    "dense": DENSE,
    "dense, norms behind": DenseSpec(**{**vars(DENSE), "block": "post", "qk_norm": "full"}),
    "moe, norms on both sides": MoESpec(
        DenseSpec(**{**vars(DENSE), "block": "sandwich", "norm": "rms1p"}),
        (1,), (12,) * 6, top_k=2, copies=3,
    ),
    "moe": MoESpec(DENSE, (0, 1), (12,) * 6, top_k=2, copies=3, granularity=2),
    "moe, shared, sigmoid, one dense layer": MoESpec(
        DENSE, (1,), (12,) * 6, top_k=2, copies=3, shared=8, shared_gate=True, score="sigmoid"
    ),
    "moe, parallel, no gate": MoESpec(
        DenseSpec(**{**vars(DENSE), "block": "parallel", "gated": False, "activation": "gelu", "ffn_bias": True}),
        (0, 1), (12,) * 6, top_k=2, copies=3, order="topk-then-softmax",
    ),
}  # fmt: skip
BALANCES = {
    "whole step": BalanceConfig(aux_weight=0.5, z_weight=0.1),
    "capacity": BalanceConfig(aux_weight=0.5, aux_scope="sequence", capacity_factor=0.7),
}


def made(shape: str, mode: str, balance: str = "whole step", experts: str = "reference") -> tuple[Decoder, Balance]:
    model = layout.initialise(Decoder(SHAPES[shape], experts=experts, compute=torch.float64).double())
    recompute(model, mode)
    return model, Balance(BALANCES[balance], model, sequences=2)


def micro_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(50, (count, 2, 17), generator=torch.Generator().manual_seed(1))
    return [(part[:, :-1], part[:, 1:]) for part in ids]


def step(model: Decoder, balance: Balance) -> tuple[dict[str, Tensor], list[Any]]:
    """Two micro-batches on their way at once, as in a pipeline."""
    losses = [model.loss(tokens, labels) for tokens, labels in micro_batches(2)]
    for loss in losses:
        loss.backward()
    balance.end_step()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, balance.load.fetch()


@pytest.mark.parametrize("experts", ["reference", "grouped"])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_and_counts_are_those_without(shape: str, balance: str, mode: str, experts: str) -> None:
    want, counts = step(*made(shape, "none", balance))
    have, counts_again = step(*made(shape, mode, balance, experts))
    assert counts == counts_again
    assert have.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.allclose(have[name], gradient, rtol=1e-10, atol=1e-10 * float(gradient.abs().max())), name


@pytest.mark.usefixtures("with_quack")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["moe", "moe, shared, sigmoid, one dense layer"])
@pytest.mark.parametrize("frozen", ["", "experts.up", "experts.down"])
def test_a_model_whose_experts_read_tokens(frozen: str, shape: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """expert_backend=quack from tokens to tokens, around stand-ins, against the specification."""
    monkeypatch.setattr(quack, "available", lambda: "")
    monkeypatch.setattr(quack, "fits", lambda *_: not torch.compiler.is_compiling())
    real, calls = quack.ffn, list[int]()
    monkeypatch.setattr(quack, "ffn", lambda *inputs: (calls.append(1), real(*inputs))[1])
    found = []
    for experts, how in (("reference", "none"), ("quack", mode)):
        model, balance = made(shape, how, experts=experts)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in name)
        found.append(step(model, balance)[0])
    want, have = found
    assert calls and have.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.allclose(have[name], gradient, rtol=1e-9, atol=1e-9 * float(gradient.abs().max())), name


@pytest.mark.usefixtures("with_quack")
def test_experts_do_not_read_tokens_behind_somebodys_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack, "available", lambda: "")
    monkeypatch.setattr(quack, "fits", lambda *_: True)
    x = torch.zeros(4, DENSE.hidden, dtype=torch.float64)

    def experts() -> Experts:
        (block, *_) = moe_blocks(made("moe", "none", experts="quack")[0])
        assert block.experts.fused(block.dispatcher, x)
        return block.experts

    def other(part: Experts) -> None:
        part.backend = backend("grouped")

    changes: list[Callable[[Experts], object]] = [
        lambda part: setattr(part, "low", 1.0),
        lambda part: part.register_forward_hook(lambda *_: None),
        lambda part: setattr(part, "up_bias", nn.Parameter(torch.zeros(1))),
        lambda part: setattr(part, "down_bias", nn.Parameter(torch.zeros(1))),
        lambda part: setattr(part, "gated", False),
        other,
    ]
    for change in changes:
        part = experts()
        change(part)
        assert not part.fused(create("local", 6, None), x)


@pytest.mark.parametrize("shape", ["moe", "moe, shared, sigmoid, one dense layer"])
def test_experts_second_product_is_not_made_again(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("products", "of_rows"):
        function = getattr(grouped, name)
        monkeypatch.setattr(grouped, name, lambda *a, f=function, n=name: (calls.append(n), f(*a))[1])
    step(*made(shape, "none", experts="grouped"))
    once = len(calls)
    step(*made(shape, "full", experts="grouped"))
    layers = len(SHAPES[shape].layers)
    assert len(calls) - 2 * once == 2 * layers  # of each micro-batch the first product


def test_a_region_around_the_balance_hook_would_be_seen() -> None:
    """What the test above is there to find: choices counted a second time, and another loss."""
    model, balance = made("moe", "none")
    for layer in model.layers.values():
        assert isinstance(layer, Layer) and isinstance(layer.ffn, MoE)
        layer.ffn.forward = again(layer.ffn.forward)  # type: ignore[method-assign]
    want, counts = step(*made("moe", "none"))
    have, counts_again = step(model, balance)
    assert counts != counts_again
    assert not torch.allclose(have["layers.0.ffn.router.weight"], want["layers.0.ffn.router.weight"])


def test_each_mode_has_its_regions() -> None:
    shape = replace(SHAPES["moe, shared, sigmoid, one dense layer"], dense=replace(DENSE, qk_norm="head"))  # type: ignore[arg-type]

    def found(mode: str, layer: int) -> set[str]:
        model = Decoder(shape, experts="reference")
        recompute(model, mode)
        return {
            f"{name}.{attribute}".removeprefix(".")
            for name, module in model.layers[str(layer)].named_modules()
            for attribute, value in vars(module).items()
            if value is again
        }

    heads, halves = {"attention.q_norm.region", "attention.k_norm.region"}, {"attn_norm.region", "ffn_norm.region"}
    for layer, ffn in ((0, "ffn"), (1, "ffn.shared")):  # a dense one, an MoE with a shared expert
        assert found("none", layer) == set()
        assert found("selective", layer) == heads | halves | {f"{ffn}.neurons_region"}
        assert found("attention", layer) == {"region", "ffn_norm.region", f"{ffn}.neurons_region"}
    assert found("experts", 0) == found("selective", 0)
    assert found("experts", 1) == heads | halves | {"ffn.region"}
    assert found("full", 0) == {"region", "ffn_norm.region", "ffn.region"}
    assert found("full", 1) == {"region", "ffn_norm.region", "ffn.router.region", "ffn.region"}


@contextmanager
def kept(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes that backward will find, by storage; without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    holding = []  # so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            holding.append(tensor)
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize("shape", SHAPES)
def test_less_is_kept(shape: str) -> None:
    sizes = {}
    for mode in MODES:
        model, _ = made(shape, mode)
        with kept(model) as found:
            model.hidden(micro_batches(1)[0][0])
        sizes[mode] = sum(found.values())
    assert sizes["selective"] < 0.95 * sizes["none"], sizes
    assert sizes["full"] < 0.6 * sizes["selective"], sizes
    assert sizes["full"] < sizes["attention"] < sizes["selective"], sizes
    if "moe" in shape:
        assert sizes["full"] < sizes["experts"] < sizes["selective"], sizes
    else:
        assert sizes["experts"] == sizes["selective"], sizes


def test_names_stay_and_validation_is_not_touched() -> None:
    plain, model = made("moe", "none")[0], made("moe", "full")[0]
    assert plain.state_dict().keys() == model.state_dict().keys()
    tokens, labels = micro_batches(1)[0]
    with torch.no_grad():
        assert torch.equal(plain.loss(tokens, labels), model.loss(tokens, labels))


@pytest.mark.parametrize("mode", swept(["selective", "full"], ["attention", "experts"]))
def test_it_compiles(mode: str) -> None:
    want, counts = step(*made("moe", "none"))
    model, balance = made("moe", mode)
    model.layers["1"].compile(backend="aot_eager")  # each would take seconds, and they are alike
    have, counts_again = step(model, balance)
    assert counts == counts_again
    assert all(torch.allclose(have[n], g, rtol=1e-10, atol=1e-10 * float(g.abs().max())) for n, g in want.items())


@pytest.mark.parametrize("mode", swept(["none", "experts"], ["attention", "full"]))
def test_experts_of_narrow_copies_compile(mode: str) -> None:
    """float32 weights that compute in bfloat16, on one device: the copies are made outside of the compiled graphs."""
    found = []
    for split in (True, False):
        model = layout.initialise(Decoder(SHAPES["moe"], experts="reference", compute=torch.bfloat16))
        parallelize(model, ParallelMesh(MeshConfig(), device_type="cpu"), recomputed=mode)
        for block in moe_blocks(model):
            weights = block.experts.weights
            assert isinstance(weights, LocalExperts)
            weights.split = split
        if not split:
            model.layers["1"].compile(backend="aot_eager")
        losses = []
        with one_step(moe_blocks(model), 2):
            for tokens, labels in micro_batches(2):
                losses.append(model.loss(tokens, labels))
                losses[-1].backward()
        found.append({n: p.grad for n, p in model.named_parameters()} | {"loss": torch.stack(losses).detach()})
    want, have = found
    for name, tensor in want.items():
        assert tensor is not None and have[name].dtype == tensor.dtype == torch.float32
        torch.testing.assert_close(have[name], tensor, rtol=0.02, atol=0.02 * float(tensor.abs().max()), msg=name)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_region_is_no_frame_of_a_compiler(mode: str) -> None:
    """Where a graph breaks within a half of a layer, as it does around sinks, its region would be compiled for both
    halves: for inputs of three dimensions and of two. A compiler then takes all sizes for symbols, and a kernel that is
    chosen by a width cannot be."""
    dense = replace(DENSE, sinks=True, window=8, window_layers=(0,))
    model = layout.initialise(Decoder(MoESpec(dense, (0, 1), (12,) * 6, top_k=2, copies=3), experts="reference"))
    recompute(model, mode)
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    for layer in model.layers.values():
        layer.compile(backend="eager")
    for tokens, labels in micro_batches(2):
        model.loss(tokens, labels).backward()
    frames = {each.co_name for each in torch._dynamo.utils.get_compilation_metrics()}
    torch._dynamo.reset()
    assert mode == "full" or {"attended", "routed"} <= frames, "their graphs break, so they are frames"
    assert not frames & {"once", "again"}
