"""Expert FFNs over rows sorted by expert, one backend a file; SPECIFICATION is what the others are held to.

    CAPABILITIES                  what it can do besides, as data; other modules ask for it, and name no backend
    available() -> str            "" if it can run here, else one sentence why not
    experts(x_RD, weight_R, count_E, w, activation) -> y_RD

R routed rows, sorted by local expert; D hidden; E local experts; F neurons. `count_E` (int32, on x's device) are the
rows of each expert, possibly 0. Rows beyond its sum may come back as anything, and so may their gradients: nobody reads
them. Routing weights are applied inside, so that combining is a plain sum: y = down(act(gate x) * up x * weight) +
weight * down_bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from training.dispatch import Dispatcher
from training.kernels.router import Rows
from upcycle import plugin

DEFAULT = "grouped"
SPECIFICATION = "reference"  # runs everywhere


@dataclass(frozen=True)
class LowRank:
    """Hold the adapters of all local experts (model/lora.py), as if scale * B A were added to the matrices."""

    up_a_EDr: Tensor
    up_b_EHr: Tensor  # H: the rows of up, 2F if gated
    down_a_EFr: Tensor
    down_b_EDr: Tensor
    scale: float


@dataclass(frozen=True)
class ExpertWeights:
    """Hold all local experts, stacked; uneven ones are padded with zero neurons, which compute and learn nothing."""

    up_EFD: Tensor  # gated: (E, 2F, D), gate first, as transformers stacks them
    down_EDF: Tensor
    gated: bool
    up_bias_EF: Tensor | None = None  # gated: (E, 2F)
    down_bias_ED: Tensor | None = None
    low: LowRank | None = None


ExpertFunction = Callable[[Tensor, Tensor, Tensor, ExpertWeights, str], Tensor]


class TokenFunction(Protocol):
    """Compute each token's sum over its experts, added to `onto_TD`, where all experts are on this device. `rows` is
    where the router that x_TD came through takes x's gradient from."""

    def __call__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        expert_TK: Tensor,
        w: ExpertWeights,
        activation: str,
        onto_TD: Tensor | None = None,
        rows: Rows | None = None,
    ) -> Tensor: ...


def no_fusion(x_TD: Tensor, up: Tensor, down: Tensor, activation: str) -> TokenFunction | None:
    return None


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do besides computing rows."""

    adapters: bool = False  # computes the adapters of model/lora.py
    waitless: bool = False  # reads no count on the host, so that a step can be recorded as a CUDA graph
    opaque: bool = False  # torch.compile cannot look into it, and leaves the whole MoE block out
    # x_TD, up (E, 2, F, D), down (E, D, F), activation -> the function that computes them from tokens to tokens
    fused: Callable[[Tensor, Tensor, Tensor, str], TokenFunction | None] = no_fusion
    # tokens, experts, D, F, rows of up a neuron -> numbers that `fused` keeps of a row for backward; None: it keeps x
    kept: Callable[[int, int, int, int, int], int | None] = lambda *_: None
    kernels: tuple[str, ...] = ()  # parts of its kernels' names, for profiles


@dataclass(frozen=True)
class Backend:
    """A backend as a model holds it: its function, and what it can do besides."""

    compute: ExpertFunction
    can: Capabilities = Capabilities()


def backend(name: str) -> Backend:
    """Return the backend `name`, or raise a ValueError that says why it cannot run here."""
    module = plugin.load("training.experts", name)
    why_not: str = module.available()
    if why_not:
        raise ValueError(why_not)
    return Backend(module.experts, module.CAPABILITIES)


def capabilities(name: str) -> Capabilities:
    """Return what the backend `name` can do, wherever it can run."""
    found: Capabilities = plugin.load("training.experts", name).CAPABILITIES
    return found


def fused(
    dispatcher: Dispatcher, backend: Backend, x_TD: Tensor, up: Tensor, down: Tensor, activation: str
) -> TokenFunction | None:
    """Return the function that does what dispatch, backend and combine do together, if this pair has one for these."""
    return backend.can.fused(x_TD, up, down, activation) if dispatcher.can.stays else None
