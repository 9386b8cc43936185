"""What counts of a router say, by hand; and on a model whose choices are counted a second way."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evaluation.__main__ import main as evaluate
from evaluation.judge.experts import routing, watch
from tests.parity import tiny
from tests.unit.training.test_data import make_tokenizer
from training.checkpoint import layout, standalone
from training.checkpoint.export import export
from training.config.reading import upcycle_config
from training.config.schema import ModelConfig
from training.model.decoder import Decoder
from training.model.moe import MoE, Routing
from upcycle.__main__ import main as upcycle

VIRTUAL = ["method.name=virtual_group", "experts=4", "granularity=2", "top_k=2", "target=mixtral"]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, upcycled: 4 copies of 2 parts, one copy chosen."""
    folder = tmp_path_factory.mktemp("routing")
    tiny.make("llama", folder / "dense", vocab_size=400)
    make_tokenizer(folder / "dense", bos=False)
    assert upcycle(["convert", f"source={folder / 'dense'}", f"output={folder / 'moe'}", *VIRTUAL]) == 0
    return folder / "moe"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "words.txt").write_text("the cat and the dog went home and slept " * 40)
    (folder / "digits.txt").write_text("12 + 34 = 46; 5 * 6 = 30; 7 - 8 = -1; " * 40)
    return [str(folder / "words.txt"), str(folder / "digits.txt")]


def config(moe: Path, texts: list[str], **more: object) -> routing.RoutingConfig:
    return replace(routing.RoutingConfig(str(moe), tuple(texts), tokens=300, sequence=32), **more)  # type: ignore[arg-type]


def load(folder: Path) -> Decoder:
    with layout.opened(folder) as origin:
        return layout.load(Decoder(origin.spec, experts="reference"), origin)


def block(model: Decoder, layer: int) -> MoE:
    found = model.layers[str(layer)].ffn
    assert isinstance(found, MoE)
    return found


# ---- numbers by hand


def test_specialisation_is_0_for_the_same_use_and_1_for_none_in_common() -> None:
    assert routing.specialisation(torch.tensor([[3, 1], [30, 10]])) == pytest.approx(0, abs=1e-12)
    assert routing.specialisation(torch.tensor([[5, 0, 0], [0, 7, 7]])) == pytest.approx(1)
    assert routing.specialisation(torch.tensor([[5, 0, 0]])) is None
    # H((5/8, 3/8)) - (H((1, 0)) + H((1/4, 3/4))) / 2, by the smaller domain counting as much as the larger one
    mixed = routing.specialisation(torch.tensor([[400, 0], [1, 3]]))
    assert mixed == pytest.approx((0.954434 - 0.811278 / 2), abs=1e-6)


def test_together_is_1_for_independent_experts() -> None:
    # of 8 tokens: experts 0 and 1 in 4 each, together in 2 as chance has it; 2 and 3 always together, in 2
    pair = torch.tensor([[4, 2, 0, 0], [2, 4, 0, 0], [0, 0, 2, 2], [0, 0, 2, 2]], dtype=torch.float64)
    lift = routing.together(pair, 8)
    assert lift[0, 1] == 1 and lift[2, 3] == 4 and lift[0, 2] == 0
    assert lift.diagonal().isnan().all()
    assert routing.strongest(lift) == [(2, 3, 4.0), (0, 1, 1.0)]


def test_chance_of_whole_groups() -> None:
    assert routing.chance_of_whole(4, 2, 2) == 4 / 28
    assert routing.chance_of_whole(4, 2, 4) == 6 / 70
    assert routing.chance_of_whole(4, 2, 3) == 0
    assert routing.chance_of_whole(8, 1, 2) == 1


def test_whole_groups_and_whole_ffns(moe: Path) -> None:
    """4 copies of 2 parts, so experts 0 and 1 are copy 0, and even ones are the first part."""
    seen = watch.Watch(load(moe), 2)
    chosen = torch.tensor([[0, 1], [4, 5], [0, 3], [1, 2], [0, 2], [7, 5]])
    scores = torch.full((6, 8), 1 / 8)
    seen.see(0, Routing(torch.ones(6, 2), chosen, scores, scores))
    tokens, groups, undecided, whole, missing, doubled = seen.sums_L6[0].tolist()
    assert (tokens, groups, whole) == (6, 2, 4)
    assert missing == doubled == pytest.approx(2)
    assert undecided == pytest.approx(6)
    assert seen.count_LN[0].tolist() == [3, 2, 2, 1, 1, 2, 0, 1]
    assert seen.pair_LNN[0][0].tolist() == [3, 1, 1, 1, 0, 0, 0, 0]


# ---- on a model


def test_counts_are_those_of_the_routers(moe: Path, texts: list[str]) -> None:
    model, token_BS = load(moe), torch.arange(60).view(2, 30)
    with torch.no_grad():
        counted = watch.count(model, token_BS, 2)
        seen: list[Tensor] = []
        first = block(model, 0)
        handle = first.router.register_forward_hook(lambda _, __, out: seen.append(out.expert_TK))
        model.hidden(token_BS)
        handle.remove()
    assert counted.count_LN[0].tolist() == torch.bincount(seen[0].flatten(), minlength=8).tolist()
    assert first.balance is None  # as it was
    assert int(counted.count_LN.sum()) == 60 * 2 * len(counted.blocks)


def test_an_exact_upcycle_is_whole_and_has_not_moved(moe: Path, texts: list[str]) -> None:
    found = routing.measure(config(moe, texts, start=str(moe)))
    assert found["granularity"] == 2 and found["tokens"] == {"words": 288, "digits": 288}
    for row in found["layers"]:
        assert row["whole_groups"] == row["whole"] == 1 and row["missing"] == row["doubled"] == 0
        assert row["spread"] == [0.0] * 8 and row["moved"] == [0.0] * 8 and row["router_moved"] == 0
    for number, row in enumerate(found["layers"]):
        mean = [sum(found["load"][name][number][i] for name in found["load"]) / 2 for i in range(8)]
        assert sum(mean) == pytest.approx(8, rel=1e-3)
        assert max(mean) == pytest.approx(row["max_over_mean"], rel=1e-3)
        pairs = {(i, j) for i, j, _ in row["pairs"]}
        assert pairs <= {(0, 1), (2, 3), (4, 5), (6, 7)}  # a group's two are together whenever they are chosen
    json.dumps(found, allow_nan=False)


def test_what_was_changed_is_what_moved(moe: Path, texts: list[str], tmp_path: Path) -> None:
    with layout.opened(moe) as origin:
        model = layout.load(Decoder(origin.spec), origin)
        changed = layout.views(model)
        for matrix in ("gate", "up", "down"):
            changed[f"layers.1.experts.3.{matrix}.weight"].mul_(1.5)
        changed["layers.0.router.weight"].mul_(-2)
        folder = export(model, origin, tmp_path / "changed", dtype="float32")
    found = routing.measure(config(folder, texts, start=str(moe)))  # the export has no upcycle.json, the start has one
    zero, one = found["layers"][:2]
    assert one["moved"] == pytest.approx([0, 0, 0, 0.5, 0, 0, 0, 0], abs=1e-6)
    # copies 1, 1.5, 1, 1 of part 1 (experts 1, 3, 5, 7): mean 1.125
    assert one["spread"] == pytest.approx([0, 1 / 9, 0, 3 / 9, 0, 1 / 9, 0, 1 / 9], abs=1e-6)
    assert zero["router_moved"] == pytest.approx(3) and zero["moved"] == [0.0] * 8


def test_a_run_that_upcycled_as_it_loaded_is_a_start_too(moe: Path, texts: list[str], tmp_path: Path) -> None:
    made = ModelConfig(upcycle=json.loads((moe / "upcycle.json").read_text())["config"] | {"output": ""})
    with layout.online(upcycle_config(made)) as origin:
        standalone.keep(tmp_path, origin, made)
    (tmp_path / "moe").mkdir()
    for file in moe.iterdir():
        if file.name != "upcycle.json":  # as a trained model is exported: nothing says how it was made
            (tmp_path / "moe" / file.name).write_bytes(file.read_bytes())
    assert routing.measure(config(tmp_path / "moe", texts))["granularity"] == 1
    found = routing.measure(config(tmp_path / "moe", texts, start=str(tmp_path)))
    assert found["granularity"] == 2
    assert all(row["moved"] == [0.0] * 8 and row["router_moved"] == 0 for row in found["layers"])


def test_the_command_writes_and_prints_a_table(
    moe: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "routing.json"
    assert evaluate(["routing", str(moe), *texts, "tokens=200", "sequence=20", f"output={out}"]) == 0
    said = capsys.readouterr().out
    assert "Whole virtual groups" in said and "moved" not in said
    written = json.loads(out.read_text())
    assert written["kind"] == "routing" and written["config"]["sequence"] == 20
    assert not any(math.isnan(v) for rows in written["load"].values() for row in rows for v in row)


# ---- refusals


def test_a_layer_without_a_figure_has_a_gap_in_the_table(moe: Path, texts: list[str]) -> None:
    found = routing.measure(config(moe, texts))
    found["layers"][1]["specialisation"] = None
    head, *rows = routing.table(found).splitlines()
    at = head.index("Domain specialisation")
    assert rows[0][at : at + 21].strip() and not rows[1][at : at + 21].strip()


def test_refusals_are_one_sentence(moe: Path, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "no text is given": config(moe, []),
        "is a dense model": config(moe.parent / "dense", texts),
        "start has no experts": config(moe, texts, start=str(moe.parent / "dense")),
        "granularity=3 must divide the 8 experts": config(moe, texts, granularity=3),
        "two texts are called words": config(moe, [texts[0], texts[0]]),
    }
    for sentence, asked in cases.items():
        with pytest.raises(ValueError, match=sentence):
            routing.measure(asked)
    for words, said in (
        (["tokens=4"], "routing needs a checkpoint"),
        ([str(moe), *texts, "length=20"], "unknown key 'length'; write sequence"),
        ([str(moe), *texts, "compute=bfloat16"], "unknown key 'compute'; write dtype"),
    ):
        assert evaluate(["routing", *words]) == 2
        assert said in capsys.readouterr().err
