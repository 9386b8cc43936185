"""A part learns the same on any mesh; its experts are whole on each rank, so expert parallel is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.ranks import run
from tests.parallel.runs import on_rank
from tests.unit.training.test_parts import place as place


def words(place: Path, output: Path, *more: str) -> list[str]:
    work = place / "law.work"
    texts = json.dumps([str(work / f"{name}.jsonl") for name in ("general", "documents")])
    return [
        f"output={output}", f"export={output}-out", f"model.upcycle.source={place / 'base'}", "steps=3", "batch=4",
        "model.upcycle.target=upcycled", "model.upcycle.method.name=part", "model.upcycle.method.part=law",
        f"model.upcycle.router.init.texts={texts}", "model.upcycle.calibration.tokens=2048",
        "model.upcycle.calibration.sequence=32", f"data.train=[{work / 'data'}]", "data.sequence=32", "log_every=1",
        "optim.groups=[{match: '*', lr: 0}, {match: experts, lr: 1}]", "balance.aux_weight=0", "schedule.warmup=1",
        "schedule.peak=1e-2", "model.dtype=float32", "device=cpu", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("more", [["micro_batch=2"], ["micro_batch=4", "mesh.tp=2"], ["micro_batch=2", "mesh.pp=2"]])
def test_a_part_learns_the_same_on_two_ranks(more: list[str], place: Path, tmp_path: Path) -> None:
    on_rank(0, 1, words(place, tmp_path / "one", "micro_batch=4"))
    run(2, on_rank, words(place, tmp_path / "two", *more))
    have, want = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in ("two", "one"))
    assert have.keys() == want.keys()
    for name in want:
        anchor = ".experts." not in name or int(name.split(".")[5]) < 1
        assert torch.equal(have[name], want[name]) if anchor else torch.allclose(have[name], want[name], atol=2e-4), (
            name
        )


def test_expert_parallel_of_a_part_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="keeps its experts whole"):
        run(2, on_rank, words(place, tmp_path / "two", "micro_batch=2", "mesh.ep=2"))
