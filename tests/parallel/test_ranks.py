"""What a test of several ranks relies on when ranks end or fail."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ranks import Failed, run


def leaves(rank: int, world: int, folder: str) -> bool:
    """Rank 1 is done at once; rank 0 fails if its process is gone half a second later."""
    place = Path(folder) / "pid"
    if rank == 1:
        place.with_suffix(".partial").write_text(str(os.getpid()))
        place.with_suffix(".partial").rename(place)
        return True
    while not place.exists():
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(int(place.read_text()), 0)  # raises an error if there is no such process
    return True


def dies(rank: int, world: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    raise ConnectionError("closed by peer")


def test_a_rank_that_is_done_stays_until_all_are(tmp_path: Path) -> None:
    """Seen in CI: ranks that ended after their groups were made broke the peer that was still connecting."""
    assert run(2, leaves, str(tmp_path)) == [True, True]


def test_a_rank_that_died_is_named_next_to_the_peer_that_lost_it() -> None:
    with pytest.raises(Failed) as failed:
        run(2, dies)
    assert "closed by peer" in failed.value.why[0]
    assert failed.value.why[1] == "it died without a word, exit code -9"
