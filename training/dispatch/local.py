"""All experts on this device: sorting is all there is to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.dispatch import Dispatched


@dataclass(frozen=True)
class Local:
    experts: int

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Dispatched:
        k = expert_TK.shape[1]
        flat_R = expert_TK.flatten()
        order_R = torch.argsort(flat_R, stable=True)
        # not bincount: it would wait for the device to learn the largest expert
        count_E = torch.zeros(self.experts, dtype=torch.int32, device=x_TD.device)
        count_E.scatter_add_(0, flat_R, torch.ones_like(flat_R, dtype=torch.int32))
        return Dispatched(x_TD[order_R // k], weight_TK.flatten()[order_R], count_E, (order_R, k))

    def combine(self, y_RD: Tensor, handle: tuple[Tensor, int]) -> Tensor:
        order_R, k = handle
        back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(order_R.numel(), device=order_R.device))
        # gathered and summed in a fixed order: adding rows by index would be another sum every time on a GPU
        return y_RD[back_R].view(-1, k, y_RD.shape[1]).sum(1)
