"""The wheel holds the converter with its ready configs and nothing else, and plans where there is no clone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.parity import tiny

ROOT = Path(__file__).parents[2]
# as the console script does it; where the code comes from, and which of the clone's packages can be imported
RUN = """
import sys
from importlib.metadata import entry_points, version
from importlib.util import find_spec
import upcycle
assert upcycle.__file__.startswith(sys.prefix), upcycle.__file__
assert version("upcycle") == upcycle.__version__
assert not [name for name in ("training", "evaluation", "tests") if find_spec(name)]
[script] = entry_points(group="console_scripts", name="upcycle")
script.load()()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the wheel, is not installed: pip install -e .[test]")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_converter_and_its_ready_configs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert {name.split("/")[0].split("-")[0] for name in files} == {"upcycle"}
    ready = {path.name: path.read_bytes() for path in (ROOT / "configs" / "upcycle").iterdir()}
    assert {Path(name).name: text for name, text in files.items() if name.startswith("upcycle/configs/")} == ready
    assert "upcycle/py.typed" in files
    assert "upcycle/arch/remote/modeling_upcycled.py" in files


def test_the_wheel_plans_a_ready_config_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    """Installed as pip would, by unpacking, with this environment's packages behind it but not what its .pth files add:
    those are not read of a folder in PYTHONPATH."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    source = tiny.make("llama", tmp_path / "dense")

    def upcycle(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
        return subprocess.run(
            [python, "-c", RUN, *words], cwd=tmp_path, capture_output=True, text=True, env=environment
        )

    planned = upcycle("plan", "llama3-8b-e8t2", f"source={source}")
    assert planned.returncode == 0, planned.stderr
    assert "target       mixtral: asked for" in planned.stdout
    unknown = upcycle("plan", "llama3-8b-e8t3", f"source={source}")
    assert (unknown.returncode, "did you mean 'llama3-8b-e8t2'" in unknown.stderr) == (2, True), unknown.stderr
