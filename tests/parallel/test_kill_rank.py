"""One rank of a run is killed in the middle of a step: the other names it and ends, torchrun starts both again, and the
run ends with the bytes of one that nobody touched; the same if a node is killed with its torchrun and starts again. And
torchrun is killed: its ranks end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.parallel.ranks import run as run_ranks
from tests.parallel.runs import on_rank
from tests.parallel.test_run import folder_of, rows, words
from training.observe.metrics import FILE

ROOT = Path(__file__).parents[2]


def asked(place: Path, name: str) -> list[str]:
    more = ["steps=24", "mesh.ep=2", "checkpoint.every=3", f"export={place / name / 'export'}", "micro_batch=2"]
    return words(place, place / name, *more)


def started(place: Path, name: str) -> subprocess.Popen[bytes]:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    with open(place / f"{name}.said", "wb") as said:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(
            [*torchrun, "-m", "training", *asked(place, name)], cwd=ROOT, env=environment, stdout=said, stderr=said
        )


def pid_of(rank: int, torchrun: int) -> int:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                mine = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1]) == torchrun
                if mine and f"\0RANK={rank}\0" in "\0" + (process / "environ").read_text():
                    return int(process.name)
            except (OSError, ValueError):
                continue
    raise AssertionError(f"no process of rank {rank}")


def last_step(folder: Path) -> int:
    lines = (folder / FILE).read_bytes().splitlines() if (folder / FILE).exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"}")), default=0)


def test_a_killed_rank_is_named_and_the_restarted_run_is_the_same(tmp_path: Path) -> None:
    place = folder_of(tmp_path, num_hidden_layers=2)
    run_ranks(2, on_rank, asked(place, "whole"))
    run = started(place, "killed")
    while run.poll() is None and last_step(place / "killed") < 7:
        time.sleep(0.02)
    os.kill(pid_of(1, run.pid), signal.SIGKILL)
    killed = time.monotonic()
    said = place / "killed.said"
    while (
        time.monotonic() - killed < 60
        and not re.search(rb"this run ends|exitcode: -9", said.read_bytes())
        and run.poll() is None
    ):
        time.sleep(0.05)
    seconds = time.monotonic() - killed
    assert run.wait(240) == 0, said.read_text()[-3000:]
    # whoever is first: our watch, or torchrun, which sees its own child die
    sentences = [line for line in said.read_text().splitlines() if "this run ends" in line or "exitcode: -9" in line]
    assert sentences and re.search(r"rank 1|local_rank: 1", sentences[0]), said.read_text()[-3000:]
    print(f"after {seconds:.1f} s: {sentences[0]}")
    name = "model.safetensors"
    assert (place / "killed" / "export" / name).read_bytes() == (place / "whole" / "export" / name).read_bytes()
    assert [row["step"] for row in rows(place / "killed")] == [row["step"] for row in rows(place / "whole")]


def node(place: Path, name: str, said: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the torchrun of one of two nodes, as configs/launch does, with one rank."""
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
        "--monitor-interval", "0.2",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # without it torch tells a node that returns no address
    with said.open("ab") as out:
        command = [*torchrun, "-m", "training", *asked(place, name)]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)


def test_a_killed_node_that_starts_again_is_taken_back_and_the_run_is_the_same(tmp_path: Path) -> None:
    place = folder_of(tmp_path, num_hidden_layers=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(2, on_rank, asked(place, "whole"))
    said = [place / f"{number}.said" for number in range(2)]
    nodes = [node(place, "killed", said[0], port)]
    try:
        while nodes[0].poll() is None and not listening(port):
            time.sleep(0.05)  # the first node has the store
        nodes.append(node(place, "killed", said[1], port))
        while all(each.poll() is None for each in nodes) and last_step(place / "killed") < 7:
            time.sleep(0.02)
        ranks = children(nodes[1].pid)
        nodes[1].kill()  # nothing of the node is left that could say so
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert ranks and nodes[1].wait() == -signal.SIGKILL and last_step(place / "killed") < 24
        nodes[1] = node(place, "killed", said[1], port)  # as Slurm or Kubernetes does
        codes = [each.wait(240) for each in nodes]
    finally:
        for each in nodes:
            each.kill()
    assert codes == [0, 0], "".join(file.read_text()[-3000:] for file in said)
    name = "model.safetensors"
    assert (place / "killed" / "export" / name).read_bytes() == (place / "whole" / "export" / name).read_bytes()
    assert [row["step"] for row in rows(place / "killed")] == [row["step"] for row in rows(place / "whole")]


def listening(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


DEAF = """
import os, signal, sys, time
from pathlib import Path
import torch
from training.parallel.processes import processes
torch.set_num_threads(1)
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)  # as one that waits for its device
with processes("cpu"):
    (Path(sys.argv[1]) / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("world", "own_store"), [(1, "0"), (2, "0"), (1, "1")])
def test_no_rank_outlives_its_torchrun(world: int, own_store: str, tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    files = [tmp_path / str(rank) for rank in range(world)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = own_store
    run = subprocess.Popen([*torchrun, str(tmp_path / "deaf.py"), str(tmp_path)], cwd=ROOT, env=environment)
    pids = list[int]()
    try:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and not all(file.exists() and file.read_text() for file in files):
            assert run.poll() is None
            time.sleep(0.05)
        pids = [int(file.read_text()) for file in files]
        assert all(map(alive, pids))
        run.kill()
        deadline = time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, pids))
    finally:
        run.kill()
        run.wait()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
