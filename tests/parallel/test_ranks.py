"""What a test of several ranks says when ranks fail."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ranks import UNREACHED, Failed, run


def unreached(rank: int, world: int, marks: str, dies: bool, times: int) -> int:
    """Rank 0 finds nobody, in so many starts."""
    starts = Path(marks) / str(rank)
    starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
    again = len(starts.read_text()) > times
    if rank == 1 and dies and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and not again:
        time.sleep(0.2)
        raise RuntimeError(f"{UNREACHED} with [...] Connection closed by peer")
    return rank


def test_processes_that_gloo_could_not_connect_start_again_and_it_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"(?s)started again: rank 0 failed:.*{UNREACHED}"):
        assert run(2, unreached, str(tmp_path), False, 1) == [0, 1]


def test_once_only(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="started again"), pytest.raises(Failed, match=UNREACHED):
        run(2, unreached, str(tmp_path), False, 2)
    assert (tmp_path / "0").read_text() == "xx"


def test_a_rank_that_died_is_named_next_to_the_peer_that_lost_it_and_nothing_starts_again(tmp_path: Path) -> None:
    with pytest.raises(Failed) as failed:
        run(2, unreached, str(tmp_path), True, 1)
    assert UNREACHED in failed.value.why[0]
    assert failed.value.why[1] == "it died without a word, exit code -9"
    assert (tmp_path / "0").read_text() == "x"
