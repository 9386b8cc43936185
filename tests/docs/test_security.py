"""SECURITY.md promises what tests hold, and the Slurm recipe says and binds what it can."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
RECIPE = ROOT / "configs" / "launch" / "slurm.sbatch"


def test_every_promise_names_tests_that_are_there() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 9
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, f"no test holds: {row}"
        for file, name in named:
            defined = {
                node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
            }
            assert name in defined, f"{file} has no {name}"


@pytest.mark.parametrize("interface", ["", "ib0"])
def test_the_slurm_recipe_binds_what_can_be_bound(tmp_path: Path, interface: str) -> None:
    for name, lines in (("scontrol", "echo node-1"), ("srun", 'echo "$@"\nenv')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7", "JOB_INTERFACE": interface,
    }  # fmt: skip
    said = subprocess.run(
        ["bash", str(RECIPE), "config"], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert "--rdzv-endpoint node-1:29400" in said
    assert ("NCCL_SOCKET_IFNAME==ib0\n" in said) == ("GLOO_SOCKET_IFNAME=ib0\n" in said) == bool(interface)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in said  # each start meets in a part of the store of its own
    for page in (RECIPE.read_text().replace("\n# ", " "), " ".join(PAGE.split())):
        assert "torchrun unpickles" in page and "run code as you" in page.replace("runs", "run")
