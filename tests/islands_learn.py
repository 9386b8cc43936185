"""Do islands learn? A tiny MoE on Python's own source, four islands of unequal speed, simulated clock and link.

    python -m tests.islands_learn --seeds 0 1 2

Steps are real (AdamW), and so are the rules and the bytes of every message; only time is counted, not waited for: a step
takes 1 : 1.07 : 1.21 : 1.9 by island, and a byte as long as it would for a model of 1 B parameters whose step takes 1 s.
Prints the table of docs/islands.md.
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.checkpoint.layout import initialise
from training.islands import wire
from training.islands.places import Layout, share_of
from training.islands.rules import dense, dgs, diloco
from training.islands.sparse import Sparse
from training.model.decoder import Decoder
from training.optim import OptimConfig, Optimizer
from upcycle.spec import DenseSpec, MoESpec

SPEEDS = (1.0, 1.07, 1.21, 1.9)
EVERY, LENGTH, BATCH, PEAK = 20, 64, 8, 2e-3
LINKS = (1e8, 1e9, 1e10)
PARAMETERS = 1e9  # of the model whose seconds are told
DENSE = DenseSpec(family="llama", layers=2, hidden=48, ffn=96, heads=4, kv_heads=2, head_dim=12, vocab=256, context=64)
MOE = MoESpec(dense=DENSE, layers=(0, 1), widths=(96,) * 8, top_k=2, copies=8)


def text() -> tuple[Tensor, Tensor]:
    """(training, held out), bytes of other files."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    parts = [b"".join(f.read_bytes() for f in files if (hash_of(f.name) % 10 == 0) == held) for held in (False, True)]
    train, held = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return train, held


def hash_of(name: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(name))


class Learner:
    def __init__(self, start: dict[str, Tensor], spec: DenseSpec | MoESpec, seed: int) -> None:
        self.model = Decoder(spec, experts="grouped")
        self.model.load_state_dict(start, strict=False)
        self.optimizer = Optimizer(OptimConfig(weight_decay=0.0, beta2=0.99), self.model.named_parameters())
        self.draw = torch.Generator().manual_seed(seed)
        self.named = dict(sorted(self.model.named_parameters()))

    def step(self, data: Tensor, lr: float, batch: int = BATCH) -> None:
        at = torch.randint(len(data) - LENGTH - 1, (batch,), generator=self.draw)[:, None] + torch.arange(LENGTH)
        (self.model.loss(data[at], data[at + 1]) / at.numel()).backward()
        self.optimizer.clip()
        self.optimizer.step(lr)
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def vector(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.named.values()])

    @torch.no_grad()
    def fill(self, x: Tensor) -> None:
        at = 0
        for p in self.named.values():
            p.copy_(x[at : at + p.numel()].view_as(p))
            at += p.numel()

    @torch.no_grad()
    def loss(self, data: Tensor) -> float:
        at = torch.arange(0, 200 * LENGTH, LENGTH)[:, None] + torch.arange(LENGTH)
        return float(self.model.loss(data[at], data[at + 1])) / at.numel()


def upcycled(seed: int, data: Tensor, steps: int) -> dict[str, Tensor]:
    """Eight copies of each FFN of a dense model that has learned for some steps."""
    learner = Learner(initialise(Decoder(DENSE), seed).state_dict(), DENSE, seed)
    for step in range(steps):
        learner.step(data, PEAK * min(1.0, (step + 1) / 20))
    found = dict(learner.model.state_dict())
    for i in range(DENSE.layers):
        ffn = f"layers.{i}.ffn."
        gate, up, down = (found.pop(f"{ffn}{name}.weight") for name in ("gate", "up", "down"))
        found[f"{ffn}experts.up"] = torch.stack([gate, up])[None].repeat(8, 1, 1, 1)
        found[f"{ffn}experts.down"] = down[None].repeat(8, 1, 1)
        draw = torch.Generator().manual_seed(seed + i)
        found[f"{ffn}router.weight"] = 0.02 * torch.randn(8, DENSE.hidden, generator=draw)
    return found


@dataclass
class Arm:
    rule: Any
    share: float = 1.0
    momentum: float = 0.0
    keep: bool = True
    answer: float = 0.0
    gain: float = 0.0


ARMS = {
    "DiLoCo": Arm(diloco, keep=False),
    "dense, asynchronous": Arm(dense, keep=False),
    "error feedback, 5 %": Arm(dgs, 0.05),
    "error feedback, 2 %": Arm(dgs, 0.02),
    "error feedback, 1 %": Arm(dgs, 0.01),
    "error feedback, 5 % both ways": Arm(dgs, 0.05, answer=0.05),
    "DGS (m = 0.5), 5 %": Arm(dgs, 0.05, 0.5),
    "DGS as published (residual handed back), 5 %": Arm(dgs, 0.05, 0.5, keep=False),
}


def rate(done: int, steps: int) -> float:
    return PEAK * min(1.0, (done + 1) / 80) * (0.55 + 0.45 * math.cos(math.pi * min(done / steps, 1.0)))


def run(arm: Arm, start: dict[str, Tensor], train: Tensor, held: Tensor, steps: int, seed: int) -> dict[str, Any]:
    islands = [Learner(start, MOE, 1000 * seed + k) for k in range(len(SPEEDS))]
    layout = Layout({name: tuple(p.shape) for name, p in islands[0].named.items()})
    pull = arm.rule.Pull(islands[0].vector(), layout.top(arm.answer) if arm.answer else None, 2**-16)
    unsent = [torch.zeros(layout.size) for _ in islands]
    gain = arm.gain or arm.rule.gain(len(islands))
    up = down = exchanges = done = 0
    clock = dict.fromkeys(LINKS, 0.0)
    busy = {link: [0.0] * len(islands) for link in LINKS}
    for k in range(len(islands)):
        pull.join(k)
    heap = [(EVERY * SPEEDS[k], k) for k in range(len(islands))]
    heapq.heapify(heap)
    waiting: list[tuple[int, float]] = []
    while done < steps:
        now, k = heapq.heappop(heap)
        learner, kept = islands[k], unsent[k]
        begin = pull.has[k] - kept if arm.keep else pull.has[k]
        learner.fill(begin)
        for _ in range(EVERY):
            learner.step(train, rate(done, steps))
            done += 1
        delta = gain * (begin - learner.vector())
        found = []
        for place in layout.places.values():
            part = slice(place.first, place.last)
            push = arm.rule.Push(kept[part].view(place.segments, -1), arm.momentum)
            width = place.size // place.segments
            count = width if place.dense or arm.share == 1 else share_of(width, arm.share)
            sent = push.push(delta[part].view(place.segments, -1), [count] * place.segments)
            found.append((sent.index + place.first, sent.value))
        message = Sparse(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        up += len(wire.encode(message, layout.size))
        pull.push(k, message)
        exchanges += 1
        waiting.append((k, now))
        ready = [(i, at) for i, at in waiting if i not in getattr(pull, "pushed", ())]
        last = max(at for _, at in waiting)
        for i, at in ready:
            told = pull.pull(i)
            size = len(wire.encode(told, layout.size))
            down += size
            for link in LINKS:
                moved = (size + up / exchanges) * 8 * PARAMETERS / layout.size / link
                begun = last if len(ready) > 1 else at
                busy[link][i] += EVERY * SPEEDS[i] + moved + (begun - at)
            heapq.heappush(heap, ((last if len(ready) > 1 else at) + EVERY * SPEEDS[i], i))
        waiting = [pair for pair in waiting if pair not in ready]
    for link in LINKS:
        clock[link] = max(busy[link])
    islands[0].fill(pull.model)
    return {"loss": islands[0].loss(held), "up": up / done, "down": down / done, "clock": clock, "size": layout.size}


def whole(start: dict[str, Tensor], train: Tensor, held: Tensor, steps: int, seed: int) -> dict[str, Any]:
    """One run over all islands: every step waits for the slowest, and sums dense gradients in bfloat16."""
    learner = Learner(start, MOE, 1000 * seed)
    count = steps // len(SPEEDS)
    for step in range(count):
        learner.step(train, rate(len(SPEEDS) * step, steps), BATCH * len(SPEEDS))
    size = learner.vector().numel()
    clock = {link: count * (max(SPEEDS) + 2 * 16 * PARAMETERS / link) for link in LINKS}
    return {"loss": learner.loss(held), "up": 2.0 * size, "down": 2.0 * size, "clock": clock, "size": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=960, help="of all islands together")
    parser.add_argument("--dense", type=int, default=300, help="steps before it is upcycled")
    words = parser.parse_args()
    train, held = text()
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in words.seeds:
        start = upcycled(seed, train, words.dense)
        print(f"seed {seed}: starts at {Learner(start, MOE, 0).loss(held):.4f}", flush=True)
        found.setdefault("one big run", []).append(whole(start, train, held, words.steps, seed))
        for name, arm in ARMS.items():
            found.setdefault(name, []).append(run(arm, start, train, held, words.steps, seed))
            print(name, found[name][-1], flush=True)
    print(
        "| | held-out loss, mean (min-max) | up, % of dense | down, % | seconds at 0.1, 1, 10 Gb/s |\n|---|---|---|---|---|"
    )
    for name, runs in found.items():
        losses = [r["loss"] for r in runs]
        mean = {key: sum(r[key] for r in runs) / len(runs) for key in ("up", "down")}
        seconds = ", ".join(f"{sum(r['clock'][link] for r in runs) / len(runs):,.0f}" for link in LINKS)
        per = 2 * runs[0]["size"] / 100 / (1 if name == "one big run" else EVERY)
        print(f"| {name} | {sum(losses) / len(losses):.4f} ({min(losses):.4f}-{max(losses):.4f}) | {mean['up'] / per:.1f} | "
              f"{mean['down'] / per:.1f} | {seconds} |")  # fmt: skip


if __name__ == "__main__":
    main()
