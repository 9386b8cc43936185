"""The memory plan: what is counted is held to the ranks in tests/parallel/test_shard.py; here what follows from it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.speeds import COPIES, MORE_SLICES, SLICES, SMOL
from tests.parallel.models import SPECS
from tests.parity import tiny
from training.checkpoint.layout import opened
from training.cli.estimate import main
from training.config.reading import read_config
from training.config.schema import CheckpointConfig, ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.dispatch import nvlink
from training.estimating import hardware, law
from training.estimating.bench import BenchConfig, spec_of
from training.estimating.budget import amount, bill
from training.estimating.estimate import EstimateConfig, clocked, estimate_words, split, table, why
from training.estimating.mappings import SPARE, Timed, ranked
from training.estimating.memory import Memory, in_flight, memory
from training.estimating.seconds import Routing, Seconds, step
from training.model.lora import LoraConfig
from training.model.recompute import MODES
from training.optim.balance import BalanceConfig
from training.optim.config import OptimConfig
from training.parallel.mesh import MeshConfig
from training.run.parts import source
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.reading import read
from upcycle.config.ready import HARDWARE
from upcycle.planning.size import dense_parameters

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
    # recomputed layers make their copies again: those of one layer pass, and the ends' stay
    full = replace(CONFIG, model=replace(CONFIG.model, recompute="full"))
    assert memory(M, full, 1).gathered == 2 * ENDS + 3 * 2 * (ATTENTION + max(FFN, EXPERTS))
    # two: half of everything; embedding, head and last norm stay gathered, and two layers with one's gradients pass,
    # each as large as the MoE layer, of which norms and router are float32
    largest = 4 * (NORMS + ROUTER) + 2 * (ATTENTION + EXPERTS)
    assert largest == 480 > 4 * NORMS + 2 * (ATTENTION + FFN)
    assert by_hand(2, 8) == Memory(
        weights=856, gradients=856, moments=1712, gathered=2 * ENDS + 4 * NORM + 3 * 480, activations=2816, loss=LOSS
    )
    # two copies: nothing is divided, and FSDP gathers units all the same
    assert by_hand(2, 8, dp_replicate=2) == replace(by_hand(1, 8), gathered=2 * ENDS + 4 * NORM + 3 * 480)
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
    exact = replace(CONFIG, model=replace(CONFIG.model, dtype="float32"))  # where nothing is copied
    assert on(mesh, exact).gathered == on(mesh, replace(exact, model=replace(exact.model, recompute="full"))).gathered
    again = {mode: on(mesh, replace(CONFIG, model=replace(CONFIG.model, recompute=mode))) for mode in MODES}
    assert again["full"].gathered == again["experts"].gathered < several.gathered == again["attention"].gathered


def test_what_kernels_of_narrow_experts_keep() -> None:
    """Their activation too, and their rows as tokens, which are counted already; and no run took more than is planned."""
    config = replace(CONFIG, data=DataConfig(sequence=1024), batch=128, micro_batch=64)
    alone, divided = (memory(COPIES, config, world).activations for world in (1, 2))
    a_row, (tokens, layers, rows) = 2 * (3 * 1536 - (576 + 2 * 1536)), (65536, 30, 2)
    assert alone - divided == tokens * layers * rows * a_row  # weights that FSDP divides are for torch's products
    more = replace(COPIES, widths=(1536,) * 9)  # one expert more than anybody measured, and 12 bytes of its router
    assert alone - memory(more, config, 1).activations == tokens * layers * (rows * a_row - 12)
    quack = replace(config, model=replace(config.model, expert_backend="quack"))  # of rows the first product alone
    assert memory(COPIES, quack, 1).activations - divided == tokens * layers * rows * 2 * -576
    for spec, seen in ((SMOL, 36.7e9), (SLICES, 45.2e9), (MORE_SLICES, 54.3e9), (COPIES, 63.0e9)):
        assert seen < memory(spec, replace(config, batch=64), 1).total < 1.5 * seen


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


def test_nvlink_has_memory_for_arrivals_and_buffers() -> None:
    moe, tokens = SPECS["moe"], 32
    plain, own = (on(MeshConfig(ep=4, arrivals=1.5, dispatcher=name)) for name in ("alltoall", "nvlink"))
    row = 2 * (moe.dense.hidden + 2 * max(moe.widths))
    assert own.activations - plain.activations == 0.5 * moe.top_k * row * tokens * len(moe.layers)
    size = nvlink.buffer_bytes(tokens, 4, moe.dense.hidden, moe.top_k, 2)
    assert own.gathered - plain.gathered == size > 2 * 4 * tokens * moe.dense.hidden * 2
    most = on(MeshConfig(ep=4, arrivals=1e6, dispatcher="nvlink"))
    worst = 4 * min(moe.top_k, moe.experts // 4) - moe.top_k
    assert most.activations - plain.activations == worst * row * tokens * len(moe.layers), "no more than can come"
    assert on(MeshConfig(tp=2, dispatcher="nvlink")) == on(MeshConfig(tp=2)), "on one rank nothing travels"


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


# ---- with a clock


def test_the_fastest_that_fit_come_first() -> None:
    card, asked = hardware.read("h200"), EstimateConfig(gpus=4, hardware="h200", budget="1B tokens", price=2.0)
    config = replace(CONFIG, mesh=MeshConfig(tp=2))
    fit, own = ranked(SPECS["moe"], config, 4, card)
    assert own in fit and len(fit) > 5
    assert [each.seconds.total for each in fit] == sorted(each.seconds.total for each in fit)
    assert all(each.memory == memory(SPECS["moe"], replace(config, mesh=each.mesh), 4) for each in fit[:3])
    lines = clocked(SPECS["moe"], config, asked, card, rows=3).splitlines()
    first = lines[1].split()
    rate = 8 * 32 / fit[0].seconds.total
    assert first[:3] == ["1", f"{rate:,.0f}", f"{rate / 4:,.0f}"] and ";" not in lines[1]
    assert sum("(this config)" in line for line in lines) == 1
    assert "Not measured on this card: " in "\n".join(lines) and "network" in "\n".join(lines)
    hours = 1e9 / rate / 3600
    assert f"1 B tokens in {hours:,.1f} hours, {4 * hours:,.0f} GPU-hours, {8 * hours:,.0f} at 2" in "\n".join(lines)


@pytest.mark.parametrize(("batch", "idle"), [(8, True), (4 * 1024 // 32, False), (4 * 1024 // 32 - 4, True)])
def test_a_batch_that_leaves_all_gpus_idle_is_told(batch: int, idle: bool) -> None:
    """Config of a few GPUs, asked for many: its best mapping is the best of bad ones, which no rank in a table says."""
    config = replace(CONFIG, batch=batch, micro_batch=1)
    shown = clocked(SPECS["moe"], config, EstimateConfig(gpus=4, hardware="h200"), hardware.read("h200"))
    each = f"A step has {batch * 32:,} tokens, {batch * 32 / 4:,.0f} a GPU, which are too few for 4 GPUs; "
    assert (f"\n{each}write batch={2**22 // 32} for steps of 4 M" in shown) == idle


def test_what_does_not_fit_is_not_ranked() -> None:
    """A card that the smallest mapping just fits has that one alone; one byte less, and nothing does."""
    sizes = [memory(SPECS["moe"], replace(CONFIG, mesh=mesh), 4).total for mesh in (MeshConfig(), MeshConfig(ep=4))]
    every, _ = ranked(SPECS["moe"], CONFIG, 4, hardware.read("h200"))
    least = min(each.memory.total for each in every)
    assert least < max(sizes)
    tight = replace(hardware.read("h200"), memory=(least + SPARE) / 1e9)
    fit, own = ranked(SPECS["moe"], CONFIG, 4, tight)
    assert {each.memory.total for each in fit} == {least} and own not in fit
    lines = clocked(SPECS["moe"], CONFIG, EstimateConfig(gpus=4), tight).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["1", "no"] and "(this config)" in lines[2]
    with pytest.raises(ValueError, match=r"no mapping of 4 .*What fits: .*model\.recompute=selective"):
        clocked(SPECS["moe"], CONFIG, EstimateConfig(gpus=4), replace(tight, memory=(least + SPARE - 1) / 1e9))


SUGGESTED = re.compile(r"([^;:()]+) \(([\d.]+) GB a GPU\)")


def suggested(file: Path, *words: str, gpus: int, card: Path) -> dict[str, float]:
    """Return what the error about a step that fits nowhere suggests, each with its GB."""
    with pytest.raises(ValueError, match="fits no mapping of") as caught:
        estimate_words(str(file), [*words, f"gpus={gpus}", f"hardware={card}"])
    assert "\n" not in str(caught.value)
    return {found[0].strip(): float(found[1]) for found in SUGGESTED.findall(str(caught.value))}


def test_what_fits_nowhere_is_told_what_would_fit_and_that_fits(tmp_path: Path) -> None:
    """Each suggestion is typed as it stands: it fits, by the GB that it names, and names nothing that is set already."""
    dense, file, sheet = tmp_path / "dense", tmp_path / "run.yaml", tmp_path / "card.yaml"
    tiny.make("llama", dense)
    slices = {"source": str(dense), "target": "upcycled", "method": "virtual_group"}
    file.write_text(json.dumps({"model": {"upcycle": slices}, "data": {"sequence": 32}, "batch": 64, "micro_batch": 4}))

    def holds(gigabytes: float) -> Path:
        known = {**yaml.safe_load((HARDWARE / "h100.yaml").read_text()), "memory": gigabytes + SPARE / 1e9}
        sheet.write_text(yaml.safe_dump(known))
        return sheet

    def least(*words: str, gpus: int = 2) -> float:
        config = read_config(str(file), words)
        with source(config) as origin:
            fit, own = ranked(origin.spec, config, gpus, hardware.read("h100"))
        return min(each.memory.total for each in [*fit, own]) / 1e9

    few = least("model.upcycle.experts=8") * 1.0001
    first = suggested(file, gpus=2, card=holds(few))
    keys = [[word for word in words.split() if not word.startswith("mesh.")] for words in first]
    assert ["model.upcycle.experts=8"] in keys and ["gpus=8"] in keys
    assert all(len(words) == 1 for words in keys), "the smallest sets alone"
    for words, gigabytes in first.items():
        assert gigabytes <= few * 1.01
        more = [word for word in words.split() if not word.startswith("gpus=")]
        gpus = next((int(word[5:]) for word in words.split() if word.startswith("gpus=")), 2)
        assert "this config" in estimate_words(str(file), [*more, f"gpus={gpus}", f"hardware={sheet}"])
    everything = ["optim.moments=bfloat16", "model.recompute=full", "micro_batch=1", "model.upcycle.experts=2"]
    for number, set_already in enumerate(everything):  # nothing fits a card this small, so all that is left is named
        with pytest.raises(ValueError, match="does not fit either") as caught:
            estimate_words(str(file), [set_already, "gpus=1", f"hardware={holds(1e-6)}"])
        left = {key.partition("=")[0] for key in everything[:number] + everything[number + 1 :]}
        assert {key.partition("=")[0] for key in re.findall(r"[\w.]+=[\w:]+", str(caught.value))} >= left
        assert set_already.partition("=")[0] not in str(caught.value)
    both = least("micro_batch=1", "model.upcycle.experts=2", "optim.moments=bfloat16")
    pairs = suggested(file, "micro_batch=1", gpus=2, card=holds(both * 1.0001))
    sizes = {sum("mesh." not in word for word in words.split()) for words in pairs if "gpus=" not in words}
    assert sizes == {2}, pairs


def test_a_copy_in_each_node_is_offered_where_it_pays() -> None:
    """Gathers over all nodes wait for each of them; a copy in each node takes its memory. Who has the one or the other
    to spare is told so, and nobody has to ask."""
    fast, config = hardware.read("h200"), replace(CONFIG, batch=32)
    for latency, bandwidth, pays in ((1e4, 4000.0, True), (0.0, 1e-3, False)):  # more weights of each to update
        network = replace(fast.network, latency=latency)
        card = replace(fast, node=2, host=(0.0, 0.0), bandwidth=bandwidth, network=network)
        found = {each.mesh: each for each in ranked(SPECS["moe"], config, 8, card)[0]}
        copied = found[MeshConfig(dp_replicate=4)]
        assert (copied.seconds.total < found[MeshConfig()].seconds.total) == pays, latency
        assert copied.memory.weights > 3.9 * found[MeshConfig()].memory.weights
    tight = replace(card, memory=(copied.memory.total + SPARE - 1) / 1e9)
    assert MeshConfig(dp_replicate=4) not in {each.mesh for each in ranked(SPECS["moe"], config, 8, tight)[0]}
    asked = EstimateConfig(gpus=8)
    assert "dp_replicate=4" in clocked(SPECS["moe"], config, asked, replace(fast, node=2, host=(0.0, 0.0)), rows=99)


def test_choices_that_every_rank_gets_are_counted() -> None:
    """Hybrid-EP gathers a byte for each token of all ranks and each expert."""
    moe = SPECS["moe"]
    plain, hybrid = (on(MeshConfig(ep=4, dispatcher=name)) for name in ("alltoall", "hybridep"))
    tokens = CONFIG.micro_batch * CONFIG.data.sequence
    assert hybrid.gathered - plain.gathered == tokens * 4 * moe.experts


def test_what_is_not_in_the_seconds_is_said() -> None:
    card, plain = hardware.read("h200"), replace(CONFIG, data=replace(CONFIG.data, mask_documents=False))
    frozen = replace(plain, optim=OptimConfig(groups=({"match": "*.router.*", "lr": 0.0},)))
    for config, says in (
        (plain, ""), (CONFIG, "documents (less attention)"), (frozen, "frozen parameters"),
        (replace(plain, model=replace(plain.model, dtype="float32")), "float32 (they are bfloat16's)"),
        (replace(plain, lora=LoraConfig(rank=4)), "adapters"), (replace(plain, optim=OptimConfig(name="muon")), "Muon"),
    ):  # fmt: skip
        text = clocked(SPECS["moe"], config, EstimateConfig(gpus=1), card)
        assert (f"they leave out: {says}" in text) if says else ("they leave out" not in text), says


def test_why_another_is_slower() -> None:
    """By the two parts that grew most; what is faster in it is not told."""
    first = Timed(MeshConfig(), by_hand(1, 8), Seconds(products=1.0, rows=0.2, tensor=0.1))
    other = replace(first, seconds=Seconds(products=0.9, rows=0.25, tensor=0.11, bubble=0.3))
    assert why(other, first) == "; bubble +300 ms, rows +50 ms"
    assert why(first, first) == ""


def test_budgets() -> None:
    assert amount("budget", "100B tokens") == amount("budget", "100b") == (1e11, "tokens")
    assert amount("budget", "1e22 FLOPs") == (1e22, "flops")
    assert amount("budget", "5K GPU-hours") == (5000, "gpu-hours")
    # 100 tokens in 2 seconds on 4 GPUs: 12.5 a second and GPU
    for budget, tokens in (("3600 tokens", 3600), ("3.6e6 FLOPs", 3600), ("0.08 GPU-hours", 3600)):
        said = bill(budget, 10, 4, 100, 1000.0, 2.0)
        assert said.startswith(f"{tokens / 1000:.3g} K tokens in 0.02 hours, 0.08 GPU-hours, 0.8 at 10"), (budget, said)
    assert bill("9B", 10, 4, 100, 1.0, 2.0).startswith(
        "9 B tokens in 50,000.0 hours, 200,000 GPU-hours, 2,000,000 at 10 a GPU-hour"
    )
    wrong_ones = ("100 euros", "0B", "1.2.3B tokens", "1e400 tokens", "1e30T tokens", "nan")
    for key, wrong in (*(("budget", each) for each in wrong_ones), ("seen", "5 FLOPs"), ("seen", "1e300")):
        with pytest.raises(ValueError, match=f"{key} is .*100B tokens"):
            amount(key, wrong)


def test_words_of_planning_and_of_training() -> None:
    asked, rest = split(["gpus=8", "hardware=h100", "batch=4", "budget=1T tokens", "price=2.5", "seen=15T"])
    assert rest == ["batch=4"] and asked == EstimateConfig(8, "h100", "1T tokens", 2.5, "15T")
    for words, says in (
        (["budget=1T"], "hardware is not set"),
        (["hardware=h100", "price=-1"], "price is -1"),
        (["hardware=h100", "budget=1T", "price=nan"], "price is nan"),
        (["hardware=h100", "budget=1T", "price=inf"], "price is inf"),
        (["hardware=h100", "price=2"], "price needs a budget"),
        (["hardware=h100", "seen=15T"], "seen needs a budget"),
        (["hardware=h100", "budget=lots"], "budget is 'lots'"),
    ):
        with pytest.raises(ValueError, match=says):
            split(["gpus=8", *words])
    with pytest.raises(ValueError, match="gpus is 99999999999999999999; it must be at most 100,000"):  # it never ended
        split(["gpus=99999999999999999999"])


@pytest.mark.parametrize("method", ["virtual_group", "split", "copy"])
def test_the_law_is_asked_of_the_dense_model_itself(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a target's config has one width, what is read back of slices is a dense model as narrow as a slice."""
    dense = tiny.make("llama", tmp_path / "dense")
    words = {"virtual_group": ["experts=2", "granularity=4", "top_k=4"], "split": ["experts=4", "top_k=4"]}
    made = [f"model.upcycle.{word}" for word in words.get(method, ["experts=2", "top_k=1"])]
    cases = list[law.Case]()
    monkeypatch.setattr("training.estimating.law.advice", lambda case: cases.append(case) or "advice")
    run = [f"model.upcycle.source={dense}", f"model.upcycle.method={method}", "model.upcycle.target=mixtral", *made]
    asked = ["data.sequence=32", "batch=8", "gpus=1", "hardware=h100", "budget=1B tokens", "seen=1T"]
    assert main([*run, *asked]) == 0
    (case,) = cases
    with opened(dense) as origin:
        assert case.parameters == dense_parameters(origin.dense)
    assert case.cost == pytest.approx(1), "slices and top-1 of copies compute what the dense model does"
    assert case.method == method and case.granularity == (4 if method == "virtual_group" else 1)


def test_the_law_says_nothing_of_a_mixture_that_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.make("mixtral", tmp_path / "moe")
    with opened(source) as origin:
        assert isinstance(origin.spec, MoESpec)
        top_k = 2 * origin.spec.top_k
    run = [f"model.upcycle.source={source}", "model.upcycle.experts=2", f"model.upcycle.top_k={top_k}"]
    asked = ["data.sequence=32", "batch=8", "gpus=1", "hardware=h100", "budget=1B tokens", "seen=1T"]
    assert main([*run, *asked]) == 0
    said = capsys.readouterr().out
    assert "nothing about a grown mixture" in said and "Expected loss" not in said


def test_a_batch_that_the_config_cannot_cut_is_not_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training refuses it; the plan had it as the fastest, with hours, of a step that nobody can take."""
    dense = tiny.make("llama", tmp_path / "dense")
    words = [f"model.source={dense}", "data.sequence=32", "batch=4", "micro_batch=2", "gpus=4"]
    refused = "This config does not train on 4 GPUs: batch=4 cannot be cut into micro-batches of micro_batch=2 "
    for more in ([], ["hardware=h100", "budget=1B tokens", "seen=1T"]):
        assert main([*words, *more]) == 0
        said = capsys.readouterr().out
        assert f"\n{refused}" in said and "try batch=8\n" in said and "tp=2" in said
        assert not more or ("this config)" not in said and "with this config" not in said and "law" not in said)
        assert main([*words, *more, "batch=8"]) == 0
        said = capsys.readouterr().out
        assert "cannot be cut" not in said and "(this config)" in said
        assert not more or ("with this config" in said and "law" in said)
    assert main([*words, "batch=12"]) == 0 and "batch=12 cannot be cut" in capsys.readouterr().out, (
        "one and a half each"
    )
    assert main([*words[:-1], "gpus=3", "hardware=h100"]) == 2
    assert "try batch=6" in capsys.readouterr().err


def test_the_command_with_a_clock_and_the_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.make("llama", tmp_path / "dense")
    words = ["data.sequence=32", "batch=8", "gpus=2", "hardware=h100", "budget=1B tokens", "seen=1T"]
    made = [
        "model.upcycle.method=virtual_group",
        "model.upcycle.experts=4",
        "model.upcycle.granularity=2",
        "model.upcycle.top_k=2",
    ]
    assert main([f"model.upcycle.source={source}", *made, *words]) == 0
    said = capsys.readouterr().out
    assert "(this config)" in said and "GPU-hours" in said
    assert "is not shown" in said and "  1 T tokens before" in said
    assert "router.choice=each-slice" in said, "groups with a free router"
    assert main([f"model.source={source}", *words]) == 0
    assert "model.upcycle is not set" in capsys.readouterr().out


def test_the_law_is_asked_at_the_rate_of_the_configs_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory is known: a step that takes little of one GPU is recorded."""
    source, rates = tiny.make("llama", tmp_path / "dense"), list[float]()
    monkeypatch.setattr("training.estimating.estimate.seconds_of", lambda *_: 2.0)
    monkeypatch.setattr("training.estimating.estimate.advised", lambda *asked: rates.append(asked[-1]))
    words = ["data.sequence=32", "batch=8", "gpus=2", "hardware=h100", "budget=1B tokens", "seen=1T"]
    assert main([f"model.source={source}", *words]) == 0 and rates == [8 * 32 / 2.0 / 2]


def test_a_step_that_waits_for_its_host_is_told_of_larger_micro_batches() -> None:
    """One that is the whole batch cannot grow, nor one by twice which the batch is not cut; a fast host is no reason."""
    slow = hardware.read("h200")
    for card, config, says in (
        (slow, CONFIG, True), (replace(slow, host=(0.0, 0.0)), CONFIG, False),
        (slow, replace(CONFIG, batch=1), False), (slow, replace(CONFIG, batch=3), False),
    ):  # fmt: skip
        shown = clocked(
            SPECS["moe"], replace(config, model=replace(config.model, graph=False)), EstimateConfig(gpus=1), card
        )
        assert ("% of a step for the host" in shown and "try micro_batch=2, " in shown) == says


@pytest.mark.parametrize("word", ["mesh.dispatcher=alltoal", "model.expert_backend=alltoal"])
def test_names_that_nobody_has_are_refused(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would be predicted faster than any that is there: without waits."""
    words = [f"model.source={tiny.make('mixtral', tmp_path / 'moe')}", "data.sequence=32", "batch=8", "gpus=2"]
    for more in ([], ["hardware=h100"]):
        assert main([*words, *more, word]) == 2 and "'alltoal' is not one of" in capsys.readouterr().err
    if word.startswith("mesh"):
        assert main(["bench-qwen3-30b", "gpus=8", "hardware=h100", word]) == 2
        assert "'alltoal' is not one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "batch", "says"),
    [
        ("1f1b", 2, "needs 2 micro-batches a step, got 1"),
        ("interleaved", 10, "needs a multiple of 2 micro-batches a step, got 5; try 4"),
        ("gpipe", 2, ""),
        ("interleaved", 8, ""),
    ],
)
def test_a_schedule_that_refuses_the_batch_is_not_ranked(schedule: str, batch: int, says: str) -> None:
    """Neither the config's own mapping nor another with so many stages."""
    spec = replace(SPECS["dense"], layers=8)
    config = replace(CONFIG, batch=batch, mesh=MeshConfig(pp=2, schedule=schedule))
    fit, own = ranked(spec, config, 4, hardware.read("h200"))
    assert (own in fit) == (not says) and any(each.mesh.pp == 1 for each in fit)
    for mesh in (each.mesh for each in fit if each is not own and each.mesh.pp > 1):
        count = batch * mesh.tp * mesh.cp * mesh.pp // 4
        assert count >= mesh.pp and (schedule != "interleaved" or count % (count // mesh.pp) == 0)
    shown = clocked(spec, config, EstimateConfig(gpus=4), hardware.read("h200"))
    assert (f"\nThis config does not train on 4 GPUs: mesh.schedule={schedule} with mesh.pp=2 {says}" in shown) == bool(
        says
    )


def test_a_config_of_the_bench_is_planned_by_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 4096, "num_local_experts": 4,
             "num_experts_per_tok": 2}  # fmt: skip
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"architecture: {json.dumps({'model_type': 'mixtral', **sizes})}\ndata: {{sequence: 4096}}\nbatch: 8\n"
    )
    rates = {}
    for routing in ("natural", "balanced"):
        assert main([str(file), "gpus=2", "hardware=h200", "mesh.ep=2", f"routing={routing}"]) == 0
        said = capsys.readouterr().out
        own = next(line for line in said.splitlines() if "(this config)" in line)
        assert "ep=2" in own and "float32 weights" in said
        rates[routing] = float(own.split()[1].replace(",", ""))
    assert rates["balanced"] > rates["natural"]
    row = read(BenchConfig, str(file), ["mesh.ep=2", "routing=balanced"])
    seconds = step(spec_of(row), row.run(4), 2, hardware.read("h200"), Routing(0.0, in_turn=True)).total
    assert rates["balanced"] == pytest.approx(8 * 4096 / seconds, abs=1)
    assert main([str(file), "gpus=2"]) == 0 and "GB on the fullest" in capsys.readouterr().out
    for word, says in {
        "stack=true": "stack, seen or islands; leave them out",
        "batch=0": "batch is 0",
        "mesh.ep=3": "try mesh.ep=2",
    }.items():
        assert main([str(file), "gpus=2", "hardware=h200", word]) == 2
        assert says in capsys.readouterr().err
    small = tmp_path / "small.yaml"
    small.write_text((hardware.HARDWARE / "h200.yaml").read_text().replace("memory: 141", "memory: 4"))
    assert main([str(file), "gpus=2", f"hardware={small}"]) == 2
    said = capsys.readouterr().err
    assert "no mapping of 2 " in said and "The memory is that of float32 weights; the bfloat16" in said
