"""Reading a config from a file and words: files that are refused, and names that look like numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from upcycle.__main__ import main
from upcycle.config.reading import read
from upcycle.config.schema import UpcycleConfig


@pytest.mark.parametrize("text", ["a: &a [*a]", "layers: &x [1, *x]"])
def test_a_yaml_that_holds_itself_is_refused(llama: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "loop.yaml").write_text(text)
    assert main(["plan", str(tmp_path / "loop.yaml"), f"source={llama}"]) == 2


def test_names_are_kept_as_typed() -> None:
    config = read(UpcycleConfig, "", ["output=0123", "source=1_000", "router.score=on", "top_k=03", "layers=[0]"])
    assert (config.output, config.source, config.router.score) == ("0123", "1_000", "on")
    assert (config.top_k, config.layers) == (3, [0])
