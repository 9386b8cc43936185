"""The notebooks run from top to bottom, offline, and are kept without their outputs. Two of them show what `make demo` in
small made: here every stage of it runs, a second run does nothing again, one that was stopped goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples import demo

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    return notebook["cells"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: two notebooks show what the demo made."""
    return tmp_path_factory.mktemp("notebooks")


def asked() -> list[str]:
    """The words of the demo that the notebooks want, all of them the same."""
    cells = ["".join(cell["source"]) for path in NOTEBOOKS for cell in read(path)]
    first, *others = (found[1] for cell in cells if (found := re.search(r"DemoConfig\((.*?)\)", cell, re.DOTALL)))
    assert others == [first]
    return [f"{key}={value}" for key, value in re.findall(r"(\w+)=\"?([\w/]+)", first)]


def test_the_demo_stops_goes_on_and_does_nothing_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words, here, real = asked(), folder / "runs" / "notebook", demo.call

    def killed(program: str, *more: object) -> None:
        if program == "convert":
            raise KeyboardInterrupt
        real(program, *more)

    monkeypatch.setattr(demo, "call", killed)
    assert demo.main(words) == 130
    first = json.loads((here / "done.json").read_text())["stages"]
    assert list(first) == ["text", "start", "tokens", "first"]

    monkeypatch.setattr(demo, "call", real)
    assert demo.main(words) == 0
    done = json.loads((here / "done.json").read_text())["stages"]
    assert {name: done[name] for name in first} == first
    assert len(done) == 16
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert [line[:3] for line in lines] == ["1. ", "2. ", "3. ", "4. ", "5. "]
    assert lines[2].endswith("the defaults of groups: optim.router_lr=0.3 optim.share=0.5 optim.shrink=0.3.")
    page = (here / "report.html").read_text()
    for shown in ("dense", "copies", "groups", "ppl_prose", "tiny_stories", "specialis"):
        assert shown in page

    def never(program: str, *more: object) -> None:
        raise AssertionError(f"{program} {more} again")

    monkeypatch.setattr(demo, "call", never)
    assert demo.main(words) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[-5:] == lines
    assert sum("done before" in line for line in again) == 16

    assert demo.main([*words, "seed=1"]) == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(read(path)):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_has_no_outputs(path: Path) -> None:
    assert len(NOTEBOOKS) == 3
    for cell in read(path):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
        for target in ("".join(cell["source"])).split("](")[1:] if cell["cell_type"] == "markdown" else ():
            assert (path.parent / target.split(")")[0]).is_file(), target
