"""`method.name=copy` writes the experts mergekit-moe writes, byte for byte; so does branch_train_mix with several donors.

mergekit stacks experts as transformers 5 holds them in memory; ours are one tensor each, as files are named. The twins
of two: all else in the folder that is comparable is compared too, and a wrong donor is seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.converting import mergekit_config, write_tokenizer
from tests.oracles import peers
from tests.parity import tiny
from upcycle.__main__ import main
from upcycle.io.checkpoint import Checkpoint

pytestmark = pytest.mark.oracle
DONORS = 4


@pytest.fixture(scope="module")
def donors(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("dense")
    made = [tiny.make("llama", folder / f"llama{i}", seed=i, dtype=torch.bfloat16) for i in range(DONORS)]
    for donor in made:
        write_tokenizer(donor)
    return made


def mergekit(base: Path, experts: list[Path], out: Path) -> dict[str, Tensor]:
    recipe = out.with_suffix(".yaml")
    recipe.write_text(mergekit_config(base, experts, top_k=2))
    peers.run("mergekit-moe", recipe, out, "--i-understand-this-is-not-useful-without-training")
    return tensors(out)


def ours(out: Path, *words: str) -> dict[str, Tensor]:
    """The converter's folder, with mergekit's names: w1 and w3 stacked, then the experts."""
    common = [f"output={out}", f"experts={DONORS}", "top_k=2", "target=mixtral"]
    assert main(["convert", *common, *words]) == 0
    made = tensors(out)
    for layer in range(tiny.SIZES["num_hidden_layers"]):
        there, here = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        w1, w2, w3 = ([made.pop(f"{there}.experts.{i}.w{n}.weight") for i in range(DONORS)] for n in (1, 2, 3))
        made[f"{here}.gate.weight"] = made.pop(f"{there}.gate.weight")
        made[f"{here}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)])
        made[f"{here}.experts.down_proj"] = torch.stack(w2)
    return made


def tensors(folder: Path) -> dict[str, Tensor]:
    with Checkpoint.open(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.entries}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    """Names of the tensors that are not the same bits; routers, random in both, are only held to their shape."""
    assert a.keys() == b.keys()
    assert all(a[name].shape == b[name].shape and a[name].dtype == b[name].dtype for name in a)
    return {name for name in a if not name.endswith("mlp.gate.weight") and not torch.equal(a[name], b[name])}


def test_copies_are_mergekits(donors: list[Path], tmp_path: Path) -> None:
    theirs = mergekit(donors[0], [donors[0]] * DONORS, tmp_path / "theirs")
    made = ours(tmp_path / "ours", f"source={donors[0]}", "method.name=copy")
    assert differing(theirs, made) == set()
    assert sum(".experts." in name for name in made) == 2 * tiny.SIZES["num_hidden_layers"]


def test_donors_are_mergekits_and_in_another_order_they_are_not(donors: list[Path], tmp_path: Path) -> None:
    theirs = mergekit(donors[0], donors, tmp_path / "theirs")
    words = [f"source={donors[0]}", "method.name=branch_train_mix", "method.rest=base"]
    made = ours(tmp_path / "ours", *words, f"donors=[{','.join(map(str, donors))}]")
    assert differing(theirs, made) == set()
    swapped = ours(tmp_path / "swapped", *words, f"donors=[{','.join(map(str, [donors[1], donors[0], *donors[2:]]))}]")
    assert differing(theirs, swapped) == {name for name in theirs if ".experts." in name}
