"""vLLM reads a joined model as transformers does: tokens go to the base's own FFN and to each of two parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines import engines
from tests.engines.models import SHAPE
from tests.parity import tiny
from tests.unit.training.test_data import make_tokenizer, texts
from training import api
from training.checkpoint import layout
from training.parts.join import names_of, spec_of
from upcycle.arch import engines as known
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import part
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.plan import UpcyclePlan

ROWS = 0.3  # deviation of the parts' router rows, with which base and parts get tokens


def empty(plan: UpcyclePlan, _: object) -> dict[str, torch.Tensor]:
    return {f"layers.{layer}.rows": torch.zeros(2, plan.dense.hidden) for layer in plan.moe.layers}


def joined(folder: Path) -> Path:
    base = tiny.make("llama", folder / "base", **SHAPE)
    make_tokenizer(base, bos=False)
    with Checkpoint.open(base) as checkpoint:
        about: part.Base = {"name": "base", "files": part.sums_of(checkpoint)}
    for seed, name in enumerate(("law", "code")):
        draw = torch.Generator().manual_seed(seed)
        settings = UpcycleConfig(
            source=str(base), target="upcycled", method={"name": "part", "part": name}, granularity=4, top_k=4
        )
        with layout.online(settings, empty, reads=False) as origin:
            names = names_of(origin)

            def noisy(role: str, names: dict[str, str] = names, draw: torch.Generator = draw) -> torch.Tensor:
                tensor = origin.read(names[role])
                size = ROWS if role.endswith("router.weight") else 0.3 * float(tensor.std())
                return tensor + size * torch.randn(tensor.shape, generator=draw)

            part.write(folder / name, spec_of(origin), name, noisy, about, [{"steps": 1}], [], {})
    return api.join(base, folder / "law", folder / "code", output=folder / "joined")


def test_vllm_reads_a_joined_model_as_transformers_does(tmp_path: Path) -> None:
    if os.environ.get("ENGINES") != "all":
        pytest.skip("asked by `make engines` alone, which takes minutes")
    engine, folder = engines.need("vLLM"), joined(tmp_path)
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
