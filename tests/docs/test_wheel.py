"""The wheel holds all three packages and all ready configs, and works where there is no clone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.docs.test_journeys import make_model
from tests.unit.training.test_data import texts

ROOT = Path(__file__).parents[2]
# as the console script does it, after a look at where the code comes from
RUN = """
import sys
from importlib.metadata import entry_points, version
import upcycle
assert upcycle.__file__.startswith(sys.prefix), upcycle.__file__
assert version("upcycle") == upcycle.__version__
[script] = entry_points(group="console_scripts", name="upcycle")
"""
ONE = f"{RUN}script.load()()"
# several commands in one process, which imports once; each line of standard input is a command
MANY = f"""{RUN}
import contextlib, io, json
from upcycle.__main__ import main
for line in sys.stdin.read().splitlines():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(json.loads(line))
    print(json.dumps([code, said.getvalue()]))
"""
SMALL = [
    "data.sequence=32",
    "batch=2",
    "steps=2",
    "schedule.warmup=1",
    "device=cpu",
    "model.dtype=float32",
    "mesh.ep=1",
]
DATA = ["data.train=[tokens]", "data.valid=[]"]


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


def test_the_wheel_holds_the_packages_and_their_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    assert {name.split("/")[0].split("-")[0] for name in files} == {"upcycle", "training", "evaluation"}
    for place, inside in (("configs", "upcycle/configs"), ("evaluation/suites", "evaluation/suites")):
        here = {path.relative_to(ROOT / place).as_posix() for path in (ROOT / place).rglob("*") if path.is_file()}
        assert {f"{inside}/{name}" for name in here} <= files
    tracked = subprocess.run(
        ["git", "ls-files", "upcycle", "training", "evaluation"], cwd=ROOT, capture_output=True, text=True
    )
    assert {name for name in tracked.stdout.split() if (ROOT / name).is_file()} <= files


def test_vllm_finds_the_plug_in(wheel: Path, tmp_path: Path) -> None:
    """Register the class as vLLM does, with a stand-in for vLLM; the class itself needs vLLM and is not imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "vllm.py").write_text("class ModelRegistry:\n    register_model = print\n")
    code = """
import sys
from importlib.metadata import entry_points
[plugin] = entry_points(group="vllm.general_plugins")
plugin.load()()
assert not {"torch", "upcycle.serving.vllm"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.stdout == "UpcycledForCausalLM upcycle.serving.vllm:UpcycledForCausalLM\n", done.stderr
    assert "class UpcycledForCausalLM(" in (tmp_path / "upcycle" / "serving" / "vllm.py").read_text()


# this environment's packages, but not what its .pth files add: those are not read of a folder in PYTHONPATH
ENVIRONMENT = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def installed(wheel: Path, folder: Path) -> Path:
    """Return the Python of a new environment in which the wheel is installed as pip would, by unpacking."""
    venv.create(folder / "venv", symlinks=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    return folder / "venv" / "bin" / "python"


def test_notebook_1_needs_no_clone(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "notebooks" / "01_upcycle_and_look_inside.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    python = installed(wheel, tmp_path)
    check = "import sys; assert upcycle.__file__.startswith(sys.prefix), upcycle.__file__"
    command = [python, "-c", f"{code}\n{check}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "exactly: True" in done.stdout


def test_it_plans_converts_trains_and_asks_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    """Folders of the user's own hide nothing."""
    python = installed(wheel, tmp_path)
    make_model(tmp_path / "dense", "llama3-8b")
    (tmp_path / "book.txt").write_text("\n".join(texts(60, 0)))
    for name in ("training", "evaluation"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")

    command = [python, "-c", ONE, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and "usage: upcycle COMMAND" in done.stdout, done.stderr
    train = ["train", "model.source=moe", *DATA, *SMALL, "output=runs/moe", "export=trained"]
    chat = ["chat", "model.upcycle.source=dense", *DATA, *SMALL, "output=runs/chat", "export=", "batch=4"]
    says: list[tuple[list[str], int, str]] = [
        (["plan", "llama3-8b-e8t2", "source=dense"], 0, "target       mixtral: asked for"),
        (["plan", "llama3-8b-e8t3", "source=dense"], 2, "did you mean 'llama3-8b-e8t2'"),
        (["convert", "source=dense", "output=moe", "experts=4"], 0, "moe is complete"),
        (["prepare", "tokens", "tokenizer=dense", "sources=[book.txt]"], 0, "tokens"),
        (train, 0, "runs/moe is trained"),
        (["train", *chat], 0, "runs/chat is trained"),
        (["estimate", *chat, "gpus=8", "batch=64", "hardware=h100"], 0, "mappings fit"),
        (["eval", "tiny", "trained", "limit=2", "device=cpu", "output=asked"], 0, ""),
        (["report", "asked", "runs/moe", "moe", "output=report.html"], 0, "report.html"),
    ]
    lines = "\n".join(json.dumps(words) for words, _, _ in says)
    command = [python, "-c", MANY]
    done = subprocess.run(command, cwd=tmp_path, input=lines, capture_output=True, text=True, env=ENVIRONMENT)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(found) == len(says), done.stderr
    for (words, code, said), (ended, printed) in zip(says, found, strict=True):
        assert ended == code and said in printed, (words, printed)
    assert (tmp_path / "report.html").is_file()
