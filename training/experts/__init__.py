"""Expert FFNs over rows sorted by expert: one backend a file, and all must compute the same as SPECIFICATION.

    CAPABILITIES                  its optional features, as data; other modules read them and name no backend
    available() -> str            "" if it can run here, else one sentence that says why not
    experts(x_RD, weight_R, count_E, w, activation) -> y_RD

R routed rows, sorted by local expert; D hidden; E local experts; F neurons. `count_E` (int32, on x's device) holds the
number of rows of each expert, possibly 0. Outputs and gradients of rows beyond its sum may hold anything: nobody reads
them. A backend applies the routing weights, so that combining is a plain sum: y = down(act(gate x) * up x * weight) +
weight * down_bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from training.dispatch import Dispatcher
from training.kernels.router import Rows
from upcycle import plugin

AUTO = "auto"  # the fastest backend that is installed and computes the model's experts
DEFAULT = "grouped"
SPECIFICATION = "reference"  # runs everywhere


@dataclass(frozen=True)
class LowRank:
    """The adapters of all local experts (model/lora.py); they add scale * B A to the matrices."""

    up_a_EDr: Tensor
    up_b_EHr: Tensor  # H: the rows of up, 2F if gated
    down_a_EFr: Tensor
    down_b_EDr: Tensor
    scale: float


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of all local experts, stacked; narrow experts are padded with zero neurons, which learn nothing."""

    up_EFD: Tensor  # gated: (E, 2F, D), gate first, as transformers stacks them
    down_EDF: Tensor
    gated: bool
    up_bias_EF: Tensor | None = None  # gated: (E, 2F)
    down_bias_ED: Tensor | None = None
    low: LowRank | None = None


@dataclass(frozen=True)
class Need:
    """The experts that a backend is asked to compute."""

    hidden: int
    width: int  # neurons of the widest expert, or of a rank's part of it
    dtype: torch.dtype  # of rows
    device: str  # cuda | cpu
    activation: str
    gated: bool = True
    biases: bool = False
    adapters: bool = False


ExpertFunction = Callable[[Tensor, Tensor, Tensor, ExpertWeights, str], Tensor]


class TokenFunction(Protocol):
    """Compute each token's sum over its experts, added to `onto_TD`, if all experts are on this device.

    With `rows`, backward leaves the gradient of x_TD there for the router."""

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
    """The optional features of a backend."""

    speed: int = -1  # `auto` tries the highest first; below 0: never
    refuses: Callable[[Need], str] = lambda _: ""  # why it cannot compute such experts, or ""
    adapters: bool = False  # computes the adapters of model/lora.py
    waitless: bool = False  # never reads counts on the host, so that a step can be recorded as a CUDA graph
    opaque: bool = False  # torch.compile cannot trace it, so the whole MoE block is not compiled
    # (x_TD, up (E, 2, F, D), down (E, D, F), activation) -> a function from tokens to tokens; None: it has none
    fused: Callable[[Tensor, Tensor, Tensor, str], TokenFunction | None] = no_fusion
    # (tokens, experts, D, F, rows of up a neuron) -> numbers of a row that `fused` keeps for backward; None: x and h
    kept: Callable[[int, int, int, int, int], int | None] = lambda *_: None
    kernels: tuple[str, ...] = ()  # parts of its kernels' names, for profiles


@dataclass(frozen=True)
class Backend:
    """The function of a backend and its optional features."""

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
    """Return the optional features of the backend `name`, even if it cannot run here. `auto` has those of DEFAULT."""
    found: Capabilities = plugin.load("training.experts", DEFAULT if name == AUTO else name).CAPABILITIES
    return found


def fastest(need: Need) -> tuple[str, str]:
    """Return the fastest backend that is installed and computes these experts, and why not the next faster, or ""."""
    able = {name: capabilities(name) for name in plugin.names("training.experts")}
    why = ""
    for name in sorted((name for name, can in able.items() if can.speed >= 0), key=lambda name: -able[name].speed):
        if not (reason := unfit(name, need)):
            return name, why
        why = reason
    raise ValueError(why)


def unfit(name: str, need: Need) -> str:
    """Return why the backend `name` cannot compute these experts here, or ""."""
    reason: str = capabilities(name).refuses(need) or plugin.load("training.experts", name).available()
    return reason


def fused(
    dispatcher: Dispatcher, backend: Backend, x_TD: Tensor, up: Tensor, down: Tensor, activation: str
) -> TokenFunction | None:
    """Return a function that replaces dispatch, backend and combine, or None if there is none for these inputs."""
    return backend.can.fused(x_TD, up, down, activation) if dispatcher.can.stays else None
