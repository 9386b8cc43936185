"""Router rows of balanced clusters: what they find, how evenly they send, and when a plan makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity import tiny
from tests.unit.upcycle.plans import load, readable
from upcycle.converting import card
from upcycle.text import clusters, measure, observe

DIM, TOKENS = 48, 4096
SLICES = ("target=upcycled", "method.name=virtual_group", "granularity=2", "top_k=2", "experts=4")


def tokens(kinds: int, seed: int, *, mean: float = 3.0) -> tuple[Tensor, Tensor]:
    """(what a router reads, which kind each is of): kinds of unequal size around a mean that all share, as in models."""
    draw = torch.Generator().manual_seed(seed)
    places = torch.Generator().manual_seed(0)
    centre_KD = 2 * torch.randn(kinds, DIM, generator=places)
    shift_D = mean * torch.randn(DIM, generator=places)
    kind_T = torch.multinomial(torch.arange(1.0, kinds + 1), TOKENS, replacement=True, generator=draw)
    return centre_KD[kind_T] + torch.randn(TOKENS, DIM, generator=draw) + shift_D, kind_T


def made(x_TD: Tensor, count: int, *, layer: int = 0, seed: int = 0) -> Tensor:
    return clusters.rows({layer: x_TD}, count, seed)[layer]


def fullest(x_TD: Tensor, rows_ND: Tensor) -> float:
    load_N = torch.bincount((x_TD @ rows_ND.T).argmax(1), minlength=len(rows_ND)).double()
    return float(load_N.max() / load_N.mean())


@pytest.mark.parametrize("count", [2, 8, 16])
def test_each_cluster_gets_its_share_of_new_text_too(count: int) -> None:
    seen, new = tokens(40, 1)[0], tokens(40, 2)[0]
    rows = made(seen, count, layer=3)
    assert rows.shape == (count, DIM) and rows.dtype == torch.float32
    assert fullest(seen, rows) < 1.05
    assert fullest(new, rows) < 1.25
    if count > 2:
        drawn = 0.01 * torch.randn(count, DIM, generator=torch.Generator().manual_seed(0))
        assert fullest(new, drawn) > 2, "random rows send most tokens to a few; else this test shows nothing"


def test_tokens_of_a_kind_go_together() -> None:
    x, kind = tokens(16, 1)
    chosen = (x @ made(x, 16).T).argmax(1)
    pairs = torch.zeros(16, 16).index_put_((kind, chosen), torch.ones(len(x)), accumulate=True)
    together = float((pairs**2).sum() / (pairs.sum(1) ** 2).sum())  # of two tokens of a kind; 1 / 16 by chance
    assert together > 0.5, together


def test_logits_have_one_spread_whatever_the_size_of_what_is_read() -> None:
    x = tokens(12, 1)[0]
    for scale in (1e-3, 1.0, 1e3):
        rows = made(scale * x, 8)
        logits = scale * x @ rows.T
        assert float(rows.mean(0).abs().max()) < 1e-5 * float(rows.abs().max())
        assert float(logits.std(1).mean()) == pytest.approx(clusters.SPREAD, rel=1e-3)


def test_rows_follow_from_text_seed_and_layer_alone() -> None:
    x = tokens(40, 1)[0]
    rows = made(x, 8, layer=1)
    torch.randn(7)
    assert torch.equal(rows, made(x, 8, layer=1))
    assert not torch.equal(rows, made(x, 8, layer=1, seed=1))
    assert not torch.equal(rows, made(x, 8, layer=2))


def test_a_layers_rows_do_not_depend_on_the_layers_that_are_divided_with_it() -> None:
    seen = {layer: tokens(kinds, layer, mean=layer)[0] for layer, kinds in ((0, 40), (3, 2), (5, 12))}
    together = clusters.rows(seen, 8, seed=0)
    assert list(together) == [0, 3, 5]
    for layer, x in seen.items():
        assert torch.equal(together[layer], made(x, 8, layer=layer))


def test_more_layers_cost_few_more_operations() -> None:
    """A GPU waits for the host between small operations, so layers share the hundreds of changes of their prices."""

    class Counted(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.total += 1
            return op(*args, **(kwargs or {}))

    counts = []
    for layers in (1, 5):
        with Counted() as counted:
            clusters.rows({layer: torch.randn(32, DIM) for layer in range(layers)}, 4, seed=0)
        counts.append(counted.total)
    assert counts[1] < 1.5 * counts[0], counts


@pytest.mark.parametrize(("less", "groups"), [(0, [[0, 1]]), (1, [[0], [1]])])
def test_a_gpu_divides_layers_together_and_finds_the_rows_of_a_cpu(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, less: int, groups: list[list[int]]
) -> None:
    source, letters = readable(llama, tmp_path)
    plan, checkpoints = load(f"source={source}", *SLICES, f"calibration.texts=[{letters}]", "calibration.tokens=16")
    want = measure.measure(plan, checkpoints, quiet=True)
    divided: list[list[int]] = []

    def rows(seen: dict[int, Tensor], *others: int) -> dict[int, Tensor]:
        divided.append(list(seen))
        return real(seen, *others)

    real, walk = clusters.rows, observe.walk
    monkeypatch.setattr(clusters, "rows", rows)
    monkeypatch.setattr(observe, "walk", lambda *given, **named: walk(*given, **{**named, "device": "cpu"}))
    monkeypatch.setattr(measure, "TOGETHER", 2 * 16 * plan.dense.hidden * 4 - less)  # of two layers in float32
    got = measure.measure(plan, checkpoints, quiet=True, device="cuda")
    assert divided == groups and got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_tokens_that_are_all_alike_make_finite_rows() -> None:
    assert made(torch.ones(64, DIM), 4).isfinite().all()


@pytest.mark.parametrize(("count", "given"), [(8, 15), (1, 100)])
def test_what_cannot_be_divided_is_one_sentence(count: int, given: int) -> None:
    with pytest.raises(ValueError, match=r"^\d+ tokens of text cannot be divided into \d+ clusters .*=normal$"):
        made(torch.randn(given, DIM), count)


@pytest.mark.parametrize(
    ("words", "texts", "kind"),
    [
        (SLICES, True, "clusters"),
        (SLICES, False, "normal"),
        ((*SLICES, "router.init.name=virtual_group"), True, "virtual_group"),
        ((*SLICES, "router.choice=any"), True, "normal"),
        (("target=mixtral", "experts=4"), True, "normal"),
        (("target=mixtral", "experts=4", "router.init.name=clusters"), True, "clusters"),
    ],
)
def test_rows_are_clusters_by_themselves_where_slices_choose_and_text_is_named(
    tmp_path: Path, words: tuple[str, ...], texts: bool, kind: str
) -> None:
    source = tiny.make("llama", tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    more = [f"calibration.texts=[{tmp_path / 'a.txt'}]"] if texts else []
    made, _ = load(f"source={source}", *words, *more)
    assert made.config.router.init.name == kind
    assert made.needs_text == (kind == "clusters")
    router = dict(card.rows(made))["router"]
    assert router.endswith("rows clusters" if kind == "clusters" else f"rows {kind}, std 0.01")
    assert any("set calibration.texts" in note for note in made.notes) == (made.moe.slices > 1 and kind == "normal")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("router.init.name=clusters",),
            "router.init.name=clusters is measured on text and calibration.texts is empty",
        ),
        (("router.init.name=clusters", "method.name=split", "experts=2"), "divides text among copies"),
    ],
)
def test_clusters_without_text_or_copies_are_one_sentence(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load(f"source={tiny.make('llama', tmp_path / 'dense')}", *words)
