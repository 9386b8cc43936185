"""Stop a run after a signal on any rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType

import torch
import torch.distributed as dist


class Stopped(BaseException):
    """The run was asked to stop and saved `step`. Not an Exception, so that nothing in a suite can catch it."""

    def __init__(self, step: int = 0) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


class Stop:
    """Handle SIGTERM and SIGINT: the first asks the loop to save and end after this step or validation batch, the
    second ends the process at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> Stop:
        self.before = {number: signal.signal(number, self.handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        # os.write, because print may have been interrupted
        os.write(2, f"\n{self.signal.name}: saving, then leaving; once more to stop at once\n".encode())

    def requested(self, group: dist.ProcessGroup | None = None) -> bool:
        """Return whether to end; with a gloo group, whether any of its ranks was asked to."""
        return anywhere([self.signal is not None], group)[0]

    def poll(self, group: dist.ProcessGroup | None = None) -> None:
        """Raise Stopped if `requested` is true; for work that is longer than a step."""
        if self.requested(group):
            raise Stopped


def anywhere(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return which of the flags are true on any rank of a gloo group."""
    if group is None:
        return list(flags)
    found = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]
