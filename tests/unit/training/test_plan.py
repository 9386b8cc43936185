"""The memory plan: what is counted is held to the ranks in tests/parallel/test_shard.py; here what follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parallel.models import SPECS
from tests.parity import tiny
from training.balance import BalanceConfig
from training.config import ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.model.recompute import MODES
from training.parallel.mesh import MeshConfig
from training.plan import main, memory, table

CONFIG = TrainConfig(model=ModelConfig(source="none"), data=DataConfig(sequence=32), batch=8, micro_batch=1)


def on(mesh: MeshConfig, config: TrainConfig = CONFIG, world: int = 4) -> object:
    return memory(SPECS["moe"], replace(config, mesh=mesh), world)


def test_what_is_divided_is_smaller() -> None:
    one, four = on(MeshConfig(), world=1), on(MeshConfig())
    assert one.weights == one.gradients == one.moments / 2 > 3.9 * four.weights
    assert on(MeshConfig(ep=4)).gathered < four.gathered, "no rank gathers all experts"
    assert on(MeshConfig(ep=4, reshard=False)).gradients > on(MeshConfig(ep=4)).gradients
    assert on(MeshConfig(tp=4)).activations < four.activations
    assert on(MeshConfig(cp=4)).activations == four.activations // 4
    assert on(MeshConfig(pp=2, schedule="gpipe")).activations > on(MeshConfig(pp=2)).activations
    sizes = {
        mode: on(MeshConfig(), replace(CONFIG, model=replace(CONFIG.model, recompute=mode))).activations
        for mode in MODES
    }
    assert sizes["none"] > sizes["selective"] > max(sizes["attention"], sizes["experts"])
    assert min(sizes["attention"], sizes["experts"]) > sizes["full"]


def test_one_micro_batch_trades_its_activations_for_gradients() -> None:
    one = on(MeshConfig(), replace(CONFIG, batch=4))
    several = on(MeshConfig())
    assert several.total - one.total == min(one.activations, one.gradients)


def test_experts_of_one_rank_alone() -> None:
    """Their gradient stays narrow while there is only one, and with recompute=full their copies do not stay."""
    mesh, moe = MeshConfig(ep=4), SPECS["moe"]
    experts = len(moe.layers) * moe.experts * 3 * 8 * moe.dense.hidden // 4  # weights on each rank
    one, several = on(mesh, replace(CONFIG, batch=4)), on(mesh)
    assert several.gradients - one.gradients == experts * (4 - 2)
    three = on(mesh, replace(CONFIG, batch=12))
    assert three.total - several.total == min(experts * (4 - 2), several.activations), "wide with the second's backward"
    assert three.total == on(mesh, replace(CONFIG, batch=16)).total
    shared = MeshConfig(ep=2)  # two ranks with the same experts: FSDP sums in float32
    assert on(shared).gradients == on(shared, replace(CONFIG, batch=4)).gradients
    exact = replace(CONFIG, model=replace(CONFIG.model, compute="float32"))  # where nothing is copied
    assert on(mesh, exact).gathered == on(mesh, replace(exact, model=replace(exact.model, recompute="full"))).gathered
    again = {mode: on(mesh, replace(CONFIG, model=replace(CONFIG.model, recompute=mode))) for mode in MODES}
    assert again["full"].gathered == again["experts"].gathered < several.gathered == again["attention"].gathered


def test_buffers_that_are_padded_grow_with_the_capacity() -> None:
    def kept(factor: float, pad: bool, **mesh: int) -> int:
        balance = BalanceConfig(capacity_factor=factor, pad_to_capacity=pad)
        found: int = on(MeshConfig(**mesh), replace(CONFIG, balance=balance)).activations
        return found

    moe, mesh = SPECS["moe"], {"ep": 4}
    row = 2 * (moe.dense.hidden + 2 * max(moe.widths))  # bytes, bf16
    tokens = 32 * len(moe.layers)
    assert kept(1.0, True, **mesh) == kept(1.0, False, **mesh) == kept(4.0, False, **mesh)
    assert kept(1.5, True, **mesh) - kept(1.0, True, **mesh) == 0.5 * moe.top_k * row * tokens
    roomiest = kept(1e6, True, **mesh) - kept(1.0, True, **mesh)
    assert roomiest == (moe.experts - moe.top_k) * row * tokens, "no token chooses an expert twice"
    assert kept(1.5, True, tp=2) == kept(1.0, True, tp=2), "on one rank nothing travels"


def test_the_table_begins_with_the_config_and_has_only_what_can_run() -> None:
    lines = table(SPECS["moe"], replace(CONFIG, mesh=MeshConfig(tp=2)), 4).splitlines()
    assert lines[1].endswith("tp=2 cp=1 pp=1 ep=1 etp=1   (this config)")
    totals = [float(line.split()[6]) for line in lines[2:]]
    assert totals == sorted(totals)
    assert len(set(lines)) == len(lines) > 5
    assert not any("pp=4" in line for line in lines), "three layers are no four stages"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"model.source={tiny.make('llama', tmp_path / 'dense')}", "data.sequence=32", "batch=8"]
    assert main([*words, "gpus=2", "mesh.tp=2"]) == 0
    assert "tp=2 cp=1 pp=1 ep=1 etp=1   (this config)" in capsys.readouterr().out
    for more, says in ((["gpus=0"], "gpus=8"), ([], "gpus=8"), (["gpus=2", "mesh.tp=4"], "try mesh.tp=2")):
        assert main([*words, *more]) == 2
        assert says in capsys.readouterr().err
