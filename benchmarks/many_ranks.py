"""Measure on one machine what a thousand ranks cost before the first one computes, for results/2026-11-planning.md.

  python -m benchmarks.many_ranks start 1024 [copies]  # one rank of torch's "fake" group: meshes, FSDP, host of a step
  python -m benchmarks.many_ranks checkpoint 1024      # plans, lines and manifest of all ranks, on one rank
  python -m benchmarks.many_ranks sockets 16           # real gloo processes in three groups, both ways to connect

`start` measures 24 MoE layers with tiny products, ep 8, two micro-batches and FSDP over all ranks. With `copies`, FSDP
is inside a node of 8, and each node has a copy of the model. Nothing is sent, so a rank computes wrong numbers.
`checkpoint` measures 1,100 tensors; each rank has two rows of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

LAYERS, NODE, TENSORS = 24, 8, 1100
GROUPS = 3  # groups of all ranks: a run has one each for gradients, checkpoints and messages


def start(world: int, copies: bool) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    from training.config.schema import ModelConfig
    from training.data.mixture import DataConfig
    from training.estimating import bench, measure
    from training.optim.balance import BalanceConfig
    from training.parallel.mesh import MeshConfig
    from training.run import build

    sent: Counter[str] = Counter()

    class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            sent.update(str(function).split(".")[:1])
            return function(*args, **(kwargs or {}))

    built: list[float] = []
    steps: list[float] = []
    real = build.learner

    def learner(*inputs: Any, **named: Any) -> Any:
        made = real(*inputs, **named)
        built.append(time.process_time() - began)
        return made

    def timed(step: Any, device: torch.device, often: int) -> float:
        at = time.process_time()
        step()
        steps.append(time.process_time() - at)
        return steps[-1]

    def counted(step: Any, device: torch.device, often: int) -> float:
        sent.clear()
        with Counted():  # type: ignore[no-untyped-call]
            step()
        return 1.0

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    config = bench.BenchConfig(
        architecture={
            **measure.TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
            "num_hidden_layers": LAYERS, "hidden_size": 128, "intermediate_size": 128,
        },
        data=DataConfig(sequence=8), batch=2 * world, micro_batch=1, weights="float32", warmup=1, steps=1,
        balance=BalanceConfig(capacity_factor=1.0, pad_to_capacity=True),
        model=ModelConfig(expert_backend="reference", dtype="float32"),
        mesh=MeshConfig(ep=8, reshard=True, dp_replicate=world // NODE if copies else 1),
    )  # fmt: skip
    with patch.object(bench, "learner", learner), patch.object(bench, "timed", timed):
        began = time.process_time()
        bench.measured(config, bench.spec_of(config), torch.device("cpu"))
    with patch.object(bench, "timed", counted):
        bench.measured(config, bench.spec_of(config), torch.device("cpu"))
    dist.destroy_process_group()
    collectives = sent["c10d"] + sent["_c10d_functional"]
    return {"start, s": built[0], "host of a step, s": min(steps), "collectives of a step": collectives}


def checkpoint(world: int, folder: Path) -> dict[str, Any]:
    """Measure a save on rank 0 and a load on any rank. The time to write the shards does not count."""
    from training.checkpoint import storage
    from training.checkpoint.storage import Piece

    def pieces(rank: int) -> list[Piece]:
        return [Piece(f"layers.{n}.weight", "float32", (2 * world, 4), (2 * rank, 0), (2, 4)) for n in range(TENSORS)]

    def lines(rank: int) -> bytes:
        made = storage.write_shard(folder / f"shard-{rank:05d}.safetensors", pieces(rank), staged)
        os.truncate(folder / f"shard-{rank:05d}.safetensors", 0)
        return made

    staged = {piece.tensor: torch.zeros(2, 4) for piece in pieces(0)}
    keys = [b"".join(rank.to_bytes(4) + n.to_bytes(4) for n in range(TENSORS)) for rank in range(world)]
    every = [lines(rank) for rank in range(world)]
    own = pieces(0)
    began = time.process_time()
    with (
        patch.object(storage, "gather_bytes", lambda said, group: [said, *keys[1:]]),
        patch.object(dist, "get_rank", lambda group: 0),
    ):
        mine = storage.owned(own, None)
    text = storage.joined({"step": 3}, every)
    saved = time.process_time() - began
    assert mine == own, "no other rank holds the pieces of rank 0"
    began = time.process_time()
    storage.sealed(text)
    signed = time.process_time() - began
    (folder / storage.MANIFEST).write_bytes(text)
    with open(folder / "shard-00000.safetensors", "r+b") as shard:
        shard.truncate(1 << 20)
    began = time.process_time()
    shards = storage.Shards(folder, storage.read_manifest(folder, slice(0, None, world)))
    for piece in own:
        shards.read(piece.tensor, [(0, 2), (0, 4)])  # the ranges that a mesh would ask for
    loaded = time.process_time() - began
    return {
        "manifest, MB": len(text) / 1e6,
        "rank 0 is sent, MB": sum(len(said) + len(digests) for said, digests in zip(every[1:], keys[1:], strict=True)) / 1e6,
        "saving, rank 0, s": saved, "of that signing, s": signed, "loading, each rank, s": loaded,
    }  # fmt: skip


def sockets(world: int) -> dict[str, Any]:
    """Return the most sockets that a rank has open after each group has summed and has gathered on rank 0. The ranks
    connect when they first need it, as `processes` asks, or all at once."""
    found = {}
    for name, lazy in (("as needed", "1"), ("all at once", "0")):
        environ = {**os.environ, "TORCH_GLOO_LAZY_INIT": lazy, "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(world),
            "--master-port",
            "29731",
        ]
        said = subprocess.run(
            [*command, "-m", "benchmarks.many_ranks", "of-one"], env=environ, capture_output=True, text=True, check=True
        ).stdout
        found[f"sockets, {name}"] = max(map(int, said.split()))
    return found


def of_one() -> int:
    def opened() -> int:
        links = []
        for each in Path("/proc/self/fd").iterdir():
            try:
                links.append(os.readlink(each))
            except OSError:  # the descriptor of the folder itself is closed by now
                continue
        return sum(link.startswith("socket:") for link in links)

    from training.parallel.collectives import all_reduce, gather
    from training.parallel.processes import processes

    before = opened()
    with processes("cpu"):
        groups = [dist.new_group(backend="gloo") for _ in range(GROUPS - 1)]
        for group in (dist.group.WORLD, *groups):
            all_reduce(torch.ones(1), group)
            gather(1, group)
        count = torch.tensor([opened() - before])
        dist.all_reduce(count, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(int(count))
    return 0


def main() -> int:
    match sys.argv[1:]:
        case ["of-one"]:
            return of_one()
        case ["start", world, *copies] if copies in ([], ["copies"]):
            found = start(int(world), bool(copies))
        case ["checkpoint", world]:
            with tempfile.TemporaryDirectory() as folder:
                found = checkpoint(int(world), Path(folder))
        case ["sockets", world]:
            found = sockets(int(world))
        case _:
            print(__doc__)
            return 2
    print(json.dumps({"ranks": int(sys.argv[2]), **{key: round(value, 3) for key, value in found.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
