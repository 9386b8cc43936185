"""How long will a step take? A sum over what a rank does, for any mapping, of the rates in a file of configs/hardware.

What is summed, of the slowest rank:

    products    projections, dense FFNs and the head, by the shape of each: forward, gradients of input and weight
    experts     grouped products, of the fullest rank, at uneven counts
    attention   by half of the causal square (of the window)
    memory      what passes over the data cost: norms, rotation, activations, routers, the loss, casts, sums
    rows        to the experts and home, sorting included; this trainer hides nothing of it
    tensor      what tp and cp move within a layer
    gathers     FSDP's gathers and sums, as far as nothing hides them: see `once`
    bubble      a pipeline's idle time, and what its stages send
    optimizer   weights, moments and gradients, read and written once
    host        what is left waiting where the host launches more slowly than the device computes, unless recorded

Recomputation is in the part that it repeats. Constants of the model stand below with where they are from; all else is
counted, or a rate of the hardware file. benchmarks/results/2026-11-planning.md compares it with what was measured.
Frozen parameters, adapters, teachers, Muon's products, documents and FP8 are not in it: they count as plain training.
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
from training.parallel.mesh import grids
from training.parallel.pipeline import cut, stages
from training.run.record import MOST, hindrance
from upcycle.arch.spec import BYTES, DenseSpec, MoESpec
from upcycle.planning.size import mean_context

# Rows of an expert that its last tiles have room for and it has not: half of a pair of 128. Of 1,024 rows that leaves
# 0.89 of the rate at even counts: four layers balanced were 2.4 ms of 26.2 faster on an H100, and 3 of 25 on an H200
PARTIAL = 128
# Kernels of a profile took 64.7 ms where a step takes 67.5: the card lowers its clock under load
CLOCK = 1.04
EAGER = 2  # passes of norms and rotation without model.compile: SmolLM2's norms reached a third of the memory's rate
# Standard deviation of an expert's rows, of their mean. Random routers on random tokens, as the bench has: a capacity
# of 1 won 3.3 to 4.2 % of a step. In training the fullest of 8 to 32 had 1.2 to 1.43 times the mean (docs/science.md).
RANDOM, TRAINED = 0.05, 0.2
# A host and a device that are nearly equally fast wait for each other by turns: the sum of fourth powers, by SmolLM2's
# dense step on an H100, 252 ms where the device was busy for 200
TURNS = 4
COMPILED = 0.5  # of a layer's host time with model.compile; an estimate
# What the host does besides in a layer and micro-batch, of a MoE layer's host time: FSDP's hooks around its units (a
# MoE layer took 9.5 ms with them and 5 without, `measure` on 2 H200), and what tp and cp send (six mappings on those)
HOOKS, OVER_TP, OVER_CP = 0.8, 0.15, 0.4
# A capacity's mask, of a MoE layer's host time: 100 of 1,731 of torch's calls forward and backward, on two CPU ranks
DROPPING = 0.06
# Times a dispatcher's wait, where rows go over ep and etp: 54 of torch's calls instead of 47, on four CPU ranks
BOTH = 1.15
# Passes over data in elements, forward and backward: a norm with its residual addition, rotation and head norm, an
# activation (9 with what is made again), and over logits the products, the loss and its gradient
NORM, ROTATION, ACTIVATION, LOGITS = 8, 5, 9, 5
SEPARATE = 14  # of a dense FFN's activation, where no kernel of ours and no compiler makes one pass of product and gate
JOINED = 4  # of queries and keys of latents, whose turned part is put behind the rest and taken off their gradient
ROUTER = 12  # of float32 logits: scores, choice, statistics, losses
# How much longer than a copy's a byte takes in passes of torch's own, in profiles of steps on two H200: float32 +=
# bfloat16 (2.6 and 2.5 TB/s in two rows with ep 2, where copies have 4.2; our kernel for experts had 4.2), and AdamW
# with all in float32 (2.9 TB/s in three)
MIXED, FUSED = 1.64, 1.45
# As long as a copy of so many bytes takes torch to put an element of FSDP's gradients where they are summed: 660 M of
# them in 1.91 ms, of bfloat16, in the profile of two layers with ep 2. (Of float32: 736 M in less than 2.37)
TOGETHER = 12
BUBBLES = {
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved": 0.5,
    "zero_bubble": 1 / 3,
    "zbv": 1 / 6,
}  # of (pp - 1) micro-batches


@dataclass(frozen=True)
class Seconds:
    """Of one step, by what takes them."""

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


Parts = defaultdict[str, float]  # seconds by the names of Seconds; and of what happens once a step


@dataclass(frozen=True)
class Routing:
    """How evenly tokens go to experts."""

    spread: float = TRAINED  # see RANDOM
    in_turn: bool = False  # all experts equally many rows, a token's experts neighbours: the bench's routing=balanced


def step(
    spec: DenseSpec | MoESpec,
    config: TrainConfig,
    world: int,
    card: Hardware,
    routing: Routing | None = None,
    *,
    blocks: bool = False,
    ranges: Sequence[range] | None = None,
    taken: float = 0.0,
) -> Seconds:
    """Of a step of `config` on `world` GPUs. `blocks`: no head and no optimiser, as a bench's stack of layers.
    `ranges`: the layers of each stage, where they are known. `taken`: bytes of a GPU that the step takes, if known."""
    mesh, layers = config.mesh, (spec.dense if isinstance(spec, MoESpec) else spec).layers
    if ranges is None:
        ranges = [range(layers)] if mesh.pp == 1 else cut(spec, mesh.pp, mesh.schedule)
    replayed = not blocks and recorded(config, world, isinstance(spec, MoESpec), taken / card.memory / 1e9)
    return Clock(spec, config, world, card, routing or Routing(), blocks, replayed).step(ranges)


def recorded(config: TrainConfig, world: int, moe: bool, share: float) -> bool:
    """Whether a step is recorded once and replayed without its host (training/run/record.py): one GPU that trains
    alone,
    with nothing in the way; by itself only where the step takes half of the memory at most. `share`: of it."""
    asked = config.model.graph
    free = not hindrance(config, world, moe, taught=config.teacher.asked)
    return free and (share <= MOST if asked is None else asked)


class Clock:
    def __init__(
        self,
        spec: DenseSpec | MoESpec,
        config: TrainConfig,
        world: int,
        card: Hardware,
        routing: Routing,
        blocks: bool,
        replayed: bool = False,  # without a host
    ) -> None:
        self.config, self.card, self.routing, self.blocks, self.mesh = config, card, routing, blocks, config.mesh
        self.replayed = replayed
        self.moe = spec if isinstance(spec, MoESpec) else None
        self.dense = spec.dense if isinstance(spec, MoESpec) else spec
        self.world, self.mode = world, config.model.recompute
        attention, experts = grids(self.mesh, world)
        self.sizes = attention | experts
        self.narrow = BYTES[config.model.computes()]
        self.tokens = config.micro_batch * config.data.sequence / (self.mesh.cp * self.mesh.tp)  # a rank's own
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
        ranks = {place: self.rank(layer, *place) for place in set(places)}  # many of a pipeline are alike
        # who has most to do waits for the first and the last micro-batch of the others
        whole = sum(ranks[place]["micro"] for place in places)
        for rank in ranks.values():
            rank["bubble"] += BUBBLES[mesh.schedule] * (whole - rank.pop("micro"))
        worst = max((ranks[place] for place in sorted(ranks)), key=lambda each: sum(each.values()))
        return Seconds(**{field.name: worst[field.name] for field in fields(Seconds)})

    def rank(self, layer: dict[bool, Parts], dense: int, moe: int, chunks: int, first: bool, last: bool) -> Parts:
        """A step of one place in the pipeline, with so many dense and MoE layers in so many stages."""
        total: Parts = defaultdict(float)
        for routed, often in ((False, dense), (True, moe)):
            for name, seconds in layer[routed].items() if often else ():
                total[name] += seconds * often * self.count
        for name, seconds in self.ends(first, last and not self.blocks).items():
            total[name] += seconds * self.count
        compute = sum(total.values())
        micro = compute / self.count
        once = self.once(dense, moe, first or last)
        # a forward is a third; weights that stay are gathered in the first, and their sums cross in the last backward
        hidden = micro / 3 if self.weights_once else compute
        total["gathers"] += max(0.0, once["gathers"] - hidden) + once["exposed"]
        total["gathers"] += max(0.0, once["across"] - 2 * micro / 3)
        total["memory"] += 0 if self.blocks else once["memory"]
        if self.mesh.pp > 1:
            total["bubble"] = self.sent(chunks)
        total["micro"] = micro  # of one micro-batch; `step` makes the bubble of it
        eager = self.card.host[0] * dense + self.card.host[1] * moe
        more = HOOKS * (self.sizes["dp_shard"] * self.mesh.cp * self.mesh.tp > 1)
        more += OVER_TP * (self.mesh.tp > 1) + OVER_CP * (self.mesh.cp > 1)
        beside = more * self.card.host[1] * (dense + moe)
        beside += DROPPING * self.card.host[1] * moe * (self.config.balance.capacity_factor > 0)
        host = (eager * (COMPILED if self.config.model.compile else 1) + beside) * self.count / 1e3
        if not self.replayed:  # what FSDP does is in every layer's hooks, and fills a slow host's gaps too
            busy = compute + total["gathers"] + (0 if self.blocks else once["memory"])
            total["host"] = (busy**TURNS + host**TURNS) ** (1 / TURNS) - busy
        total["optimizer"] = once["optimizer"]
        return total

    # ---- a layer, forward and backward of one micro-batch

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
        width = (d.head_dim + d.value_dim) / 2  # of queries and keys, and of values
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
        """(columns out, columns in) of the products around attention, on a rank of tp."""
        d, tp = self.dense, self.mesh.tp
        if d.latent is None:
            return [((d.heads + 2 * d.kv_heads) * d.head_dim / tp, d.hidden), (d.hidden, d.heads * d.head_dim / tp)]
        at = d.latent  # each rank of tp makes all latents
        return [
            (at.q_rank + at.kv_rank + at.rope, d.hidden),
            (d.heads * d.head_dim / tp, at.q_rank or d.hidden),
            (d.heads * (d.head_dim - at.rope + at.value) / tp, at.kv_rank),
            (d.hidden, d.heads * at.value / tp),
        ]

    def around(self, seen: float, heads: float, of_keys: float, core: float) -> float:
        """What context parallel moves: a ring's keys and values pass under its attention, ulysses' heads do not."""
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
        rows = self.tokens * moe.top_k * mesh.etp  # in balance
        each = rows * fullest / local
        even = 1 if self.routing.in_turn else each / (each + PARTIAL)
        up = 2 if d.gated else 1
        found: Parts = defaultdict(float)
        # of the two products only the first is made again
        found["experts"] = self.product(local, each, up * width, d.hidden, again) / even
        found["experts"] += self.product(local, each, d.hidden, width, False) / even
        found["memory"] = self.passing(ACTIVATION * rows * kept * width * self.narrow)
        found["memory"] += self.passing(ROUTER * self.tokens * moe.experts * 4)
        found["products"] = 3 * self.product(0, self.tokens, moe.experts, d.hidden, False)  # float32 out of three
        # backward goes by the plan of forward, and waits for nobody
        found["rows"] = (1 + again) * self.waiting() + (4 + again) * self.home(moe, kept)
        if self.can.tells and mesh.ep > 1:
            choices = self.tokens * mesh.ep * moe.experts
            found["rows"] += (1 + again) * self.collective(mesh.ep, mesh.etp, choices)
        return found

    def load(self, moe: MoESpec) -> tuple[float, float]:
        """(the share of rows that a capacity keeps, the fullest rank's rows over the mean before it)"""
        spread, room = self.routing.spread, self.config.balance.capacity_factor
        if self.routing.in_turn or not spread:
            return 1.0, 1.0
        ranks, normal = self.mesh.ep, NormalDist()
        highest = normal.inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0  # of so many normal numbers
        kept = 1.0
        if room:
            z = (room - 1) / spread
            kept = 1 - spread * (normal.pdf(z) - z * (1 - normal.cdf(z)))
        fullest = kept * (1 + spread / math.sqrt(moe.experts / ranks) * highest)
        return kept, min(fullest, room) if room else fullest

    def home(self, moe: MoESpec, kept: float) -> float:
        """Rows from tokens to experts or back: sorted where they leave and where they arrive, and on the wires."""
        mesh, row = self.mesh, self.dense.hidden * self.narrow
        rows = self.tokens * moe.top_k * kept
        leave = self.passing((self.tokens + rows) * row)
        if self.alone:
            return leave
        wires = self.wires(moe, kept, row)
        if self.can.sorts:
            return wires
        arrive = self.passing(2 * rows * mesh.etp * row)
        if mesh.etp > 1:  # repeated for every peer, and summed up where they come back
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

    # ---- once a step, or a micro-batch

    def ends(self, first: bool, last: bool) -> Parts:
        d = self.dense
        found: Parts = defaultdict(float)
        if last:
            found["products"] = self.product(0, self.tokens, d.vocab, d.hidden, False)
            found["memory"] = self.passing(LOGITS * self.tokens * d.vocab * self.narrow)
        if first:
            found["memory"] += self.passing(2 * 4 * d.vocab * d.hidden)  # its gradient is made of zeros
        return found

    @property
    def weights_once(self) -> bool:
        return not self.mesh.reshard or self.mesh.pp > 1

    def once(self, dense_layers: int, moe_layers: int, edge: bool) -> Parts:
        """FSDP's part, casts, sums and the optimiser: of the parameters of a rank's layers, by kind.

        FSDP asks for a layer's weights while the layer before computes. The first layer asks for the second's before
        its own attention and experts come to ask for theirs, so the gathers of two have nothing to hide under. A unit's
        gradients are not put together for their sum before the sum of the unit before is done: experts' (or an FFN's)
        hide under their rows' way home and the backward of their layer's attention, attention's under nothing, the rest
        of a layer under the next one's FFN."""
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
        # (parameters, ranks of FSDP, stride, bytes that are gathered of each, units in each layer, ranks of copies,
        # which of the sums above)
        kinds = [
            (attention, over, mesh.tp, self.narrow, 1, mesh.dp_replicate, "attention"),
            (ffn, over, mesh.tp, self.narrow, 0.5, mesh.dp_replicate, "ffn"),
            (routed, size["edp_shard"], mesh.ep * mesh.etp, self.narrow, 1, size["edp_replicate"], "ffn"),
            (small, over * mesh.tp, 1, 4, 1, mesh.dp_replicate, "small"),
            (0 if self.blocks else ends, over * mesh.tp, 1, self.narrow, 0, mesh.dp_replicate, "ends"),
        ]
        times = 1 if self.weights_once else self.count  # sums a step; gathers are twice as many where weights are freed
        gathers = 1 if self.weights_once else 2 * self.count
        found: Parts = defaultdict(float)
        sums: Parts = defaultdict(float)
        shards = 0.0
        for parameters, ranks, stride, width, units, copies, place in kinds:
            shard = parameters / ranks
            shards += shard
            if not parameters:
                continue
            found["memory"] += self.passing(self.kept(parameters, ranks, width, gathers, times))
            calls = units * layers + (units == 0)
            gathered, summed = (
                calls * self.collective(ranks, stride, parameters * each / calls) if ranks > 1 else 0.0
                for each in (width, 4)
            )
            if copies > 1:  # over copies, once a step: a scatter and a gather
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
            moments = {"adamw": 2, "muon": 1}[self.config.optim.name] * BYTES[self.config.optim.moments]
            single = self.count == 1 and size["edp_shard"] == 1 and routed > shards / 2
            gradients = self.narrow if single else 4
            mixed = min(gradients, BYTES[self.config.optim.moments]) < 4  # then a kernel of ours does it
            update = (8 + 2 * moments + gradients) * (1 if mixed else FUSED)
            found["optimizer"] = self.passing(shards * (update + gradients))
        return found

    def kept(self, parameters: float, ranks: int, width: float, gathers: int, times: int) -> float:
        """Bytes that pass through memory for weights that are cast and gathered and gradients that are added up. (Norms
        and routers are float32 throughout; they are too few to be counted in another way.)"""
        shard = parameters / ranks
        if ranks == 1:
            return (10 * (self.count - 1) + 6) * shard
        # cast, put where the others read it, and taken apart
        size = gathers * ((6 + 2 * width) * shard + 2 * width * parameters)
        if not self.weights_once:
            return size + times * TOGETHER * parameters + 12 * (self.count - 1) * shard
        added = 6 + 10 * (self.count - 1) if self.count > 1 else 0  # made float32, and others added
        return size + (added * MIXED + TOGETHER) * parameters

    def sent(self, chunks: int) -> float:
        """What a pipeline's stages send in a step, forward and back; they wait for it."""
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
        """What the dispatcher does."""
        return capabilities(self.mesh.dispatcher)

    @property
    def alone(self) -> bool:
        return self.mesh.ep * self.mesh.etp == 1

    def wire(self, stride: int) -> Link:
        return self.card.link if stride < self.card.node else self.card.network

    def placed(self, size: int, stride: int) -> tuple[int, int]:
        """(ranks of a group in one node, nodes); its neighbours are `stride` ranks apart."""
        near = max(1, min(size, self.card.node // stride))
        return near, -(-size // near)

    def collective(self, size: int, stride: int, whole: float) -> float:
        """A gather of `whole` bytes on every rank, or the sum that is its transpose: a ring through all nodes, which
        has as many cards' network as the group has ranks in a node."""
        card = self.card
        near, nodes = self.placed(size, stride)
        latency = ((near - 1) * card.link.latency + (nodes - 1) * card.network.latency) / 1e6
        inside = whole * (1 - 1 / size) / (card.link.rate * 1e9) if near > 1 else 0.0
        return latency + max(inside, whole * (1 - 1 / nodes) / (near * card.network.rate * 1e9))

    def exchange(self, size: int, stride: int, own: float) -> float:
        """An all-to-all of `own` bytes that each rank has."""
        card = self.card
        near, nodes = self.placed(size, stride)
        latency = ((near - 1) * card.link.latency + (nodes - 1) * card.network.latency) / 1e6
        inside = own * (near - 1) / size / (card.rows[DEFAULT][0] * 1e9)
        return latency + max(inside, own * (1 - 1 / nodes) / (card.network.rate * 1e9))


def distinct(experts: int, k: int, places: int) -> float:
    """How many of the `places` that the experts lie in a token's k random experts are in."""
    away = experts - experts // places
    return places * (1 - (math.comb(away, k) / math.comb(experts, k) if away >= k else 0.0))
