"""The mappings of tests/parallel/test_shard.py on NCCL: torchrun starts this file again, a process a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel import test_shard as shard
from training.parallel.processes import processes

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_mappings_on_nccl(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    found = subprocess.run([*command, "-m", "tests.gpu.test_shard_gpu"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-6000:]
    print(found.stdout[-500:])


def main() -> None:
    import torch.distributed as dist

    with processes("cuda") as device:
        world = dist.get_world_size()
        cases = [case for case in shard.CASES if case.world == world]
        for case in cases:
            ranks: list[shard.Result] = [None] * world  # type: ignore[list-item]
            dist.all_gather_object(ranks, shard.of_rank(case, device))
            if dist.get_rank() == 0:
                shard.assert_same(ranks, shard.reference(case, ranks, device))
                print(case, "is one process", flush=True)


if __name__ == "__main__":
    main()
