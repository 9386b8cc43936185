"""Functions that dispatchers share: autograd of dispatch and combine, each the transpose of the other, and refusals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from training.dispatch import DEFAULT, Capabilities, Dispatched


class Route(Protocol):
    """The plan of one dispatch: where rows go out and come home, in forward and in backward."""

    def out(self, x_TD: Tensor) -> Tensor:
        """Copy each token to all its rows."""
        ...

    def home(self, y_RD: Tensor, weight_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the sum of each token's rows, and for each choice the value of its row in `weight_R` (0 for a dropped
        choice)."""
        ...


# the dispatch in forward, which also makes the plan: x_TD, weight_TK -> x_RD, weight_R, count_E, plan
First = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Any]]


# profiles find the phases of a step by the names of record_function, see phases.py


def dispatch(first: First, x_TD: Tensor, weight_TK: Tensor) -> Dispatched:
    return Dispatched(*_Out.apply(x_TD, weight_TK, first))  # type: ignore[no-untyped-call]


def combine(y_RD: Tensor, route: Route) -> Tensor:
    y_TD: Tensor = _Home.apply(y_RD, route)  # type: ignore[no-untyped-call]
    return y_TD


class Routed:
    """The base class of dispatchers whose handle is a Route."""

    can: ClassVar[Capabilities]

    def combine(self, y_RD: Tensor, handle: Route) -> Tensor:
        return combine(y_RD, handle)

    def trouble(self) -> str:
        return ""


class _Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_TK: Tensor, first: First) -> tuple[Tensor, Tensor, Tensor, Route]:
        with record_function("dispatch"):
            x_RD, weight_R, count_E, ctx.route = first(x_TD, weight_TK)
        ctx.mark_non_differentiable(count_E)
        return x_RD, weight_R, count_E, ctx.route

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, grad_R: Tensor, *_: Any) -> tuple[Tensor, Tensor | None, None]:
        with record_function("combine"):
            return *ctx.route.home(grad_RD, grad_R), None


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, route: Route) -> Tensor:
        ctx.route = route
        with record_function("combine"):
            return route.home(y_RD, None)[0]

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        with record_function("dispatch"):
            return ctx.route.out(grad_TD), None


def most_tokens(x_TD: Tensor, group: ProcessGroup) -> int:
    """Return the largest number of tokens of a rank in the group.

    With gradients all ranks bring the same number, so this does not communicate. Do not call it inside of an autograd
    function, where gradients are always off."""
    if torch.is_grad_enabled():
        return len(x_TD)
    most = torch.tensor(len(x_TD), device=x_TD.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


# ---- weights of rows; kernels/permute.py moves the rows themselves


def put(weight_C: Tensor, back_C: Tensor, rows: int) -> Tensor:
    """Return the weights of `rows` rows: row back_C[c] has choice c's weight, and a row without a choice has 0."""
    weight_R = weight_C.new_zeros(rows + 1)
    return weight_R.scatter_(0, back_C.clamp(max=rows), weight_C)[:rows]


def take(weight_R: Tensor, back_C: Tensor) -> Tensor:
    """Return the weight of row back_C[c] for each choice c, and 0 for a row beyond the last."""
    return torch.cat([weight_R, weight_R.new_zeros(1)])[back_C.clamp(max=len(weight_R))]


# ---- refusals


def missing(dispatcher: str, *classes: str) -> str:
    """Return \"\" if deep_ep has one of `classes` and there is a CUDA device, else one sentence that says why not."""
    start, end = f"dispatcher={dispatcher} needs", f"use dispatcher={DEFAULT}"
    try:
        package = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        name = (error.name or "deep_ep").partition(".")[0]
        return f"{start} the package {name}, which is not installed; build it as our Dockerfile does, or {end}"
    except Exception as error:  # deep_ep asserts, compiles and looks for NCCL on import
        reason = (str(error).splitlines() or ["no reason given"])[0].rstrip(".;")
        return f"{start} the package deep_ep, which does not import ({reason}); {end}"
    if not any(hasattr(package, name) for name in classes):
        return f"{start} a deep_ep with {' or '.join(classes)}, and the installed one has none; {end}"
    if not torch.cuda.is_available():
        return f"{start} a CUDA device, and there is none; {end}"
    return ""


def whole_experts(dispatcher: str, ep_group: ProcessGroup | None, etp_group: ProcessGroup | None) -> ProcessGroup:
    if etp_group is not None:
        raise ValueError(
            f"dispatcher={dispatcher} sends rows to whole experts, and mesh.etp is {etp_group.size()}; "
            f"use mesh.etp=1 or dispatcher={DEFAULT}"
        )
    assert ep_group is not None, "create() uses local for a mesh without ep"
    return ep_group


def only_bfloat16(dispatcher: str, x_TD: Tensor) -> None:
    if x_TD.is_cuda and x_TD.dtype != torch.bfloat16:
        got = str(x_TD.dtype).removeprefix("torch.")
        raise ValueError(
            f"dispatcher={dispatcher} sends bfloat16 and got {got}; use model.dtype=bfloat16 or dispatcher={DEFAULT}"
        )
