"""Measure time and memory: seconds of each phase, a trace of some steps, a snapshot of the allocator.

phases = Phases(device)
with phases("forward"): ...                  # records two events, without waiting for the device
metrics.log(step, **phases.fetch())          # {"time/forward": seconds per step, ...}
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class Phases:
    """Measure the seconds of each phase by name, with the device's clock on CUDA and the processor's elsewhere. Call
    `tell` with the name when a phase begins, and with "" when it ends."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.tell: Callable[[str], None] = lambda name: None
        self.spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.tell(name)
        if not self.cuda:
            with record_function(name):
                start = time.perf_counter()
                yield
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.tell("")
            return
        if torch.cuda.is_current_stream_capturing():  # times inside a graph's step are not measured
            yield
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with record_function(name):
            first.record()
            yield
            last.record()
        self.spans.setdefault(name, []).append((first, last))
        self.tell("")

    def fetch(self, steps: int = 1) -> dict[str, float]:
        """Return the seconds per step of each phase since the last fetch. This waits for the device."""
        if self.spans:
            torch.cuda.synchronize()
        for name, spans in self.spans.items():
            self.seconds[name] = sum(first.elapsed_time(last) for first, last in spans) / 1e3
        found = {f"time/{name}": seconds / steps for name, seconds in self.seconds.items()}
        self.spans, self.seconds = {}, {}
        return found


def steps_to_trace(text: str) -> range:
    """Return the steps to trace from a config's text: "10-12", "10", or ""."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text, re.ASCII)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if text and not 1 <= first <= last:
        raise ValueError(f"profile is {text!r}; write the steps to trace, such as 10-12 or 10, counted from 1")
    return range(first, last + 1)


class Trace:
    """Trace some steps into a file for chrome://tracing or perfetto. Call `before` before each step."""

    def __init__(self, folder: Path, steps: range) -> None:
        self.first, self.last = steps.start, steps.stop - 1
        self.path = folder / f"trace-{self.first}-{self.last}.json.gz"
        self.profiler: profile | None = None

    def before(self, step: int) -> None:
        if step > self.last:
            self.close()
        elif step >= self.first and self.profiler is None:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self.profiler = profile(activities=kinds, record_shapes=True)
            self.profiler.start()
        if self.profiler is not None:
            self.profiler.step()

    def close(self) -> None:
        """Write the trace. The end of the run also calls this, because the steps may be its last."""
        if self.profiler is not None:
            self.profiler.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(self.path))
            self.profiler = None
            self.first = self.last + 1

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def memory_snapshot(path: Path) -> Iterator[None]:
    """Record the CUDA allocator's actions and their callers in this context, for pytorch.org/memory_viz."""
    if not torch.cuda.is_available():
        raise ValueError("memory_snapshot=true needs a CUDA device, and there is none; leave it out on this machine")
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
