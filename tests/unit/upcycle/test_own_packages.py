"""Folders of the user's own hide nothing of ours, and an old package is named with the version that is wanted."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from upcycle.cli import frame
from upcycle.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
SCRIPT = "from upcycle.__main__ import script; script()"  # as pip makes it

TRAIN = ["train", "model.source=none"]
# a module of ours that asks for torch was found; torch itself, which takes seconds, is left to the launcher of several
ASKED = "torch is asked for by "
STOP = f"""
import os, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and ("RANK" in os.environ or not any(word.startswith("nproc=") for word in sys.orig_argv)):
            frame = sys._getframe()
            while frame and not frame.f_globals.get("__name__", "").startswith(("upcycle.", "training.", "evaluation.")):
                frame = frame.f_back
            raise ValueError("{ASKED}" + frame.f_code.co_filename)
sys.meta_path.insert(0, Stop())
"""


def run(folder: Path, *words: str, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, without the paths of these tests."""
    known = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    known |= {"OMP_NUM_THREADS": "1"} | environment | ({"PYTHONPATH": path} if path else {})
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, env=known)


def own_folders(folder: Path, whole: bool, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
        if whole:
            (folder / name / "__init__.py").write_text("raise SystemExit('not ours')")


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The places where Python looks for us, and a hook that stops our processes where they ask for torch."""
    folder = tmp_path_factory.mktemp("hook")
    (folder / "sitecustomize.py").write_text(STOP)
    return f"{folder}{os.pathsep}{ROOT}"


@pytest.mark.parametrize("whole", [True, False], ids=["with __init__.py", "without"])
def test_the_users_folders_do_not_hide_the_command(whole: bool, path: str, tmp_path: Path) -> None:
    own_folders(tmp_path, whole, *frame.OURS)
    script = ("-P", "-c", SCRIPT)  # the first place of a script is its own folder, never the current one
    for words in (TRAIN, [*TRAIN, "nproc=2"], ["routing", "none", "none.txt"], ["inspect", "none"]):
        done = run(tmp_path, *script, *words, path=path)
        said = done.stderr  # of whichever rank came first
        assert done.returncode == 2 and f"{ASKED}{ROOT}/" in said and "Traceback" not in said, said


@pytest.mark.parametrize("whole", [True, False], ids=["with __init__.py", "without"])
def test_the_users_folders_do_not_hide_python_m_upcycle(whole: bool, path: str, tmp_path: Path) -> None:
    """But for one of that very name that is a package itself: Python takes it before a line of ours has run."""
    own_folders(tmp_path, whole, *(frame.OURS[1:] if whole else frame.OURS))
    for more in ([], ["nproc=2"]):
        done = run(tmp_path, "-m", "upcycle", *TRAIN, *more, path=path)
        said = done.stderr  # of whichever rank came first
        assert done.returncode == 2 and f"{ASKED}{ROOT}/" in said and "Traceback" not in said, said


def test_processes_that_a_clone_starts_run_the_clone(path: str, tmp_path: Path) -> None:
    """Not another version, which is installed."""
    other = tmp_path / "installed" / "upcycle"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('another version')")
    hook = path.split(os.pathsep)[0]
    done = run(ROOT, "-m", "upcycle", *TRAIN, "nproc=2", path=f"{hook}{os.pathsep}{other.parent}")
    assert done.returncode == 2 and f"{ASKED}{ROOT}/" in done.stderr, done.stderr


# ---- old packages


def installed(folder: Path, **versions: str) -> Path:
    """Say in the way of pip that these packages are installed."""
    for name, version in versions.items():
        (folder / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_names_an_old_package_and_the_version_wanted(name: str, tmp_path: Path) -> None:
    path = f"{installed(tmp_path, transformers='4.57.6', safetensors='0.5.3')}:{ROOT}"
    done = run(tmp_path, "-m", "upcycle", name, "word", path=path)
    assert done.returncode == 2
    assert done.stderr == (
        "upcycle: transformers is 4.57.6 and must be 5.17 or newer, safetensors is 0.5.3 and must be 0.6 or newer; "
        'pip install --upgrade "transformers>=5.17" "safetensors>=0.6"\n'
    )


def test_help_needs_no_version_and_newer_ones_are_no_fault(tmp_path: Path) -> None:
    path = f"{installed(tmp_path, transformers='4.57.6')}:{ROOT}"
    assert run(tmp_path, "-m", "upcycle", "train", "--help", path=path).returncode == 0
    (tmp_path / "new").mkdir()
    path = f"{installed(tmp_path / 'new', transformers='5.17.0.dev0', torch='10.0.1+cu130', safetensors='1.0')}:{ROOT}"
    assert "or newer" not in run(tmp_path / "new", "-m", "upcycle", "inspect", "none", path=path).stderr


def test_the_versions_are_those_that_pip_is_told() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"{package}>={version}" for package, version in frame.NEEDS.items()} <= set(told)
