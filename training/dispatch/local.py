"""All experts on this device: sorting is all there is to do."""

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
        raise ValueError(f"dispatcher=local knows no other ranks; with mesh.ep or mesh.etp use dispatcher={DEFAULT}")
    return Local(experts)


@dataclass(frozen=True)
class Local:
    can: ClassVar = CAPABILITIES
    experts: int

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched:
        k = expert_TK.shape[1]  # room or not, there is one row a choice
        back_R, count_E = places(expert_TK, self.experts)
        x_RD: Tensor = _Spread.apply(x_TD, back_R, k)  # type: ignore[no-untyped-call]
        weight_R = torch.empty_like(weight_TK).flatten().scatter(0, back_R, weight_TK.flatten())
        return Dispatched(x_RD, weight_R, count_E, (back_R, k))

    def combine(self, y_RD: Tensor, handle: tuple[Tensor, int]) -> Tensor:
        y_TD: Tensor = _Gather.apply(y_RD, *handle)  # type: ignore[no-untyped-call]
        return y_TD

    def trouble(self) -> str:
        return ""


# The two are each other's transpose. Written out, because autograd would turn the gradient into a scatter-add: atomics
# in another order every time, and several times slower than the gather and sum that it really is.


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
