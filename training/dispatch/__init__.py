"""Token dispatch: send rows to the experts' devices and back, one dispatcher a file; `local` is the specification.

    CAPABILITIES                                               its properties, as data; other modules name no dispatcher
    available() -> str                                         "" if it can run here, else one sentence why not
    dispatcher(experts, ep_group, etp_group) -> Dispatcher     one object serves all layers; a group of one is None
    dispatch(x_TD, weight_TK, expert_TK, room) -> Dispatched   rows sorted by local expert, counts on the device
    combine(y_RD, handle) -> y_TD                              the sum of a token's rows

dispatch and combine are differentiable in x, weight and y. A choice with weight 0 was dropped: it need not be sent, and
its weight's gradient may be 0. Ranks hold the experts in order. With gradients all ranks bring the same number of
tokens; without gradients each rank brings any number, also 0. `local` never waits for the device. The others wait once
a dispatch for the number of rows, unless `room`, the same on all ranks, promises that no expert gets more rows from any
one rank (deepep 2.x waits in any case, and nvlink does not wait in training)."""

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
    # int32: the number of rows of each local expert; rows beyond the sum may hold anything, and nobody reads them
    count_E: Tensor
    handle: Any


@dataclass(frozen=True)
class Capabilities:
    """The properties of a dispatcher, for the code that runs it or estimates its cost."""

    stays: bool = False  # all experts and all their tokens are on this device
    loses: bool = False  # has memory for its `arrivals` times the rows of balanced routing, and loses further rows
    each_choice: bool = False  # sends a row for each choice, not for each rank that has some of a token's experts
    sorts: bool = False  # its own kernels sort rows by expert
    tells: bool = False  # sends the choices of every token to all ranks, one byte for each expert
    # the time that the device is idle in a dispatch that the host waits for, as a share of an MoE layer's host time;
    # measured as the extra time of dispatch over combine, which moves the same rows (docs/performance.md)
    wait: float = 0.0
    kernels: tuple[str, ...] = ()  # parts of its kernels' names, for profiles
    # (tokens of a rank, ranks, hidden size, k, bytes an element) -> bytes of its buffers
    buffer_bytes: Callable[[int, int, int, int, int], int] = lambda *_: 0
    # (k, ranks, experts of a rank, arrivals) -> rows that a rank has memory for, for each of its own tokens
    rows_a_token: Callable[[int, int, int, float], float] = lambda k, *_: k
    # (mesh.ep, ranks of this machine or 0 if unknown): raises a ValueError if it cannot span these machines
    check_nodes: Callable[[int, int], None] = lambda *_: None


class Dispatcher(Protocol):
    can: ClassVar[Capabilities]

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched: ...
    def combine(self, y_RD: Tensor, handle: Any) -> Tensor: ...
    def trouble(self) -> str: ...  # a sentence about an error since the last call, or ""; may wait for the device


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
    """Return the properties of the dispatcher `name`, even if it cannot run here."""
    found: Capabilities = plugin.load("training.dispatch", name).CAPABILITIES
    return found
