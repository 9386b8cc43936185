"""What breaks first with hundreds of ranks, and can be known on one machine."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from benchmarks.many_ranks import checkpoint, start
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


def many(folder: Path, ranks: int) -> Path:
    """A checkpoint of so many ranks with two rows each: its manifest, and shards without bytes."""
    files = {f"shard-{rank:05d}.safetensors": {"bytes": 1 << 20, "sha256": "0" * 64} for rank in range(ranks)}
    pieces = [{"file": name, "start": 8, "offset": [2 * i, 0], "shape": [2, 4]} for i, name in enumerate(files)]
    entry = {"dtype": "float32", "shape": [2 * ranks, 4], "pieces": pieces}
    body = {"format": 1, "step": 3, "files": files, "tensors": dict.fromkeys("abcd", entry)}
    (folder / storage.MANIFEST).write_bytes(storage.signed(body))
    for name in files:
        (folder / name).touch()
    return folder


def test_a_rank_keeps_the_pieces_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks' pieces those that its rows are in: one of 64 on the same mesh, three where its rows lie across."""
    reader = storage.Reader(tmp_path, storage.read_manifest(many(tmp_path, 64)))
    assert not reader.metadata.storage_data
    for name, rows, want in (
        ("a", (8, 10), [8]),
        ("b", (9, 14), [8, 10, 12]),
        ("c", (8, 8), []),
        ("d", (0, 128), None),
    ):
        monkeypatch.setattr(storage, "rows_of", lambda _, rows=rows: rows)
        reader.want({name: torch.empty(0)})
        kept = [index.offset[0] for index in reader.metadata.storage_data if index.fqn == name and index.offset]
        assert kept == (list(range(0, 128, 2)) if want is None else want)
        chunks = reader.metadata.state_dict_metadata[name].chunks
        assert [chunk.offsets[0] for chunk in chunks] == kept


def test_of_many_that_hold_a_piece_one_writes_it() -> None:
    """Whoever holds it: a copy of the model on every node, a norm on all ranks of tp. Each rank finds the same, and no
    rank plans for all: DCP's plans of 1,024 ranks took rank 0 two minutes."""
    drawn = np.random.default_rng(0)
    keys = [drawn.choice(60, 40, replace=False).astype(np.uint64) for _ in range(16)]
    writes = storage.written(keys)
    wrote = [key for own, mask in zip(keys, writes, strict=True) for key in own[mask]]
    assert sorted(wrote) == sorted(set(np.concatenate(keys).tolist()))
    assert [len(mask) for mask in writes] == [40] * 16 and max(mask.sum() for mask in writes) < 12, "spread over ranks"


def test_who_writes_is_found_anew_when_any_rank_holds_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a stage thaws what had no moments; and is not asked again while nothing changes."""
    others, asked = [["x", "y"]], [0]

    def pieces(names: Sequence[str]) -> list[storage.Piece]:
        return [storage.Piece(name, torch.float32, (2,), (0,), (2,)) for name in names]

    def exchanged(keys: storage.Keys, group: object) -> list[storage.Keys]:
        asked[0] += 1
        return [keys, storage.digests(pieces(others[-1]))]

    changed = [True]
    monkeypatch.setattr(storage, "gather", lambda value, group: [value, changed[-1]])
    monkeypatch.setattr(storage, "exchanged", exchanged)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    owners = storage.Owners("of two")  # type: ignore[arg-type]

    def names(held: Sequence[str]) -> set[str]:
        return {piece.name for piece in owners.own(pieces(held))}

    both = names("xyz")
    assert "z" in both and asked == [1]
    changed.append(False)
    assert names("xyz") == both and asked == [1]
    assert "w" in names("xyw") and asked == [2], "this rank holds another one"
    changed.append(True)
    others.append(["w", "z"])
    assert {"x", "y"} <= names("xyw") and asked == [3], "the other rank does"


def test_ranks_lines_are_a_manifest(tmp_path: Path) -> None:
    """What 64 ranks wrote, joined unparsed, reads as one; and nothing is left out or overlaps without a word."""
    every, name = [], 'a "name"\twith\nodd characters'
    for rank in range(64):
        own = [
            storage.Piece(name, torch.float32, (128, 3), (2 * rank, 0), (2, 3)),
            *([storage.Piece("b", torch.int64, (), (), ())] if rank == 5 else []),
        ]
        staged = {name: torch.full((2, 3), float(rank)), "b": torch.tensor(7)}
        every.append(storage.write_shard(tmp_path / f"shard-{rank:05d}.safetensors", own, staged))
    (tmp_path / storage.MANIFEST).write_bytes(storage.joined({"step": 3}, every))
    assert storage.damage(tmp_path) is None
    reader = storage.Reader(tmp_path, storage.read_manifest(tmp_path))
    places = {name: torch.zeros(128, 3), "b": torch.tensor(0)}
    reader.want(places)
    load(dict(places), storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    assert torch.equal(places[name][:, 0], torch.arange(64.0).repeat_interleave(2)) and places["b"] == 7
    for bad in (every[:-1], [*every, every[0]]):
        with pytest.raises(ValueError, match="does not fill it"):
            storage.joined({"step": 3}, bad)
    with pytest.raises(ValueError, match="one name and different shapes"):
        storage.joined({}, [*every, every[0].split(b"\n")[0] + b'\n"b"\t{"dtype":"int8","shape":[]}\t1\t1\t{}'])


def test_each_rank_judges_its_share_of_a_manifest(tmp_path: Path) -> None:
    body = storage.read_manifest(many(tmp_path, 4))
    body["tensors"]["c"] = {**body["tensors"]["c"], "shape": [9, 4]}
    (tmp_path / storage.MANIFEST).write_bytes(storage.signed(body))
    said = [storage.read_whole(tmp_path, slice(rank, None, 4))[1] or "" for rank in range(4)]
    assert ["what no save says" in each for each in said] == [False, False, True, False]
    assert "what no save says" in (storage.damage(tmp_path) or ""), "one rank judges all"


def test_a_manifests_sum_is_of_its_bytes(tmp_path: Path) -> None:
    path = many(tmp_path, 2) / storage.MANIFEST
    good = path.read_bytes()
    for bad in (good.replace(b'"step":3', b'"step":4'), good + b" ", good[:-70] + b"1" * 68 + good[-2:], good[:-1]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="is damaged"):
            storage.read_manifest(tmp_path)


def test_what_is_not_read_is_not_passed_over(tmp_path: Path) -> None:
    """DCP reads the pieces that it finds and says nothing of the rest, which would stay what the memory held."""
    reader = storage.Reader(tmp_path, storage.read_manifest(many(tmp_path, 2)))
    with pytest.raises(ValueError, match="does not hold all of 'anything wanted'"):
        reader.prepare_local_plan(LoadPlan([]))
    place = {"a": torch.empty(tuple(reader.metadata.state_dict_metadata["a"].size))}
    reader.want(place)
    metadata = reader.metadata.state_dict_metadata["a"]
    whole = ChunkStorageMetadata(torch.Size((0,) * place["a"].ndim), place["a"].shape)
    items = create_read_items_for_chunk_list("a", metadata, [whole])
    assert reader.prepare_local_plan(LoadPlan(items)).items == items
    with pytest.raises(ValueError, match="does not hold all of 'a'"):
        reader.prepare_local_plan(LoadPlan(items[1:]))


def test_what_the_page_says_of_a_thousand_ranks_can_be_timed_again(tmp_path: Path) -> None:
    """By the commands beside its table, here with few: each rank adds as many lines to a manifest, more than eight ranks
    gather experts too, and with a copy in each node some of that is summed instead."""
    two, four, six = (checkpoint(world, tmp_path) for world in (2, 4, 6))
    for what in ("manifest, MB", "rank 0 is sent, MB"):
        assert six[what] - four[what] == pytest.approx(four[what] - two[what], rel=0.05) and two[what] > 0
    eight, many, copies = (start(*case)["collectives of a step"] for case in ((8, False), (16, False), (16, True)))
    assert 0 < eight < copies < many
