"""Our own dispatcher for ranks that reach each other's memory over NVLink; in training the host never waits.

    out:   each rank puts its tokens, choices and weights where others can read them; all ranks meet; each rank counts
           the choices of its experts, and reads each token that it needs once, for all of its experts
    home:  each rank writes the sum of a token's rows once, to the token's rank; all ranks meet; each rank adds the sums
           that arrived

Every rank sees all choices, so the rank where rows arrive computes their counts and places, on the device. Without
gradients the host waits for the number of rows that arrive. In training there is memory for `arrivals` times the rows
of balanced routing. Tokens beyond that memory become nan, so that the step is skipped, and `trouble` reports this where
the training loop waits anyway.

On CUDA the memory is torch's symmetric memory without multicast, in two slots that take turns: a rank writes a slot
only after it met the others since they last read the slot. Elsewhere, and for float64, collectives move the same bytes:
they are the specification.

P ranks, T tokens of each (padded where they bring different numbers), K choices, C = P * T * K, R rows, E experts here.
"""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from training.dispatch import ARRIVALS, DEFAULT, Capabilities, Dispatched, common
from training.experts.common import absent
from training.kernels.permute import gather, kernels_run, places, spread

NOWHERE = 2**31 - 1  # the row of a choice whose expert is on another rank
PATIENCE = 2**31 - 1  # times that a rank checks for the other ranks: seven minutes on an H200
HEAD = 1 << 12  # bytes before the slots, which count how often each rank has come
LINE = 128  # bytes, to which parts of a slot are aligned


def available() -> str:
    return absent("dispatcher=nvlink", "triton", f"use dispatcher={DEFAULT}") if torch.cuda.is_available() else ""


def dispatcher(experts: int, ep_group: dist.ProcessGroup | None, etp_group: dist.ProcessGroup | None = None) -> NVLink:
    group = common.whole_experts("nvlink", ep_group, etp_group)
    check_nodes(group.size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    return NVLink(experts, group)


def check_nodes(ep: int, local: int) -> None:
    """Raise a ValueError for ranks of several machines; `local` is the number of ranks of this one, 0 if unknown."""
    if local and local % ep:
        most = max(n for n in range(1, ep + 1) if ep % n == 0 and local % n == 0)
        raise ValueError(
            f"dispatcher=nvlink works only between GPUs of one machine, and mesh.ep={ep} spans machines of "
            f"{local} ranks; write mesh.ep={most}, or mesh.dispatcher={DEFAULT}"
        )


def rows_a_token(k: int, ranks: int, local: int, arrivals: float) -> float:
    """Return the number of rows that a rank has memory for in training, for each of its own tokens."""
    return min(arrivals * k, ranks * min(k, local))


def slot_bytes(tokens: int, ranks: int, hidden: int, k: int, itemsize: int) -> int:
    """Return the bytes of a slot: rows on their way home, choices, weights."""
    return lined(ranks * tokens * hidden * itemsize) + 2 * lined(4 * tokens * k)


def buffer_bytes(tokens: int, ranks: int, hidden: int, k: int, itemsize: int) -> int:
    return HEAD + 2 * slot_bytes(tokens, ranks, hidden, k, itemsize)


def lined(size: int) -> int:
    return -(-size // LINE) * LINE


CAPABILITIES = Capabilities(
    loses=True,
    sorts=True,
    kernels=("meet_kernel", "pull_kernel", "push_kernel"),
    buffer_bytes=buffer_bytes,
    rows_a_token=rows_a_token,
    check_nodes=check_nodes,
)


class Wires(Protocol):
    """The transport of rows between ranks: symmetric memory or collectives."""

    def first(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, most: int, rows: int | None
    ) -> tuple[Tensor, Tensor, Route]:
        """Return x_RD, weight_R and the route; each rank's tokens are padded to `most`, and `rows` rows have memory
        (None: all)."""
        ...

    def out(self, x_TD: Tensor, route: Route) -> Tensor: ...
    def home(self, y_RD: Tensor, weight_R: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class Route:
    """The plan of one dispatch."""

    dispatcher: NVLink
    tokens: int  # of this rank
    most: int
    k: int
    rows: int
    back_C: Tensor  # for each choice of each rank, its row here
    kept_TK: Tensor  # this rank's choices; a dropped choice has an expert beyond the last
    count_E: Tensor

    def out(self, x_TD: Tensor) -> Tensor:
        return self.dispatcher.wires(x_TD).out(x_TD.contiguous(), self)

    def home(self, y_RD: Tensor, weight_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.dispatcher.wires(y_RD).home(y_RD.contiguous(), weight_R, self)


@dataclass
class NVLink(common.Routed):
    can = CAPABILITIES
    experts: int
    group: dist.ProcessGroup
    arrivals: float = ARRIVALS
    # int32, on the device: number of meetings, 1 + a rank that did not come, number of rows if memory was too small
    state: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.int32))
    peers: Peers | None = None
    balanced: int = 0  # rows that balanced routing would have sent to a rank in the last training dispatch

    @property
    def local(self) -> int:
        return self.experts // self.group.size()

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched:
        most, k, ranks = max(common.most_tokens(x_TD, self.group), 1), expert_TK.shape[1], self.group.size()
        rows = None
        if room is not None:
            rows = min(self.experts * room, ranks * most * min(k, self.local))
        elif torch.is_grad_enabled():
            rows, self.balanced = int(most * rows_a_token(k, ranks, self.local, self.arrivals)), most * k
        self.state = self.state.to(x_TD.device)

        def first(x_TD: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Route]:
            wires = self.wires(x_TD, buffer_bytes(most, ranks, x_TD.shape[1], k, x_TD.element_size()))
            x_RD, weight_R, route = wires.first(
                x_TD.contiguous(), weight_TK.contiguous(), expert_TK.contiguous(), most, rows
            )
            return x_RD, weight_R.to(weight_TK.dtype), route.count_E, route

        return common.dispatch(first, x_TD, weight_TK)

    def wires(self, rows: Tensor, size: int = 0) -> Wires:
        """Return the transport for `rows`, with buffers of at least `size` bytes; `size` is the same on all ranks."""
        if not kernels_run(rows):
            return Collectives(self)
        if self.peers is None or self.peers.size < size:
            if self.peers is not None:  # other ranks may still read it
                torch.cuda.synchronize()
                dist.barrier(self.group)
            self.peers = Peers(self, size, rows.device)
        return self.peers

    def trouble(self) -> str:
        """Return a sentence about an error on this rank since the last call, or \"\"; the host waits for the device."""
        _, missing, came = self.state.tolist()
        self.state[1:].zero_()
        if missing:
            return (
                f"dispatcher=nvlink waited for rank {missing - 1} of mesh.ep={self.group.size()} in vain; read that "
                f"rank's messages, or use mesh.dispatcher={DEFAULT}"
            )
        if not came:
            return ""
        if not self.balanced:
            return f"{came} rows came to a rank's experts, more than balance.capacity_factor allows"
        times = came / self.balanced
        return (
            f"{came:,} rows came to a rank's experts, {times:.2f} times as many as balanced routing sends, and "
            f"mesh.arrivals={self.arrivals:g} has memory for fewer; that step was skipped: resume the "
            f"last checkpoint with mesh.arrivals={math.ceil(11 * times) / 10:g}, or mesh.dispatcher={DEFAULT}"
        )


# ---- collectives: the specification


@dataclass(frozen=True)
class Collectives:
    of: NVLink

    def first(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, most: int, rows: int | None
    ) -> tuple[Tensor, Tensor, Route]:
        of, k, local = self.of, expert_TK.shape[1], self.of.local
        kept_TK = expert_TK.where(weight_TK != 0, of.experts)
        expert_C = all_gather(padded(kept_TK, most, of.experts), of.group).flatten() - of.group.rank() * local
        here_C = (expert_C >= 0) & (expert_C < local)
        back_C, count_E = places(expert_C.where(here_C, local).view(-1, k), local + 1)
        end_E = count_E[:-1].cumsum(0, dtype=torch.int32)
        rows = int(end_E[-1]) if rows is None else rows
        of.state[2] = torch.maximum(of.state[2], end_E[-1] * (end_E[-1] > rows))
        count_E = end_E.clamp(max=rows).diff(prepend=end_E.new_zeros(1))
        route = Route(of, len(x_TD), most, k, rows, back_C.where(here_C, NOWHERE), kept_TK, count_E)
        weight_C = all_gather(padded(weight_TK, most), of.group).flatten()
        return self.out(x_TD, route), common.put(weight_C, route.back_C, rows), route

    def out(self, x_TD: Tensor, route: Route) -> Tensor:
        return spread(all_gather(padded(x_TD, route.most), self.of.group), route.back_C, route.k, route.rows)

    def home(self, y_RD: Tensor, weight_R: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
        lost_C = (route.back_C >= route.rows) & (route.back_C < NOWHERE)
        sums_ND = gather(y_RD, route.back_C, route.k).masked_fill(lost_C.view(-1, route.k).any(1)[:, None], torch.nan)
        y_TD = self.summed(sums_ND)[: route.tokens]
        if weight_R is None:
            return y_TD, None
        return y_TD, self.summed(common.take(weight_R, route.back_C).view(-1, route.k))[: route.tokens]

    def summed(self, rows_N: Tensor) -> Tensor:
        """Return the sum over ranks of the rows for this rank's tokens; `rows_N` holds rows for all ranks' tokens."""
        ranks, came_N = self.of.group.size(), torch.empty_like(rows_N)
        dist.all_to_all_single(came_N, rows_N.contiguous(), group=self.of.group)
        return came_N.view(ranks, -1, rows_N.shape[1]).sum(0)


def all_gather(rows_TN: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, in order of ranks."""
    out_PTN = rows_TN.new_empty(group.size(), *rows_TN.shape)
    dist.all_gather(list(out_PTN.unbind(0)), rows_TN.contiguous(), group=group)
    return out_PTN.flatten(0, 1)


def padded(rows_TN: Tensor, most: int, value: int = 0) -> Tensor:
    return functional.pad(rows_TN, (0, 0, 0, most - len(rows_TN)), value=value)


# ---- symmetric memory


class Peers:
    """Buffers that all ranks reach, and moves of rows through them; all ranks create and call it in the same order."""

    def __init__(self, of: NVLink, size: int, device: torch.device) -> None:
        self.of, self.size, self.turn = of, size, 0
        self.me, self.ranks = of.group.rank(), of.group.size()
        of.state[:1].zero_()
        self.memory, addresses = reached(size, device, of.group)
        starts = torch.tensor(addresses, dtype=torch.int64)
        self.pads = starts.to(device)
        slots = [starts + HEAD, starts + HEAD + (size - HEAD) // 2]
        self.slots = [(slot.to(device), int(slot[self.me])) for slot in slots]

    def first(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, most: int, rows: int | None
    ) -> tuple[Tensor, Tensor, Route]:
        of, slot = self.of, self.next(x_TD, most, expert_TK.shape[1])
        kept_TK, total_E = kernels().put(x_TD, slot, (expert_TK, weight_TK, of.experts), of.local)
        self.meet()
        chosen_C, count_EP = kernels().count(slot, total_E, of.experts)
        rows = int(total_E.sum()) if rows is None else rows  # the host waits for the device
        back_C, weight_R, count_E = kernels().place(slot, chosen_C, count_EP, total_E, of.state, rows)
        x_RD = kernels().pull(slot, back_C, x_TD, rows)
        return x_RD, weight_R, Route(of, len(x_TD), most, slot.k, rows, back_C, kept_TK, count_E)

    def out(self, x_TD: Tensor, route: Route) -> Tensor:
        slot = self.next(x_TD, route.most, route.k)
        kernels().put(x_TD, slot, None, self.of.local)
        self.meet()
        x_RD: Tensor = kernels().pull(slot, route.back_C, x_TD, route.rows)
        return x_RD

    def home(self, y_RD: Tensor, weight_R: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
        of, slot = self.of, self.next(y_RD, route.most, route.k)
        kernels().push(slot, route.back_C, y_RD, weight_R)
        self.meet()
        sums: tuple[Tensor, Tensor | None] = kernels().summed(
            slot, route.kept_TK, of.state, y_RD, route.tokens, of.experts, weight_R is not None
        )
        return sums

    def meet(self) -> None:
        kernels().meet(self.pads, self.of.state, self.me, PATIENCE)

    def next(self, rows: Tensor, most: int, k: int) -> Any:
        """Return the slot whose turn it is; all ranks finished reading it before they last met."""
        self.turn = 1 - self.turn
        addresses, own = self.slots[self.turn]
        expert = lined(self.ranks * most * rows.shape[1] * rows.element_size())
        weight = expert + lined(4 * most * k)
        return kernels().Slot(addresses, self.me, own, self.ranks, most, k, expert, weight)


def reached(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Any, list[int]]:
    """Return memory of this rank that all ranks reach (its first HEAD bytes are zero), and each rank's address."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    memory[:HEAD].zero_()
    handle = symmetric.rendezvous(memory, group)
    torch.cuda.synchronize()  # no rank may write before all have their zeros
    dist.barrier(group)
    return (memory, handle), list(handle.buffer_ptrs)


def kernels() -> Any:
    return importlib.import_module("training.kernels.triton.peers")
