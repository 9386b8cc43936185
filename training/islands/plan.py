"""Estimate the bytes and seconds of islands' exchanges before a run, and compare them with dense exchanges.

Up is exact except for unevenly filled chunks. Down assumes that islands choose at random: an island lacks
1 - (1 - share) ** islands of the numbers. Our simulation shows somewhat less, because islands choose alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from training.config.schema import TrainConfig
from training.experts import SPECIFICATION
from training.islands.center import ANSWERS
from training.islands.config import IslandsConfig
from training.islands.link.wire import BITMAP, CHUNK, FEW, most
from training.islands.places import NUMBERS, Layout, share_of
from training.model.decoder import Decoder
from training.model.lora import attach
from training.optim.slots import learning
from upcycle.arch.spec import DenseSpec, MoESpec

# measured bytes for each number of an exchange of all numbers: WHOLE while it is answered, with the copies that a
# socket
# needs; WRITTEN while it is written as bytes; PART for each number that is in a tensor at that time
WHOLE, WRITTEN, PART = 9.0, 2.2, 36
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


class Traffic(NamedTuple):
    up: float  # bytes in one exchange of one island
    down: float


def bits_a_second(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)b(?:it)?/s", text)
    if not found or not float(found[1]):
        raise ValueError(f"link={text} is not a speed; write bits a second, for instance link=1Gb/s or link=100Mb/s")
    return float(found[1]) * UNITS[found[2]]


def layout_of(spec: DenseSpec | MoESpec, config: TrainConfig) -> Layout:
    with torch.device("meta"):
        model = Decoder(spec, experts=SPECIFICATION)
        attach(model, config.lora)
    names = learning(config.optim, [name for name, _ in model.named_parameters()])
    return Layout({name: tuple(p.shape) for name, p in model.named_parameters() if name in names})


def size_of(numbers: float, share: float) -> float:
    """Return the bytes that a share of so many numbers takes in a message."""
    in_chunk = share * CHUNK
    places = 2 * in_chunk if in_chunk <= FEW else BITMAP
    return numbers / CHUNK * (2 + places + 2 * in_chunk)


def traffic(layout: Layout, config: IslandsConfig, islands: int) -> Traffic:
    if config.rule != "dgs":
        return Traffic(most(layout.size), most(layout.size))
    up = down = 0.0
    for place in layout.places.values():
        width = place.size // place.segments
        sent = 1.0 if place.dense else share_of(width, config.share) / width
        met = 1 - (1 - sent) ** islands
        answered = 1.0 if place.dense else share_of(width, config.answer) / width if config.answer else 1.0
        up += size_of(place.size, sent)
        down += size_of(place.size, min(met, answered))
    return Traffic(up, down)


def held(rule: str, islands: int, numbers: int) -> int:
    """Return the most bytes of the server: the model, each island's copy, kept answers, and diloco's outer momentum
    and sum of a round."""
    answers = max(ANSWERS * numbers, islands * most(numbers))
    return 4 * numbers * (1 + islands + (2 if rule == "diloco" else 0)) + answers


def everything(layout: Layout) -> float:
    """Return a host's bytes at an exchange of all numbers: the larger of writing a push and answering it."""
    largest = max(place.size for place in layout.places.values())
    return max(WRITTEN * layout.size + PART * largest, WHOLE * layout.size + PART * min(NUMBERS, layout.size))


def table(spec: DenseSpec | MoESpec, config: TrainConfig, islands: int, link: str) -> str:
    layout, speed = layout_of(spec, config), bits_a_second(link)
    own = config.islands
    rows: Sequence[tuple[str, IslandsConfig, int]] = [
        (f"{own.rule}, this config", own, own.every),
        ("dgs, share=0.01 answer=0.01", replace(own, rule="dgs", share=0.01, answer=0.01), own.every),
        ("dense", replace(own, rule="dense"), own.every),
        ("dense, every step", replace(own, rule="dense"), 1),
    ]
    lines = [
        f"{islands} islands, {link} each, {layout.size / 1e9:.3g} B numbers; one that comes late takes "
        f"{4 * layout.size / 1e9:.4g} GB in {32 * layout.size / speed:,.0f} s",
        f"memory: an island's GPUs together {8 * layout.size / 1e9:.4g} GB more than a run's (as moments), the server "
        f"{held(own.rule, islands, layout.size) / 1e9:.4g} GB; while everything is exchanged, as at the end, the "
        f"hosts of both about {everything(layout) / 1e9:.4g} GB more",
        f"{'':28}  {'GB up':>9}  {'GB down':>9}  {'s an exchange':>13}  {'exchanges':>9}  {'GB in all':>10}  "
        f"{'hours':>8}",
    ]
    for name, given, every in rows:
        found, count = traffic(layout, given, islands), -(-config.steps // every)
        seconds = 8 * (found.up + found.down) / speed
        lines.append(
            f"{name:28}  {found.up / 1e9:9.4g}  {found.down / 1e9:9.4g}  {seconds:13,.1f}  {count:9,}  "
            f"{count * (found.up + found.down) / 1e9:10,.4g}  {count * seconds / 3600:8,.3g}"
        )
    return "\n".join(lines)


def agreed(config: TrainConfig) -> dict[str, Any]:
    """Return the settings, by key, in which islands must agree with their server."""
    schedule = {f"schedule.{key}": value for key, value in asdict(config.schedule).items()}
    optim = ("weight_decay", "router_decay", "router_lr", "expert_lr", "embed_lr")
    own = {f"optim.{key}": getattr(config.optim, key) for key in optim}
    own |= {f"islands.{key}": getattr(config.islands, key) for key in ("every", "gain")}
    groups = [asdict(group) for group in config.optim.groups]
    return schedule | own | {"optim.groups": groups, "balance.bias_rate": config.balance.bias_rate}
