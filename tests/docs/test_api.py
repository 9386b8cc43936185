"""docs/api.md: every public function is there, and every example runs."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT
from tests.docs.test_journeys import make_model
from tests.unit.training.test_data import texts
from tests.unit.upcycle.conftest import llama
from upcycle import convert, plan
from upcycle.__main__ import main
from upcycle.config.reading import config_of, read
from upcycle.config.schema import UpcycleConfig

__all__ = ["llama"]  # a fixture
PAGE = ROOT / "docs" / "api.md"
PACKAGES = ("upcycle", "training", "evaluation")


def test_every_function_is_on_the_page_and_its_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "dense", "llama3-8b")
    (tmp_path / "book.txt").write_text("\n".join(texts(40, 0)))
    monkeypatch.chdir(tmp_path)
    found = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert found.failed == 0 and found.attempted > 15
    named = set(re.findall(r"`(\w+)\(", PAGE.read_text()))
    public = {name for package in PACKAGES for name in importlib.import_module(package).__all__}
    assert named == public - {"Plan", "__version__"}


def test_a_name_that_is_not_there_is_named() -> None:
    for package in PACKAGES:
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
            _ = importlib.import_module(package).nothing


def test_functions_make_what_the_commands_make(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.yaml").write_text("experts: 4\nmethod: {name: drop, ratio: 0.25}\n")
    made = plan(tmp_path / "my.yaml", source=llama, method={"ratio": 0.5}, layers=[1])
    before = made.hash
    words = [str(tmp_path / "my.yaml"), f"source={llama}", "method.ratio=0.5", "layers=[1]"]
    assert main(["plan", *words]) == 0
    assert capsys.readouterr().out == f"{made}\n"
    assert convert(made, output=tmp_path / "ours", quiet=True) == tmp_path / "ours"
    assert made.config.output == "" and made.hash == before, "a plan stays as it was"
    assert main(["convert", *words, f"output={tmp_path / 'theirs'}"]) == 0
    ours, theirs = (json.loads((tmp_path / name / "upcycle.json").read_text()) for name in ("ours", "theirs"))
    assert (ours["plan"], ours["files"]) == (theirs["plan"], theirs["files"])


def test_a_config_is_the_same_in_every_form() -> None:
    words = ["source=a", "method.name=copy", "granularity=1"]
    want = read(UpcycleConfig, "tiny", words)
    assert config_of(UpcycleConfig, "tiny", {"source": "a", "method": {"name": "copy"}, "granularity": 1}) == want
    more = config_of(UpcycleConfig, want, {"seed": 1, "router.init.std": 0.1})
    assert more == read(UpcycleConfig, "tiny", [*words, "seed=1", "router.init.std=0.1"])


def test_mistakes_are_one_sentence(llama: Path) -> None:
    for keys, says in (
        ({"experts": 4}, "source is not set"),
        ({"source": llama, "expert": 4}, "did you mean 'experts'"),
        ({"source": llama, "experts": 4, "top_k": 5}, "top_k must be at most 4"),
    ):
        with pytest.raises(ValueError, match=says):
            plan(**keys)
    made = plan(source=llama)
    with pytest.raises(ValueError, match="output is not set"):
        convert(made)
    with pytest.raises(ValueError, match="experts would change the plan"):
        convert(made, experts=8)
