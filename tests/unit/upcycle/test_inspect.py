"""What inspect says of a folder's routers without any text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity import tiny
from training.checkpoint.layout import opened
from training.optim.config import OptimConfig, settled
from upcycle.__main__ import main
from upcycle.arch.spec import MoESpec
from upcycle.io import publish
from upcycle.verifying.inspect import describe

WORDS = ["experts=4", "granularity=2", "top_k=2", "dtype=float32"]


def converted(folder: Path, *words: str) -> Path:
    tiny.make("llama", folder / "dense")
    assert main(["convert", f"source={folder / 'dense'}", f"output={folder / 'moe'}", *WORDS, *words]) == 0
    return folder / "moe"


@pytest.mark.parametrize("target", ["mixtral", "glm4_moe", "granitemoe"])
def test_rows_of_a_group_are_equal_until_they_are_not(tmp_path: Path, target: str) -> None:
    sigmoid = ["router.score=sigmoid"] if target == "glm4_moe" else []
    folder = converted(tmp_path, f"target={target}", "method.name=virtual_group", *sigmoid)
    assert "equal within groups of 2 in 2 of 2 MoE layers" in describe(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = min(n for n, t in tensors.items() if ".0." in n and t.shape == (8, 64))
    rows = torch.zeros(8, 64)
    rows[:, 0] = torch.tensor([3.0, 5.0, 4, 4, 4, 4, 4, 4])  # the rows of the first group are 1 to either side of 4
    save_file(tensors | {name: rows}, file, metadata={"format": "pt"})
    said = describe(folder)
    # spread: sqrt(2) relative to sqrt(8 * 16)
    assert "router of layer 0    rows of a group differ by up to 2, 12.50% of their size" in said
    assert "equal within groups of 2 in 1 of 2 MoE layers" in said


def test_nothing_is_said_where_experts_are_no_slices_or_nobody_knows(tmp_path: Path) -> None:
    folder = converted(tmp_path, "method.name=split")
    assert "rows" not in describe(folder)
    virtual = converted(tmp_path / "virtual", "method.name=virtual_group")
    assert "router rows" in describe(virtual)
    manifest = json.loads((virtual / "upcycle.json").read_text())
    for changed in ({"granularity": "x"}, {"method": {}}):
        (virtual / "upcycle.json").write_text(json.dumps(manifest | {"config": manifest["config"] | changed}))
        with pytest.raises(ValueError, match="is not a manifest that upcycle wrote"):
            describe(virtual)
    (virtual / "upcycle.json").write_text(json.dumps(manifest | {"config": manifest["config"] | {"granularity": 3}}))
    with pytest.raises(ValueError, match="granularity=3, which does not divide the 8 experts"):
        describe(virtual)
    (virtual / "upcycle.json").unlink()
    assert "router rows" not in describe(virtual)


@pytest.mark.parametrize(("method", "equal"), [("virtual_group", True), ("noise", False), ("drop", False)])
def test_a_folder_says_whether_its_copies_began_equal(tmp_path: Path, method: str, equal: bool) -> None:
    folder = converted(tmp_path, f"method.name={method}", "router.choice=each-slice", "target=upcycled")
    with opened(folder) as origin:
        assert isinstance(origin.spec, MoESpec) and origin.spec.equal is equal
        settings = settled(OptimConfig(), origin.spec)
    assert (settings.share, settings.shrink) == ((0.5, 0.3) if equal else (0.0, 0.0))


def test_a_choice_in_each_slice_is_whole_and_its_slices_are_the_models(tmp_path: Path) -> None:
    folder = converted(tmp_path, "method.name=virtual_group", "router.choice=each-slice")
    said = describe(folder)
    assert "chooses in each of 2 slices" in said and "router rows" not in said
    with opened(folder) as origin:
        assert isinstance(origin.spec, MoESpec)
        assert (origin.spec.copies, origin.spec.granularity, origin.spec.slices) == (4, 2, 2)
    manifest = json.loads((folder / "upcycle.json").read_text())
    # 4 divides the 8 experts too, but the router would choose in other classes
    other = manifest | {"config": manifest["config"] | {"granularity": 4}}
    (folder / "upcycle.json").write_bytes(publish.signed(other))  # whole by its sum
    for read in (describe, lambda folder: opened(folder).__enter__()):
        with pytest.raises(ValueError, match=r"granularity=4, but config\.json says expert_slices=2"):
            read(folder)
    (folder / "upcycle.json").unlink()  # as training exports it
    assert "chooses in each of 2 slices" in describe(folder)
