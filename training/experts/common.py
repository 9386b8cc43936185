"""Functions that backends share: refusals, checks of a call's inputs, and the mark of a recomputation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional

from training.experts import DEFAULT, ExpertWeights, Need
from training.kernels import swiglu
from upcycle.cli.frame import install


def missing(backend: str, module: str) -> str:
    """Return \"\" if `module` can be imported and there is a CUDA device, else one sentence that says why not."""
    return absent(f"expert_backend={backend}", module, f"use {DEFAULT}")


def absent(asked: str, module: str, instead: str) -> str:
    package = module.partition(".")[0]
    otherwise = f"{how}, or {instead}" if (how := install(package)) else instead
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == package:
            return f"{asked} needs the {package} package, which is not installed; {otherwise}"
        return f"{asked} needs the package {error.name}, which is not installed; {otherwise}"
    except (ImportError, OSError, RuntimeError, TypeError) as error:  # QuACK refuses some folders by a TypeError
        reason = (str(error).splitlines() or ["no reason given"])[0].rstrip(".;")
        return f"{asked} needs the {package} package, which does not import ({reason}); {instead}"
    if not torch.cuda.is_available():
        return f"{asked} needs a CUDA device, and there is none; {instead}"
    return ""


# not an argument, because the functions between a recomputed region and its experts do not know of recomputation
_again = ContextVar("again", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Mark a forward as a recomputation, which only saves tensors for backward: nobody reads the experts' output."""
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def recomputed() -> bool:
    return not torch.compiler.is_compiling() and _again.get()  # the compiler does not support ContextVar


def check(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, w: ExpertWeights) -> None:
    experts, hidden, width = w.down_EDF.shape
    rows = width * (2 if w.gated else 1)
    assert w.up_EFD.shape == (experts, rows, hidden) and x_RD.shape[1:] == (hidden,), "the matrices do not fit"
    assert weight_R.shape == x_RD.shape[:1] and count_E.shape == (experts,), "not one weight a row, one count an expert"
    assert w.up_bias_EF is None or w.up_bias_EF.shape == (experts, rows), "the bias of up does not fit"
    assert w.down_bias_ED is None or w.down_bias_ED.shape == (experts, hidden), "the bias of down does not fit"
    if w.low is not None:
        shapes = [tuple(t.shape[:2]) for t in (w.low.up_a_EDr, w.low.up_b_EHr, w.low.down_a_EFr, w.low.down_b_EDr)]
        assert shapes == [(experts, size) for size in (hidden, rows, width, hidden)], "the adapters do not fit"
    given = {t.dtype for t in (x_RD, w.up_EFD, w.down_EDF, w.up_bias_EF, w.down_bias_ED) if t is not None}
    assert len(given) == 1, f"rows and weights have several dtypes: {given}"
    if count_E.device.type == "cpu":  # on a GPU, reading the counts would mean waiting for it
        assert int(count_E.sum()) <= len(x_RD), "the counts promise more rows than there are"


def need_of(x_RD: Tensor, w: ExpertWeights, activation: str) -> Need:
    biases = w.up_bias_EF is not None or w.down_bias_ED is not None
    hidden, width = w.down_EDF.shape[1:]
    return Need(hidden, width, x_RD.dtype, x_RD.device.type, activation, w.gated, biases, w.low is not None)


def narrow(backend: str, need: Need) -> str:
    """Return why a backend for bfloat16 on CUDA, without adapters and biases, cannot compute such experts, or ""."""
    asked = f"expert_backend={backend}"
    if need.device != "cuda" or need.dtype != torch.bfloat16:
        got = f"{str(need.dtype).removeprefix('torch.')} on {need.device}"
        return f"{asked} computes in bfloat16 on CUDA, and got {got}; use {DEFAULT}"
    if need.adapters:
        return f"{asked} cannot compute adapters, and lora adds them to the experts; use {DEFAULT}"
    return f"{asked} cannot compute biases, and the experts have biases; use {DEFAULT}" if need.biases else ""


def only_bfloat16(backend: str, x_RD: Tensor, w: ExpertWeights, activation: str) -> None:
    if why := narrow(backend, need_of(x_RD, w, activation)):
        raise ValueError(why)


def sized(
    x_RD: Tensor, weight_R: Tensor, count_E: Tensor, w: ExpertWeights, activation: str,
    linear: Callable[[Tensor, Tensor, list[int]], Tensor],
) -> Tensor:  # fmt: skip
    """Compute experts without biases by `linear(x_RK, w_ENK, sizes)`; the host waits for the device to read sizes."""
    sizes, ends_E = count_E.tolist(), count_E.cumsum(0, dtype=torch.int32)
    rows = sum(sizes)
    h_RH = linear(x_RD[:rows].contiguous(), w.up_EFD, sizes)
    a_RF = swiglu.activate(h_RH, weight_R[:rows].contiguous(), ends_E, activation, w.gated)
    y_RD = linear(a_RF, w.down_EDF, sizes)
    return functional.pad(y_RD, (0, 0, 0, len(x_RD) - rows)) if rows < len(x_RD) else y_RD
