"""Two torchruns, as of two nodes, of whose processes one is killed: the second start's processes find each other.

The agents share one store, which outlives the restart, and count restarts differently: the one whose process died counts
one more than the other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from training.parallel.processes import processes
torch.set_num_threads(1)
first = Path(sys.argv[1])
begins = not first.exists()
with processes("cpu", timedelta(seconds=40)):
    total = torch.ones(1)
    dist.all_reduce(total)
    if begins and dist.get_rank() == 1:
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if begins:
        time.sleep(100)  # alive and well until its agent sees that the other one starts again
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "after", os.environ["TORCHELASTIC_RESTART_COUNT"], "sum", int(total), flush=True)
"""


def test_two_agents_start_again_after_a_kill(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(WORK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--monitor-interval", "0.2", "--local-addr", "127.0.0.1",
    ]  # fmt: skip
    agents, files = [], [tmp_path / f"{node}.said" for node in range(2)]
    try:
        for file in files:
            with open(file, "wb") as said:
                command = [*torchrun, str(script), str(tmp_path / "first")]
                agents.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True
                    )
                )
        deadline = time.monotonic() + 100
        codes = [agent.wait(max(deadline - time.monotonic(), 0)) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    said = "".join(file.read_text() for file in files)
    assert codes == [0, 0], said[-3000:]
    ended = sorted(line for line in said.splitlines() if line.startswith("rank "))
    # the second start's sums, on agents that count differently: else there was nothing to try
    assert [line.split()[-1] for line in ended] == ["4", "4"], said[-3000:]
    assert len({line.split()[3] for line in ended}) == 2, ended
