"""vLLM reads a joined model as transformers does: tokens go to the base's own FFN and to each of two parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engines import engines
from tests.engines.models import SHAPE
from tests.parts import joined
from tests.unit.training.test_data import texts
from upcycle.arch import engines as known


def test_vllm_reads_a_joined_model_as_transformers_does(tmp_path: Path) -> None:
    if os.environ.get("ENGINES") != "all":
        pytest.skip("asked by `make engines` alone, which takes minutes")
    engine, folder = engines.need("vLLM"), joined(tmp_path, **SHAPE)
    words = " ".join(texts(20, 5)).split()
    asked = engines.question(folder, " ".join(words[:6]), " ".join(words[6:]))
    twin = tmp_path / "twin"
    twin.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (twin / path.name).write_bytes(path.read_bytes())
    tensors = load_file(twin / "model.safetensors")
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name][4:] = 0  # every token stays with the base
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    want = engines.transformers(asked)
    got, wrong = engines.ask(engine, [asked, asked | {"folder": str(twin)}], tmp_path)
    assert "refused" not in got, got
    equal, difference = engines.same(got, want)
    print(f"vLLM, two parts: {equal} of 64 tokens, log-probabilities within {difference:.1e}")
    assert engines.verdict(got, want) == known.RIGHT
    assert engines.verdict(wrong, want).startswith("wrong: ")
