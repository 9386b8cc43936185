"""How ranks find each other; and that those with different configurations say so, all of them, before they train."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.parallel.ranks import run
from training.__main__ import main
from training.config.reading import read_config, settings
from training.parallel.processes import listed, part_of_this_start
from training.run import loop as train

WORDS = [
    "model.source=nowhere",
    "output=nowhere",
    "device=cpu",
    "batch=4",
    "micro_batch=2",
    "schedule.warmup=1",
    "steps=4",
]
# what rank 1 is told otherwise, and what is said of it
DIFFER = {
    "schedule.peak=0.5": "schedule.peak is 0.0002 on rank 0 and 0.5 on rank 1",
    "data.seed=7": "data.seed is 0 on rank 0 and 7 on rank 1",
    "steps=9": "steps is 4 on rank 0 and 9 on rank 1",
    "micro_batch=1": "micro_batch is 2 on rank 0 and 1 on rank 1",
    "mesh.tp=2": "mesh.tp is 1 on rank 0 and 2 on rank 1",
    "output=elsewhere": "output is 'nowhere' on rank 0 and 'elsewhere' on rank 1",
    "log.project=tries": "log.project is 'upcycle' on rank 0 and 'tries' on rank 1",
}


def outcomes(rank: int, world: int) -> list[tuple[int, str]]:
    os.environ["RANK"] = str(rank)
    found = []
    for word in [*DIFFER, "device="]:
        said = io.StringIO()
        with (
            contextlib.redirect_stderr(said),
            mock.patch.object(train, "preflight", lambda config: config),
        ):  # there is no such model
            code = main([*WORDS, word] if rank else WORDS)
        found.append((code, said.getvalue()))
    return found


def test_the_key_that_differs_is_named_on_every_rank() -> None:
    for rank, found in enumerate(run(2, outcomes, timeout=60)):
        for (code, said), sentence in zip(found, DIFFER.values(), strict=False):
            assert code == 2
            assert f"{sentence}; start every rank with the same configuration" in said, (rank, said)
            assert len(said.splitlines()) == 1
        assert "on rank" not in found[-1][1], "its own device is a rank's own business"


def test_one_file_name_with_different_contents_differs(tmp_path: Path) -> None:
    """The upcycle config is compared as it is read, not by its name."""
    file = tmp_path / "upcycle.yaml"
    found = []
    for experts in (4, 8):
        file.write_text(f"source: nowhere\nexperts: {experts}\n")
        found.append(settings(read_config("", [f"model.upcycle={file}", "output=out"])))
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"model.upcycle.experts"}
    assert "device" not in found[0]
    file.unlink()  # as where a run resumes, which reads it no more
    assert settings(read_config("", [f"model.upcycle={file}", "output=out"]))["model.upcycle"] == str(file)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([0, 2], "ranks 0 and 2"), (list(range(6)), "ranks 0, 1, 2, 3 and 2 others")],
)
def test_many_ranks_are_not_all_named(ranks: list[int], words: str) -> None:
    assert listed(ranks) == words


def test_a_start_meets_in_a_part_of_the_store_of_its_own() -> None:
    """Three starts one after the other in one store. Of the second only two ranks come: what they wrote is stale. Ranks
    of the third come late or early, and all get one place, which is nobody else's."""
    store, patience = dist.HashStore(), timedelta(seconds=20)
    store.set_timeout(timedelta(seconds=1))

    def start(ranks: Sequence[int], late: int, patience: timedelta) -> list[Any]:
        def come(rank: int) -> Any:
            time.sleep(0.3 if rank == late else 0)
            try:
                return part_of_this_start(store, rank, 3, patience)
            except (RuntimeError, dist.DistError) as error:
                return str(error)

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(come, ranks))

    first = start([0, 1, 2], 0, patience)
    second = start([0, 1], 1, timedelta(seconds=0.5))
    third = start([0, 1, 2], 2, patience)
    assert "not all of the 3 ranks arrived within" in second[0]
    for parts in (first, third):
        parts[1].set("key", str(len(parts)))
        assert all(part.check(["key"]) for part in parts)
        assert all(str(part.get("key"), "utf-8") == "3" for part in parts)
        parts[0].set("key", "4")
    first[0].set("only", "here")
    assert not any(part.check(["only"]) for part in third)


DONE = """
import os, signal
from training.parallel import processes
from torch._inductor.async_compile import AsyncCompile
processes.COMPILERS = 1.0
with processes.processes("cpu"):
    pool = AsyncCompile.process_pool()
    pool.submit(int).result()
    os.kill(pool.process.pid, signal.SIGSTOP)
    print(pool.process.pid)
"""


def test_a_rank_that_is_done_ends_though_torchs_compile_workers_do_not() -> None:
    environ = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    environ.pop("WORLD_SIZE", None)
    done = subprocess.run([sys.executable, "-c", DONE], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not Path(f"/proc/{int(done.stdout)}").exists()  # torch waits for it for 300 seconds
