"""Hold the time model to every row that was measured; benchmarks/results shows them with their errors as they are."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.speeds import (
    COUPLED,
    EVEN,
    FAR,
    FOLDED,
    HYBRID,
    LLAMA,
    MISSED,
    MIXTRAL,
    NEAR_ENOUGH,
    PAGE,
    PERFORMANCE,
    QWEN,
    QWEN2,
    ROWS,
    SIX,
    SIXTEEN,
    SLOW_CORES,
    TWELVE,
    WITHIN,
    error,
    folding,
    on_page,
    predicted,
    published,
    ratios,
    shown,
)
from tests.parallel.models import SPECS
from training.cli.estimate import main as plan
from training.config.schema import ModelConfig, TrainConfig
from training.config.stages import Stage
from training.data.mixture import DataConfig
from training.dispatch import capabilities
from training.estimating import hardware, measure
from training.estimating.budget import ACCURACY, bill
from training.estimating.estimate import lasting, seconds_of
from training.estimating.hardware import Hardware, Link
from training.estimating.mappings import ranked
from training.estimating.memory import memory
from training.estimating.recommend import BASIS
from training.estimating.seconds import (
    ACTIVATION,
    BOTH,
    CLOCK,
    COMPILED,
    DROPPING,
    EAGER,
    FUSED,
    HOOKS,
    JOINED,
    MIXED,
    NORM,
    PARTIAL,
    ROTATION,
    SEPARATE,
    TOGETHER,
    Clock,
    Routing,
    Seconds,
    distinct,
    step,
)
from training.islands.config import IslandsConfig
from training.optim.balance import BalanceConfig
from training.optim.config import OptimConfig
from training.optim.teacher import TeacherConfig
from training.parallel.mesh import MeshConfig
from training.run.record import obstacle
from upcycle.arch.spec import DenseSpec, Latent, MoESpec


def test_rows_that_were_measured_are_predicted() -> None:
    """Within 10 % what it was calibrated on, within 15 % what it was not; what misses is named, and does miss."""
    for row in ROWS:
        if row.use in WITHIN:
            assert (abs(error(row)) <= WITHIN[row.use]) == (row.what not in MISSED), (row.what, error(row))


def test_muon_reads_and_writes_one_moment_of_matrices_and_two_of_the_rest() -> None:
    spec, card = SPECS["moe"], hardware.read("h200")
    config = TrainConfig(model=ModelConfig(source="none"), data=DataConfig(sequence=32), batch=8, micro_batch=1)
    muon = replace(config, optim=OptimConfig(name="muon"))
    spared = memory(spec, config, 1).moments - memory(spec, muon, 1).moments
    adamw, less = (step(spec, each, 1, card).optimizer for each in (config, muon))
    assert adamw - less == pytest.approx(2 * FUSED * spared / (card.bandwidth * 1e9), rel=0.01)


def test_every_page_says_the_spread_of_these_rows() -> None:
    every = [abs(error(row)) for row in ROWS if row.use in WITHIN]
    near = [each for each in every if each <= 0.15]
    far = sorted(round(100 * each) for each in every if each > 0.15)
    said = f"{len(near)} of {len(every)} measured steps were predicted within {100 * max(near):.0f} %"
    assert f"{said}, and the other three were off by {far[0]}, {far[1]} and {far[2]} %" == ACCURACY and len(far) == 3
    for page in (PAGE, Path(__file__).parents[3] / "docs" / "scaling.md"):
        assert ACCURACY in " ".join(page.read_text().split()), page
    assert ACCURACY in BASIS and ACCURACY in bill("1B tokens", 0.0, 1, 1, 1.0, 1.0)


def test_the_page_has_these_rows() -> None:
    assert on_page(PAGE.read_text()) == shown(), "python -m benchmarks.speeds writes it anew"
    assert on_page(PERFORMANCE.read_text(), "| whole model |") == published(), "so it does this one"


def test_the_order_of_what_was_measured_in_turn() -> None:
    rows = {(row.file, row.words, row.routing.in_turn, row.host): row for row in ROWS}

    def rate(file: str, words: str, in_turn: bool = False, host: float = 1.0) -> float:
        return predicted(rows[file, words, in_turn, host])[0]

    for more in (" balance.capacity_factor=1", ""):
        order = (f"layers=3 {FOLDED}{more}{HYBRID}", f"layers=3 {FOLDED}{more}", f"layers=3 {COUPLED}{more}")
        rates = [rate(MIXTRAL, words) for words in order]
        assert rates == sorted(rates, reverse=True), more
    dispatchers = [rate(QWEN, SIXTEEN + word, host=SLOW_CORES) for word in (HYBRID, " mesh.dispatcher=deepep", "")]
    assert dispatchers == sorted(dispatchers, reverse=True)
    for host in (1.0, SLOW_CORES):
        assert rate(QWEN, SIXTEEN + HYBRID, True, host) > rate(QWEN, SIXTEEN + HYBRID, host=host)
    again = [
        rate(QWEN, SIXTEEN + HYBRID + more)
        for more in ("", " model.recompute=full", " model.recompute=full micro_batch=2")
    ]
    assert again == sorted(again, reverse=True)
    assert rate(LLAMA, TWELVE + " balance.capacity_factor=1") > rate(LLAMA, TWELVE)
    folded, coupled = (
        rate(QWEN2, f"{words} balance.capacity_factor=1", host=SLOW_CORES) for words in (FOLDED + HYBRID, COUPLED)
    )
    assert folded > coupled


# Of two of a run, the one that was more than 6 % faster and is predicted not to be. In the first run the two with tp were
# the other way around, by 6 %, and those with cp 5 % apart. FSDP and ep 2 are predicted within 0.2 %
REVERSED = {
    ("6 layers, ep 2, another day", "all on FSDP, another day"),
    ("tp 2, another day", "tp 2, ep 2, another day"), ("cp 2, another day", "cp 2, ep 2, another day"),
}  # fmt: skip


def test_the_order_of_all_mappings_of_two() -> None:
    """Of two of which one was more than 6 % faster, that one is predicted to be; of a process's first there is no order."""
    rows = [row for row in ROWS if row.words.startswith(SIX) and row.what not in MISSED]
    again = [row for row in rows if row.what.endswith("another day")]
    first = [row for row in rows if row not in again]
    assert (len(first), len(again)) == (9, 8)
    found = {
        (one.what, other.what)
        for run in (first, again)
        for one, other in itertools.permutations(run, 2)
        if one.measured > 1.06 * other.measured and predicted(one)[0] <= predicted(other)[0]
    }
    assert found == REVERSED


def test_what_folding_wins() -> None:
    """Within 0.03, but for the one of two dispatchers that the page calls missed."""
    for what, measured, said in ratios():
        assert (abs(said - measured) <= NEAR_ENOUGH) == (what not in FAR), (what, measured, said)
    assert on_page(PAGE.read_text(), "| folded over") == folding(), "python -m benchmarks.speeds writes it"


# A card of round numbers, whose every rate is 1 TFLOP/s, and wires without latency
ROUND = Hardware(
    name="round", memory=80, node=2, peak=1, bandwidth=1e6, products=((1, 1, 1, 1, 1, 1, 1), (2, 1, 1, 1, 1, 1, 1)),
    attention=((64, 64, 1, 1),), link=Link(0, 100), network=Link(0, 10), rows={"alltoall": (100, 0)}, host=(0, 0),
)  # fmt: skip
PLAIN = TrainConfig(
    model=ModelConfig(source="x", compile=True), data=DataConfig(sequence=64), batch=8, micro_batch=1,
    mesh=MeshConfig(reshard=False),
)  # fmt: skip
D = DenseSpec(
    family="llama", layers=2, hidden=256, ffn=512, heads=4, kv_heads=4, head_dim=64, vocab=1024, context=64
)  # fmt: skip
M = MoESpec(D, layers=(0, 1), widths=(512,) * 8, top_k=2, copies=8)


def of_round(spec: DenseSpec | MoESpec, world: int = 1, routing: Routing = EVEN, **mesh: Any) -> Seconds:
    return step(spec, replace(PLAIN, mesh=replace(PLAIN.mesh, **mesh)), world, ROUND, routing)


def test_a_dense_step_by_hand() -> None:
    """FLOPs of the half-square convention at a rate of one, with the clock's share."""
    found = of_round(D)
    tokens = 8 * 64
    weights = 2 * (4 * 256 * 256 + 3 * 256 * 512) + 1024 * 256
    assert found.products == pytest.approx(CLOCK * 6 * weights * tokens / 1e12)
    assert found.attention == pytest.approx(CLOCK * 6 * 2 * 256 * 32 * 2 * tokens / 1e12)
    assert found.experts == found.rows == found.tensor == found.gathers == found.bubble == found.host == 0
    # weights, moments and gradients in float32, read, and all but the gradients written; norms are weights too
    parameters = weights + 1024 * 256 + 2 * 2 * 256
    assert found.optimizer == pytest.approx(4 * ((2 * 3 + 1) * FUSED + 1) * parameters / 1e15, rel=0.01)
    assert found.total == pytest.approx(sum(vars(found).values()))
    eager = step(D, replace(PLAIN, model=ModelConfig(source="x")), 1, ROUND)
    passes = 2 * (2 * NORM * 256 + ROTATION * (4 + 4) * 64) * tokens * 2 / 1e15
    activations = 2 * (SEPARATE - ACTIVATION) * 512 * tokens * 2 / 1e15
    assert eager.memory - found.memory == pytest.approx((EAGER - 1) * passes + activations) and activations > 0
    full = step(D, replace(PLAIN, model=replace(PLAIN.model, recompute="full")), 1, ROUND)
    head = CLOCK * 6 * 1024 * 256 * tokens / 1e12
    assert full.products - head == pytest.approx((found.products - head) * 4 / 3)


def test_a_moe_step_by_hand() -> None:
    alone, two, four = (of_round(M, world, ep=world) for world in (1, 2, 4))
    tokens, expert = 8 * 64, 3 * 256 * 512
    assert alone.experts == pytest.approx(CLOCK * 6 * expert * 2 * tokens * 2 / 1e12)
    assert alone.experts == pytest.approx(2 * two.experts), "each rank has half of the tokens, and so of the rows"
    # what leaves a rank: half of the choices, twice out and twice home, two layers, four micro-batches
    sorting = 2 * 4 * 4 * 64 * (1 + 2 + 2 * 2) * 512 / 1e15
    assert two.rows - sorting == pytest.approx(2 * 4 * 4 * 64 * 2 / 2 * 512 / 100e9)
    # four are two nodes: half of the choices cross at a tenth of the rate
    assert four.rows - sorting / 2 == pytest.approx(2 * 4 * 2 * 64 * 2 / 2 * 512 / 10e9)
    uneven = of_round(M, 2, Routing(0.2), ep=2)
    each = 64 * 2 / 4 * (1 + 0.2 / 2 * NormalDist().inv_cdf(1.625 / 2.25))
    assert uneven.experts / two.experts == pytest.approx((each + PARTIAL) / each * each / 32)
    capped = Clock(M, replace(PLAIN, balance=BalanceConfig(capacity_factor=1.0)), 2, ROUND, Routing(0.2), False)
    assert capped.load(M) == (
        pytest.approx(1 - 0.2 / math.sqrt(2 * math.pi)),
        pytest.approx(1 - 0.2 / math.sqrt(2 * math.pi)),
    )


def test_choices_of_all_ranks_are_gathered() -> None:
    """By Hybrid-EP, a byte for each token and expert, once a dispatch; and again where it is recomputed."""
    card = replace(ROUND, rows={"alltoall": (100, 0), "hybridep": (1e9, 0)})

    def rows(mode: str) -> float:
        config = replace(PLAIN, mesh=MeshConfig(ep=2, dispatcher="hybridep", reshard=False))
        config = replace(config, model=replace(config.model, recompute=mode))
        return step(M, config, 2, card, EVEN).rows

    gathered = 2 * 4 * 64 * 2 * 8 / 2 / 100e9  # in two layers, of four micro-batches
    assert rows("none") == pytest.approx(gathered, rel=1e-3)
    assert rows("full") == pytest.approx(2 * gathered, rel=1e-3)


def test_a_dispatch_waits_for_the_device_once() -> None:
    """As long as its dispatcher says of the host; again where it is recomputed, never in backward, and not at all where
    sizes are known or one rank has all."""
    card = replace(ROUND, host=(0, 1e3), rows={"alltoall": (1e9, 0), "hybridep": (1e9, 0), "nvlink": (1e9, 0)})

    def rows(mode: str = "none", ep: int = 2, pad: bool = False, dispatcher: str = "alltoall") -> float:
        config = replace(PLAIN, mesh=MeshConfig(ep=ep, dispatcher=dispatcher, reshard=False))
        balance = BalanceConfig(capacity_factor=1.0 if pad else 0.0, pad_to_capacity=pad)
        config = replace(config, model=replace(config.model, recompute=mode), balance=balance)
        return step(M, config, ep, card, EVEN).rows

    often = 2 * 4  # layers and micro-batches
    assert rows() == pytest.approx(often * capabilities("alltoall").wait, rel=1e-3)
    assert rows("full") == pytest.approx(2 * often * capabilities("alltoall").wait, rel=1e-3)
    assert rows(dispatcher="hybridep") == pytest.approx(often * capabilities("hybridep").wait, rel=1e-3)
    assert max(rows(ep=1), rows(pad=True), rows(dispatcher="nvlink")) < 1e-3
    mapped = replace(PLAIN, mesh=MeshConfig(ep=2, etp=2, reshard=False))
    both = step(M, mapped, 4, card, EVEN).rows
    assert both == pytest.approx(2 * 2 * BOTH * capabilities("alltoall").wait, rel=1e-3), (
        "half as many micro-batches on each rank"
    )


FOUR = replace(D, layers=4)  # of 262,144 parameters of attention each, 393,216 of an FFN, 512 of norms
FAST = replace(ROUND, bandwidth=1e12)


def test_copies_of_a_model_are_summed_once_a_step() -> None:
    """However many micro-batches it has."""
    card, mesh = replace(ROUND, link=Link(0, 1e9), network=Link(0, 1e-6)), MeshConfig(dp_replicate=2)
    few, many = (step(D, replace(PLAIN, mesh=mesh, batch=batch), 4, card).gathers for batch in (8, 64))
    assert many == pytest.approx(few), "a sum after each would make eight times as much"
    # a scatter and a gather of half of the weights, in float32; those of layers under the last backward, the ends' under nothing
    found = step(
        D, replace(PLAIN, mesh=replace(mesh, reshard=False)), 4, replace(FAST, link=card.link, network=Link(0, 3))
    )
    layers, ends = 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256), 2 * 1024 * 256
    micro = (found.products + found.attention) / 2
    across = 2 * 4 * 0.5 / 2 / 3e9
    assert 2 / 3 * micro < layers * across < 2 * micro, "or it would not show"
    assert found.gathers == pytest.approx((layers + ends) * across - 2 / 3 * micro, rel=1e-3)


def test_latents_by_hand() -> None:
    """Queries and keys of 64, values of 32; every rank of tp makes the latents of 32, and of 48 and the turned 16."""
    latent = Latent(q_rank=32, kv_rank=48, rope=16, value=32)
    latents = replace(D, latent=latent)
    tokens, made, rest = 8 * 64, (32 + 48 + 16) * 256, 4 * 64 * 32 + 4 * (64 - 16 + 32) * 48 + 4 * 32 * 256
    found, plain, two = of_round(latents), of_round(D), of_round(latents, 2, tp=2)
    head = CLOCK * 6 * 1024 * 256 * tokens / 1e12
    ffn = 3 * 256 * 512
    assert found.products - head == pytest.approx(CLOCK * 6 * 2 * (made + rest + ffn) * tokens / 1e12)
    assert two.products - head / 2 == pytest.approx(CLOCK * 6 * 2 * (made + (rest + ffn) / 2) * tokens / 1e12)
    assert found.attention == pytest.approx(CLOCK * 6 * 4 * (64 + 32) * 32 * 2 * tokens / 1e12)
    # two norms, joined queries and keys; a part of each query and one part of all keys turn, and not each whole head
    turned = (4 + 1) * 16 - (4 + 4) * 64
    passes = NORM * (32 + 48) + JOINED * 2 * 4 * 64 + ROTATION * turned
    more = 2 * passes * tokens * 2 / 1e15
    weights = 2 * (made + rest - 4 * 256 * 256)
    # of the optimiser's part alone a matrix more is a matrix more; in `memory`, its sums of four micro-batches too
    assert found.optimizer - plain.optimizer == pytest.approx(weights * (28 * FUSED + 4) / 1e15)
    assert found.memory - plain.memory == pytest.approx(more + weights * (10 * 7 + 6) / 1e15)
    across = Clock(latents, replace(PLAIN, mesh=MeshConfig(cp=2, context="ulysses")), 2, ROUND, EVEN, True)
    moved = 2 * 4 * (64 + 32) * 64 * 2  # queries and outputs, keys and values, there and back
    assert across.around(64, 4, 4, 0) == pytest.approx(2 * across.exchange(2, 1, moved))
    alone = Clock(replace(latents, latent=replace(latent, q_rank=0)), PLAIN, 1, ROUND, EVEN, True)
    assert alone.projections()[:2] == [(48 + 16, 256), (4 * 64, 256)], "queries of the hidden states themselves"


def test_a_token_crosses_to_a_node_once() -> None:
    """By a dispatcher that copies for no two experts of a node; alltoall sends a row for each choice."""
    card = replace(ROUND, rows={"alltoall": (100, 0), "hybridep": (100, 10)})

    def wires(dispatcher: str, world: int) -> float:
        config = replace(PLAIN, mesh=MeshConfig(ep=world, dispatcher=dispatcher))
        return Clock(M, config, world, card, Routing(0.0), False).wires(M, 1.0, 512)

    assert distinct(8, 2, 2) == pytest.approx(2 * (1 - 6 / 28))
    assert wires("hybridep", 4) == pytest.approx(64 * distinct(8, 2, 2) / 2 * 512 / 10e9)
    assert wires("alltoall", 4) == pytest.approx(64 * 2 / 2 * 512 / 10e9)
    # inside a node every rank is a place, and a row costs its nanoseconds too
    assert wires("hybridep", 2) == pytest.approx(64 * distinct(8, 2, 2) / 2 * (512 / 100 + 10) / 1e9)


def test_weights_that_stay_are_gathered_under_one_micro_batch() -> None:
    """However many a step has; freed ones hide under all, and are gathered for each."""
    card = replace(ROUND, node=8, link=Link(0, 1e-3))
    few, many = (step(D, replace(PLAIN, batch=batch), 4, card).gathers for batch in (8, 64))
    assert few == pytest.approx(many)
    freed = replace(PLAIN, mesh=MeshConfig(reshard=True))
    first, second = (step(D, replace(freed, batch=batch), 4, card).gathers for batch in (8, 16))
    assert second > 1.9 * first


def fsdp(batch: int, reshard: bool, card: Hardware = ROUND) -> Seconds:
    return step(FOUR, replace(PLAIN, batch=batch, mesh=MeshConfig(reshard=reshard)), 2, card)


def test_what_fsdp_copies() -> None:
    """Bytes of a parameter on two ranks, of one and of four micro-batches; those of a layer's activations taken off."""
    ends, norms = 2 * 1024 * 256, 4 * 2 * 256
    wide = 4 * (4 * 256 * 256 + 3 * 256 * 512) + ends

    def size(batch: int, reshard: bool) -> float:
        clock = Clock(FOUR, replace(PLAIN, batch=batch, mesh=MeshConfig(reshard=reshard)), 2, ROUND, EVEN, False)
        assert clock.count == batch / 2
        micro = 4 * clock.layer(False)["memory"] + clock.ends(True, True)["memory"]
        return (fsdp(batch, reshard).memory - clock.count * micro) * 1e15

    # half of each is cast and put where all read it; a whole bfloat16 is taken apart; norms are gathered in float32
    gather = (6 + 4) / 2 * wide + 4 * wide + (6 + 8) / 2 * norms + 8 * norms
    both = wide + norms
    assert size(2, False) == pytest.approx(gather + TOGETHER * both)
    assert size(8, False) == pytest.approx(gather + (TOGETHER + (6 + 3 * 10) * MIXED) * both)
    assert size(2, True) == pytest.approx(2 * gather + TOGETHER * both)
    assert size(8, True) == pytest.approx(4 * (2 * gather + TOGETHER * both) + 3 * 12 * both / 2)


@pytest.mark.parametrize("reshard", [False, True])
def test_what_hides_fsdps_wires(reshard: bool) -> None:
    """The gathers of two layers nothing; attention's sums nothing, an FFN's the backward of attention alone; all other
    gathers of weights that stay one forward. Four micro-batches on two ranks, link of 1 GB/s."""
    found = fsdp(8, reshard, slow := replace(FAST, link=Link(0, 1)))
    half = 0.5 / 1e9
    gathers, sums = (8, 4) if reshard else (1, 1)
    layer = gathers * half * (2 * (4 * 256 * 256 + 3 * 256 * 512) + 4 * 2 * 256)
    ends = half * 2 * 1024 * 256 * (2 * gathers + 4 * sums)
    attention, ffn = (4 * 4 * sums * half * each for each in (4 * 256 * 256, 3 * 256 * 512))
    core = (found.attention + CLOCK * 6 * 4 * 4 * 256 * 256 * 4 * 64 / 1e12) / 4  # of a micro-batch
    under = sums * core * 2 / 3
    assert ffn > 2 * under, "or it would not show"
    micro = (found.products + found.attention) / 4
    rest = 4 * layer - (4 * micro if reshard else micro / 3)
    assert rest > 0
    exposed = ends + 2 * layer + attention + ffn - under
    assert found.gathers == pytest.approx(exposed + rest, rel=1e-4)
    near = fsdp(8, reshard, replace(slow, link=Link(0, 100)))  # a hundredth: FFN's sums and most gathers hide
    assert near.gathers == pytest.approx((exposed - ffn + under) / 100, rel=1e-4)


@pytest.mark.parametrize(("mode", "share"), [("none", 2 / 3), ("attention", 3 / 4)])
def test_experts_sums_hide_under_rows_too(mode: str, share: float) -> None:
    """Two ranks that share all experts: they are summed while rows are on their way home and attention goes backward."""
    config = replace(PLAIN, model=replace(PLAIN.model, recompute=mode))
    clock = Clock(M, config, 2, replace(ROUND, link=Link(0, 0.01), bandwidth=0.01), EVEN, False)
    half, experts = 0.5 / 0.01e9, 8 * 3 * 256 * 512
    attention, small, ends = 4 * 256 * 256, 2 * 256 + 8 * 256, 2 * 1024 * 256
    home = (64 + 64 * 2) * 512 / 0.01e9
    under = share * sum(clock.attending().values()) + home
    assert 4 * experts * half > under > 1.01 * (under - home), "or it would not show"
    once = clock.once(0, 2, True)
    gathers = half * 2 * (2 * (attention + experts) + 4 * small)
    assert once["exposed"] == pytest.approx(
        half * (6 * ends + 2 * 4 * attention) + gathers + 2 * (4 * experts * half - under), rel=1e-6
    )


def test_what_fsdp_does_fills_a_slow_hosts_gaps() -> None:
    """Its copies and waits are in every layer: no time is added where the host is far behind, as it is for the optimiser."""
    slow = replace(ROUND, host=(1e3, 1e3))
    for card in (slow, replace(slow, bandwidth=1), replace(slow, link=Link(0, 0.1))):
        found = fsdp(8, False, card)
        assert found.total - found.optimizer == pytest.approx(4 * 4 * (COMPILED + HOOKS), rel=1e-3)


def test_gathers_hide_under_computation_and_pipelines_idle() -> None:
    slow = replace(ROUND, network=Link(0, 1e-3))
    hidden = step(D, PLAIN, 4, replace(ROUND, link=Link(0, 1e9), network=Link(0, 1e9)))
    assert 0 < hidden.gathers < 1e-6 < step(D, PLAIN, 4, slow).gathers
    latency = replace(slow, network=Link(1e6, 10), link=Link(0, 1e9))
    assert step(D, PLAIN, 8, latency).gathers > 2 * step(D, PLAIN, 4, latency).gathers, (
        "a ring has as many hops as nodes"
    )
    piped = step(D, replace(PLAIN, mesh=MeshConfig(pp=2)), 2, replace(ROUND, link=Link(0, 1e9)))
    # the stage with the head waits for one micro-batch of the other one, which has a layer alone
    other = CLOCK * 6 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256 * 32) * 64 / 1e12
    assert piped.bubble == pytest.approx(other, rel=0.01)


def test_groups_that_do_not_fill_their_nodes() -> None:
    card = replace(ROUND, node=8)
    clock = Clock(D, PLAIN, 16, card, EVEN, False)
    assert [clock.placed(size, stride) for size, stride in ((8, 1), (12, 1), (4, 2), (8, 2), (4, 8), (2, 16))] == [
        (8, 1), (8, 2), (4, 1), (4, 2), (1, 4), (1, 2),
    ]  # fmt: skip
    # across two nodes a gather has four cards' network, and in one none of it
    assert clock.collective(8, 2, 8e9) == pytest.approx(max(8 * 7 / 8 / 100, 8 / 2 / 4 / 10))
    assert clock.collective(8, 1, 8e9) == pytest.approx(8 * 7 / 8 / 100)


def test_a_slow_host() -> None:
    """The sum of fourth powers: never below either, and near the larger."""
    fast, card = of_round(D).total, replace(ROUND, host=(1e3, 2e3))
    waits = step(D, replace(PLAIN, model=ModelConfig(source="x", graph=False)), 1, card)
    assert waits.total == pytest.approx(2 * 8, rel=0.01) and waits.host > 0.99 * (16 - fast)
    compiled = replace(PLAIN, model=ModelConfig(source="x", compile=True, graph=False))
    assert step(M, compiled, 1, card).total == pytest.approx(2 * 8 * 2 * COMPILED, rel=0.01)
    half = replace(M, layers=(0,))  # only its MoE layer has a mask
    more = replace(compiled, balance=BalanceConfig(capacity_factor=1.0))
    assert step(half, more, 1, card, EVEN).total == pytest.approx(8 * ((1 + 2) * COMPILED + 2 * DROPPING), rel=0.01)


ALONE = replace(PLAIN, model=ModelConfig(source="x"))  # on one GPU: recorded
SLOW = replace(ROUND, host=(1e3, 2e3))


def asking(**model: Any) -> TrainConfig:
    return replace(ALONE, model=replace(ALONE.model, **model))


@pytest.mark.parametrize(
    ("config", "world", "spec", "waits"),
    [
        (ALONE, 1, D, False), (ALONE, 1, M, False), (ALONE, 2, M, True),
        (asking(graph=True), 1, M, False), (asking(graph=False), 1, D, True),
        (asking(dtype="float32"), 1, D, False), (asking(dtype="float32"), 1, M, True),
        (asking(expert_backend="reference"), 1, D, False), (asking(expert_backend="reference"), 1, M, True),
        (asking(transformer_engine=("norm",)), 1, D, True),
        (replace(ALONE, teacher=TeacherConfig(source="y", weight=0.5)), 1, D, True),
        (replace(ALONE, islands=IslandsConfig(join="here:1")), 1, D, True),
    ],
)  # fmt: skip
def test_a_recorded_step_has_no_host(config: TrainConfig, world: int, spec: DenseSpec | MoESpec, waits: bool) -> None:
    """In the model where it has none in training: by the same conditions as `record.obstacle`."""
    found = step(spec, config, world, SLOW, EVEN)
    assert (found.host > 0) == waits
    assert step(spec, config, world, SLOW, EVEN, blocks=True).host > 0, "a stack of layers has no steps"
    run = SimpleNamespace(
        config=config, device=torch.device("cuda"), mesh=SimpleNamespace(world=world),
        teacher=config.teacher.asked or None,
        model=SimpleNamespace(moe=isinstance(spec, MoESpec), dense=SimpleNamespace(carried=None)),
    )  # fmt: skip
    assert waits == (config.model.graph is False or bool(obstacle(cast(Any, run))))


def test_a_table_a_stage_and_the_law_have_the_same_seconds() -> None:
    _, own = ranked(D, ALONE, 1, SLOW)
    assert own.seconds.host == 0
    assert seconds_of(D, ALONE, 1, SLOW) == own.seconds.total
    long = lasting(Stage(1, "", 0, replace(ALONE, steps=3_600_000)), D, 1, SLOW)
    assert long.endswith(f" {1000 * own.seconds.total:,.1f} hours")
    none = lasting(Stage(2, "decay", 0, replace(ALONE, batch=1, micro_batch=1)), D, 2, SLOW)
    assert none.startswith("decay: This config does not train on 2 GPUs: batch=1 ") and "hours" not in none


def test_copies_of_a_token() -> None:
    """The facts' 5.34, 3.63 and 1.99 ranks of a token at 8 of 128; one expert is in one place."""
    assert [round(distinct(128, 8, ranks), 2) for ranks in (8, 4, 2, 1)] == [5.34, 3.63, 1.99, 1.0]
    assert distinct(8, 1, 8) == pytest.approx(1)


# ---- hardware files


@pytest.mark.parametrize("path", sorted(hardware.HARDWARE.glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_hardware_says_what_is_a_data_sheets(path: Path) -> None:
    card = hardware.read(path.stem)
    assert path.read_text().startswith(f"# {card.name}") and card.sheet and card.source
    for row in card.products:
        near = hardware.rates(card, 0 if row[0] == 1 else row[0], *row[1:4])
        assert near == pytest.approx(row[4:], rel=0.12), "what was measured is what is used"
        assert max(near) < card.peak
    few = hardware.rates(card, 0, 1, 4096, 4096)[0]
    assert few < 2 * card.bandwidth / 1e3, "one row is as fast as its weight is read"


def test_hardware_that_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    good = (hardware.HARDWARE / "h200.yaml").read_text()
    for old, new, says in (
        ("memory: 141", "memory: 0", "above 0"),
        ("host: [2.3, 5.6]", "host: [2.3]", "a list of 2"),
        ("sheet: [memory", "sheet: [colour", "'colour'"),
        ("link: {latency: 3, rate: 350}", "", "link"),
        ("rows: {alltoall", "rows: {others", "no alltoall"),
        ("[128, 4096, 566, 434]", "[128, 4096, 0, 434]", "attention is 0; it must be finite and above 0"),
        ("[128, 4096, 566, 434]", "[128, .nan, 566, 434]", "attention is nan"),
        ("memory: 141", "memory: .inf", "memory is inf"),
        ("peak: 989.5", "peak: .nan", "peak is nan"),
        ("link: {latency: 3, rate: 350}", "link: {latency: 3, rate: 0}", "link.rate is 0"),
        ("link: {latency: 3, rate: 350}", "link: {latency: -3, rate: 350}", "link.latency is -3"),
        ("network: {latency: 6, rate: 45}", "network: {latency: 6, rate: -45}", "network.rate is -45"),
        ("network: {latency: 6, rate: 45}", "network: {latency: .nan, rate: 45}", "network.latency is nan"),
        ("rows: {alltoall: [190, 0]", "rows: {alltoall: [0, 0]", "rows.alltoall is 0; it must be finite and above 0"),
        (
            "rows: {alltoall: [190, 0]",
            "rows: {alltoall: [190, -1]",
            "rows.alltoall is -1; it must be finite and at least",
        ),
        ("host: [2.3, 5.6]", "host: [2.3, -5.6]", "host is -5.6; it must be finite and at least 0"),
    ):
        assert old in good
        (tmp_path / "mine.yaml").write_text(good.replace(old, new))
        with pytest.raises(ValueError, match=re.escape(says)):
            hardware.read(str(tmp_path / "mine.yaml"))
    with pytest.raises(ValueError, match="h100"):
        hardware.read("h300")


def test_a_machines_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "LAYERS", (1, 2))
    file = tmp_path / "mine.yaml"
    assert plan([f"measure={file}", "device=cpu"]) == 0
    card, like = hardware.read(str(file)), hardware.read("h200")
    assert card.name == "cpu" and set(card.sheet) == {"memory", "node", "network", "link", "rows"}
    assert card.link == like.link and [row[:4] for row in card.products] == list(measure.SMALL[0])
    assert all(0 < number < 10 for row in card.products for number in row[4:]) and min(card.host) > 0
    assert card.bandwidth > 0.1 and "hardware=" in capsys.readouterr().out
    assert plan([f"measure={file}"]) == 2 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "environ", "says"),
    [
        (["measure=no/such/mine.yaml"], {}, "make the folder no/such"),
        (["device=xpu"], {}, "device is xpu"),
        (["node=-1"], {}, "node is -1; it must be at least 0"),
        ([], {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "start it on one"),
    ],
)
def test_what_cannot_be_measured_is_said_before(
    words: list[str],
    environ: dict[str, str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one sentence, with nothing measured and nothing written."""
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measure.bench, "measured", lambda *_: pytest.fail("it began to measure"))
    assert plan(["measure=hardware.yaml", *words]) == 2 and says in capsys.readouterr().err
    assert (plan(["measure=hardware.yaml", "device=cuda"]) == 2 and "device=cpu" in capsys.readouterr().err) or environ
    assert not any(tmp_path.iterdir())
