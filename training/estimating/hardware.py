"""Read the rates of a card and of its links from a YAML file of configs/hardware, for `upcycle estimate`.

A number is either measured on this card, or taken from a data sheet or (scaled) from another card. `sheet` names the
keys that are not measured, and `upcycle estimate` repeats them in its answers. `upcycle estimate measure` writes such a
file for the machine that it runs on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

from training.dispatch import DEFAULT
from upcycle.config.reading import find
from upcycle.config.ready import HARDWARE
from upcycle.io import strict

NEAR = 0.05  # a row of exactly the asked shape weighs as much as about 20 rows that differ by a factor of two


@dataclass(frozen=True)
class Link:
    latency: float  # microseconds a hop, with NCCL's own time
    rate: float  # GB/s of a GPU in each direction that gathers and sums reach


@dataclass(frozen=True, eq=False)  # compared by identity, so that it can be a key of the caches below
class Hardware:
    name: str
    memory: float  # GB of a GPU
    node: int  # number of GPUs that the fast link joins
    peak: float  # dense bfloat16 TFLOP/s of the data sheet, for MFU
    bandwidth: float  # GB/s of memory that a copy reaches, reads and writes added
    # (groups, rows of each, columns out, columns in) and TFLOP/s of the product, of its input's gradient and of its
    # weight's; one group is a plain product, several are one kernel over experts with equally many rows
    products: tuple[tuple[float, float, float, float, float, float, float], ...]
    # (head_dim, sequence) and TFLOP/s of causal attention, which counts half of the square: forward, and forward with
    # backward
    attention: tuple[tuple[float, float, float, float], ...]
    link: Link  # inside a node
    network: Link  # between nodes
    # for each dispatcher (GB/s, and further nanoseconds of each row) of rows that go to other ranks of a node with
    # natural routing; the rate of hybridep includes the sort
    rows: Mapping[str, tuple[float, float]]
    # milliseconds of the host for (a dense, a MoE) layer of a micro-batch, forward and backward, without compile
    host: tuple[float, float]
    sheet: tuple[str, ...] = ()  # keys that are not measured: from a data sheet or another card
    source: str = ""  # origin of the numbers

    def __post_init__(self) -> None:
        if not self.products or not self.attention:
            raise ValueError(
                f"hardware {self.name!r}: products and attention need at least one row; "
                "`upcycle estimate measure` writes them"
            )
        if DEFAULT not in self.rows:
            raise ValueError(f"hardware {self.name!r}: rows has no {DEFAULT}, the default dispatcher; add its rate")
        above = [(name, getattr(self, name)) for name in ("memory", "node", "peak", "bandwidth")]
        above += [(name, n) for name in ("products", "attention") for row in getattr(self, name) for n in row]
        above += [("link.rate", self.link.rate), ("network.rate", self.network.rate)]
        above += [(f"rows.{name}", rate) for name, (rate, _) in self.rows.items()]
        waits = [("link.latency", self.link.latency), ("network.latency", self.network.latency)]
        waits += [*(("host", wait) for wait in self.host), *((f"rows.{name}", w) for name, (_, w) in self.rows.items())]
        wrong = [(name, n, "above 0") for name, n in above if not 0 < n < math.inf]
        wrong += [(name, n, "at least 0") for name, n in waits if not 0 <= n < math.inf]
        for name, n, bound in wrong:
            raise ValueError(f"hardware {self.name!r}: {name} is {n}; it must be finite and {bound}")
        known = {field.name for field in fields(self)}
        for name in self.sheet:
            if name not in known:
                raise ValueError(
                    f"hardware {self.name!r}: sheet names {name!r}, which is not a key; correct or remove it"
                )


def read(name: str) -> Hardware:
    """Read a ready hardware file (h100, h200, b200) or the file at a path."""
    file = find(name, HARDWARE, "card", "upcycle estimate measure=FILE")
    found: Hardware = strict.held(strict.read_yaml(file), Hardware, str(file))
    return found


@lru_cache(maxsize=65536)
def rates(card: Hardware, groups: float, rows: float, out: float, inner: float) -> tuple[float, float, float]:
    """Return TFLOP/s of a product of any shape, of its input's gradient and of its weight's.

    The rate is the mean over the table's rows, weighted by the nearness of their sizes (in factors of two), and at most
    the rate that the memory allows. `groups` is 0 for a plain product."""
    alike = [row for row in card.products if (row[0] > 1) == (groups > 0)] or list(card.products)
    near = [
        1 / (NEAR + sum(math.log2(max(x, 1) / y) ** 2 for x, y in zip((groups, rows, out, inner), row, strict=False)))
        for row in alike
    ]
    per_byte = rows * out * inner / (rows * inner + inner * out + rows * out)  # FLOPs for each byte moved, in bfloat16
    most = per_byte * card.bandwidth / 1e3
    found = [sum(w * row[i] for w, row in zip(near, alike, strict=True)) / sum(near) for i in (4, 5, 6)]
    return min(found[0], most), min(found[1], most), min(found[2], most)


@lru_cache(maxsize=4096)
def attention_rates(card: Hardware, head_dim: float, sequence: float) -> tuple[float, float]:
    """Return TFLOP/s of causal attention: forward, and forward with backward."""
    near = [
        1 / (NEAR + 4 * math.log2(head_dim / row[0]) ** 2 + math.log2(max(sequence, 1) / row[1]) ** 2)
        for row in card.attention
    ]
    forward, both = (sum(w * row[i] for w, row in zip(near, card.attention, strict=True)) / sum(near) for i in (2, 3))
    return forward, both
