"""Makes a model parallel, from outside: the model's files know no mesh. Read `parallelize`.

Everything is a sum. A rank's loss is its own tokens' nats divided by the number of scored tokens of *all* ranks, so the
true gradient is the plain sum over the ranks that hold different tokens, and nobody divides by a number of ranks.

Whose gradients are summed over whom depends on what a parameter sees. There are three kinds (placement.py has the
table, by which plan.py counts memory too):

    tokens   embedding, head, norms, router: a rank's own tokens. Between attention and FFN each tp rank holds another
             part of the sequence, so tp is one more data axis: sharded over dp_shard x cp x tp.
    tensor   attention, dense FFN, shared expert: divided by heads and neurons over tp, and each part sees the whole
             sequence, gathered before and summed and scattered after. Sharded over dp_shard x cp on top.
    experts  whole experts over ep, neurons over etp; tokens come through the dispatcher. Sharded over edp on top.

FSDP2 gathers each kind over its own mesh: a layer is a unit of tokens, with its attention, dense FFN or shared expert
(tensor) and routed experts as units inside. What no other rank shares stays out of it.

Shapes: B sequences, S tokens each (s: of this rank), T = B * s; D hidden.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
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
from training.model.layers import Attention, FeedForward, Linear, Norm
from training.model.moe import Experts, MoE
from training.model.recompute import MOVES, recompute
from training.parallel import context
from training.parallel.collectives import Group, all_gather, all_reduce, local, reduce_scatter
from training.parallel.mesh import ParallelMesh
from training.parallel.pipeline import SPLIT
from training.parallel.placement import Rule, rule, sharded_dim


def parallelize(
    model: Decoder,
    mesh: ParallelMesh,
    *,
    recomputed: str = "none",
    compiled: bool = False,
) -> None:
    """Divides `model` (a whole one, or a pipeline stage; best on the meta device) over the ranks of `mesh`.

    The order matters: matrices are divided before what computes with them is wrapped, and FSDP gathers around it all.
    """
    divide(model, mesh)
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
            if mesh.size("ep") * mesh.size("etp") > 1:
                # as many rows as arrive, mostly other sizes each time, and nothing between our kernels to be joined
                block.region = torch.compiler.disable(block.region)  # type: ignore[no-untyped-call]
        model.compile_parts()
    shard_data_parallel(model, mesh)


def layers(model: Decoder) -> Iterator[Layer]:
    return (layer for layer in model.layers.values() if isinstance(layer, Layer))


def dense_ffns(layer: Layer) -> list[FeedForward]:
    """A dense layer's FFN, or the shared expert of an MoE one."""
    ffn = layer.ffn.shared if isinstance(layer.ffn, MoE) else layer.ffn
    return [ffn] if isinstance(ffn, FeedForward) else []


def moe_blocks(model: nn.Module) -> Iterator[MoE]:
    return (module for module in model.modules() if isinstance(module, MoE))


def divide(model: Decoder, mesh: ParallelMesh) -> None:
    """Each parameter to what tensor and expert parallel leave of it on this rank."""
    for name, parameter in list(model.named_parameters()):
        found = rule(name, model.dense)
        cuts = {axis: dim for axis, dim in found.cuts if mesh.size(axis) > 1}
        if cuts:
            grid = mesh.experts if found.kind == "experts" else mesh.attention
            placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in cuts.values()]
            place(model, name, parameter, grid[tuple(cuts)], placements)


# ---- tensor parallel, with the sequence parallel between


def attention_over_tp(attention: Attention, mesh: ParallelMesh) -> None:
    group = present(mesh.group("tp"))
    for linear in (attention.q, attention.k, attention.v):
        columns(linear)
    rows(attention.o, mesh.size("tp"))
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None and attention.spec.qk_norm == "full":
            norm_over_heads(norm, group)
        elif norm is not None:  # one gain for all heads: each rank's gradient is that of its own heads
            norm.gain = partial(summed_gain, group)
    # the sequence is dimension 1
    attention.register_forward_pre_hook(lambda _, inputs: (along_sequence(Gather, inputs[0], group), *inputs[1:]))
    attention.register_forward_hook(lambda _, inputs, out: along_sequence(Scatter, out, group))


def ffn_over_tp(ffn: FeedForward, mesh: ParallelMesh) -> None:
    group = present(mesh.group("tp"))
    if ffn.gate is not None:
        columns(ffn.gate)
    columns(ffn.up)
    rows(ffn.down, mesh.size("tp"))
    # an FFN does not care which tokens are whose neighbours: any dimension will do, and the first is free
    ffn.register_forward_pre_hook(lambda _, inputs: (Gather.apply(inputs[0], group),))  # type: ignore[no-untyped-call]
    ffn.register_forward_hook(lambda _, inputs, out: Scatter.apply(out, group))  # type: ignore[no-untyped-call]


def columns(linear: Linear) -> None:
    """Each rank makes some of the outputs."""
    linear.matrix = partial(local_matrix, 1)


def rows(linear: Linear, tp: int) -> None:
    """Each rank has some of the inputs and makes a summand of all outputs. The bias, which every rank has whole, comes
    in equal parts; with the sum's gradient, which every rank has whole too, each finds the bias's whole gradient."""
    linear.matrix = partial(local_matrix, tp)


def local_matrix(parts: int, linear: Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    bias = None if linear.bias is None else part_of(local(linear.bias), parts).to(dtype)
    return local(linear.weight).to(dtype), bias


def norm_over_heads(norm: Norm, group: Group) -> None:
    """An rms norm over all heads, of which each rank has some: the mean square is over all ranks'."""
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
    weight: Tensor = SumGradient.apply(norm.weight, group)  # type: ignore[no-untyped-call]
    return weight.to(dtype) + 1.0 if norm.kind.endswith("1p") else weight.to(dtype)


# ---- experts


def experts_over_ep(model: Decoder, mesh: ParallelMesh, keep: bool) -> None:
    ep, etp = mesh.size("ep"), mesh.size("etp")
    # one for all layers: it may hold large buffers
    dispatcher = None
    if ep * etp > 1 and model.moe is not None:
        dispatcher = create(mesh.config.dispatcher, model.moe.experts, mesh.group("ep"), mesh.group("etp"))
    for block in moe_blocks(model):
        if dispatcher is not None:
            block.dispatcher = dispatcher
        split = mesh.config.schedule in SPLIT  # such a schedule asks for the gradient itself
        block.experts.weights = LocalExperts(etp, split, keep)


@dataclass
class LocalExperts:
    """The experts of this rank in the dtype that they compute in. They are the largest tensors there are, and every
    pass over them that is not made counts. (What FSDP gathers is in that dtype already.)"""

    etp: int
    split: bool  # the schedule asks autograd for the gradients itself
    keep: bool  # copies from one micro-batch of a step to the next
    copies: dict[Tensor, Tensor] | None = None
    left: int = 0  # forwards of the step that still want them

    def __call__(self, experts: Experts, dtype: torch.dtype) -> ExpertWeights:
        matrices = experts.up, experts.down
        if self.split or experts.up.dtype == dtype:
            up, down = (local(p).to(dtype) for p in matrices)
        else:
            up, down = self.copied(matrices, dtype)
        own_up, own_down = experts.up_bias, experts.down_bias
        up_bias = None if own_up is None else local(own_up).to(dtype).flatten(1, 2)
        down_bias = None if own_down is None else part_of(local(own_down), self.etp).to(dtype)
        return ExpertWeights(up.flatten(1, 2), down, experts.gated, up_bias, down_bias)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads and writes what lies outside of any graph
    def copied(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        kept = self.copies if self.copies is not None else {}
        for parameter in parameters:
            if parameter not in kept:
                kept[parameter] = local(parameter.detach()).to(dtype)
        if torch.is_grad_enabled():
            self.left -= 1
            if self.left <= 0:  # autograd holds them until each layer has its gradient
                self.copies = None
        return [Summed.apply(parameter, kept[parameter]) for parameter in parameters]  # type: ignore[no-untyped-call]


@contextmanager
def one_step(model: nn.Module, micro_batches: int) -> Iterator[None]:
    """Around the micro-batches of a step, in which no weight changes: experts are copied once. Autograd holds copies
    from forward to backward anyway, so that keeping them makes no peak higher, unless backward makes new ones."""
    found = [block.experts.weights for block in moe_blocks(model)]
    keeping = [each for each in found if isinstance(each, LocalExperts) and each.keep]
    for each in keeping:
        each.copies, each.left = {}, micro_batches
    try:
        yield
    finally:
        for each in keeping:
            each.copies = None


class Summed(torch.autograd.Function):
    """`copy` as a function of `parameter`. Its gradient is kept in the dtype it comes in while there is nothing to add
    to it; what comes later is added in the parameter's dtype, without the wide copy that autograd would make of it."""

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
            grad = updates.total(local(parameter.grad), grad, parameter.dtype)
            parameter.grad = None
        parameter.grad_dtype = None  # any
        if isinstance(parameter, DTensor):
            grad = DTensor.from_local(grad, parameter.device_mesh, parameter.placements, run_check=False)
        parameter.grad = grad
        return None, None


# ---- data parallel


def shard_data_parallel(model: Decoder, mesh: ParallelMesh) -> None:
    # modules cast for themselves; given the dtype, FSDP casts before it gathers, and the wire carries half as much
    masters = next(model.parameters()).dtype
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    narrow = MixedPrecisionPolicy(param_dtype=model.compute, reduce_dtype=masters, cast_forward_inputs=False)
    alone: set[nn.Parameter] = set()  # divided over no rank, or not further than it is
    names = {module: name for name, module in model.named_modules()}
    left = {name: rule(name, model.dense) for name, _ in model.named_parameters()}

    def unit(module: nn.Module) -> None:
        """Shards the parameters that are in no unit inside of it. They are gathered together, so they are alike."""
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
    # our outputs are views, and nothing is done to them in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def prefetch(units: Sequence[Sequence[FSDPModule]]) -> None:
    """Each layer's first unit asks for the next layer's weights. FSDP would do it when the host comes there, but at a
    dispatch the host waits for the device."""
    for before, after in itertools.pairwise(group for group in units if group):
        before[0].set_modules_to_forward_prefetch(list(after))
        after[0].set_modules_to_backward_prefetch(list(reversed(before)))


def synchronize(model: nn.Module, mesh: ParallelMesh, last: bool) -> None:
    """Before a micro-batch: without mesh.reshard only a step's last one sums gradients and frees weights."""
    if isinstance(model, FSDPModule) and not mesh.config.reshard:
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def reshard(model: nn.Module) -> None:
    """Free gathered weights after forwards that no backward follows, for which FSDP would keep the root's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---- data


def own_part(batch: Batch, mesh: ParallelMesh) -> Batch:
    """This rank's tokens of the sequences of its data-parallel group. Attention sees the cp share that tp
    gathers, so positions are of all that, and documents of whole sequences."""
    batch = context.split(batch, mesh.index("cp"), mesh.size("cp"))
    tp, index = mesh.size("tp"), mesh.index("tp")
    tokens, labels = (part.chunk(tp, dim=1)[index] for part in (batch.tokens, batch.labels))
    return Batch(tokens, labels, batch.documents, batch.positions)


# ---- small parts


def place(
    model: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """Keeps this rank's part of a parameter that every rank has whole (or on the meta device)."""
    part = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
    path, _, last = name.rpartition(".")
    model.get_submodule(path).register_parameter(last, nn.Parameter(part, parameter.requires_grad))


def present(group: Group | None) -> Group:
    assert group is not None
    return group


def along_sequence(function: type[torch.autograd.Function], x_BSD: Tensor, group: Group) -> Tensor:
    """Collectives join the first dimension; with one sequence the transpositions cost nothing."""
    y: Tensor = function.apply(x_BSD.transpose(0, 1), group)  # type: ignore[no-untyped-call]
    return y.transpose(0, 1)


def part_of(bias: Tensor, parts: int) -> Tensor:
    y: Tensor = Part.apply(bias, parts) if parts > 1 else bias  # type: ignore[no-untyped-call]
    return y


def summed(x: Tensor, group: Group) -> Tensor:
    y: Tensor = Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return y


class Gather(torch.autograd.Function):
    """All ranks' rows; its gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    """This rank's rows of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class Sum(torch.autograd.Function):
    """The sum over ranks, which each rank goes on with in its own way: their gradients are summed too."""

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
    """An equal part of what `parts` ranks have whole; each gets the whole's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        return x / parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
