"""Expert FFNs over rows sorted by expert, one backend a file; `reference` is the specification.

    available() -> str            "" if it can run here, else one sentence why not
    experts(x_RD, weight_R, count_E, w, activation) -> y_RD

Shapes: R routed rows, sorted by local expert; D hidden; E local experts; F neurons.
`count_E` (int32, on x's device) says how many rows each expert has; it may be 0, and rows beyond its sum (buffers
larger than what was routed) come back as zeros. The routing weight is applied inside, before `down`, so that combining
the experts of a token is a plain sum: y = down(act(gate x) * up x * weight) + weight * down_bias.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """All local experts, stacked. Uneven ones are padded with zero neurons, which compute and learn nothing."""

    up_EFD: Tensor  # gated: (E, 2F, D), gate first, as transformers stacks them
    down_EDF: Tensor
    gated: bool
    up_bias_EF: Tensor | None = None  # gated: (E, 2F)
    down_bias_ED: Tensor | None = None
