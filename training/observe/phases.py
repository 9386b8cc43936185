"""Split a step's device time by phase, in milliseconds, from the profiler's timeline of kernels.

The phases `dispatch` and `combine` send rows to the experts and back. They are the ranges of these names, which
dispatch/common.py opens; the backward pass of a dispatch is a combine. All other kernels are sorted by name. Kernels of
two streams may run at once, so the phases may sum to more than the step. `exposed communication` is the time in which
only communication runs, and `idle` is the time in which no kernel runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from training.parallel.processes import rank
from upcycle import plugin


def of_plugins(package: str) -> tuple[str, ...]:
    """Return the parts of kernel names that a package's plug-ins declare."""
    return tuple(word for name in plugin.names(package) for word in plugin.load(package, name).CAPABILITIES.kernels)


RANGES = ("dispatch", "combine", "optimizer")
# the first phase with a word that a kernel's name contains; backends and dispatchers declare their own words
NAMES: Mapping[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "sdpa", "cudnn::fusion", "flex"),
    "experts": of_plugins("training.experts"),
    "router": ("choose_kernel", "softmax", "route_kernel", "route_backward_kernel", "gathered_kernel"),
    "places of rows": ("count_kernel", "place_kernel", "spread_kernel", "gather_kernel"),
    "weights and gradients between ranks": ("allgather", "reducescatter", "allreduce"),
    "products": ("gemm", "nvjet", "cutlass", "sm90_xmma", "ampere_", "splitkreduce"),
    "norms and rotation": ("norm_kernel", "norm_backward_kernel", "heads_kernel", "heads_backward_kernel"),
    "copies": ("memcpy", "memset", "copy", "fill", "catarray"),
}  # fmt: skip
COMMUNICATION = ("nccl", *of_plugins("training.dispatch"))
KERNELS = 25  # number of kernels that are listed by name


@dataclass(frozen=True)
class Span:
    """The microseconds of a kernel, or of a range that the program named, on the device's clock."""

    name: str
    start: float
    end: float


def phases(step: Callable[[], None], repeats: int = 3) -> dict[str, float]:
    """Return the milliseconds of each phase of a step, a mean over `repeats`, and print the slowest kernels on rank
    0."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    kernels, ranges = recorded(found.events() or ())
    for name, spent, calls in dearest(kernels)[: KERNELS if rank() == 0 else 0]:
        print(f"{spent / 1e3 / repeats:8.3f} ms {calls / repeats:6.0f} x  {name[:100]}", file=sys.stderr)
    return {name: round(spent / 1e3 / repeats, 3) for name, spent in table(kernels, ranges).items()}


def recorded(events: Iterable[Any]) -> tuple[list[Span], list[Span]]:
    """Return (kernels, ranges) of the profiler's events."""
    kernels, ranges = [], []
    for event in events:
        if event.device_type.name == "CUDA":
            span = Span(event.name, event.time_range.start, event.time_range.end)
            # a range that a program names is also on the device's timeline, from its first kernel to its last; kernels
            # in nested ranges count for the inner range; torch itself names an optimiser's step
            if event.is_user_annotation:
                ranges.append(replace(span, name="optimizer") if span.name.startswith("Optimizer.step") else span)
            else:
                kernels.append(span)
    return kernels, [span for span in ranges if span.name in RANGES]


def table(kernels: Sequence[Span], ranges: Sequence[Span]) -> dict[str, float]:
    """Return the microseconds of each phase, longest first, then exposed communication and idle time."""
    spent: dict[str, float] = {}
    within = {name: union(span for span in ranges if span.name == name) for name in RANGES}
    for name, parts in within.items():
        if parts:
            spent[name] = length(parts)
    known = union(ranges)
    for kernel in kernels:
        if not covers(known, (kernel.start + kernel.end) / 2):
            phase = phase_of(kernel.name)
            spent[phase] = spent.get(phase, 0.0) + kernel.end - kernel.start
    busy, computing = union(kernels), union(kernel for kernel in kernels if not communicates(kernel.name))
    out = dict(sorted(spent.items(), key=lambda item: -item[1]))
    out["exposed communication"] = length(busy) - length(computing)
    out["idle"] = busy[-1][1] - busy[0][0] - length(busy) if busy else 0.0
    return out


def phase_of(kernel: str) -> str:
    lower = kernel.lower()
    return next((phase for phase, words in NAMES.items() if any(word in lower for word in words)), "rest")


def communicates(kernel: str) -> bool:
    return any(word in kernel.lower() for word in COMMUNICATION)


def dearest(kernels: Sequence[Span]) -> list[tuple[str, float, int]]:
    """Return (name, microseconds, calls) of each kernel, slowest first."""
    total: dict[str, tuple[float, int]] = {}
    for kernel in kernels:
        spent, calls = total.get(kernel.name, (0.0, 0))
        total[kernel.name] = spent + kernel.end - kernel.start, calls + 1
    return sorted(((name, *both) for name, both in total.items()), key=lambda item: -item[1])


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the time that at least one of the spans covers, as pieces in order."""
    pieces: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if pieces and span.start <= pieces[-1][1]:
            pieces[-1] = pieces[-1][0], max(pieces[-1][1], span.end)
        else:
            pieces.append((span.start, span.end))
    return pieces


def length(pieces: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in pieces)


def covers(pieces: Sequence[tuple[float, float]], at: float) -> bool:
    return any(start <= at <= end for start, end in pieces)
