"""What breaks first with hundreds of ranks, and can be known on one machine."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import many_ranks
from benchmarks.many_ranks import checkpoint, start
from tests.parallel import ranks
from training.checkpoint import storage
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
        ValueError, match="1024 ranks need 1535 open files each, and this machine allows 1200; write ulimit -n"
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


def many(folder: Path, ranks: int) -> Path:
    """A checkpoint of so many ranks with two rows each: its manifest, and shards without bytes."""
    files = {f"shard-{rank:05d}.safetensors": {"bytes": 1 << 20, "sha256": "0" * 64} for rank in range(ranks)}
    pieces = [{"file": name, "start": 8, "offset": [2 * i, 0], "shape": [2, 4]} for i, name in enumerate(files)]
    entry = {"dtype": "float32", "shape": [2 * ranks, 4], "pieces": pieces}
    body = {"format": 1, "step": 3, "files": files, "tensors": dict.fromkeys("abcd", entry)}
    (folder / storage.MANIFEST).write_bytes(storage.sealed(storage.encode(body)))
    for name in files:
        (folder / name).touch()
    return folder


def owned_on_rank(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Return the names that a rank holds, and those that it writes: of all ranks' norms, a copy's and its own."""
    names = [*(f"norm-{n}" for n in range(40)), *(f"copy-{rank % 2}-{n}" for n in range(20)), f"own-{rank}"]
    held = [storage.Piece(name, "float32", (2,), (0,), (2,)) for name in names]
    return names, [piece.tensor for piece in storage.owned(held, dist.group.WORLD)]


def test_of_many_that_hold_a_piece_one_writes_it() -> None:
    """Each rank finds the same, and no rank plans for all: DCP's plans of 1,024 ranks took rank 0 two minutes."""
    held, wrote = zip(*ranks.run(4, owned_on_rank), strict=True)
    assert sorted(name for names in wrote for name in names) == sorted({name for names in held for name in names})
    assert all(f"own-{rank}" in names for rank, names in enumerate(wrote)) and max(map(len, wrote)) < 40, "spread"


def test_ranks_lines_are_a_manifest(tmp_path: Path) -> None:
    """What 64 ranks wrote, joined unparsed, reads as one, any part of it; and nothing is left out or overlaps without a
    word."""
    whole = torch.arange(384.0).view(128, 3)
    every, name = [], 'a "name"\twith\nodd characters'
    for rank in range(64):
        own = [storage.Piece(name, "float32", (128, 3), (2 * rank, 0), (2, 3))]
        own += [storage.Piece("b", "int64", (), (), ())] if rank == 5 else []
        staged = {name: whole[2 * rank : 2 * rank + 2], "b": torch.tensor(7)}
        every.append(storage.write_shard(tmp_path / f"shard-{rank:05d}.safetensors", own, staged))
    (tmp_path / storage.MANIFEST).write_bytes(storage.joined({"step": 3}, every))
    saved = storage.Shards(tmp_path, storage.read_whole(tmp_path))
    assert torch.equal(saved.read(name), whole) and saved.read("b") == 7
    assert torch.equal(saved.read(name, [(3, 9), (1, 2)]), whole[3:9, 1:2])
    assert saved.read(name, [(8, 8), (0, 3)]).shape == (0, 3)
    saved.tensors[name]["pieces"].pop(1)
    assert torch.equal(saved.read(name, [(4, 9), (0, 3)]), whole[4:9])
    with pytest.raises(ValueError, match="does not contain all of"):
        saved.read(name, [(3, 9), (0, 3)])
    for bad in (every[:-1], [*every, every[0]]):
        with pytest.raises(ValueError, match="do not fill it"):
            storage.joined({"step": 3}, bad)
    with pytest.raises(ValueError, match="the same name and different shapes"):
        storage.joined({}, [*every, every[0].split(b"\n")[0] + b'\n"b"\t{"dtype":"int8","shape":[]}\t1\t1\t{}'])


def test_each_rank_judges_its_share_of_a_manifest(tmp_path: Path) -> None:
    body = storage.read_manifest(many(tmp_path, 4))
    body["tensors"]["c"] = {**body["tensors"]["c"], "shape": [9, 4]}
    (tmp_path / storage.MANIFEST).write_bytes(storage.sealed(storage.encode(body)))
    for share in (slice(2, None, 4), slice(None)):
        with pytest.raises(ValueError, match=r"which a save does not write|an impossible entry"):
            storage.read_manifest(tmp_path, share)
    for rank in (0, 1, 3):
        storage.read_manifest(tmp_path, slice(rank, None, 4))


def test_a_manifests_sum_is_of_its_bytes(tmp_path: Path) -> None:
    path = many(tmp_path, 2) / storage.MANIFEST
    good = path.read_bytes()
    for bad in (good.replace(b'"step":3', b'"step":4'), good + b" ", good[:-70] + b"1" * 68 + good[-2:], good[:-1]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="is damaged"):
            storage.read_manifest(tmp_path)


def test_what_the_page_says_of_a_thousand_ranks_can_be_timed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands next to its table, here with few ranks, layers and tensors: each rank adds as many lines to a manifest, more than eight ranks
    gather experts too, and with a copy in each node some of that is summed instead."""
    monkeypatch.setattr(many_ranks, "LAYERS", 3)
    monkeypatch.setattr(many_ranks, "TENSORS", 50)
    two, four, six = (checkpoint(world, tmp_path) for world in (2, 4, 6))
    for what in ("manifest, MB", "rank 0 is sent, MB"):
        assert six[what] - four[what] == pytest.approx(four[what] - two[what], rel=0.05) and two[what] > 0
    eight, many, copies = (start(*case)["collectives of a step"] for case in ((8, False), (16, False), (16, True)))
    assert 0 < eight < copies < many
