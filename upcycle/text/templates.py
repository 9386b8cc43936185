"""Bound the work of a stranger's template (jinja2's sandbox bounds one loop, but not a loop in a loop)."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

SECONDS = 10.0  # processor time of one text; a real template takes a thousandth of a second
ROOM = 1 << 30  # bytes of memory that one text may need


class TooMuch(ValueError):
    """The template needs more time or memory than a text does."""


@contextmanager
def bounded(what: str, seconds: float = 0) -> Iterator[None]:
    """Raise TooMuch if the work inside takes more than `seconds`, or SECONDS, of processor time, or more than ROOM.

    Only the main thread can stop a loop.
    """
    seconds = seconds or SECONDS
    main = threading.current_thread() is threading.main_thread()
    late = TooMuch(f"{what} computes for more than {seconds:g} seconds without an end; correct it")
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        raise late

    before = signal.signal(signal.SIGPROF, stop) if main else None
    limits = limit_memory()
    try:
        if main:
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds)  # again and again: jinja's optimizer drops errors
        yield
    except MemoryError:
        raise TooMuch(f"{what} needs more than {ROOM} bytes of memory for one text; correct it") from None
    finally:
        if main:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before or signal.SIG_DFL)
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        if stopped:
            raise late


def limit_memory() -> tuple[int, int] | None:
    """Let this process take at most ROOM more memory, and return the limits before; None where the system cannot."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY or soft > most:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
            return soft, hard
    return None
