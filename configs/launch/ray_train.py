# Train on a Ray cluster: one Ray Train worker on each node, in it one torchrun, one process for each GPU.
#
# upcycle launch fills in the four names in capitals; submit with: ray job submit --working-dir . -- python FILE
#
# When something breaks:
#   a process dies    torchrun starts all again, up to --max-restarts times; the run continues from its last checkpoint
#   a node dies       Ray ends the other workers and starts all again on nodes that live, from the last checkpoint
#
# `output` and the data must be on a file system that all nodes see. upcycle must be installed on them.
import os
import subprocess
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util import get_node_ip_address

NODES = 1
GPUS = 8  # of each node
CARD = None  # Ray's name of the card, or None
WORDS = ["stories", "output=/shared/runs/moe"]


def node() -> None:
    """Run torchrun on a node; Ray's own process group, which nothing else uses, has found the first node's address."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={GPUS}"]
    first = (
        f"--rdzv-endpoint={os.environ['MASTER_ADDR']}:29400",
        f"--rdzv-conf=is_host={int(os.environ['RANK'] == '0')}",
    )
    meeting = ["--rdzv-backend=c10d", *first, f"--local-addr={get_node_ip_address()}", "--max-restarts=3"]
    subprocess.run([*torchrun, *meeting, "-m", "training", *WORDS], check=True)


if __name__ == "__main__":
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # else workers leave the folder that travelled, which has the config
    TorchTrainer(
        node,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=NODES, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": GPUS}, accelerator_type=CARD
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
