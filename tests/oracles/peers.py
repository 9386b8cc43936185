"""Runs the peers' own programs, each in the environment that `make oracles` builds."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / ".venv-oracles" / "bin"


def run(program: str, *arguments: str | Path) -> None:
    """`program` is a command of that environment (python, mergekit-moe). Skips the test if there is none."""
    if not (PEERS / program).is_file():
        pytest.skip(f"{program} of .venv-oracles is not there; run `make oracles`")
    command = [str(PEERS / program), *map(str, arguments)]
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr[-3000:]}"
