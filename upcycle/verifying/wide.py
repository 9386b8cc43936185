"""Compute a model of transformers in float64 throughout, also where its code casts to float32.

Routers, norms and softmaxes of transformers cast to float32. In a model that was loaded in float64 this leaves
differences of up to 1e-5 between two equal functions, because a trained model amplifies them from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class Float64(TorchFunctionMode):
    """Inside this context a cast of a float64 tensor to float32 does nothing, and a product with one is in float64."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        if function in PRODUCTS and {value.dtype for value in args} == {torch.float32, torch.float64}:
            # before 5.19 transformers multiplies frequencies, which stay wide here, by positions in float32
            args = [value.double() for value in args]
        return function(*args, **kwargs)
