"""Detect bad steps from the loss and the gradient norm, without waiting for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from training.optim.config import OptimConfig
from training.parallel.collectives import local

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over ranks that hold different parameters (pipeline stages)


def global_norm(gradients: Sequence[Tensor], reduce: Reduce | None = None) -> Tensor:
    """Return the 2-norm of all gradients together, on the device; it is the same on every rank.

    DTensors of one placement share one small all-reduce, and replicated parts count once. Experts and dense weights may
    be on different meshes. `reduce` adds the squares of ranks with other parameters. torch.nn.utils.get_total_norm
    needs an all-reduce for each tensor and a single mesh.
    """
    groups = defaultdict[object, list[Tensor]](list)
    for g in gradients:
        key = (g.device_mesh, g.placements) if isinstance(g, DTensor) else None
        assert key is None or not any(isinstance(p, Partial) for p in key[1]), "gradients are not reduced yet"
        groups[key].append(g)
    squares = []
    for group in groups.values():
        parts = [local(g) for g in group] if isinstance(group[0], DTensor) else group
        dtypes = dict.fromkeys([part.dtype for part in parts])
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        # one dtype at a time: torch reads mixed dtypes tensor by tensor, at a fifth of the memory's speed
        kinds = [[part for part in parts if part.dtype == dtype] for dtype in dtypes]
        norms = [norm for kind in kinds for norm in torch._foreach_norm(kind, 2.0, dtype=wide)]
        square = torch.stack(norms).square().sum()
        if isinstance(group[0], DTensor):
            sums = [Replicate() if isinstance(p, Replicate) else Partial() for p in group[0].placements]
            square = DTensor.from_local(square, group[0].device_mesh, sums, run_check=False).full_tensor()
        squares.append(square)
    total = torch.stack(squares).sum()
    return (total if reduce is None else reduce(total)).sqrt()


class SpikeGuard:
    """Find steps whose loss or gradient norm is far above the recent mean, in standard deviations, on the device.

    Pass values that are equal on every rank, or ranks would skip different steps. A spike also enters the window, so a
    real change of level soon counts as normal. NaN and Inf never enter. The guard is silent until half the window is
    full.
    """

    def __init__(self, config: OptimConfig, device: torch.device | str = "cpu") -> None:
        self.sigma = config.spike_sigma
        self.values = torch.zeros(2, config.spike_window, dtype=torch.float64, device=device)  # losses, norms
        self.seen = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def spike(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether to skip this step, as a bool on the device, and add its values to the window."""
        new = torch.stack([loss.detach(), norm.detach()]).double()
        window = self.values.shape[1]
        place = torch.arange(window, device=new.device)
        full = place < self.seen
        count = full.sum().clamp(min=1)
        mean = self.values.sum(1) / count
        deviation = (((self.values - mean[:, None]) * full).square().sum(1) / count).sqrt()
        # equal values have no deviation; rounding alone must not count as a spike
        far = new > mean + self.sigma * torch.maximum(deviation, 1e-6 * mean.abs())
        finite = new.isfinite().all()
        flag = far.any() & finite & (self.seen >= window // 2) & (self.sigma > 0)
        here = (place == self.seen % window) & finite
        self.values.copy_(torch.where(here, new[:, None], self.values))
        self.seen += finite
        return flag

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self.values, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state["values"].shape == self.values.shape:  # a window of another length starts empty
            for name, tensor in self.state_dict().items():
                tensor.copy_(state[name])
