"""A plan's bytes are those of messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.unit.training.test_train import config, place
from training.config.schema import ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.estimating.bench import BenchConfig, spec_of
from training.estimating.memory import memory
from training.islands.config import IslandsConfig
from training.islands.link import wire
from training.islands.places import Layout, share_of
from training.islands.plan import bits_a_second, everything, held, layout_of, table, traffic
from training.islands.sparse import Sparse, largest
from training.run.parts import source
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


def smollm2() -> Layout:
    """SmolLM2-135M with four copies in every sixth layer, as benchmarks/data/islands_smollm2.jsonl has it."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (49152, 576), "final_norm.weight": (576,)}
    for layer in range(30):
        of = f"layers.{layer}."
        shapes |= {f"{of}attention.{name}.weight": (576 if name in "qo" else 192, 576) for name in "qkvo"}
        shapes |= {f"{of}{name}.weight": (576,) for name in ("attn_norm", "ffn_norm")}
        if layer % 6 == 5:
            shapes |= {f"{of}ffn.experts.up": (4, 2, 1536, 576), f"{of}ffn.experts.down": (4, 576, 1536)}
            shapes[f"{of}ffn.router.weight"] = (4, 576)
        else:
            shapes |= {f"{of}ffn.{name}.weight": (1536, 576) for name in ("gate", "up")}
            shapes[f"{of}ffn.down.weight"] = (576, 1536)
    return Layout(shapes)


def test_the_plan_is_within_a_tenth_of_what_a_run_of_smollm2_sent() -> None:
    """Messages of four islands on GPUs. What an island is told is planned for a run that goes on: at its first exchange
    it has missed 0, 1, 2, 3 pushes, and later 3 and its own, so four exchanges of each have 13 % less than is planned."""
    layout = smollm2()
    rows = [json.loads(line) for line in Path("benchmarks/data/islands_smollm2.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["model"] == "copies" and row["rule"] == "dgs" and not row["answer"]]
    assert rows and all(row["dense"] == 2 * layout.size for row in rows)
    for row in rows:
        given = IslandsConfig(share=row["share"], every=row["every"])
        assert row["up"] == pytest.approx(traffic(layout, given, 4).up, rel=0.01)
        if row["exchanges"] > 50:
            assert row["down"] == pytest.approx(traffic(layout, given, 4).down, rel=0.1)


def test_the_plan_of_30_b_is_that_of_counts_drawn_for_each_of_its_chunks() -> None:
    """Qwen3-30B-A3B. A chunk's count is not its share: what is planned from the shares is what 7.5 M counts come to."""
    keys = yaml.safe_load(Path("configs/train/bench-qwen3-30b.yaml").read_text())["architecture"]
    spec = spec_of(BenchConfig(architecture=keys))
    layout = layout_of(spec, TrainConfig(model=ModelConfig(source="x"), data=DataConfig(train=("x",)), batch=1))
    planned = traffic(layout, IslandsConfig(share=0.01), 4).up
    assert layout.size == 30_532_122_624 and planned == pytest.approx(1.263e9, rel=1e-3)
    draw, count = np.random.default_rng(0), np.zeros(wire.chunks_of(layout.size), np.int64)
    for place_ in layout.places.values():
        width = place_.size // place_.segments
        first, last = place_.first // wire.CHUNK, (place_.last - 1) // wire.CHUNK
        here = np.full(last - first + 1, wire.CHUNK)
        here[0] -= place_.first - first * wire.CHUNK
        here[-1] -= (last + 1) * wire.CHUNK - place_.last
        count[first : last + 1] += draw.binomial(here, 1.0 if place_.dense else share_of(width, 0.01) / width)
    drawn = 4 + 2 * len(count) + int((np.where(count > wire.FEW, wire.BITMAP, 2 * count) + 2 * count).sum())
    assert drawn == pytest.approx(planned, rel=1e-4)


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
            "the server 0.006928 GB; while everything is exchanged, as at the end, the hosts of both about 0.01094 GB"
            in table(origin.spec, given, 4, "1Gb/s")
        )
    for rule in ("dgs", "dense", "diloco"):
        pull = plugin.load("training.islands.rules", rule).Pull(torch.zeros(1000))
        for k in range(4):
            pull.join(k)
        kept = [tensor for name, tensor in pull.state().items() if name != "pushed"]
        answers = 4 * wire.most(1000)  # the last one of each island, if all were told everything
        assert held(rule, 4, 1000) == sum(tensor.nbytes for tensor in kept) + answers, rule


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
        with pytest.raises(ValueError, match="is not a speed; write bits a second"):
            bits_a_second(text)
