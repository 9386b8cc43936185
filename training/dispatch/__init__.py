"""Token dispatch: rows to the experts' devices and back, one way a file; `local` is the specification.

    dispatch(x_TD, weight_TK, expert_TK) -> Dispatched    rows sorted by local expert, counts on the device
    combine(y_RD, handle) -> y_TD                         the sum of a token's rows; weights are applied in the expert

Both are differentiable in x, weight and y. Nothing here waits for the device: counts stay tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Dispatched:
    x_RD: Tensor
    weight_R: Tensor  # 0: the row was dropped
    count_E: Tensor  # int32 rows of each local expert
    handle: Any


class Dispatcher(Protocol):
    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Dispatched: ...
    def combine(self, y_RD: Tensor, handle: Any) -> Tensor: ...
