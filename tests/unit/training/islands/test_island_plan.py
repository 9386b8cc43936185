"""A plan's bytes are those of messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.training.test_train import config, place
from training.build import source
from training.islands import wire
from training.islands.config import IslandsConfig
from training.islands.places import Layout, share_of
from training.islands.plan import bits_a_second, everything, held, layout_of, table, traffic
from training.islands.sparse import Sparse, largest
from training.plan import memory
from upcycle import plugin

__all__ = ["place"]  # a fixture

LAYOUT = Layout({"layers.0.ffn.experts.up": (4, 2, 64, 96), "layers.0.attention.q.weight": (96, 96), "norm.weight": (96,),
                 "embed.weight": (500, 96)})  # fmt: skip


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("islands", [1, 4])
def test_the_plan_is_within_a_tenth_of_what_is_sent(share: float, islands: int) -> None:
    draw = torch.Generator().manual_seed(0)
    told, first = torch.zeros(LAYOUT.size, dtype=torch.bool), torch.zeros(0)
    for number in range(islands):
        found = []
        for place_ in LAYOUT.places.values():
            part = torch.randn(place_.segments, place_.size // place_.segments, generator=draw)
            count = part.shape[1] if place_.dense else share_of(part.shape[1], share)
            found.append(largest(part, [count] * place_.segments) + place_.first)
        index = torch.cat(found)
        told[index] = True
        first = index if number == 0 else first
    planned = traffic(LAYOUT, IslandsConfig(share=share), islands)
    for index, bytes_ in ((first, planned.up), (told.nonzero().flatten(), planned.down)):
        assert len(wire.encode(Sparse(index, torch.ones(len(index))), LAYOUT.size)) == pytest.approx(bytes_, rel=0.1)
    dense = traffic(LAYOUT, IslandsConfig(rule="dense"), islands)
    assert dense.up == wire.most(LAYOUT.size)


def test_a_table_has_this_config_and_dense_beside_it(place: Path, tmp_path: Path) -> None:
    given = config(place, tmp_path / "run")
    with source(given) as origin:
        said = table(origin.spec, given, 4, "100Mb/s")
        assert layout_of(origin.spec, given).size == 243_008
    assert "dgs, this config" in said and "dense, every step" in said and "4 islands, 100Mb/s each" in said


def test_a_plan_has_the_memory_of_island_and_server(place: Path, tmp_path: Path) -> None:
    """An island keeps two more numbers a parameter, as its optimiser's state says; the server one for all and one each."""
    given = config(place, tmp_path / "run")
    island = replace(given, islands=IslandsConfig(join="server:29600"))
    with source(given) as origin:
        plain, more = (memory(origin.spec, each, 1) for each in (given, island))
        assert more.moments - plain.moments == 8 * 243_008 and replace(more, moments=plain.moments) == plain
        assert "an island's GPUs together 0.001944 GB more" in table(origin.spec, given, 4, "1Gb/s")
        assert (
            "the server 0.00486 GB; while everything is exchanged, as at the end, the hosts of both about 0.01094 GB"
            in table(origin.spec, given, 4, "1Gb/s")
        )
    for rule in ("dgs", "dense", "diloco"):
        pull = plugin.load("training.islands.rules", rule).Pull(torch.zeros(1000))
        for k in range(4):
            pull.join(k)
        kept = [tensor for name, tensor in pull.state().items() if name != "pushed"]
        assert held(rule, 4, 1000) == sum(tensor.nbytes for tensor in kept), rule


def test_the_plan_of_an_exchange_of_everything_is_what_was_measured() -> None:
    """56.6 M numbers, a third of them in one tensor: an island took 680 MB more, the server 663 MB (2,713 and 2,056 MB
    when all of it was numbers at once)."""
    layout = Layout({"embed": (49152, 384), **{f"layers.{i}": (1024, 2304) for i in range(16)}, "norm": (12672,)})
    assert layout.size == 56_635_776 and 680e6 < everything(layout) < 1.2 * 680e6
    thirty = Layout({f"layers.{i}": (128, 768, 2048) for i in range(151)})  # 30 B: bytes alone matter
    assert everything(thirty) < 10 * thirty.size


def test_speeds_are_bits_a_second() -> None:
    assert [bits_a_second(text) for text in ("1Gb/s", "0.1Gb/s", "100Mb/s", "9600bit/s")] == [1e9, 1e8, 1e8, 9600]
    for text in ("1", "1GB/s", "0Gb/s", "fast"):
        with pytest.raises(ValueError, match="is no speed; write bits a second"):
            bits_a_second(text)
