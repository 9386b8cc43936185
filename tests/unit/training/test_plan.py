"""The memory plan: what is counted is held to the ranks in tests/parallel/test_shard.py; here what follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parallel.models import SPECS
from tests.parity import tiny
from training.balance import BalanceConfig
from training.config import CheckpointConfig, ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.model.recompute import MODES
from training.parallel.mesh import MeshConfig
from training.plan import Memory, in_flight, main, memory, table
from upcycle.spec import DenseSpec, MoESpec

CONFIG = TrainConfig(model=ModelConfig(source="none"), data=DataConfig(sequence=32), batch=8, micro_batch=1)


# A model whose every term is written out below: a dense layer, and one of 4 experts of 3 neurons, 2 a token.
D = DenseSpec(family="llama", layers=2, hidden=4, ffn=6, heads=2, kv_heads=1, head_dim=2, vocab=10, context=64)
M = MoESpec(D, layers=(1,), widths=(3,) * 4, top_k=2, copies=4)
# parameters: an embedding and a head of 10 * 4, and in each layer two norms of 4, q and o of 4 * 4, k and v of 2 * 4
ENDS, NORM, NORMS, ATTENTION = 10 * 4 + 10 * 4, 4, 2 * 4, 16 + 8 + 8 + 16
FFN, ROUTER, EXPERTS = 3 * 6 * 4, 4 * 4, 4 * 3 * 3 * 4  # gate, up, down
ALL = 428
# bf16 bytes that a token leaves for backward: attention's input of 4, q, k and v of 8 twice, its output of 4, a float32
# for each of 2 heads; twice the stream and two norms; then gate, up, activation and product of 6 and the input of 4
DENSE_LAYER = 2 * (4 + 2 * 8 + 4) + 4 * 2 + 2 * 4 * 4 + 2 * (4 * 6 + 4)
# or the inputs of 4 of two rows with gate and up of 3; of 4 experts three float32, of 2 choices two int64
MOE_LAYER = 2 * (4 + 2 * 8 + 4) + 4 * 2 + 2 * 4 * 4 + 2 * 2 * (4 + 2 * 3) + 4 * 3 * 4 + 8 * 2 * 2
LOSS = 2 * 8 * 10 + (4 + 2) * 10 * 4  # 8 tokens' logits; the head's gradient in float32 and bf16


def by_hand(world: int, batch: int, **mesh: object) -> Memory:
    data = DataConfig(sequence=8)
    config = replace(CONFIG, data=data, batch=batch, mesh=MeshConfig(**mesh))  # type: ignore[arg-type]
    return memory(M, config, world)


def test_a_small_model_by_hand() -> None:
    assert ENDS + NORM + 2 * (NORMS + ATTENTION) + FFN + ROUTER + EXPERTS == ALL
    assert (DENSE_LAYER, MOE_LAYER) == (144, 208)
    # one GPU: 4 + 4 + 2 * 4 bytes a weight, and a bf16 copy of all but norms and router; of 8 tokens the activations
    copies = 2 * (ALL - NORM - 2 * NORMS - ROUTER)
    assert by_hand(1, 8) == Memory(
        weights=1712, gradients=1712, moments=3424, gathered=copies, activations=8 * (144 + 208), loss=LOSS
    )
    assert by_hand(1, 8).host == 1712 + 3424  # what an asynchronous checkpoint copies
    # two: half of everything; embedding, head and last norm stay gathered, and two layers with one's gradients pass,
    # each as large as the MoE layer, of which norms and router are float32
    largest = 4 * (NORMS + ROUTER) + 2 * (ATTENTION + EXPERTS)
    assert largest == 480 > 4 * NORMS + 2 * (ATTENTION + FFN)
    assert by_hand(2, 8) == Memory(
        weights=856, gradients=856, moments=1712, gathered=2 * ENDS + 4 * NORM + 3 * 480, activations=2816, loss=LOSS
    )
    # two with an expert pair each: no experts are gathered, a bf16 copy of the own ones stays, and a dense layer is
    # the largest that passes
    passing = max(4 * NORMS + 2 * (ATTENTION + FFN), 4 * (NORMS + ROUTER) + 2 * ATTENTION)
    assert by_hand(2, 8, ep=2) == Memory(
        weights=856, gradients=856, moments=1712,
        gathered=2 * ENDS + 4 * NORM + 2 * EXPERTS // 2 + 3 * passing, activations=2816, loss=LOSS,
    )  # fmt: skip


def test_a_pipelines_stages_by_hand() -> None:
    """Stage 0 has the dense layer of two micro-batches at once, stage 1 the MoE layer of one and is the fullest; with
    gpipe both have all four."""
    last = Memory(
        weights=4 * 260, gradients=4 * 260, moments=8 * 260, gathered=2 * (40 + ATTENTION + EXPERTS),
        activations=8 * 208, loss=LOSS,
    )  # fmt: skip
    assert ATTENTION + NORMS + ROUTER + EXPERTS + NORM + 40 == 260
    assert by_hand(2, 4, pp=2) == last
    assert by_hand(2, 4, pp=2, schedule="gpipe") == replace(last, activations=4 * 8 * 208)


@pytest.mark.parametrize(
    ("schedule", "count", "parts", "held"),
    [
        ("1f1b", 8, 1, [4, 3, 2, 1]),  # the first stage has sent as many as there are stages before one comes back
        ("1f1b", 2, 1, [2, 2, 2, 1]),
        ("gpipe", 8, 1, [8, 8, 8, 8]),
        ("interleaved", 8, 2, [4, 4, 4, 4]),
        ("zbv", 3, 2, [3, 3, 3, 3]),
    ],
)
def test_micro_batches_in_flight(schedule: str, count: int, parts: int, held: list[int]) -> None:
    mesh = MeshConfig(pp=4, schedule=schedule)
    assert [in_flight(mesh, count, place, parts) for place in range(4)] == held
    assert in_flight(MeshConfig(schedule=schedule), count, 0, 1) == 1, "without a pipeline one after the other"


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
    assert lines[0].split()[6:8] == ["total", "host"]
    plain = replace(CONFIG, mesh=MeshConfig(tp=2), checkpoint=CheckpointConfig(asynchronous=False))
    assert "host" not in table(SPECS["moe"], plain, 4).splitlines()[0]
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


def test_the_table_leaves_out_what_a_schedule_cannot_cut() -> None:
    """Two stages a rank of two layers: pp=2 would want four. It was a traceback of the whole table."""
    config = replace(CONFIG, data=DataConfig(sequence=8), mesh=MeshConfig(schedule="interleaved"))
    shown = table(M, config, 2)
    assert "ep=2" in shown and "pp=2" not in shown
