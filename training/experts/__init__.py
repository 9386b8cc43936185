"""Expert FFNs over rows sorted by expert, one backend a file; `reference` is the specification.

    available() -> str            "" if it can run here, else one sentence why not
    experts(x_RD, weight_R, count_E, w, activation) -> y_RD

`quack`, and model/narrow.py for `grouped`, also go from tokens to tokens where all experts are here: `fits`, `ffn`
(Experts.from_tokens).

Shapes: R routed rows, sorted by local expert; D hidden; E local experts; F neurons.
`count_E` (int32, on x's device) says how many rows each expert has; it may be 0. Rows beyond its sum (buffers
larger than what was routed) may come back as anything, as do their gradients: nobody reads them, and to write zeros
there would be a pass over memory. The routing weight is applied inside, before `down`, so that combining
the experts of a token is a plain sum: y = down(act(gate x) * up x * weight) + weight * down_bias.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """Adapters of all local experts (model/lora.py): matrices are as if scale * B A were added to them."""

    up_a_EDr: Tensor
    up_b_EHr: Tensor  # H: the rows of up, 2F if gated
    down_a_EFr: Tensor
    down_b_EDr: Tensor
    scale: float


@dataclass(frozen=True)
class ExpertWeights:
    """All local experts, stacked. Uneven ones are padded with zero neurons, which compute and learn nothing."""

    up_EFD: Tensor  # gated: (E, 2F, D), gate first, as transformers stacks them
    down_EDF: Tensor
    gated: bool
    up_bias_EF: Tensor | None = None  # gated: (E, 2F)
    down_bias_ED: Tensor | None = None
    low: LowRank | None = None
