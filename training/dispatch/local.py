"""All experts on this device: dispatch only sorts rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from training.dispatch import DEFAULT, Capabilities, Dispatched
from training.kernels.permute import gather, places, spread

CAPABILITIES = Capabilities(stays=True)


def available() -> str:
    return ""


def dispatcher(experts: int, ep_group: ProcessGroup | None, etp_group: ProcessGroup | None = None) -> Local:
    if ep_group is not None or etp_group is not None:
        raise ValueError(f"dispatcher=local cannot reach other ranks; for mesh.ep or mesh.etp use dispatcher={DEFAULT}")
    return Local(experts)


@dataclass(frozen=True)
class Local:
    can: ClassVar = CAPABILITIES
    experts: int

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched:
        k = expert_TK.shape[1]  # one row a choice, with or without `room`
        back_R, count_E = places(expert_TK, self.experts)
        x_RD: Tensor = _Spread.apply(x_TD, back_R, k)  # type: ignore[no-untyped-call]
        weight_R = torch.empty_like(weight_TK).flatten().scatter(0, back_R, weight_TK.flatten())
        return Dispatched(x_RD, weight_R, count_E, (back_R, k))

    def combine(self, y_RD: Tensor, handle: tuple[Tensor, int]) -> Tensor:
        y_TD: Tensor = _Gather.apply(y_RD, *handle)  # type: ignore[no-untyped-call]
        return y_TD

    def trouble(self) -> str:
        return ""


# Each of these two is the transpose of the other. They are written by hand, because autograd would compute the gradient
# by scatter-add: its atomics run in another order every time, and it is several times slower than gather and sum.


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, back_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back_R)
        ctx.k = k
        return spread(x_TD, back_R, k)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return gather(grad_RD, ctx.saved_tensors[0], ctx.k), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, back_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back_R)
        ctx.k = k
        return gather(y_RD, back_R, k)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return spread(grad_TD, ctx.saved_tensors[0], ctx.k), None, None
