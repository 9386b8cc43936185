"""Do islands learn? Train a small MoE on four islands of unequal speed, with a simulated clock and simulated links.

    python -m benchmarks.islands_learn words FOLDER tokens=/data/tok vocab=1024
                                                    write token shards with a small vocabulary, for a toy
    python -m benchmarks.islands_learn base FOLDER tokens=/data/tok
                                                    train a dense model from nothing
    python -m benchmarks.islands_learn arms FOLDER tokens=/data/tok
                                                    run each arm at each rate; append to FOLDER/rows.jsonl
    python -m benchmarks.islands_learn arms FOLDER tokens=/data/tok tuned=ROWS seeds=0,1,2
                                                    run each arm at its best rate, and the runs that follow
    python -m benchmarks.islands_learn arms FOLDER tokens=/data/tok "named=1:copies:2:5e-4;3:copies:0:1e-3:70:794:1e8"
                                                    run only these arms: number, model, seed and rate; every, seconds
                                                    and link may follow
    python -m benchmarks.islands_learn table FOLDER/rows.jsonl [plot=curves.png]
                                                    print the table of results/2026-11-islands.md
    python -m benchmarks.islands_learn table benchmarks/data/islands_smollm2.jsonl
                                                    print the table of the runs of SmolLM2 on GPUs

The steps are real: the trainer makes them, with AdamW, clipping and balancing, on a model that is upcycled while it
loads. The rules of push and pull are real too, and so is the size of every message. Only the time is simulated. One
process handles the events (an island has finished its steps; its push has reached the server) in the order of a virtual
clock. A step takes 1, 1.07, 1.21 or 1.9 seconds, depending on the island. A message takes as long as it would for a
model of 1 billion numbers, and each island has its own link. An island with one H100 and steps of 65,000 tokens has
about this ratio between computing and sending.

A run ends after a number of steps, summed over all islands (equal tokens), or at a time (equal seconds). Its learning
rate falls towards that end.
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import itertools
import json
import queue
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import Tensor

from evaluation.judge.seeds import paired
from training.checkpoint import layout
from training.checkpoint.export import export
from training.config.schema import TrainConfig
from training.data.open import check_tokens, open_training, open_validation
from training.islands.config import IslandsConfig
from training.islands.island import OTHER, Island
from training.islands.link import wire
from training.islands.places import Layout
from training.islands.rules import diloco
from training.islands.sparse import Sparse
from training.observe.plots import COLORS
from training.optim.schedule import ScheduleConfig, schedule
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.run import build, parts
from training.run.record import stepping
from training.run.step import train_step, validate
from upcycle import plugin
from upcycle.config.reading import build as built
from upcycle.io import publish

SPEEDS = (1.0, 1.07, 1.21, 1.9)
NUMBERS = 1e9  # of the model for which the clock counts
LINKS = (1e8, 1e9, 1e10)
KEPT = 3  # ids that `words` does not change: they begin and end documents
FINE = 1000  # parts of a run, each with its own learning rate


@dataclass(frozen=True)
class Size:
    """Hold the sizes of the model, of its data and of the training."""

    hidden: int = 384
    layers: int = 4
    ffn: int = 1024
    source: str = ""  # the dense model's folder; "": train one of the sizes above from nothing
    every: int = 2  # 2: every second layer is upcycled
    copies: int = 8
    sequence: int = 128
    batch: int = 8  # sequences in a step of an island
    micro: int = 0  # sequences in a micro-batch; 0: the whole batch
    steps: int = 800  # steps of all islands together
    base: int = 600  # steps of the dense model, with 8 such batches each
    held: int = 12000  # tokens of each held-out set
    vocab: int = 49152
    train: str = "encyclopedia,techdocs"  # folders in `tokens`, separated by commas
    valid: str = "encyclopedia-val,techdocs-val"
    compute: str = "bfloat16"
    points: int = 8  # points of a run's curve before its end


SMALL = Size(
    hidden=32, layers=2, ffn=64, every=1, copies=4, sequence=64, steps=160, base=30, held=2000, compute="float32"
)


@dataclass(frozen=True)
class Arm:
    name: str
    rule: str = "dgs"  # "": one big run instead of islands
    model: str = "copies"  # copies | groups
    seed: int = 0
    every: int = 20
    share: float = 0.014
    answer: float = 0.014
    momentum: float = 0.0
    keep: bool = True
    gain: float = 0.0
    rate: float = 0.7  # DiLoCo's outer rate
    outer: float = 0.9  # DiLoCo's outer momentum
    peak: float = 6e-4
    link: float = 1e8
    seconds: float = 0.0  # 0: the run ends after the steps of its Size


class Runner:
    """Hold what all arms of a process share: the held-out text, the upcycled model and the device."""

    def __init__(self, size: Size, tokens: Path, folder: Path, device: str) -> None:
        self.size, self.tokens, self.folder, self.device = size, tokens, folder, torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton runs its kernels on the current device
        self.mesh = ParallelMesh(MeshConfig(), device_type=self.device.type)
        self.ones: dict[tuple[str, int], One] = {}  # kept, because a step is recorded

    def one(self, arm: Arm, batch: int, islands: int = 1) -> One:
        """Return a learner before its first step, with the arm's seed. Keep learners of only one kind of model."""
        config, kind = self.config(self.moe(arm), batch, arm.seed), (arm.model, batch)
        if any(model != arm.model for model, _ in self.ones):
            self.forget()  # a recorded step holds memory that other processes need
        if kind in self.ones:
            self.ones[kind].renew(config)
        else:
            self.ones[kind] = One(self, config, islands)
        return self.ones[kind]

    def forget(self) -> None:
        self.ones.clear()
        gc.collect()  # a learner and its hooks refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def config(self, model: dict[str, Any], batch: int, seed: int) -> TrainConfig:
        data = {
            "train": [str(self.tokens / name) for name in self.size.train.split(",")],
            "valid": [{"path": str(self.tokens / name), "tokens": self.size.held} for name in self.size.valid.split(",")],
            "sequence": self.size.sequence, "seed": seed, "mask_documents": False,
        }  # fmt: skip
        given = {
            "model": {"dtype": self.size.compute, **model}, "data": data, "batch": batch, "micro_batch": self.size.micro or self.size.batch,
            "optim": {"weight_decay": 0.0}, "seed": seed, "device": self.device.type,
        }  # fmt: skip
        found: TrainConfig = built(TrainConfig, given, "")
        return found

    def moe(self, arm: Arm) -> dict[str, Any]:
        """Return keys that copy whole FFNs or half FFNs. Both models have as many weights, in total and for a token."""
        more: dict[str, Any] = {"experts": self.size.copies, "top_k": 2}
        if arm.model == "groups":
            more = {"experts": self.size.copies, "granularity": 2, "top_k": 4, "method": "virtual_group",
                    "router": {"init": {"name": "virtual_group"}, "choice": "each-slice"}}  # fmt: skip
        layers = f"every:{self.size.every}" if self.size.every > 1 else "all"
        return {
            "upcycle": {
                "source": self.size.source or str(self.folder / "dense"),
                "target": "upcycled",
                "layers": layers,
                "seed": arm.seed,
                **more,
            }
        }

    def learner(self, config: TrainConfig) -> tuple[build.Learner, layout.Origin]:
        with parts.source(config, parts.observing(config, self.device)) as origin:
            config, _ = parts.with_backend(config, origin.spec, self.device.type)
            layers = range(origin.dense.layers)
            model = parts.divided(config, origin, self.mesh, layers, self.device)
            if config.model.random:
                layout.initialise(model, config.seed)
            else:
                layout.load(model, origin)
            return build.learner(config, [model], self.mesh, self.device), origin

    def loss(self, learner: build.Learner) -> float:
        """Return the mean loss over the held-out sets."""
        config = replace(learner.config, batch=16, micro_batch=16)
        valid = open_validation(config.data, learner.model.dense.vocab)
        found = validate(replace(learner, config=config), valid, lambda: None)
        return statistics.fmean(found[f"valid/{name}/loss"] for name in self.size.valid.split(","))


class One:
    """Train all islands in turn with one learner. Each island has its own order of samples and its own moments, which
    are copied into the learner at the island's turn. The weights go in and out as one vector."""

    def __init__(self, runner: Runner, config: TrainConfig, islands: int = 1, number: int = 0) -> None:
        self.learner, self.origin = runner.learner(config)
        self.islands, self.number = islands, number
        self.open(config)
        self.make = stepping(self.learner, train_step)  # a GPU records it, so tensors must stay in place
        self.named = dict(sorted((n, p) for n, p in self.learner.model.named_parameters() if p.requires_grad))
        assert self.learner.optimizer is not None
        optimizer = self.learner.optimizer
        self.live = [optimizer.skipped, *(x for slot in optimizer.slots for x in slot.state.values())]
        self.kept = [[x.clone() for x in self.live] for _ in range(islands if islands > 1 else 0)]

    def open(self, config: TrainConfig) -> None:
        seeds = [config.data.seed + OTHER * (self.number + k) for k in range(self.islands)]
        self.samples = [open_training(replace(config.data, seed=seed), self.origin.dense.vocab) for seed in seeds]
        self.cursors, self.turn = [0] * self.islands, 0

    @torch.no_grad()
    def renew(self, config: TrainConfig) -> None:
        """Begin another run of the same shapes: load weights into the same tensors, and set everything else to 0."""
        learner = self.learner
        assert learner.optimizer is not None
        assert all(p.dtype == torch.float32 for p in self.named.values()), (
            "a separate master copy would keep its old values"
        )
        with parts.source(config, parts.observing(config, learner.device)) as self.origin:
            layout.load(learner.model, self.origin)
        states = (learner.guard.state_dict(), learner.balance.load.state_dict())
        for tensor in itertools.chain(self.live, *self.kept, *(state.values() for state in states)):
            tensor.zero_()
        self.open(config)

    def step(self, rate: float, island: int = 0) -> None:
        if island != self.turn:
            torch._foreach_copy_(self.kept[self.turn], self.live)
            torch._foreach_copy_(self.live, self.kept[island])
            self.turn = island
        config = self.learner.config
        batches = []
        for _ in range(config.batch // config.micro_batch):
            batches.append(self.samples[island].batch(self.cursors[island], config.micro_batch))
            self.cursors[island] += config.micro_batch
        self.make(batches, rate)

    @torch.no_grad()
    def vector(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.named.values()])

    @torch.no_grad()
    def fill(self, x: Tensor) -> None:
        at = 0
        for p in self.named.values():
            p.copy_(x[at : at + p.numel()].view_as(p))
            at += p.numel()


def rates(arm: Arm) -> Any:
    config = ScheduleConfig(peak=arm.peak, final=arm.peak / 10, warmup=FINE // 20)
    rate = schedule(config, FINE)
    return lambda share: rate(min(int(share * FINE), FINE - 1))


def whole(runner: Runner, arm: Arm) -> dict[str, Any]:
    """Train one run over all islands: each step waits for the slowest and sums dense bfloat16 gradients."""
    size = runner.size
    one = runner.one(arm, size.batch * len(SPEEDS))
    a_step = {link: max(SPEEDS) + 2 * 16 * NUMBERS / link for link in LINKS}
    count = int(arm.seconds / a_step[arm.link]) if arm.seconds else size.steps // len(SPEEDS)
    rate, curve = rates(arm), []
    for step in range(count):
        if step % max(count // size.points, 1) == 0:
            curve.append([step * len(SPEEDS), step * a_step[arm.link], runner.loss(one.learner)])
        one.step(rate(step / count))
    final = runner.loss(one.learner)
    curve.append([count * len(SPEEDS), count * a_step[arm.link], final])
    dense = 2.0 * len(one.vector())
    return {"loss": final, "flushed": final, "up": dense, "down": dense, "dense": dense, "exchanges": count,
            "steps": count * len(SPEEDS), "clock": count * a_step[arm.link], "curve": curve}  # fmt: skip


def length(sparse: Sparse, size: int) -> int:
    """Return the number of bytes that `wire.encode` makes of a message. The values are already rounded."""
    chunks = wire.chunks_of(size)
    edges = torch.arange(chunks + 1, device=sparse.index.device) * wire.CHUNK
    count = torch.searchsorted(sparse.index, edges).diff()
    places = torch.where(count > wire.FEW, wire.BITMAP, 2 * count)
    return 4 + 2 * chunks + int((places + 2 * count).sum())


class Islands:
    """Simulate islands and their server: handle events in the order of a virtual clock. An island computes its push
    when its steps are done, and the server computes its answer when the push has arrived."""

    def __init__(self, runner: Runner, arm: Arm) -> None:
        self.runner, self.arm = runner, arm
        self.one = runner.one(arm, runner.size.batch, len(SPEEDS))
        model = self.one.learner.model
        self.rule = plugin.load("training.islands.rules", arm.rule)
        self.keeps = self.rule.KEEPS and arm.keep
        self.layout = Layout({name: tuple(p.shape) for name, p in self.one.named.items()})
        start = self.one.vector()
        self.pull = self.rule.Pull(start, self.layout.top(arm.answer) if arm.answer else None, 2**-16)
        self.unsent = [torch.zeros_like(start) for _ in SPEEDS]
        self.gain = arm.gain or self.rule.gain(len(SPEEDS))
        moe = model.moe
        assert moe is not None
        keys = IslandsConfig(rule=arm.rule, share=arm.share, every=arm.every)
        # stand-ins for an Island, whose methods choose each expert's share by its tokens
        self.shares = [
            SimpleNamespace(config=keys, rule=self.rule, layers=list(moe.layers),
                            ages=torch.zeros(len(moe.layers), moe.experts, dtype=torch.int64)) for _ in SPEEDS
        ]  # fmt: skip
        self.up: list[int] = []
        self.down: list[int] = []
        self.done, self.pushes, self.stale, self.seen = 0, 0, list[int](), [0] * len(SPEEDS)

    def begin(self, k: int) -> Tensor:
        has: Tensor = self.pull.has[k]
        return has - self.unsent[k] if self.keeps else has

    def seconds(self, count: int) -> float:
        return count * NUMBERS / self.layout.size * 8 / self.arm.link

    def steps(self, k: int, share: float, rate: Any) -> Sparse:
        """Train an island for its steps, and return its push."""
        one, arm = self.one, self.arm
        begin = self.begin(k)
        one.fill(begin)
        for _ in range(arm.every):
            one.step(rate(share), k)
            self.done += 1
        delta = begin - one.vector()
        load = one.learner.balance.load
        of_experts = Island.shares(self.shares[k], load.since_NE.cpu())  # type: ignore[arg-type]
        load.since_NE.zero_()
        sent = self.sent(k, delta, of_experts)
        self.up.append(length(sent, self.layout.size))
        return sent

    def sent(self, k: int, delta: Tensor, of_experts: Tensor | None) -> Sparse:
        found = []
        for place in self.layout.places.values():
            part = slice(place.first, place.last)
            rows = place.segments
            like: Any = SimpleNamespace(place=place, rows=rows, has=delta[part], box=[(0, n) for n in place.shape])
            counts = Island.counts(self.shares[k], like, of_experts, of_experts is None)  # type: ignore[arg-type]
            momentum = 0.0 if of_experts is None or self.arm.rule != "dgs" else self.arm.momentum
            push = self.rule.Push(self.unsent[k][part].view(rows, -1), momentum, gain=self.gain)
            sent = push.push(delta[part].view(rows, -1), counts)
            found.append((sent.index + place.first, sent.value))
        return Sparse(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def take(self, k: int, sent: Sparse) -> None:
        self.pull.push(k, sent)
        self.stale.append(self.pushes - self.seen[k])
        self.pushes += 1

    def loss(self) -> float:
        self.one.fill(self.pull.model)  # `steps` fills in an island's weights before it trains
        return self.runner.loss(self.one.learner)

    def run(self) -> dict[str, Any]:
        arm, steps = self.arm, self.runner.size.steps
        for k in range(len(SPEEDS)):
            self.pull.join(k)
        number = itertools.count()
        # a run that ends at a time ends with an exchange of everything, which reaches the server at that time
        until = arm.seconds - (self.seconds(wire.most(self.layout.size)) if self.keeps else 0)
        events: list[tuple[float, int, int, Sparse | None]]
        events = [(arm.every * speed, next(number), k, None) for k, speed in enumerate(SPEEDS)]
        waiting: list[int] = []
        rate, now = rates(arm), 0.0
        curve: list[Any] = []
        while events:
            now, _, k, data = heapq.heappop(events)
            if arm.seconds and now > until:
                now = until
                break
            share = now / until if arm.seconds else self.done / steps
            if share >= len(curve) / self.runner.size.points:
                curve.append([self.done, now, self.loss()])
            if data is None:
                if arm.seconds or self.done < steps:
                    data = self.steps(k, share, rate)
                    heapq.heappush(events, (now + self.seconds(self.up[-1]), next(number), k, data))
                continue
            self.take(k, data)
            data = None
            waiting.append(k)
            for i in [i for i in waiting if i not in getattr(self.pull, "pushed", ())]:
                waiting.remove(i)
                answer = self.pull.pull(i)
                self.down.append(length(answer, self.layout.size))
                self.seen[i] = self.pushes
                heapq.heappush(
                    events, (now + self.seconds(self.down[-1]) + arm.every * SPEEDS[i], next(number), i, None)
                )
        final = self.loss()
        curve.append([self.done, now, final])
        norm = [float(torch.linalg.vector_norm(x)) for x in (*self.unsent, self.pull.model)]
        flushed = final
        if self.keeps:  # the last exchange of a run sends everything, in both directions
            for k in range(len(SPEEDS)):
                rest = self.sent(k, torch.zeros_like(self.unsent[k]), None)
                self.pull.push(k, rest)
            flushed = self.loss()
        return {
            "loss": final, "flushed": flushed, "up": statistics.fmean(self.up or [0]), "down": statistics.fmean(self.down or [0]),
            "dense": 2.0 * self.layout.size, "exchanges": len(self.up), "steps": self.done, "clock": now,
            "stale": statistics.fmean(self.stale or [0]), "unsent": statistics.fmean(norm[:-1]) / norm[-1], "curve": curve,
        }  # fmt: skip


def check(size: Size, arm: Arm) -> None:
    """Refuse steps that are not whole exchanges of an arm: the arm would train on more tokens than others."""
    least = len(SPEEDS) * arm.every
    if not arm.seconds and size.steps % least:
        near = max(size.steps // least, 1) * least
        raise ValueError(
            f"steps is {size.steps}, but {arm.name} exchanges after every {arm.every} steps of each of {len(SPEEDS)} islands; "
            f"write a multiple of {least}, {near} for instance"
        )


@contextmanager
def outer(arm: Arm) -> Iterator[None]:
    """Set DiLoCo's outer rate and momentum to those of the arm while the context is open."""
    before = diloco.RATE, diloco.MOMENTUM
    diloco.RATE, diloco.MOMENTUM = arm.rate, arm.outer
    try:
        yield
    finally:
        diloco.RATE, diloco.MOMENTUM = before


def run(runner: Runner, arm: Arm) -> dict[str, Any]:
    check(runner.size, arm)
    began = time.monotonic()
    torch.manual_seed(arm.seed)
    with outer(arm):
        found = Islands(runner, arm).run() if arm.rule else whole(runner, arm)
    return {**asdict(arm), **found, "wall": time.monotonic() - began}


# ---- arms


MAIN = Arm("error feedback, 1.4 %", every=10, answer=0.0)
ARMS = (
    Arm("one big run", rule="", every=1),
    MAIN,
    Arm("DiLoCo", rule="diloco", answer=0.0),
    Arm("DiLoCo, plain mean", rule="diloco", answer=0.0, rate=1.0, outer=0.0),
    Arm("dense, asynchronous", rule="dense", answer=0.0, gain=0.25),
    Arm("DGS (m = 0.5), 1.4 %", every=10, answer=0.0, momentum=0.5),
    Arm("error feedback, 1.4 % both ways", every=5),
    Arm("error feedback, 0.45 %", every=10, share=0.0045, answer=0.0),
    Arm("error feedback, 12 %", every=10, share=0.12, answer=0.0),
    Arm("error feedback, 1.4 %, gain 0.375", every=10, answer=0.0, gain=0.375),
    Arm("DiLoCo, Nesterov 1 / 0.3", rule="diloco", answer=0.0, rate=1.0, outer=0.3),
)


GROUPS = (ARMS[0].name, MAIN.name)
LATE = {MAIN.name: (20,), "DiLoCo": (50, 170), "DiLoCo, plain mean": (170,)}


def tuning(peaks: Sequence[float], seed: int) -> list[Arm]:
    """Return every arm at every learning rate, with one seed of copies, to find the best rate of each arm."""
    return [replace(arm, peak=peak, seed=seed) for peak in peaks for arm in ARMS]


def best(rows: Sequence[dict[str, Any]]) -> list[Arm]:
    found = []
    for arm in ARMS:
        own = [row for row in rows if row["name"] == arm.name and "error" not in row]
        if own:
            found.append(replace(arm, peak=min(own, key=lambda row: row["flushed"])["peak"]))
    return found


def following(tuned: Sequence[Arm], seeds: Sequence[int], seconds: float) -> list[Arm]:
    """Return the runs that follow the tuning: all seeds, virtual groups, and runs that end at a time over the slowest
    link. These exchange as rarely as that link requires."""
    found = [replace(arm, seed=seed) for seed in seeds for arm in tuned]
    found += [replace(arm, model="groups", seed=seed) for seed in seeds for arm in tuned if arm.name in GROUPS]
    late = [replace(arm, every=every) for arm in tuned for every in LATE.get(arm.name, ())]
    return [replace(arm, seconds=seconds, seed=seeds[0]) for arm in late if seconds] + found


def together(
    rates: dict[int, list[float]], again: Sequence[int], groups: Sequence[int], seeds: Sequence[int], first: int
) -> tuple[list[tuple[int, Arm]], Any]:
    """Combine the tuning and the runs that follow it. Return the arms that can start at once, and a function that takes
    the rows so far and returns more arms. Each arm comes with a priority; the lowest goes first. The other seeds of an
    arm follow when all its rates have a result. Arms after the first `first` ones follow when those have results."""
    asked = [
        (place, replace(ARMS[number], peak=peak, seed=seeds[0]))
        for place, (number, peaks) in enumerate(rates.items())
        for peak in peaks
    ]
    later = [(100 + place, arm) for place, arm in asked if place >= first]
    asked = [pair for pair in asked if pair[0] < first]
    told = set()

    def follows(rows: Sequence[dict[str, Any]]) -> list[tuple[int, Arm]]:
        found = []
        if len(rows) >= len(asked):
            found += later
            later.clear()
        for number in dict.fromkeys((*again, *groups)):
            name = ARMS[number].name
            own = [row for row in rows if row["name"] == name and row["seed"] == seeds[0] and row["model"] == "copies"]
            if name in told or len(own) < len(rates[number]) or all("error" in row for row in own):
                continue
            told.add(name)
            peak = min((row for row in own if "error" not in row), key=lambda row: row["flushed"])["peak"]
            arm = replace(ARMS[number], peak=peak)
            if number in again:
                found += [(50 + place, replace(arm, seed=seed)) for place, seed in enumerate(seeds[1:])]
            if number in groups:
                found += [(60 if seed == seeds[0] else 200, replace(arm, seed=seed, model="groups")) for seed in seeds]
        return found

    return asked, follows


def named(words: str) -> list[tuple[int, Arm]]:
    """Return the arms that words name as NUMBER:MODEL:SEED:RATE[:EVERY[:SECONDS[:LINK]]], each with its priority. A
    semicolon begins the next priority; a comma separates arms of the same priority."""
    kinds = (("model", str), ("seed", int), ("peak", float), ("every", int), ("seconds", float), ("link", float))
    found = []
    for place, part in enumerate(words.split(";")):
        for word in part.split(","):
            number, *given = word.split(":")
            known = number in map(str, range(len(ARMS))) and given[:1] in (["copies"], ["groups"])
            if not known or not 3 <= len(given) <= len(kinds):
                raise ValueError(
                    f"named has {word}; it must be like 1:copies:2:5e-4 (arm, model, seed, rate); every, seconds and link may follow"
                )
            made: dict[str, Any] = {key: kind(value) for (key, kind), value in zip(kinds, given, strict=False)}
            found.append((place, replace(ARMS[int(number)], **made)))
    return found


def kind_of(arm: Arm) -> tuple[str, bool]:
    """Return the kind of an arm. A process uses the same learner again for arms of one kind."""
    return arm.model, bool(arm.rule)


def work(place: int, size: Size, tokens: Path, folder: Path, device: str, arms: Any, rows: Any) -> None:
    torch.set_num_threads(1)
    while not size.source and not (folder / "dense" / "config.json").exists():
        time.sleep(0.2)
    runner = Runner(size, tokens, folder, device)
    while (arm := arms.get()) is not None:
        try:
            rows.put((place, run(runner, arm)))
        except Exception as error:  # report it, and continue with the other arms
            rows.put((place, {**asdict(arm), "error": repr(error)[:500]}))
            runner.forget()


def few(size: Size, tokens: Path, output: Path) -> None:
    """Copy token shards, keep the most frequent tokens of `train`, and turn all other tokens into one."""
    counts = np.zeros(1 << 16, np.int64)
    trained, held = size.train.split(","), size.valid.split(",")
    for name in trained:
        for ids in shards_of(tokens / name):
            counts += np.bincount(ids, minlength=len(counts))
    renamed = np.full(len(counts), size.vocab - 1, np.uint16)
    renamed[:KEPT] = np.arange(KEPT)
    often = np.argsort(-counts, kind="stable")
    often = often[often >= KEPT][: size.vocab - 1 - KEPT]
    renamed[often] = KEPT + np.arange(len(often))
    for name in (*trained, *held):
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        meta = json.loads((tokens / name / "meta.json").read_text()) | {"vocab": size.vocab}
        assert max(meta["eos"], meta["start"]) < KEPT, f"{name}: the ids of eos and start must be less than KEPT"
        for shard, ids in zip(meta["shards"], shards_of(tokens / name), strict=True):
            data = renamed[ids].tobytes()
            (folder / shard["tokens"]["file"]).write_bytes(data)
            shard["tokens"]["sha256"] = hashlib.sha256(data).hexdigest()
            shutil.copy(tokens / name / shard["documents"]["file"], folder)
        (folder / "meta.json").write_bytes(publish.signed(meta))
        print(
            f"{name}: {np.mean(renamed[ids] == size.vocab - 1):.1%} of the last shard's tokens became the token of rare words"
        )


def shards_of(folder: Path) -> Iterator[Any]:
    meta = json.loads((folder / "meta.json").read_text())
    if meta["dtype"] != "uint16":
        raise ValueError(
            f"{folder} has {meta['dtype']} tokens, but `words` reads only uint16; prepare it with a smaller vocabulary"
        )
    for shard in meta["shards"]:
        yield np.fromfile(folder / shard["tokens"]["file"], np.uint16)


def base(runner: Runner) -> None:
    """Train a dense model of this size from nothing, and write its checkpoint."""
    size, shape = runner.size, runner.folder / "shape"
    shape.mkdir(parents=True, exist_ok=True)
    heads = max(size.hidden // 64, 2)
    settings = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": size.hidden,
        "intermediate_size": size.ffn, "num_hidden_layers": size.layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": size.hidden // heads, "vocab_size": size.vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 0,
        "eos_token_id": 0, "dtype": "float32", "rope_theta": 10000.0,
    }  # fmt: skip
    (shape / "config.json").write_text(json.dumps(settings))
    wide, square = (size.ffn, size.hidden), (size.hidden, size.hidden)
    tensors = {
        "model.embed_tokens.weight": torch.zeros(size.vocab, size.hidden),
        "model.norm.weight": torch.ones(size.hidden),
    }
    for layer in range(size.layers):
        of = f"model.layers.{layer}."
        tensors |= {f"{of}self_attn.{name}_proj.weight": torch.zeros(square) for name in "qkvo"}
        tensors |= {f"{of}mlp.{name}_proj.weight": torch.zeros(wide) for name in ("gate", "up")}
        tensors[f"{of}mlp.down_proj.weight"] = torch.zeros(wide[::-1])
        tensors |= {f"{of}{name}_layernorm.weight": torch.ones(size.hidden) for name in ("input", "post_attention")}
    save_file(tensors, shape / "model.safetensors")  # only the shapes are used
    config = runner.config({"source": str(shape), "random": True}, 8 * size.batch, 0)
    config = replace(config, micro_batch=config.batch)
    one = One(runner, config, number=99)
    rate = rates(Arm("", peak=1e-3))
    for step in range(size.base):
        one.step(rate(step / size.base))
    print(f"dense: {len(one.vector()):,} numbers, held-out loss {runner.loss(one.learner):.4f}", flush=True)
    export(one.learner.model, one.origin, runner.folder / "dense")


@contextmanager
def workers(
    count: int, devices: Sequence[str], size: Size, tokens: Path, folder: Path
) -> Iterator[tuple[list[Any], Any]]:
    """Start processes. Yield a queue of arms for each process, and one queue of (process, row) for all."""
    context = mp.get_context("spawn")
    arms, rows = [context.Queue() for _ in range(count)], context.Queue()
    jobs = [
        context.Process(
            target=work, args=(i, size, tokens, folder, devices[i % len(devices)], arms[i], rows), daemon=True
        )
        for i in range(count)
    ]
    for job in jobs:
        job.start()
    try:
        yield arms, rows
    finally:
        for job in jobs:
            job.terminate()


def drive(
    asked: list[tuple[int, Arm]], follows: Any, size: Size, tokens: Path, folder: Path, devices: list[str], count: int,
    began: float, limit: float, last: float,
) -> tuple[int, int]:  # fmt: skip
    """Run the arms, and those that follow from their rows, on `count` workers. Return (arms done, all arms)."""
    with workers(count, devices, size, tokens, folder) as (arms, rows), open(folder / "rows.jsonl", "a") as file:
        if not size.source and not (folder / "dense" / "config.json").exists():
            base(Runner(size, tokens, folder, devices[0]))
        every: list[dict[str, Any]] = []
        total, idle = len(asked), dict.fromkeys(range(count), ("", False))  # worker -> the kind of its model
        while (asked or len(idle) < count) and time.monotonic() - began < limit:
            if time.monotonic() - began > last:
                asked = []
            for worker in list(idle):
                if asked:
                    kind = idle.pop(worker)
                    chosen = min(asked, key=lambda pair: (pair[0], kind_of(pair[1]) != kind))
                    asked.remove(chosen)
                    arms[worker].put(chosen[1])
            try:
                worker, row = rows.get(timeout=1.0)
            except queue.Empty:
                continue
            idle[worker] = row["model"], bool(row["rule"])
            every.append(row)
            new = follows(every)
            asked, total = asked + new, total + len(new)
            file.write(json.dumps(row) + "\n")
            file.flush()
            said = row.get("error") or f"{row['loss']:.4f} {row['flushed']:.4f}  wall {row['wall']:.0f}"
            print(f"{time.monotonic() - began:.0f} s  {row['name']}, {row['model']} {row['seed']}, peak {row['peak']:g}, H {row['every']}, "
                  f"{row['seconds']:.0f} s at {row['link'] / 1e9:g} Gb/s: {said}", flush=True)  # fmt: skip
            if len(every) % 6 == 0:
                print(table(every), flush=True)
        print(table(every), flush=True)
    return len(every), total


def main() -> None:
    command, place, *rest = sys.argv[1:]
    words = dict(word.split("=", 1) for word in rest)
    if command == "table":
        found = [json.loads(line) for line in Path(place).read_text().splitlines()]
        print(table(found))
        if "plot" in words:
            plot(found, Path(words["plot"]))
        return
    folder, tokens = Path(place), Path(words.pop("tokens"))
    folder.mkdir(parents=True, exist_ok=True)
    began, limit = time.monotonic(), float(words.pop("limit", "1e9"))  # seconds after which the program stops waiting
    last = float(words.pop("last", "1e9"))  # seconds after which no arm starts
    taken = [ARMS[int(number)].name for number in words.pop("arms", "").split(",") if number]
    seeds = [int(seed) for seed in words.pop("seeds", "0").split(",")]
    peaks = [float(peak) for peak in words.pop("peaks", "1.5e-4,4e-4,1e-3").split(",")]
    count = int(words.pop("workers", "1"))
    until = float(words.pop("until", "0"))
    tuned = words.pop("tuned", "")
    rates = {
        int(number): [float(peak) for peak in given.split(",")]
        for number, given in (one.split(":") for one in words.pop("rates", "").split(";") if one)
    }
    again, groups = ([int(n) for n in words.pop(key, "").split(",") if n] for key in ("again", "groups"))
    first = int(words.pop("first", "100"))
    wanted = words.pop("named", "")
    devices = words.pop("devices", "cpu").split(",")
    size = SMALL if words.pop("size", "") == "small" else Size()
    kinds = {field.name: type(getattr(size, field.name)) for field in fields(size)}
    size = replace(size, **{key: kinds[key](value) for key, value in words.items()})
    if command == "words":
        few(size, tokens, folder)
        return
    check_tokens(Runner(size, tokens, folder, "cpu").config({"source": "x"}, size.batch, 0).data)
    if command == "base":
        base(Runner(size, tokens, folder, devices[0]))
        return
    if odd := {*again, *groups} - rates.keys():
        raise ValueError(
            f"again and groups name the arms {sorted(odd)}, but rates does not; add {min(odd)}:1e-3 to rates, for instance"
        )
    asked, follows = together(rates, again, groups, seeds, first)
    if wanted:
        asked = named(wanted)
    elif not rates:
        known = [json.loads(line) for line in Path(tuned).read_text().splitlines()] if tuned else []
        plain = following(best(known), seeds, until) if tuned else tuning(peaks, seeds[0])
        asked = [(0, arm) for arm in plain if not taken or arm.name in taken]
    for _, arm in asked:
        check(size, arm)
    done, total = drive(asked, follows, size, tokens, folder, devices, count, began, limit, last)
    print(f"{done} of {total} arms in {time.monotonic() - began:.0f} s")


def behind(rows: Sequence[dict[str, Any]]) -> list[float | None]:
    """Return for each row how much larger its loss is than the loss of one big run with the same model and seed, as a
    share. The big run has the rate that is best for the first seed. None: the row failed, is a big run itself, ended at
    a time, or has no such big run."""
    bigs = [row for row in rows if "error" not in row and not row["rule"] and not row["seconds"]]
    tuned = {arm.name: arm.peak for arm in best([row for row in bigs if row["seed"] == bigs[0]["seed"]])}
    big = {(row["model"], row["seed"]): row["flushed"] for row in bigs if row["peak"] == tuned[row["name"]]}
    found: list[float | None] = []
    for row in rows:
        other = big.get((row["model"], row["seed"]))
        runs = "error" not in row and row["rule"] and not row["seconds"]
        found.append(row["flushed"] / other - 1 if runs and other is not None else None)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table by model and link: mean and range over seeds, and how far each seed is behind one big run."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row, more in zip(rows, behind(rows), strict=True):
        row = {**row, "behind": more}
        if "error" not in row:
            arm = (row["model"], row["link"] if row["seconds"] else 0, row["name"], row["every"], row["peak"], row["gain"],
                   row["share"], row["answer"])  # fmt: skip
            groups.setdefault(arm, []).append(row)
    lines = ["| model, until | arm | loss, mean (min-max) | after the last exchange | behind one big run of its seed, % | up, % of dense | down, % | up, % of the synchronous run's | steps | s |", "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (model, link, name, every, peak, _, share, answer), runs in groups.items():
        mean = {k: statistics.fmean(r[k] for r in runs) for k in ("up", "down", "dense", "steps", "clock", "exchanges")}
        # a rule that keeps a residual sends everything in its last exchange
        last = wire.most(int(mean["dense"] / 2)) if runs[0]["rule"] == "dgs" else 0.0
        sent = mean["up"] * mean["exchanges"] * (1 if runs[0]["rule"] else len(SPEEDS)) + last * len(SPEEDS)
        spans = []
        for key in ("loss", "flushed"):
            losses = [r[key] for r in runs]
            spans.append(f"{statistics.fmean(losses):.4f} ({min(losses):.4f}-{max(losses):.4f})")
        gaps = [100 * r["behind"] for r in runs if r["behind"] is not None]
        said = ", ".join(f"{gap:.2f}" for gap in gaps)
        if gaps and (found := paired(gaps)).low is not None:
            said += f": {found.mean:.2f}, 95 % {found.low:.2f} to {found.high:.2f}"
        lines.append(
            f"| {model}, {f'{link / 1e9:g} Gb/s' if link else 'equal tokens'} | {name}, H {every}, {peak:g}, {share:g}/{answer:g}, {len(runs)} seeds | "
            f"{spans[0]} | {spans[1]} | {said} | {100 * mean['up'] / mean['dense']:.1f} | {100 * mean['down'] / mean['dense']:.1f} | "
            f"{100 * sent / (mean['steps'] * mean['dense']):.2f} | {mean['steps']:.0f} | {statistics.fmean(ended(r) for r in runs):.0f} |"
        )
    return "\n".join(lines)


def ended(row: dict[str, Any]) -> float:
    """Return the seconds until a run ends, including the last exchange of a rule that keeps a residual."""
    if row["seconds"]:
        return float(row["seconds"])
    last = wire.most(int(row["dense"] / 2)) if row["rule"] == "dgs" else 0.0
    return float(row["clock"] + last * NUMBERS / (row["dense"] / 2) * 8 / row["link"])


def lines(rows: Sequence[dict[str, Any]], at: int, link: float) -> list[tuple[str, str, str, list[float], list[float]]]:
    """Return (label, style, color, x, y) for the runs of copies over a link. `at` 0: x is steps, only for runs that end
    after a number of steps. `at` 1: x is seconds. A run that ends after its steps is drawn only at its best rate."""
    found = [row for row in rows if "error" not in row and row["model"] == "copies"]
    tuned = {arm.name: arm.peak for arm in best([r for r in found if not r["seconds"] and not r["seed"]])}
    found = [row for row in found if row["seconds"] or row["peak"] == tuned.get(row["name"])]
    found = [row for row in found if row["link"] == link and (at or not row["seconds"])]
    drawn = []
    for row in found:
        curve = [c[at] for c in row["curve"]], [c[2] for c in row["curve"]]
        if at and not row["rule"]:
            curve[0][0] = row["clock"] / row["exchanges"]  # draw the first loss at the end of the first step
        if row["rule"] == "dgs":
            curve[0].append(ended(row) if at else row["steps"])
            curve[1].append(row["flushed"])
        everies = sorted({(r["seconds"], r["every"]) for r in found if r["name"] == row["name"]})
        label = row["name"] + (f", H {row['every']}" if row["rule"] else "")
        label += f", until {row['seconds']:g} s" if row["seconds"] else ""
        color = COLORS[[arm.name for arm in ARMS].index(row["name"]) % len(COLORS)]
        style = ("-", "--", ":", "-.")[everies.index((row["seconds"], row["every"])) % 4]
        drawn.append((label, style, color, *curve))
    return drawn


def plot(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Draw the held-out loss of copies: by steps, each arm at its best rate, and by seconds over the slowest link."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = (("Equal tokens", "steps of all islands", 0), ("0.1 Gb/s", "seconds, counted", 1))
    for number, (title, label, at) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        axes.set_title(title, loc="left")
        axes.set_xlabel(label)
        axes.set_ylabel("held-out loss")
        for name, style, color, x, y in lines(rows, at, LINKS[0]):
            known = name in axes.get_legend_handles_labels()[1]
            axes.plot(
                x,
                y,
                style,
                color=color,
                alpha=0.9,
                linewidth=1,
                marker=".",
                markersize=4,
                label=None if known else name,
            )
        if at:
            axes.set_xscale("log")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize="x-small")
    figure.savefig(output, dpi=90)


if __name__ == "__main__":
    main()
