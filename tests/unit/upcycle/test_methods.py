"""A method gets the models that its Needs list, and its experts are made of these alone."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity import tiny
from upcycle import plugin
from upcycle.config.reading import read
from upcycle.config.schema import UpcycleConfig
from upcycle.converting.make import Maker
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning import methods, routers
from upcycle.planning.outputs import Recipe
from upcycle.planning.plan import build

COPIES = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A source, a donor for each copy, and a spare model that replaces one of them."""
    folder = tmp_path_factory.mktemp("dense")
    return [tiny.make("llama", folder / f"model-{seed}", seed=seed) for seed in range(COPIES + 2)]


def made(method: str, models: list[Path]) -> dict[Recipe, Tensor]:
    source, *donors = models
    words = [f"method.name={method}", f"experts={COPIES}", f"source={source}"]
    words += ["target=upcycled"] if methods.load(method).needs.part else []
    words += [f"donors=[{','.join(map(str, donors))}]"] if donors else []
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(Checkpoint.open(folder)) for folder in models]
        plan = build(read(UpcycleConfig, "", words), checkpoints, {} if methods.load(method).needs.part else None)
        maker, measured = Maker(plan, checkpoints), plan.config.router.init.name in routers.MEASURED
        parts = [part for output in plan.outputs for part in output.parts]
        return {part: maker.part(part) for part in parts if part.kind != "router" or not measured}


@pytest.mark.parametrize("method", plugin.names("upcycle.planning.methods"))
def test_a_model_changes_what_the_method_needs_it_for_and_nothing_else(method: str, models: list[Path]) -> None:
    needs = methods.load(method).needs
    given = models[: 1 + COPIES] if needs.mixes else models[:1]
    before = made(method, given)
    for changed in range(len(given)):
        after = made(method, [models[-1] if i == changed else folder for i, folder in enumerate(given)])
        assert after.keys() == before.keys()
        for part, tensor in after.items():
            if part.kind == "router":
                needed = False
            elif part.kind == "expert":
                needed = ("source" if changed == 0 else "own") in needs.donors and changed in (0, 1 + part.expert)
            else:
                needed = (changed == 0) == (needs.rest == "source")
            assert torch.equal(tensor, before[part]) != needed, f"model {changed}: {part}"
