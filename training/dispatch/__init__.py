"""Token dispatch: rows to the experts' devices and back, one dispatcher a file; `local` is the specification.

    CAPABILITIES                                               what it does, as data; others ask, and name no dispatcher
    available() -> str                                         "" if it can run here, else one sentence why not
    dispatcher(experts, ep_group, etp_group) -> Dispatcher     one object serves all layers; a group of one is None
    dispatch(x_TD, weight_TK, expert_TK, room) -> Dispatched   rows sorted by local expert, counts on the device
    combine(y_RD, handle) -> y_TD                              the sum of a token's rows

Both are differentiable in x, weight and y. A choice with weight 0 was dropped: it need not be sent, and its weight's
gradient may be 0. Ranks have experts in order. Under gradients all ranks bring equally many tokens; without, each
brings as many as it has, down to none. `local` never waits for the device; the others wait once a dispatch for the
number of rows, unless `room` promises that no expert gets more rows from any one rank, the same on all ranks (deepep
2.x waits all the same)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch.distributed as dist
from torch import Tensor

from upcycle import plugin

DEFAULT = "alltoall"  # runs everywhere, and hardware files have its rate
ARRIVALS = 2.0


@dataclass(frozen=True)
class Dispatched:
    x_RD: Tensor
    weight_R: Tensor  # 0: the row was dropped
    # int32: the rows of each local expert; rows of a buffer beyond their sum may hold anything and are not read
    count_E: Tensor
    handle: Any


@dataclass(frozen=True)
class Capabilities:
    """What a dispatcher does, for those who run it or count what it costs."""

    stays: bool = False  # all experts are on this device, and so are their tokens
    loses: bool = False  # has memory for `arrivals` (an attribute) times the rows of balanced routing, and loses more
    each_choice: bool = False  # sends a row for each choice, not for each rank that has some of a token's experts
    sorts: bool = False  # its own kernels sort rows by expert
    tells: bool = False  # every rank gets the choices of all, a byte an expert
    # of a MoE layer's host time, for how long the device has nothing to do at a dispatch that the host waits for: by
    # how much that takes longer than the way home, which has the same rows (docs/performance.md)
    wait: float = 0.0
    kernels: tuple[str, ...] = ()  # parts of its kernels' names, for profiles
    # tokens of a rank, ranks, hidden size, k, bytes an element -> bytes of its buffers
    buffer_bytes: Callable[[int, int, int, int, int], int] = lambda *_: 0
    # k, ranks, experts of a rank, arrivals -> rows that a rank has memory for, for each of its own tokens
    rows_a_token: Callable[[int, int, int, float], float] = lambda k, *_: k
    # mesh.ep, ranks of this machine (0: not said): raises a ValueError where ranks of several machines do not go
    check_nodes: Callable[[int, int], None] = lambda *_: None


class Dispatcher(Protocol):
    can: ClassVar[Capabilities]

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched: ...
    def combine(self, y_RD: Tensor, handle: Any) -> Tensor: ...
    def trouble(self) -> str: ...  # what went wrong since it was asked last, or ""; the host may wait for the device


def create(
    name: str,
    experts: int,
    ep_group: dist.ProcessGroup | None,
    etp_group: dist.ProcessGroup | None = None,
    arrivals: float = ARRIVALS,
) -> Dispatcher:
    """Return the dispatcher `name`, or `local` where both groups are None; raise a ValueError if it cannot run here."""
    module = plugin.load("training.dispatch", "local" if ep_group is None and etp_group is None else name)
    reason = module.available()
    if reason:
        raise ValueError(reason)
    made: Any = module.dispatcher(experts, ep_group, etp_group)
    if made.can.loses:
        made.arrivals = arrivals
    found: Dispatcher = made
    return found


def capabilities(name: str) -> Capabilities:
    """Return what the dispatcher `name` does, wherever it can run."""
    found: Capabilities = plugin.load("training.dispatch", name).CAPABILITIES
    return found
