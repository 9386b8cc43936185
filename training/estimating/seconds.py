"""Predict the seconds of a training step on any mapping from the rates in a file of configs/hardware.

The prediction adds these parts of the slowest rank:

    products    projections, dense FFNs and the head, each by its shape: forward, gradients of input and weight
    experts     grouped products of the fullest rank, at uneven counts
    attention   half of the causal square (of the window)
    memory      passes over data: norms, rotation, activations, routers, the loss, casts, sums
    rows        token rows to the experts and back, including the sort; the trainer overlaps none of it
    tensor      data that tp and cp move within a layer
    gathers     FSDP's gathers and sums that no computation hides: see `once`
    bubble      a pipeline's idle time, and the data that its stages send
    optimizer   weights, moments and gradients, each read and written once
    host        the time that the device waits for a slow host; zero in a recorded step

Recomputation counts in the part that it repeats. The constants below name their source. Everything else is counted, or
comes from the hardware file. benchmarks/results/2026-11-planning.md compares the predictions with measured steps. The
model leaves out frozen parameters, adapters, teachers, Muon's products, documents and FP8: it counts such a step as
plain training.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist

from training.config.schema import TrainConfig
from training.dispatch import DEFAULT, Capabilities, capabilities
from training.estimating.hardware import Hardware, Link, attention_rates, rates
from training.optim.slots import MOMENTS
from training.parallel.mesh import grids
from training.parallel.pipeline import cut, stages
from training.run.record import hindrance
from upcycle.arch.spec import BYTES, DenseSpec, MoESpec
from upcycle.planning.size import mean_context

# Empty rows in the last tiles of an expert: half of a pair of 128-row tiles. With 1,024 rows the expert reaches 0.89 of
# the rate at even counts. Four balanced layers were 2.4 of 26.2 ms faster on an H100, and 3 of 25 ms on an H200
PARTIAL = 128
# The kernels of a profile took 64.7 ms, and the same step took 67.5 ms: the card lowers its clock under load
CLOCK = 1.04
EAGER = 2  # factor on norms and rotation without model.compile: SmolLM2's norms reached a third of the memory's rate
# Standard deviation of an expert's rows, divided by their mean. RANDOM is for the bench, which has random routers and
# random tokens: a capacity of 1 saved 3.3 to 4.2 % of a step. TRAINED is for training, where the fullest of 8 to 32
# experts had 1.2 to 1.43 times the mean (docs/science.md).
RANDOM, TRAINED = 0.05, 0.2
# A host and a device of nearly equal speed wait for each other in turn. A sum of fourth powers models this. The power
# fits SmolLM2's dense step on an H100, which took 252 ms and kept the device busy for 200 ms
TURNS = 4
COMPILED = 0.5  # share of a layer's host time that model.compile leaves; an estimate
# Further host work in each layer and micro-batch, as shares of a MoE layer's host time. HOOKS is for FSDP's hooks
# around its units (a MoE layer took 9.5 ms with them and 5 ms without, by `measure` on 2 H200). OVER_TP and OVER_CP are
# for the messages of tp and cp (six mappings on the same 2 H200)
HOOKS, OVER_TP, OVER_CP = 0.8, 0.15, 0.4
# The mask of a capacity takes this share of a MoE layer's host time: 100 of 1,731 torch calls, on two CPU ranks
DROPPING = 0.06
# Factor on a dispatcher's wait with both ep and etp: 54 torch calls instead of 47, on four CPU ranks
BOTH = 1.15
# Elements that pass through memory for each element of data, forward and backward: for a norm with its residual
# addition, for rotation with the head norm, for an activation (including its recomputation), and for logits (their
# product, the loss and its gradient)
NORM, ROTATION, ACTIVATION, LOGITS = 8, 5, 9, 5
SEPARATE = 14  # for a dense FFN's activation when neither a kernel of ours nor the compiler joins product and gate
JOINED = 4  # for queries and keys of latents: the rotated part is appended, and split off their gradient again
ROUTER = 12  # for float32 router logits: scores, choice, statistics, losses
# Time of a byte in torch's own passes, divided by the time of a byte in a copy, from profiles of steps on two H200.
# MIXED is for float32 += bfloat16 (2.6 and 2.5 TB/s in two rows with ep 2; copies and our kernel for experts reached
# 4.2 TB/s). FUSED is for AdamW with everything in float32 (2.9 TB/s in three rows)
MIXED, FUSED = 1.64, 1.45
# Bytes whose copy takes as long as torch needs to put one element of FSDP's gradients into the buffer of their sum. In
# the profile of two layers with ep 2 660 M bfloat16 elements took 1.91 ms, and 736 M float32 ones less than 2.37 ms
TOGETHER = 12
BUBBLES = {
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved": 0.5,
    "zero_bubble": 1 / 3,
    "zbv": 1 / 6,
}  # share of (pp - 1) micro-batches that a rank is idle


@dataclass(frozen=True)
class Seconds:
    """Hold the seconds of one step, by their cause."""

    products: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    rows: float = 0.0
    tensor: float = 0.0
    gathers: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values(), 0.0)


Parts = defaultdict[str, float]  # seconds by the field names of Seconds, and by the names that `once` uses


@dataclass(frozen=True)
class Routing:
    """Describe how evenly tokens go to experts."""

    spread: float = TRAINED  # standard deviation of an expert's rows, divided by their mean
    in_turn: bool = False  # the bench's routing=balanced: equal rows for all experts, neighbouring experts for a token


def step(
    spec: DenseSpec | MoESpec,
    config: TrainConfig,
    world: int,
    card: Hardware,
    routing: Routing | None = None,
    *,
    blocks: bool = False,
    ranges: Sequence[range] | None = None,
) -> Seconds:
    """Predict the seconds of one step of `config` on `world` GPUs.

    `blocks` leaves out head and optimiser, like a bench's stack of layers. `ranges` gives the layers of each stage, if
    known."""
    mesh, layers = config.mesh, (spec.dense if isinstance(spec, MoESpec) else spec).layers
    if ranges is None:
        ranges = [range(layers)] if mesh.pp == 1 else cut(spec, mesh.pp, mesh.schedule)
    replayed = not blocks and recorded(config, world, isinstance(spec, MoESpec))
    return Clock(spec, config, world, card, routing or Routing(), blocks, replayed).step(ranges)


def recorded(config: TrainConfig, world: int, moe: bool) -> bool:
    """Tell whether the trainer records a step once and replays it without the host (training/run/record.py).

    It does so on a single GPU if nothing in the config hinders it."""
    return config.model.graph is not False and not hindrance(config, world, moe, taught=config.teacher.asked)


class Clock:
    """Predict the seconds of one mapping; see `step` for the arguments."""

    def __init__(
        self,
        spec: DenseSpec | MoESpec,
        config: TrainConfig,
        world: int,
        card: Hardware,
        routing: Routing,
        blocks: bool,
        replayed: bool = False,  # a recorded step, which needs no host
    ) -> None:
        self.config, self.card, self.routing, self.blocks, self.mesh = config, card, routing, blocks, config.mesh
        self.replayed = replayed
        self.moe = spec if isinstance(spec, MoESpec) else None
        self.dense = spec.dense if isinstance(spec, MoESpec) else spec
        self.world, self.mode = world, config.model.recompute
        attention, experts = grids(self.mesh, world)
        self.sizes = attention | experts
        self.narrow = BYTES[config.model.computes()]
        self.tokens = config.micro_batch * config.data.sequence / (self.mesh.cp * self.mesh.tp)  # on one rank
        data = self.sizes["dp_shard"] * self.mesh.dp_replicate
        self.count = max(1, config.batch // (config.micro_batch * data))

    def step(self, ranges: Sequence[range]) -> Seconds:
        mesh, d = self.mesh, self.dense
        routed = sorted(self.moe.layers) if self.moe else []
        layer = {moe: self.layer(moe) for moe in (False, True) if (len(routed) if moe else d.layers - len(routed))}
        places: list[tuple[int, int, int, bool, bool]] = []
        for numbers in [[0]] if mesh.pp == 1 else stages(mesh.pp, mesh.schedule):
            parts = [ranges[number] for number in numbers]
            moe = sum(bisect_left(routed, part.stop) - bisect_left(routed, part.start) for part in parts)
            first, last = any(part.start == 0 for part in parts), any(part.stop == d.layers for part in parts)
            places.append((sum(map(len, parts)) - moe, moe, len(parts), first, last))
        ranks = {place: self.rank(layer, *place) for place in set(places)}  # many places of a pipeline are the same
        # the busiest rank waits for the first and the last micro-batch of the others
        whole = sum(ranks[place]["micro"] for place in places)
        for rank in ranks.values():
            rank["bubble"] += BUBBLES[mesh.schedule] * (whole - rank.pop("micro"))
        worst = max((ranks[place] for place in sorted(ranks)), key=lambda each: sum(each.values()))
        return Seconds(**{field.name: worst[field.name] for field in fields(Seconds)})

    def rank(self, layer: dict[bool, Parts], dense: int, moe: int, chunks: int, first: bool, last: bool) -> Parts:
        """Return the seconds of one place in the pipeline that has these dense and MoE layers in `chunks` stages."""
        total: Parts = defaultdict(float)
        for routed, often in ((False, dense), (True, moe)):
            for name, seconds in layer[routed].items() if often else ():
                total[name] += seconds * often * self.count
        for name, seconds in self.ends(first, last and not self.blocks).items():
            total[name] += seconds * self.count
        compute = sum(total.values())
        micro = compute / self.count
        once = self.once(dense, moe, first or last)
        # forward is a third of the time. Weights that stay are gathered under the first forward; sums over copies cross
        # under the last backward
        hidden = micro / 3 if self.weights_once else compute
        total["gathers"] += max(0.0, once["gathers"] - hidden) + once["exposed"]
        total["gathers"] += max(0.0, once["across"] - 2 * micro / 3)
        total["memory"] += 0 if self.blocks else once["memory"]
        if self.mesh.pp > 1:
            total["bubble"] = self.sent(chunks)
        total["micro"] = micro  # seconds of one micro-batch; `step` turns them into the bubble
        eager = self.card.host[0] * dense + self.card.host[1] * moe
        more = HOOKS * (self.sizes["dp_shard"] * self.mesh.cp * self.mesh.tp > 1)
        more += OVER_TP * (self.mesh.tp > 1) + OVER_CP * (self.mesh.cp > 1)
        beside = more * self.card.host[1] * (dense + moe)
        beside += DROPPING * self.card.host[1] * moe * (self.config.balance.capacity_factor > 0)
        host = (eager * (COMPILED if self.config.model.compile else 1) + beside) * self.count / 1e3
        if not self.replayed:  # FSDP works in every layer's hooks, so its work also fills a slow host's gaps
            busy = compute + total["gathers"] + (0 if self.blocks else once["memory"])
            total["host"] = (busy**TURNS + host**TURNS) ** (1 / TURNS) - busy
        total["optimizer"] = once["optimizer"]
        return total

    # ---- one layer: forward and backward of one micro-batch

    def layer(self, routed: bool) -> Parts:
        found = self.attending()
        moe = self.moe if routed else None
        width = moe.shared if moe else self.dense.ffn
        for part in (self.ffn(width) if width else {}, self.experts(moe) if moe else {}):
            for name, seconds in part.items():
                found[name] += seconds
        return found

    def attending(self) -> Parts:
        d, mesh, card = self.dense, self.mesh, self.card
        again = self.mode in ("attention", "full")
        seen = self.tokens * mesh.tp
        heads, of_keys = d.heads / mesh.tp, d.kv_heads / mesh.tp
        window = len(d.window_layers) / d.layers if d.window else 0
        sequence = self.config.data.sequence
        context = window * mean_context(sequence, d.window) + (1 - window) * mean_context(sequence, None)
        width = (d.head_dim + d.value_dim) / 2  # mean of the width of queries and keys and the width of values
        forward, both = attention_rates(card, width, 2 * context)
        core = CLOCK * 4 * heads * width * context * seen / 1e12
        found: Parts = defaultdict(float)
        found["products"] = sum(self.product(0, seen, out, inner, again) for out, inner in self.projections())
        found["attention"] = 3 * core / both + core / forward * again
        norms = (4 if d.block == "sandwich" else 2) * d.hidden * self.tokens
        turned = (heads + of_keys) * d.head_dim
        if d.latent is not None:
            norms += (d.latent.q_rank + d.latent.kv_rank) * seen
            turned = (heads + 1) * d.latent.rope
        passes = NORM * (1.5 if again else 1) * norms + ROTATION * turned * seen
        found["memory"] = self.passing(passes * self.narrow) * (1 if self.config.model.compile else EAGER)
        if d.latent is not None:
            joined = JOINED * (1.5 if again else 1) * 2 * heads * d.head_dim * seen
            found["memory"] += self.passing(joined * self.narrow)
        if mesh.tp > 1:
            found["tensor"] = (4 + 2 * again) * self.collective(mesh.tp, 1, seen * d.hidden * self.narrow)
        if mesh.cp > 1:
            found["tensor"] += self.around(seen, heads, of_keys, found["attention"])
        return found

    def projections(self) -> list[tuple[float, float]]:
        """List (columns out, columns in) of the products around attention, on a rank of tp."""
        d, tp = self.dense, self.mesh.tp
        if d.latent is None:
            return [((d.heads + 2 * d.kv_heads) * d.head_dim / tp, d.hidden), (d.hidden, d.heads * d.head_dim / tp)]
        at = d.latent  # each rank of tp computes all latents
        return [
            (at.q_rank + at.kv_rank + at.rope, d.hidden),
            (d.heads * d.head_dim / tp, at.q_rank or d.hidden),
            (d.heads * (d.head_dim - at.rope + at.value) / tp, at.kv_rank),
            (d.hidden, d.heads * at.value / tp),
        ]

    def around(self, seen: float, heads: float, of_keys: float, core: float) -> float:
        """Return the seconds of context parallel: attention hides a ring's keys and values, but not ulysses' heads."""
        mesh, width = self.mesh, (self.dense.head_dim + self.dense.value_dim) * self.narrow * seen
        if mesh.context == "ulysses":
            return 2 * self.exchange(mesh.cp, mesh.tp, (heads + of_keys) * width)
        return max(0.0, 3 * self.collective(mesh.cp, mesh.tp, of_keys * width * mesh.cp) - core)

    def ffn(self, width: float) -> Parts:
        d, tp = self.dense, self.mesh.tp
        again = self.mode == "full"
        seen, up = self.tokens * tp, 2 if d.gated else 1
        found: Parts = defaultdict(float)
        found["products"] = self.product(0, seen, up * width / tp, d.hidden, again)
        found["products"] += self.product(0, seen, d.hidden, width / tp, again)
        passes = ACTIVATION if self.config.model.compile else SEPARATE
        found["memory"] = self.passing(passes * seen * width / tp * self.narrow)
        if tp > 1:
            found["tensor"] = (4 + 2 * again) * self.collective(tp, 1, seen * d.hidden * self.narrow)
        return found

    def experts(self, moe: MoESpec) -> Parts:
        d, mesh = self.dense, self.mesh
        again = self.mode in ("experts", "full")
        kept, fullest = self.load(moe)
        local, width = moe.experts / mesh.ep, sum(moe.widths) / moe.experts / mesh.etp
        rows = self.tokens * moe.top_k * mesh.etp  # of a rank whose load is the mean
        each = rows * fullest / local
        even = 1 if self.routing.in_turn else each / (each + PARTIAL)
        up = 2 if d.gated else 1
        found: Parts = defaultdict(float)
        # recomputation repeats only the first of the two products
        found["experts"] = self.product(local, each, up * width, d.hidden, again) / even
        found["experts"] += self.product(local, each, d.hidden, width, False) / even
        found["memory"] = self.passing(ACTIVATION * rows * kept * width * self.narrow)
        found["memory"] += self.passing(ROUTER * self.tokens * moe.experts * 4)
        found["products"] = 3 * self.product(0, self.tokens, moe.experts, d.hidden, False)  # three make a float32 one
        # backward reuses the plan of forward, and does not wait
        found["rows"] = (1 + again) * self.waiting() + (4 + again) * self.home(moe, kept)
        if self.can.tells and mesh.ep > 1:
            choices = self.tokens * mesh.ep * moe.experts
            found["rows"] += (1 + again) * self.collective(mesh.ep, mesh.etp, choices)
        return found

    def load(self, moe: MoESpec) -> tuple[float, float]:
        """Return the share of rows that a capacity keeps, and the fullest rank's rows over the mean before the cut."""
        spread, room = self.routing.spread, self.config.balance.capacity_factor
        if self.routing.in_turn or not spread:
            return 1.0, 1.0
        ranks, normal = self.mesh.ep, NormalDist()
        # the expected highest of `ranks` normal numbers
        highest = normal.inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
        kept = 1.0
        if room:
            z = (room - 1) / spread
            kept = 1 - spread * (normal.pdf(z) - z * (1 - normal.cdf(z)))
        fullest = kept * (1 + spread / math.sqrt(moe.experts / ranks) * highest)
        return kept, min(fullest, room) if room else fullest

    def home(self, moe: MoESpec, kept: float) -> float:
        """Return the seconds of all rows on their way to the experts or back: the wires, and a sort at both ends."""
        mesh, row = self.mesh, self.dense.hidden * self.narrow
        rows = self.tokens * moe.top_k * kept
        leave = self.passing((self.tokens + rows) * row)
        if self.alone:
            return leave
        wires = self.wires(moe, kept, row)
        if self.can.sorts:
            return wires
        arrive = self.passing(2 * rows * mesh.etp * row)
        if mesh.etp > 1:  # every peer gets a copy of the rows, and the results are summed when they come back
            arrive += self.passing((mesh.etp + 1) * rows * row)
            arrive += self.exchange(mesh.etp, 1, rows * row * mesh.etp)
        return leave + wires + arrive

    def wires(self, moe: MoESpec, kept: float, row: float) -> float:
        mesh, card = self.mesh, self.card
        if mesh.ep == 1:
            return 0.0
        near, nodes = self.placed(mesh.ep, mesh.etp)
        if self.routing.in_turn:
            ranks = max(1.0, moe.top_k / (moe.experts / mesh.ep))
            far = max(1.0, moe.top_k / (moe.experts / nodes))
        else:
            ranks, far = distinct(moe.experts, moe.top_k, mesh.ep), distinct(moe.experts, moe.top_k, nodes)
        if self.can.each_choice:
            ranks = far = moe.top_k
        rate, more = card.rows.get(mesh.dispatcher, card.rows[DEFAULT])
        beside = self.tokens * kept * ranks * (1 - 1 / near) * (row / rate + more) / 1e9
        beyond = self.tokens * kept * far * (1 - 1 / nodes) * row / (card.network.rate * 1e9)
        latency = ((near - 1) * card.link.latency + (nodes - 1) * card.network.latency) / 1e6
        return max(beside, beyond) + latency

    # ---- once a step, or once a micro-batch

    def ends(self, first: bool, last: bool) -> Parts:
        d = self.dense
        found: Parts = defaultdict(float)
        if last:
            found["products"] = self.product(0, self.tokens, d.vocab, d.hidden, False)
            found["memory"] = self.passing(LOGITS * self.tokens * d.vocab * self.narrow)
        if first:
            found["memory"] += self.passing(2 * 4 * d.vocab * d.hidden)  # the embedding's gradient starts as zeros
        return found

    @property
    def weights_once(self) -> bool:
        return not self.mesh.reshard or self.mesh.pp > 1

    def once(self, dense_layers: int, moe_layers: int, edge: bool) -> Parts:
        """Return the seconds that a rank's parameters take once a step: FSDP, casts, sums and the optimiser.

        FSDP requests a layer's weights while the previous layer computes. The first layer requests the weights of the
        second before its own attention and experts request theirs, so nothing hides the gathers of two layers. FSDP
        collects a unit's gradients only when the sum of the unit before has ended. The sums of experts (or of an FFN)
        hide under the way back of the rows and the backward of the attention in their layer. Nothing hides the sums of
        attention. The next layer's FFN hides the rest of a layer."""
        d, mesh, moe, size = self.dense, self.mesh, self.moe, self.sizes
        layers = dense_layers + moe_layers
        matrices = 3 if d.gated else 2
        attention = sum(out * inner for out, inner in self.projections()) * layers
        ffn = moe_layers * (moe.shared if moe else 0) * matrices * d.hidden / mesh.tp
        ffn += dense_layers * d.ffn * matrices * d.hidden / mesh.tp
        routed = moe_layers * sum(moe.widths) / mesh.ep / mesh.etp * matrices * d.hidden if moe else 0
        small = layers * 2 * d.hidden + moe_layers * d.hidden * (moe.experts if moe else 0)
        ends = edge * d.vocab * d.hidden * (1 if d.tied or mesh.pp > 1 else 2)
        over = size["dp_shard"] * mesh.cp
        # (parameters, ranks of FSDP, stride, gathered bytes of each parameter, units in each layer, ranks of copies,
        # name among the sums)
        kinds = [
            (attention, over, mesh.tp, self.narrow, 1, mesh.dp_replicate, "attention"),
            (ffn, over, mesh.tp, self.narrow, 0.5, mesh.dp_replicate, "ffn"),
            (routed, size["edp_shard"], mesh.ep * mesh.etp, self.narrow, 1, size["edp_replicate"], "ffn"),
            (small, over * mesh.tp, 1, 4, 1, mesh.dp_replicate, "small"),
            (0 if self.blocks else ends, over * mesh.tp, 1, self.narrow, 0, mesh.dp_replicate, "ends"),
        ]
        times = 1 if self.weights_once else self.count  # sums in a step; freed weights are gathered twice as often
        gathers = 1 if self.weights_once else 2 * self.count
        found: Parts = defaultdict(float)
        sums: Parts = defaultdict(float)
        shards = moments = 0.0
        for parameters, ranks, stride, width, units, copies, place in kinds:
            shard = parameters / ranks
            shards += shard
            moments += shard * MOMENTS["adamw" if place in ("small", "ends") else self.config.optim.name]
            if not parameters:
                continue
            found["memory"] += self.passing(self.kept(parameters, ranks, width, gathers, times))
            calls = units * layers + (units == 0)
            gathered, summed = (
                calls * self.collective(ranks, stride, parameters * each / calls) if ranks > 1 else 0.0
                for each in (width, 4)
            )
            if copies > 1:  # a scatter and a gather over copies, once a step
                across = 2 * calls * self.collective(copies, ranks * stride, shard * 4 / calls)
                found["exposed" if place == "ends" else "across"] += across
            found["exposed" if place == "ends" else "gathers"] += gathers * gathered
            sums[place] += times * summed
        again = self.mode in ("attention", "full")
        under = layers * sum(self.attending().values()) * (2 + again) / (3 + again)
        under += moe_layers * self.home(moe, self.load(moe)[0]) if moe else 0.0
        found["exposed"] += sums["ends"] + sums["attention"] + max(0.0, sums["ffn"] - times * under)
        found["exposed"] += 2 * found["gathers"] / max(2, layers)
        if not self.blocks:
            single = self.count == 1 and size["edp_shard"] == 1 and routed > shards / 2
            gradients = self.narrow if single else 4
            held = BYTES[self.config.optim.moments]
            mixed = min(gradients, held) < 4  # then a kernel of ours updates the weights
            update = (shards * (8 + gradients) + 2 * moments * held) * (1 if mixed else FUSED)
            found["optimizer"] = self.passing(update + shards * gradients)
        return found

    def kept(self, parameters: float, ranks: int, width: float, gathers: int, times: int) -> float:
        """Return the bytes that pass through memory to cast and gather weights and to add gradients.

        Norms and routers stay float32. They are too few to count differently."""
        shard = parameters / ranks
        if ranks == 1:
            return (10 * (self.count - 1) + 6) * shard
        # the shard is cast and copied into the buffer of the gather, and the result is split into parameters
        size = gathers * ((6 + 2 * width) * shard + 2 * width * parameters)
        if not self.weights_once:
            return size + times * TOGETHER * parameters + 12 * (self.count - 1) * shard
        added = 6 + 10 * (self.count - 1) if self.count > 1 else 0  # cast to float32, then each further one is added
        return size + (added * MIXED + TOGETHER) * parameters

    def sent(self, chunks: int) -> float:
        """Return the seconds that a pipeline's stages wait for messages in a step, forward and backward."""
        stride = self.world // self.mesh.pp
        link = self.wire(stride)
        size = self.tokens * self.dense.hidden * self.narrow
        return 2 * self.count * chunks * (size / (link.rate * 1e9) + link.latency / 1e6)

    # ---- single costs

    def product(self, groups: float, rows: float, out: float, inner: float, again: bool) -> float:
        forward, to_input, to_weight = rates(self.card, round(groups), max(1, round(rows)), round(out), round(inner))
        work = CLOCK * 2 * max(groups, 1) * rows * out * inner / 1e12
        return work * ((1 + again) / forward + 1 / to_input + 1 / to_weight)

    def passing(self, size: float) -> float:
        return size / (self.card.bandwidth * 1e9)

    def waiting(self) -> float:
        mesh = self.mesh
        asks = not (self.config.balance.pad_to_capacity or self.alone)
        both = BOTH if min(mesh.ep, mesh.etp) > 1 else 1
        return asks * both * self.card.host[1] * self.can.wait / 1e3

    @property
    def can(self) -> Capabilities:
        """Return the capabilities of the dispatcher."""
        return capabilities(self.mesh.dispatcher)

    @property
    def alone(self) -> bool:
        return self.mesh.ep * self.mesh.etp == 1

    def wire(self, stride: int) -> Link:
        return self.card.link if stride < self.card.node else self.card.network

    def placed(self, size: int, stride: int) -> tuple[int, int]:
        """Return a group's ranks in one node and its nodes; neighbours of the group are `stride` ranks apart."""
        near = max(1, min(size, self.card.node // stride))
        return near, -(-size // near)

    def collective(self, size: int, stride: int, whole: float) -> float:
        """Return the seconds to gather `whole` bytes on every rank, or to sum them over the ranks.

        The ring passes through all nodes, and uses the network of every card that the group has in a node."""
        card = self.card
        near, nodes = self.placed(size, stride)
        latency = ((near - 1) * card.link.latency + (nodes - 1) * card.network.latency) / 1e6
        inside = whole * (1 - 1 / size) / (card.link.rate * 1e9) if near > 1 else 0.0
        return latency + max(inside, whole * (1 - 1 / nodes) / (near * card.network.rate * 1e9))

    def exchange(self, size: int, stride: int, own: float) -> float:
        """Return the seconds of an all-to-all in which each rank sends `own` bytes."""
        card = self.card
        near, nodes = self.placed(size, stride)
        latency = ((near - 1) * card.link.latency + (nodes - 1) * card.network.latency) / 1e6
        inside = own * (near - 1) / size / (card.rows[DEFAULT][0] * 1e9)
        return latency + max(inside, own * (1 - 1 / nodes) / (card.network.rate * 1e9))


def distinct(experts: int, k: int, places: int) -> float:
    """Return the expected number of places that hold a token's k random experts, for experts spread over `places`."""
    away = experts - experts // places
    return places * (1 - (math.comb(away, k) / math.comb(experts, k) if away >= k else 0.0))
