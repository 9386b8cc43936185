"""Find the settings of a stock MoE block by testing: our block must give the same outputs for random tokens.

transformers has about fifty MoE blocks, whose routers differ in ways that no key of config.json tells. So this file
tries every setting of our Router and takes the one that chooses the same experts with the same weights; it refuses a
block that no setting matches."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from training.experts import SPECIFICATION, backend
from training.model.moe import MoE
from training.model.stock.model import STACKED, Block, StockMoE, blocks, layer_of, parts
from upcycle.arch.ffn import ACTIVATIONS
from upcycle.arch.spec import MAX_EXPERTS, ORDERS, SCORES, Activation, DenseSpec, MoESpec

TOKENS, NEURONS = 64, 2  # tokens of the test, and neurons of an expert in it
CLOSE = 1e-5  # relative: stock routers compute in float32, and lfm2's adds 1e-6 to the sum that it divides by
LARGEST = 2**26  # the most elements of a router's weight
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_blocks(stock: Any, dense: DenseSpec) -> DenseSpec | MoESpec:
    """Return the spec of transformers' model, with routed experts if it has any; raise a ValueError if its blocks
    cannot be read."""
    found = dict(blocks(stock))
    if not found:
        many = [key for key in COUNTS if isinstance(getattr(stock.config, key, None), int)]
        if any(getattr(stock.config, key) > 1 for key in many):
            raise ValueError(f"it has experts ({many[0]}) that are not stacked in two tensors")
        return dense
    first, block = next(iter(found.items()))
    where = parts(first, block)
    if {name for name, _ in block.get_submodule(where.experts).named_parameters()} not in STACKED:
        raise ValueError("its experts have more than two tensors")
    if len(inspect.signature(block.forward).parameters) > 1:
        raise ValueError("its MoE block takes more inputs than hidden states")
    for name, other in found.items():
        if parts(name, other) != where or facts(other) != facts(block):
            raise ValueError(f"{name} is not built like {first}")
    down = block.get_submodule(where.experts).get_parameter("down_proj")
    if down.shape[0] > MAX_EXPERTS or down.shape[0] * down.shape[1] > LARGEST:
        raise ValueError(f"it has {down.shape[0]} experts of hidden size {down.shape[1]}, which must be an error")
    layers = tuple(int(layer_of(name)) for name in found)
    if len(set(layers)) < len(layers):
        raise ValueError("a layer has several blocks of experts")
    return answered(block, where, dense, layers, stock.config)


def facts(block: nn.Module) -> dict[str, Any]:
    """Return the tensor shapes and simple attributes of all modules; equal blocks differ only in weights and layer."""
    found: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and key not in ("layer_idx", "layer_id", "training"):
                found[f"{name}.{key}"] = value
    return found


class Beside(nn.Module):
    """Stand in for a shared expert with a cheap function that has no symmetry."""

    factor_D: Tensor

    def __init__(self, factor_D: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor_D", factor_D)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor_D).sin()


@torch.no_grad()
def answered(block: nn.Module, where: Block, dense: DenseSpec, layers: tuple[int, ...], settings: Any) -> MoESpec:
    """Return the MoESpec with which our block gives the same outputs as the stock block."""
    asked, draw = small(block, where), torch.Generator().manual_seed(0)
    for shared in where.shared:
        asked.set_submodule(shared, Beside(torch.randn(dense.hidden, generator=draw)))
    for name, tensor in [*asked.named_parameters(), *asked.named_buffers()]:
        size = 0.1 if name == where.bias else dense.hidden**-0.5 if name == where.weight else 0.5
        tensor.copy_(size * torch.randn(tensor.shape, generator=draw))
    x_1TD = torch.randn(1, TOKENS, dense.hidden, generator=draw)
    seen: dict[str, tuple[Any, Any]] = {}
    asked.get_submodule(where.experts).register_forward_hook(lambda _, given, out: seen.update(experts=(given, out)))
    try:
        y_1TD = asked(x_1TD)
    except Exception as error:  # transformers' code can raise anything
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"its MoE block does not run outside of the model ({said:.150})") from error
    given, routed = seen.get("experts", ((), None))
    if not isinstance(y_1TD, Tensor) or len(given) != 3 or not isinstance(routed, Tensor):
        raise ValueError("its MoE block does not return a tensor, or its experts do not get rows, choices and weights")
    rows, expert_TK, weight_TK = given
    if not expert_TK.numel() or expert_TK.shape != weight_TK.shape:
        raise ValueError("its router chooses no experts, or does not give a weight for each choice")
    if rows.shape != x_1TD[0].shape or not torch.equal(rows, x_1TD[0]):
        raise ValueError("its experts do not get the hidden states unchanged")
    stacked = dict(asked.get_submodule(where.experts).named_parameters())
    gated, experts = "gate_up_proj" in stacked, stacked["down_proj"].shape[0]
    plain = MoESpec(replace(dense, gated=gated), layers, (NEURONS,) * experts, top_k=expert_TK.shape[1], copies=1)
    want_TN = torch.zeros(TOKENS, experts).scatter_(1, expert_TK, weight_TK)
    for spec in routers(plain, settings):
        routing = ours(spec, where, asked).router(x_1TD[0])
        got_TN = torch.zeros_like(want_TN).scatter_(1, routing.expert_TK, routing.weight_TK)
        scale = scaled(want_TN, got_TN, settings)
        if scale is None:
            continue
        for activation in get_args(Activation):
            if activation not in ACTIVATIONS:
                continue  # not a plain activation, but a gated product
            spec = replace(spec, output_scale=scale, dense=replace(spec.dense, activation=activation))
            tried = ours(spec, where, asked)
            if close(MoE.forward(tried, x_1TD)[0], routed) and close(tried(x_1TD), y_1TD):
                width = block.get_submodule(where.experts).get_parameter("down_proj").shape[2]
                return replace(spec, widths=(width,) * experts)
        raise ValueError("its experts, or the terms added to them, do not give the same outputs as ours")
    raise ValueError("its router does not choose and weight experts as any setting of ours does")


def ours(spec: MoESpec, where: Block, asked: nn.Module) -> StockMoE:
    """Return our block of this spec with the weights of the stock block `asked`."""
    with torch.device("cpu"):
        block = StockMoE(spec, backend(SPECIFICATION), where, asked)
    block.router.weight.copy_(asked.get_parameter(where.weight))
    if block.router.bias is not None:
        block.router.bias.copy_(tensor_of(asked, where.bias).flatten())
    stacked = dict(asked.get_submodule(where.experts).named_parameters())
    block.experts.up.copy_(stacked["gate_up_proj" if spec.dense.gated else "up_proj"].view_as(block.experts.up))
    block.experts.down.copy_(stacked["down_proj"])
    return block


def routers(plain: MoESpec, settings: Any) -> Iterator[MoESpec]:
    """Yield a spec for each setting that our Router supports, the plainest first."""
    numbers = [(1, 1)]
    for names in (("n_group", "topk_group"), ("num_expert_group", "topk_group")):
        groups, kept = (getattr(settings, name, None) for name in names)
        if isinstance(groups, int) and isinstance(kept, int) and groups > 1 and plain.experts % groups == 0:
            numbers.append((groups, kept))
    for (groups, kept), score, order, normalize in itertools.product(numbers, SCORES, ORDERS, (True, False)):
        if order == "topk-then-softmax" and (normalize or score != "softmax"):
            continue  # this order means softmax, whose weights add up to 1 already
        if plain.top_k <= plain.experts // groups * kept and plain.experts // groups > 1:
            yield replace(plain, score=score, order=order, normalize=normalize, groups=groups, group_top_k=kept)


def scaled(want_TN: Tensor, got_TN: Tensor, settings: Any) -> float | None:
    """Return the factor from `got` to `want`: 1 or a number of the config; None if none of them fits."""
    stated = [value for value in vars(settings).values() if isinstance(value, float) and math.isfinite(value)]
    return next((scale for scale in (1.0, *stated) if close(got_TN * scale, want_TN)), None)


def close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= CLOSE * want.abs().max())


def small(block: nn.Module, where: Block) -> nn.Module:
    """Return an uninitialized copy of the block on the CPU; its experts have few neurons, to save memory."""
    experts = block.get_submodule(where.experts)
    asked = copy.deepcopy(block)
    own = asked.get_submodule(where.experts)
    halves = 2 if "gate_up_proj" in dict(experts.named_parameters()) else 1
    for name, parameter in experts.named_parameters():
        n, a, b = parameter.shape
        shape = (n, a, NEURONS) if name == "down_proj" else (n, halves * NEURONS, b)
        own.register_parameter(name, nn.Parameter(torch.empty(shape, device="cpu")))
    for name in where.shared:
        asked.set_submodule(name, nn.Identity())
    settings: Any = getattr(own, "config", None)
    if settings is not None:
        settings._experts_implementation = "eager"
    return asked.to_empty(device="cpu").float().eval()


def tensor_of(module: nn.Module, name: str) -> Tensor:
    parent, _, last = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(parent), last)
    return found
