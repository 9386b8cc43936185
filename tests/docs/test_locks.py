"""The lock files follow from the pins: what `make` installs is what pyproject.toml and constraints.txt name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"


def pins(file: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", file.read_text(), re.MULTILINE):
        found.setdefault(canonicalize_name(name), set()).add(version)
    return found


@pytest.mark.parametrize("name", ["lock.txt", "oracles.lock.txt"])
def test_a_lock_holds_what_is_asked_for_at_the_pinned_version_with_hashes(name: str) -> None:
    lock, wanted = pins(FOLDER / name), pins(FOLDER / "constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["test"]
    if name.startswith("oracles"):
        lines = [line for line in (FOLDER / "oracles.txt").read_text().splitlines() if not line.startswith("#")]
    assert {canonicalize_name(Requirement(line).name) for line in lines} - {"torch"} <= lock.keys()
    assert not {"torch"} & lock.keys() and "torch" in wanted  # its build is the machine's to choose
    assert all(lock[name] == wanted[name] for name in lock.keys() & wanted.keys())
    entries = re.split(r"^(?=[\w.-]+==)", (FOLDER / name).read_text(), flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries) and len(entries) >= len(lock)
