"""Token dispatch: rows to the experts' devices and back, one dispatcher a file; `local` is the specification.

    dispatch(x_TD, weight_TK, expert_TK, room) -> Dispatched    rows sorted by local expert, counts on the device
    combine(y_RD, handle) -> y_TD              the sum of a token's rows; weights are applied in the expert

Both are differentiable in x, weight and y. A choice with weight 0 was dropped: it need not be sent, and its weight's
gradient may be 0. Ranks have experts in order: of 8 experts on 2 ranks, the second has 4 to 7.

Under gradients, in training, all ranks bring equally many tokens. Without, in validation and suites, each brings as
many as it has, down to none; dispatchers whose sizes must agree then ask the others first (common.most_tokens).

With `local` the host never waits for the device; with the others it waits once a dispatch, for the number of rows that
arrive. `room` is a promise of the caller: no expert gets more than `room` rows from any one rank, and all ranks have
the same `room`, under gradients. Then buffers can be made large enough without asking the device, and nothing
waits (except deepep on 2.x and between nodes).

A file has `available() -> str` ("" if it can run here, else one sentence) and `dispatcher(experts, ep_group,
etp_group)`. What the latter returns may hold large buffers: one object serves all layers. Groups of one rank are None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from upcycle import plugin


@dataclass(frozen=True)
class Dispatched:
    x_RD: Tensor
    weight_R: Tensor  # 0: the row was dropped
    # int32: the rows of each local expert; rows of a buffer beyond their sum may hold anything and are not read
    count_E: Tensor
    handle: Any


class Dispatcher(Protocol):
    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched: ...
    def combine(self, y_RD: Tensor, handle: Any) -> Tensor: ...


def create(
    name: str, experts: int, ep_group: dist.ProcessGroup | None, etp_group: dist.ProcessGroup | None = None
) -> Dispatcher:
    """The dispatcher `name` of a mesh; groups of one rank are None, and with both None it is `local`. A ValueError
    says why a dispatcher cannot run here."""
    module = plugin.load("training.dispatch", "local" if ep_group is None and etp_group is None else name)
    reason = module.available()
    if reason:
        raise ValueError(reason)
    made: Dispatcher = module.dispatcher(experts, ep_group, etp_group)
    return made
