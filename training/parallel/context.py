"""Cut sequences over the cp ranks, and replace attention, the only part that looks across the cut.

The cut is a zig-zag. Under a causal mask late tokens see more than early ones, so a sequence is cut into 2 * cp chunks,
and rank r holds chunks r and 2 * cp - 1 - r. Every rank then has the same work (for cp 4):

    chunk  0 1 2 3 4 5 6 7
    rank   0 1 2 3 3 2 1 0

`split` cuts tokens, labels and positions of a batch this way. `documents` stay whole, because a query sees keys of
every rank; each rank reads them with its batch, so nothing is exchanged. Rotary positions come with the tokens.

Two ways to attend (`mesh.context`), both exact:
- ring: keys and values travel around the ranks while queries stay. Each pair of shares is a block with its own
  log-sum-exp, by which the blocks are merged. Sending overlaps with the block before. Any number of heads works. Pairs
  of chunks without a common document are skipped, and no bias is made where documents hide nothing.
- ulysses: an all-to-all exchanges sequence for heads, so that each rank attends over all positions with some heads. It
  sends fewer, larger messages, but heads must be divisible.

Shapes: B sequences, S positions of this rank's share, H query heads, G key/value heads, A dimensions of a head; blocks
have heads before positions (BHSA). A `bias` is added to the scaled logits; NEVER hides a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import P2POp, ProcessGroup
from torch.nn import functional

from training.data.batch import Batch
from training.kernels.attention import NEVER, block, block_backward, d_sinks, sunk
from training.model.attention import Sdpa, Seen
from training.model.decoder import Decoder, Layer


def chunks(rank: int, cp: int) -> tuple[int, int]:
    return rank, 2 * cp - 1 - rank


def own(x_BS: Tensor, rank: int, cp: int) -> Tensor:
    """Return a rank's share of whole sequences [B, S, ...]."""
    if x_BS.shape[1] % (2 * cp):
        raise ValueError(f"a sequence of {x_BS.shape[1]} tokens cannot be cut into 2 * mesh.cp = {2 * cp} pieces")
    pieces = x_BS.chunk(2 * cp, dim=1)
    return torch.cat([pieces[i] for i in chunks(rank, cp)], dim=1)


def split(batch: Batch, rank: int, cp: int) -> Batch:
    """Return a rank's share of a batch. Count the scored labels before, and give the model the `length` of whole
    sequences.
    """
    if cp == 1:
        return batch
    return replace(batch.each(lambda x: own(x, rank, cp)), documents=batch.documents)


def attach(model: Decoder, group: ProcessGroup | None, kind: str, tp: int = 1) -> None:
    """Put context parallel attention into the model's layers. `group`: the cp group, None for one rank.

    Afterwards the model takes shares (see `split`), whole documents, and `length`. With tensor parallelism, attention
    has heads / tp heads and, after its all-gather over tp, this cp rank's whole share.
    """
    if group is None:
        return
    cp, heads, kv_heads = group.size(), model.dense.heads // tp, model.dense.kv_heads // tp
    if kind == "ulysses" and (heads % cp or (kv_heads % cp and cp % kv_heads)):
        raise ValueError(
            f"mesh.context=ulysses cannot divide {heads} heads and {kv_heads} key/value heads of a rank evenly over "
            f"mesh.cp={cp}; use mesh.context=ring"
        )
    way: Any = {"ring": Ring, "ulysses": Ulysses}[kind]
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        sdpa = layer.attention.attend
        if not isinstance(sdpa, Sdpa):
            raise ValueError(
                f"mesh.cp={cp} replaces attention, and model.transformer_engine names attention too; leave it out there"
            )
        layer.attention.attend = way(sdpa.window, sdpa.scale, group, cap=sdpa.cap)


# ---- ring


@dataclass(frozen=True)
class Ring:
    """Ring attention over shares. Documents are those of the whole sequences, [B, cp * S]."""

    window: int | None
    scale: float
    group: ProcessGroup
    cap: float = 0.0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, q_BSHA: Tensor, k_BSGA: Tensor, v_BSGA: Tensor, seen: Seen, sink_H: Tensor | None = None
    ) -> Tensor:
        width = v_BSGA.shape[3]
        if width < k_BSGA.shape[3]:  # keys and values travel as one tensor
            v_BSGA = functional.pad(v_BSGA, (0, k_BSGA.shape[3] - width))
        q, k, v = (x.transpose(1, 2) for x in (q_BSHA, k_BSGA, v_BSGA))
        y: Tensor = RingAttention.apply(q, k, v, sink_H, seen, self)  # type: ignore[no-untyped-call]
        return y.transpose(1, 2)[..., :width]

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def around(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its tensor) for this rank, then for the rank before it, and so on. The next tensor is received
        while one is used."""
        held = own
        for step in range(self.size):
            last = step == self.size - 1
            coming = None if last else self.passed_on(held)
            yield (self.rank - step) % self.size, held
            if coming is not None:
                held = coming.wait()

    def passed_on(self, tensor: Tensor) -> Coming:
        """Send a tensor to the next rank and receive one from the rank before."""
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        arriving = torch.empty_like(tensor)
        ops = [
            P2POp(dist.isend, tensor, dist.get_global_rank(self.group, after), self.group),
            P2POp(dist.irecv, arriving, dist.get_global_rank(self.group, before), self.group),
        ]
        return Coming(tensor, arriving, dist.batch_isend_irecv(ops))

    def blocks(self, held: Iterator[tuple[int, Tensor]], like: Tensor, seen: Seen) -> Iterator[Block]:
        joined = self.joined(seen, like.shape[2])
        for source, kv in held:
            box = self.box(source, like.shape[2], joined)
            bias = None if box is None else self.bias(source, box, like, seen)
            yield Block(kv, box, bias, source == self.rank and bias is None)

    def joined(self, seen: Seen, share: int) -> Joined | None:
        """Return which chunks share documents; None without documents. Computed once per forward, because the host
        waits.
        """
        if seen.documents_BS is not None and Joined not in seen.found:
            chunk_BCS = seen.documents_BS.view(-1, 2 * self.size, share // 2)
            low_BC, high_BC = chunk_BCS.aminmax(dim=-1)
            meet = (low_BC[:, :, None] <= high_BC[:, None]) & (low_BC[:, None] <= high_BC[:, :, None])
            alone_BC = low_BC == high_BC
            same = (low_BC[:, :, None] == low_BC[:, None]) & alone_BC[:, :, None] & alone_BC[:, None]
            some, every = torch.stack((meet.any(0), same.all(0))).tolist()
            seen.found[Joined] = Joined(some, every)
        found: Joined | None = seen.found.get(Joined)
        return found

    def box(self, source: int, share: int, joined: Joined | None) -> Box | None:
        """Return which of this rank's queries see keys of `source`, and which keys, in whole chunks."""
        size = share // 2

        def sees(mine: int, other: int) -> bool:
            nearest = (mine - other) * size - (size - 1)  # distance from the first query to the last key
            near = mine >= other and (self.window is None or nearest < self.window)
            return near and (joined is None or joined.some[mine][other])

        ours, theirs = chunks(self.rank, self.size), chunks(source, self.size)
        pairs = [(i, j) for i, mine in enumerate(ours) for j, other in enumerate(theirs) if sees(mine, other)]
        if not pairs:
            return None
        rows, columns = (range(min(places), max(places) + 1) for places in zip(*pairs, strict=True))
        hidden = joined is not None and not all(
            joined.every[ours[i]][theirs[j]] for i in rows for j in columns if ours[i] >= theirs[j]
        )
        first, second = (slice(places.start * size, places.stop * size) for places in (rows, columns))
        return Box(first, second, hidden)

    def bias(self, source: int, box: Box, like: Tensor, seen: Seen) -> Tensor | None:
        """Return the bias that hides keys of a block; None if nothing is hidden, or only by causality (the diagonal
        block)."""
        share = like.shape[2]
        if not box.hidden and (self.window is None or self.window >= share * self.size):
            return None
        key = (source, self.window)
        if key not in seen.found:
            place = torch.arange(share * self.size, device=like.device, dtype=torch.int32)[None]
            q_at, k_at = own(place, self.rank, self.size)[:, box.rows], own(place, source, self.size)[:, box.columns]
            visible = q_at[:, :, None] >= k_at[:, None, :]
            if self.window is not None:
                visible &= q_at[:, :, None] < k_at[:, None, :] + self.window
            if seen.documents_BS is not None:
                q_document = own(seen.documents_BS, self.rank, self.size)[:, box.rows, None]
                visible = visible & (q_document == own(seen.documents_BS, source, self.size)[:, None, box.columns])
            hides = torch.zeros_like(visible, dtype=like.dtype).masked_fill_(visible.logical_not_(), NEVER)
            seen.found[key] = hides[:, None]
        found: Tensor = seen.found[key]
        return found


@dataclass(frozen=True)
class Joined:
    """Tables [chunk of queries][chunk of keys] over all sequences. `some`: in some sequence a document may reach from
    one chunk to the other. `every`: in every sequence both chunks lie in one document. They are safe for any numbering
    of documents, and exact if numbers rise."""

    some: list[list[bool]]
    every: list[list[bool]]


@dataclass(frozen=True)
class Box:
    """The part of two ranks' shares that a block covers."""

    rows: slice  # queries
    columns: slice  # keys
    hidden: bool  # documents hide part of it


@dataclass(frozen=True)
class Coming:
    """A tensor that is being received, with the sent one, which must live until it has left."""

    sent: Tensor
    arriving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.arriving


@dataclass(frozen=True)
class Block:
    """This rank's queries against one rank's keys and values [2, B, G, S, A]."""

    kv: Tensor
    box: Box | None  # None: no key is seen
    bias: Tensor | None
    causal: bool


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor | None, seen: Seen, ring: Ring) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out_BHSA = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse_BHS = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
        for part in ring.blocks(ring.around(torch.stack((k, v))), q, seen):
            if part.box is not None:
                rows, columns = part.box.rows, part.box.columns
                keys, values = part.kv[:, :, :, columns]
                y, z = block(q[:, :, rows], keys, values, part.bias, part.causal, ring.scale, ring.cap)
                merge_(out_BHSA[:, :, rows], lse_BHS[:, :, rows], y, z)
        if sink_H is not None:
            out_BHSA, lse_BHS = sunk(out_BHSA, lse_BHS, sink_H)
        out = out_BHSA.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse_BHS, sink_H)
        ctx.seen, ctx.ring = seen, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send keys and values around again. Their gradients follow one block behind, collect every rank's part, and
        arrive after a whole turn."""
        q, k, v, out, lse, sink_H = ctx.saved_tensors
        ring: Ring = ctx.ring
        d_q = torch.zeros_like(out, dtype=lse.dtype)
        coming: Coming | None = None
        for part in ring.blocks(ring.around(torch.stack((k, v))), q, ctx.seen):
            found = None
            if part.box is not None:
                rows, columns = part.box.rows, part.box.columns
                keys, values = part.kv[:, :, :, columns]
                d_y, query, y, z = (x[:, :, rows] for x in (grad, q, out, lse))
                found = block_backward(d_y, query, y, z, keys, values, part.bias, part.causal, ring.scale, ring.cap)
            d_kv = torch.zeros_like(part.kv, dtype=lse.dtype) if coming is None else coming.wait()
            if found is not None:
                d_q[:, :, rows] += found[0]
                d_kv[0, :, :, columns] += found[1]
                d_kv[1, :, :, columns] += found[2]
            coming = ring.passed_on(d_kv)
        assert coming is not None
        d_k, d_v = coming.wait().to(k.dtype)
        d_sink_H = None if sink_H is None else d_sinks(grad, out, lse, sink_H)
        return d_q.to(q.dtype), d_k, d_v, d_sink_H, None, None


def merge_(out: Tensor, lse: Tensor, y: Tensor, z: Tensor) -> None:
    """Merge two softmaxes over different keys into one, by their log-sum-exps."""
    both = torch.logaddexp(lse, z.to(lse.dtype))
    out.mul_((lse - both).exp_()[..., None]).add_(y * (z - both).exp_()[..., None])
    lse.copy_(both)


# ---- ulysses


@dataclass(frozen=True)
class Ulysses(Sdpa):
    """Ulysses attention over shares: all positions of some heads. Documents are those of the whole sequences."""

    group: ProcessGroup

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, q_BSHA: Tensor, k_BSGA: Tensor, v_BSGA: Tensor, seen: Seen, sink_H: Tensor | None = None
    ) -> Tensor:
        if sink_H is not None:  # of this rank's heads
            sink_H = sink_H.chunk(self.group.size())[self.group.rank()]
        # with fewer key/value heads than ranks, each rank still needs the key/value head of its query heads
        copies = max(1, self.group.size() // k_BSGA.shape[2])
        k_BSGA, v_BSGA = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k_BSGA, v_BSGA))
        q, k, v = (self.whole(x) for x in (q_BSHA, k_BSGA, v_BSGA))
        return self.shares(super().__call__(q, k, v, seen, sink_H))

    def whole(self, x_BSHA: Tensor) -> Tensor:
        """Exchange heads for positions: [B, S, H, A] -> [B, cp * S, H / cp, A], positions in order."""
        cp = self.group.size()
        b, s, h, a = x_BSHA.shape
        x = x_BSHA.view(b, s, cp, h // cp, a).permute(2, 0, 1, 3, 4)
        x = exchange(x, self.group).view(cp, b, 2, s // 2, h // cp, a)  # by rank, early and late chunk
        ordered = torch.cat((x[:, :, 0], x[:, :, 1].flip(0)))  # by chunk
        return ordered.transpose(0, 1).reshape(b, cp * s, h // cp, a)

    def shares(self, y_BSHA: Tensor) -> Tensor:
        """Invert `whole`: all positions of some heads -> this rank's positions of all heads."""
        cp = self.group.size()
        b, s, h, a = y_BSHA.shape
        y = y_BSHA.reshape(b, 2 * cp, s // (2 * cp), h, a).transpose(0, 1)
        y = torch.stack((y[:cp], y[cp:].flip(0)), dim=2).view(cp, b, s // cp, h, a)
        return exchange(y, self.group).permute(1, 2, 0, 3, 4).reshape(b, s // cp, cp * h, a)


class Exchange(torch.autograd.Function):
    """All-to-all: x[i] goes to rank i. It is its own inverse and its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


def exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    return Exchange.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]
