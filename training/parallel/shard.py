"""Make a model parallel from outside; the model's own files know no mesh. Start with `parallelize`.

Everything is a sum. A rank's loss is its own tokens' nats divided by the scored tokens of *all* ranks. The true
gradient is therefore the plain sum over ranks with different tokens, and nothing is divided by a number of ranks.

The tokens that a parameter sees decide over which ranks its gradient is summed. There are three kinds of parameters
(placement.py has the table, which training/estimating/memory.py uses too):

    tokens   embedding, head, norms, router: a rank's own tokens. Between attention and FFN each tp rank holds another
             part of the sequence, so tp is one more data axis: sharded over dp_shard x cp x tp.
    tensor   attention, dense FFN, shared expert: divided by heads and neurons over tp. Each part sees the whole
             sequence: inputs are gathered before it, outputs summed and scattered after. Sharded over dp_shard x cp
             on top.
    experts  whole experts over ep, neurons over etp; tokens come through the dispatcher. Sharded over edp on top.

FSDP2 gathers each kind over its own mesh: a layer is a unit of kind tokens, with units inside for attention, for its
dense FFN or shared expert (tensor), and for its routed experts. A parameter that no other rank shares is not in FSDP.

Shapes: B sequences, S tokens each (s: of this rank), T = B * s; D hidden.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from training.data.batch import Batch
from training.dispatch import create
from training.experts import ExpertWeights
from training.kernels import updates
from training.model.decoder import Decoder, Layer
from training.model.layers import Attention, FeedForward, LatentAttention, Linear, Norm, uncompiled
from training.model.moe import Experts, MoE, Router, after_anchor, low_rank
from training.model.nf4 import ALONE
from training.model.recompute import MOVES, recompute, recompute_stock
from training.model.stock.model import Stock
from training.parallel import context
from training.parallel.collectives import Group, all_gather, all_reduce, local, reduce_scatter
from training.parallel.mesh import ParallelMesh
from training.parallel.pipeline import SPLIT
from training.parallel.placement import Kind, Rule, rule, sharded_dim


def parallelize(
    model: Decoder,
    mesh: ParallelMesh,
    *,
    recomputed: str = "none",
    compiled: bool = False,
) -> None:
    """Divide `model` (whole, or a pipeline stage; best on the meta device) over the ranks of `mesh`.

    The order matters: matrices are divided before their modules are wrapped, and FSDP goes around everything.
    """
    if mesh.world > 1 and any(block.experts.up_codes is not None for block in moe_blocks(model)):
        raise ValueError(ALONE.format(mesh.world))
    divide(model, mesh)
    if isinstance(model, Stock):
        experts_over_ep(model, mesh, keep=recomputed not in MOVES)
        recompute_stock(model, recomputed)
        shard_stock(model, mesh)
        return
    if mesh.size("tp") > 1:
        for layer in layers(model):
            attention_over_tp(layer.attention, mesh)
            for ffn in dense_ffns(layer):
                ffn_over_tp(ffn, mesh)
    context.attach(model, mesh.group("cp"), mesh.config.context, mesh.size("tp"))
    experts_over_ep(model, mesh, keep=recomputed not in MOVES)
    recompute(model, recomputed)
    if compiled:
        for block in moe_blocks(model):
            can = block.experts.backend.can
            if mesh.size("ep") * mesh.size("etp") > 1 or can.opaque or block.experts.up_codes is not None:
                # the number of rows differs from call to call, and nothing between our kernels can be fused
                block.region = uncompiled(block.region)
        model.compile_parts()
    shard_data_parallel(model, mesh)


def layers(model: Decoder) -> Iterator[Layer]:
    return (layer for layer in model.layers.values() if isinstance(layer, Layer))


def dense_ffns(layer: Layer) -> list[FeedForward]:
    """Return the FFN of a dense layer, or the shared expert of an MoE layer."""
    ffn = layer.ffn.shared if isinstance(layer.ffn, MoE) else layer.ffn
    return [ffn] if isinstance(ffn, FeedForward) else []


def moe_blocks(model: nn.Module) -> Iterator[MoE]:
    return (module for module in model.modules() if isinstance(module, MoE))


def divide(model: Decoder, mesh: ParallelMesh) -> None:
    """Replace each parameter by the part that tensor and expert parallel leave on this rank."""
    for name, parameter in list(model.named_parameters()):
        found = rule(name, model.dense)
        cuts = {axis: dim for axis, dim in found.cuts if mesh.size(axis) > 1}
        if cuts:
            grid = mesh.experts if found.kind == "experts" else mesh.attention
            placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in cuts.values()]
            place(model, name, parameter, grid[tuple(cuts)], placements)


# ---- tensor parallel, with the sequence parallel between


def attention_over_tp(attention: Attention | LatentAttention, mesh: ParallelMesh) -> None:
    group = present(mesh.group("tp"))
    of_heads: tuple[Linear, ...]
    norms: tuple[Norm | None, ...]
    if isinstance(attention, LatentAttention):
        of_heads, norms = (attention.q_b, attention.kv_b), (attention.q_a_norm, attention.kv_a_norm)
        for linear in (attention.q_a, attention.kv_a):
            if linear is not None:  # each rank computes all latents, and their gradient comes from its own heads only
                linear.matrix, linear.pair = partial(summed_matrix, group), partial(own_pair, group, None)
    else:
        if attention.sinks is not None:
            attention.sinks.own = lambda sinks: local(sinks.weight)
        of_heads, norms = (attention.q, attention.k, attention.v), (attention.q_norm, attention.k_norm)
    for linear in of_heads:
        columns(linear, group)
    rows(attention.o, group)
    for norm in norms:
        if norm is not None and attention.spec.qk_norm == "full":
            norm_over_heads(norm, group)
        elif norm is not None:  # one gain for all heads, and a rank's gradient comes from its own heads only
            norm.gain = partial(summed_gain, group)
    # the sequence is dimension 1
    attention.register_forward_pre_hook(lambda _, inputs: (along_sequence(Gather, inputs[0], group), *inputs[1:]))
    attention.register_forward_hook(lambda _, inputs, out: along_sequence(Scatter, out, group))


def ffn_over_tp(ffn: FeedForward, mesh: ParallelMesh) -> None:
    group = present(mesh.group("tp"))
    if ffn.gate is not None:
        columns(ffn.gate, group)
    columns(ffn.up, group)
    rows(ffn.down, group)
    # an FFN treats each token separately, so any dimension can be gathered; the first needs no transposition
    ffn.register_forward_pre_hook(lambda _, inputs: (Gather.apply(inputs[0], group),))  # type: ignore[no-untyped-call]
    ffn.register_forward_hook(lambda _, inputs, out: Scatter.apply(out, group))  # type: ignore[no-untyped-call]


def columns(linear: Linear, group: Group) -> None:
    """Divide a matrix by its outputs: each rank computes some of them."""
    linear.matrix, linear.pair = partial(local_matrix, 1), partial(own_pair, group, 0)


def rows(linear: Linear, group: Group) -> None:
    """Divide a matrix by its inputs: each rank has some inputs and computes a summand of all outputs. Every rank holds
    the whole bias and adds an equal part of it, so its gradient is whole on every rank."""
    linear.matrix, linear.pair = partial(local_matrix, group.size()), partial(own_pair, group, 1)


def local_matrix(parts: int, linear: Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    bias = None if linear.bias is None else part_of(local(linear.bias), parts).to(dtype)
    return local(linear.weight).to(dtype), bias


def summed_matrix(group: Group, linear: Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return summed_gradient(linear.weight, group).to(dtype), None


def own_pair(group: Group, dim: int | None, linear: Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return this rank's pair of adapter matrices for a matrix divided by outputs (0) or inputs (1), or whole on each
    rank and used in part (None)."""
    a, b = (summed_gradient(each, group) for each in (linear.lora_a, linear.lora_b))
    a, b = (own(a, 1, group) if dim == 1 else a), (own(b, 0, group) if dim == 0 else b)
    return a.to(dtype), b.to(dtype)


def own(whole: Tensor, dim: int, group: Group) -> Tensor:
    return whole.chunk(group.size(), dim)[group.rank()]


def norm_over_heads(norm: Norm, group: Group) -> None:
    """Make an rms norm over all heads use the mean square over all ranks, since each rank has only some heads."""
    size = norm.weight.numel()  # of all ranks

    def normed(norm: Norm, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.to(wide)
        mean = summed(y.square().sum(-1, keepdim=True), group) / size
        y = y * torch.rsqrt(mean + norm.eps)
        gain = local(norm.weight).to(wide) + (1.0 if norm.kind.endswith("1p") else 0.0)
        return (y * gain).to(x.dtype) if norm.last else y.to(x.dtype) * gain.to(x.dtype)

    norm.normed = normed


def summed_gain(group: Group, norm: Norm, dtype: torch.dtype) -> Tensor:
    weight = summed_gradient(norm.weight, group)
    return weight.to(dtype) + 1.0 if norm.kind.endswith("1p") else weight.to(dtype)


# ---- experts


def experts_over_ep(model: Decoder, mesh: ParallelMesh, keep: bool) -> None:
    ep, etp, slices = mesh.size("ep"), mesh.size("etp"), mesh.group("etp")
    # one dispatcher for all layers, since it may hold large buffers
    dispatcher = None
    if ep * etp > 1 and model.moe is not None and model.moe.parts:
        raise ValueError(f"mesh.ep is {ep} and mesh.etp is {etp}; a model of parts keeps its experts whole, so write 1")
    if ep * etp > 1 and model.moe is not None:
        groups = mesh.group("ep"), mesh.group("etp")
        dispatcher = create(mesh.config.dispatcher, model.moe.experts, *groups, mesh.config.arrivals)
    for block in moe_blocks(model):
        if dispatcher is not None:
            block.dispatcher = dispatcher
        split = mesh.config.schedule in SPLIT  # these schedules ask autograd for gradients themselves
        block.experts.weights = LocalExperts(slices, split, keep)


def trouble(parts: Iterable[Decoder]) -> str:
    """Return a dispatcher's problem on the device as a sentence, or "". This waits for the device."""
    found = {id(block.dispatcher): block.dispatcher for part in parts for block in moe_blocks(part)}
    said = [each.trouble() for each in found.values()]
    return next((sentence for sentence in said if sentence), "")


@dataclass
class LocalExperts:
    """Give this rank's experts in the compute dtype, copied once per step if `keep` allows it. Experts are a model's
    largest tensors, so each saved pass over them counts. FSDP already gathers in that dtype."""

    slices: Group | None  # the ranks of etp, if there are several
    split: bool  # the schedule asks autograd for gradients itself
    keep: bool  # keep copies from one micro-batch of a step to the next
    copies: list[Tensor] | None = None  # the step's copies, which autograd knows, or None
    left: int = 0  # forwards of the step that will still use the copies

    def __call__(self, experts: Experts, dtype: torch.dtype) -> ExpertWeights:
        matrices = experts.up, experts.down
        if experts.up_codes is not None:  # for this call only, or the codes would save nothing
            up, down = experts.matrices(dtype)
        elif self.split or experts.up.dtype == dtype:
            up, down = (local(p).to(dtype) for p in matrices)
        else:
            up, down = self.copied(matrices, dtype)
        own_up, own_down = experts.up_bias, experts.down_bias
        etp = self.slices.size() if self.slices is not None else 1
        up_bias = None if own_up is None else local(own_up).to(dtype).flatten(1, 2)
        down_bias = None if own_down is None else part_of(local(own_down), etp).to(dtype)
        low = low_rank(experts, dtype, partial(self.adapter, experts))
        weights = ExpertWeights(up.flatten(1, 2), down, experts.gated, up_bias, down_bias, low)
        return after_anchor(experts, weights, dtype, local)

    def adapter(self, experts: Experts, name: str, whole: Tensor) -> Tensor:
        """Return the part of an adapter for this rank's neurons: outputs of up's adapters, inputs of down's."""
        if self.slices is None:
            return local(whole)
        whole = summed_gradient(local(whole), self.slices)
        if name == "up_lora_b":
            n, halves = len(whole), experts.up.shape[1]
            return own(whole.view(n, halves, -1, whole.shape[2]), 2, self.slices).flatten(1, 2)
        return own(whole, 1, self.slices) if name == "down_lora_a" else whole

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads and writes state outside of any graph
    def copied(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        copies: list[Tensor] = self.copies or [Summed.apply(p, local(p.detach()).to(dtype)) for p in parameters]  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            self.left -= 1
            # after the last forward autograd holds the copies until each layer has its gradient
            self.copies = copies if self.copies is not None and self.left > 0 else None
        return copies


@contextmanager
def one_step(blocks: Iterable[MoE], micro_batches: int) -> Iterator[None]:
    """Copy experts once for all micro-batches of a step, since no weight changes within it. Autograd holds copies from
    forward to backward anyway, so keeping them raises no peak, unless backward makes new ones."""
    found = [block.experts.weights for block in blocks]
    keeping = [each for each in found if isinstance(each, LocalExperts) and each.keep]
    for each in keeping:
        each.copies, each.left = [], micro_batches
    try:
        yield
    finally:
        for each in keeping:
            each.copies = None


class Summed(torch.autograd.Function):
    """`copy` as an autograd function of `parameter`. The first gradient keeps its dtype; later ones are added in the
    parameter's dtype, without the wide copy that autograd would make of each."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.parameter = parameter
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        parameter: Tensor = ctx.parameter
        if grad.dtype.itemsize > parameter.dtype.itemsize:
            grad = grad.to(parameter.dtype)
        if parameter.grad is not None:
            before = local(parameter.grad)
            grad = updates.total(before, grad, parameter.dtype)
            if grad is before:  # it was added in place
                return None, None
            parameter.grad = None
        parameter.grad_dtype = None  # allow any dtype
        if isinstance(parameter, DTensor):
            grad = DTensor.from_local(grad, parameter.device_mesh, parameter.placements, run_check=False)
        parameter.grad = grad
        return None, None


# ---- data parallel


def shard_data_parallel(model: Decoder, mesh: ParallelMesh) -> None:
    # modules cast by themselves, but with param_dtype FSDP casts before it gathers, so half the bytes travel
    # sums are as wide as master weights; frozen weights may be narrower
    masters = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    narrow = MixedPrecisionPolicy(param_dtype=model.compute, reduce_dtype=masters, cast_forward_inputs=False)
    alone: set[nn.Parameter] = set()  # parameters without ranks for FSDP to divide over
    names = {module: name for name, module in model.named_modules()}
    left = {name: rule(name, model.dense) for name, _ in model.named_parameters()}

    def unit(module: nn.Module) -> None:
        """Shard the parameters of `module` that no unit inside it has. They are gathered together."""
        prefix = f"{names[module]}." if names[module] else ""
        own = [left.pop(name) for name in list(left) if name.startswith(prefix)] or [Rule("tokens")]
        found = own[0]
        assert all((each.kind, each.exact) == (found.kind, found.exact) for each in own), f"{prefix}: {own}"
        shards, copies = found.ranks(mesh.sizes)
        if shards * copies == 1:
            alone.update(module.parameters())
            return
        fully_shard(
            module,
            mesh=mesh.fsdp(found.kind),
            mp_policy=exact if found.exact else narrow,
            reshard_after_forward=mesh.config.reshard,
            shard_placement_fn=lambda parameter: Shard(sharded_dim(local(parameter).shape, shards)),
            ignored_params=alone,
        )

    for layer in layers(model):
        unit(layer.attention)
        if isinstance(layer.ffn, MoE):
            unit(layer.ffn.experts)
        for ffn in dense_ffns(layer):
            unit(ffn)
        unit(layer)
    if model.final_norm is not None:
        unit(model.final_norm)
    unit(model)  # embedding and head
    prefetch([[m for m in layer.modules() if isinstance(m, FSDPModule)] for layer in layers(model)])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # some of our outputs are views, which is safe because nothing changes them in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def shard_stock(model: Stock, mesh: ParallelMesh) -> None:
    """Put FSDP around transformers' layers, and inside them around our experts, routers and float32 parameters."""
    if mesh.world == 1:
        return
    model.casts = False
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    masters = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
    narrow = MixedPrecisionPolicy(param_dtype=model.compute, reduce_dtype=masters, cast_forward_inputs=False)
    alone: set[nn.Parameter] = set()

    def unit(module: nn.Module, kind: Kind, policy: MixedPrecisionPolicy) -> None:
        shards, copies = Rule(kind).ranks(mesh.sizes)
        if shards * copies == 1:
            alone.update(module.parameters())
            return
        fully_shard(
            module,
            mesh=mesh.fsdp(kind),
            mp_policy=policy,
            reshard_after_forward=mesh.config.reshard,
            shard_placement_fn=lambda p: Shard(sharded_dim(local(p).shape, shards) if kind == "experts" else 0),
            ignored_params=alone,
        )

    for layer in model.stock_layers():
        for name, module in layer.named_modules():
            if isinstance(module, MoE):
                unit(module.experts, "experts", narrow)
                unit(module.router, "tokens", exact)
            elif not isinstance(module, Router) and any(
                model.exact(f"{name}.{own}") for own, _ in module.named_parameters(recurse=False)
            ):
                unit(module, "tokens", exact)
        unit(layer, "tokens", narrow)
    unit(model, "tokens", narrow)
    prefetch([[m for m in layer.modules() if isinstance(m, FSDPModule)] for layer in model.stock_layers()])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def prefetch(units: Sequence[Sequence[FSDPModule]]) -> None:
    """Make each layer's first unit request the next layer's weights. FSDP requests them only when the host reaches that
    layer, but at a dispatch the host waits for the device."""
    for before, after in itertools.pairwise(group for group in units if group):
        before[0].set_modules_to_forward_prefetch(list(after))
        after[0].set_modules_to_backward_prefetch(list(reversed(before)))


def synchronize(model: nn.Module, mesh: ParallelMesh, last: bool) -> None:
    """Prepare FSDP for a micro-batch. Without mesh.reshard only the step's last micro-batch sums gradients and frees
    weights. With it each sums within a copy of the model, and the last one over copies, which are on other nodes."""
    if isinstance(model, FSDPModule) and not mesh.config.reshard:
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    elif isinstance(model, FSDPModule) and mesh.size("dp_replicate") > 1:
        model.set_requires_all_reduce(last)


def learns_anew(model: nn.Module) -> None:
    """Make FSDP notice that other parameters learn now. It decides the dtypes of a unit's gradient sums at the first
    gather, when a frozen unit has none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def reshard(model: nn.Module) -> None:
    """Free gathered weights after forwards without a backward; FSDP would keep the root's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---- data


def own_part(batch: Batch, mesh: ParallelMesh) -> Batch:
    """Return this rank's tokens and labels of its data-parallel group's sequences. Attention sees the whole cp share,
    which tp gathers, so positions cover the share and documents the whole sequences."""
    batch = context.split(batch, mesh.index("cp"), mesh.size("cp"))
    tp, index = mesh.size("tp"), mesh.index("tp")
    tokens, labels = (part.chunk(tp, dim=1)[index] for part in (batch.tokens, batch.labels))
    return Batch(tokens, labels, batch.documents, batch.positions)


# ---- small parts


def place(
    model: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """Keep this rank's part of a parameter that every rank has whole (or on the meta device)."""
    part = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
    path, _, last = name.rpartition(".")
    model.get_submodule(path).register_parameter(last, nn.Parameter(part, parameter.requires_grad))


def present(group: Group | None) -> Group:
    assert group is not None
    return group


def along_sequence(function: type[torch.autograd.Function], x_BSD: Tensor, group: Group) -> Tensor:
    """Apply Gather or Scatter along the sequence. They work on the first dimension, so this transposes, which costs
    nothing with one sequence."""
    y: Tensor = function.apply(x_BSD.transpose(0, 1), group)  # type: ignore[no-untyped-call]
    return y.transpose(0, 1)


def part_of(bias: Tensor, parts: int) -> Tensor:
    y: Tensor = Part.apply(bias, parts) if parts > 1 else bias  # type: ignore[no-untyped-call]
    return y


def summed_gradient(x: Tensor, group: Group) -> Tensor:
    y: Tensor = SumGradient.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def summed(x: Tensor, group: Group) -> Tensor:
    y: Tensor = Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return y


class Gather(torch.autograd.Function):
    """Gather all ranks' rows; the gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    """Sum over ranks and keep this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class Sum(torch.autograd.Function):
    """Sum over ranks. Each rank uses the sum differently, so its gradients are summed over ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class Part(torch.autograd.Function):
    """Return x / parts with x's whole gradient: an equal part of a tensor that each of `parts` ranks holds whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        return x / parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
