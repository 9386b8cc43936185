"""The evaluation's engine on a GPU gives the CPU's answers, in float32 and, roughly, in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evaluation.engine import Engine
from tests.unit.test_lm import requests, scores
from training.layout import initialise
from training.model.decoder import Decoder
from upcycle.spec import DenseSpec, MoESpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DENSE = DenseSpec("llama", 2, 128, 256, 8, 4, 16, 512, context=128, init_std=0.1)  # grouped queries, aligned sizes
SPECS = {"dense": DENSE, "moe": MoESpec(DENSE, layers=(0, 1), widths=(64,) * 8, top_k=2, copies=8)}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-3), (torch.bfloat16, 1.5)])
def test_the_gpus_answers_are_the_cpus(name: str, dtype: torch.dtype, within: float) -> None:
    pairs = requests(512)  # bfloat16 chooses other experts here and there
    model = initialise(Decoder(SPECS[name], compute=torch.float32), seed=1)
    expected = scores(Engine(model, 4096, progress=False), pairs)
    model.compute = dtype
    engine = Engine(model.cuda(), 4096, progress=False)
    found = scores(engine, pairs)
    assert max(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True)) < within
    texts: dict[int, Any] = {}
    with engine.open():
        engine.write([context for context, _ in pairs[::5]], 8, lambda text: False, texts.update)
    assert all(len(text) == 8 for text in texts.values())
