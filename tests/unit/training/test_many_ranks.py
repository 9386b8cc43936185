"""What breaks first with hundreds of ranks, and can be known on one machine."""

from __future__ import annotations

import resource

import pytest

from training.dispatch.deepep import check_nodes
from training.parallel.processes import OTHER_FILES, make_room


@pytest.mark.parametrize(
    ("world", "soft", "hard", "then"),
    [
        (8, 1024, 4096, None),
        (1024, 1024, 4096, 1023 + OTHER_FILES),
        (1024, 1024, resource.RLIM_INFINITY, 1023 + OTHER_FILES),
        (1024, resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_open_files_grow_with_the_ranks(
    world: int, soft: int, hard: int, then: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 gathers from everybody: at 1,024 ranks 1,023 sockets, where a process may open 1,024 files of any kind."""
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: set_to.append(both))
    make_room(world)
    assert set_to == ([] if then is None else [(then, hard)])


def test_too_few_open_files_are_said_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1200))
    with pytest.raises(
        ValueError, match="1024 ranks need 1535 open files each, and 1200 are allowed here; write ulimit -n"
    ):
        make_room(1024)


@pytest.mark.parametrize(
    ("ranks", "local", "says"),
    [
        (8, 8, ""), (16, 8, ""), (4, 4, ""), (4, 8, ""), (16, 0, ""), (64, 16, ""),
        (8, 4, "write mesh.ep=4"), (16, 4, "write mesh.ep=4"), (4, 2, "write mesh.ep=2"),
    ],
)  # fmt: skip
def test_deepep_1_reaches_eight_ranks_by_nvlink(ranks: int, local: int, says: str) -> None:
    """Its NODE is 8 whatever the machine: on nodes of four it wrote to cards that no NVLink reaches."""
    if not says:
        check_nodes(ranks, local)
        return
    with pytest.raises(ValueError, match=says):
        check_nodes(ranks, local)
