"""Paired statistics against scipy and by hand, refusals, and losses at equal tokens and equal FLOPs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation import compare, results
from evaluation.__main__ import main as evaluate
from evaluation.results import Evaluation, Group, Item, Model, Task

CHOICES = ("A", "B", "C", "D")
Answers = Sequence[int]


def model(name: str) -> Model:
    return Model(name, f"./{name}", f"print-of-{name}", "llama", 1000, 1000, "float32")


def task(name: str, items: int, metric: str = "acc", groups: tuple[str, ...] = (), higher: bool = True) -> Task:
    function = {metric: metric} if metric == "bits_per_byte" else {}
    output = "multiple_choice"
    return Task(name, name, {metric: 0.5}, {}, {metric: higher}, items, items, 5, "1", output, groups, function)


def chosen(name: str, doc: int, right: int, answer: int, margin: float = 1.0) -> Item:
    logprobs = tuple(-1.0 if choice == answer else -1.0 - margin for choice in range(4))
    scores = {"acc": float(answer == right)}
    return Item(
        name, doc, f"doc-{name}-{doc}", f"prompt-{name}-{doc}", str(right), scores, logprobs, (False,) * 4, "", CHOICES
    )


def text(name: str, doc: int, nats: float, size: float) -> Item:
    return Item(name, doc, f"d{doc}", f"p{doc}", "", {"bits_per_byte": (nats, size)}, (nats,))


def write(folder: Path, tasks: Sequence[Task], items: Sequence[Item], groups: Sequence[Group] = ()) -> Path:
    named = {t.name: t for t in tasks}
    run = Evaluation(
        model(folder.name),
        "suite",
        "command",
        {},
        {},
        "2026-01-01T00:00:00Z",
        1.0,
        {},
        named,
        {g.name: g for g in groups},
    )
    return results.save(folder, run, items)


def subjects(folder: Path, answers: dict[str, Answers], rights: dict[str, Answers]) -> Path:
    tasks = [task(name, len(found), groups=("all",)) for name, found in answers.items()]
    items = [chosen(n, i, r, a) for n in answers for i, (r, a) in enumerate(zip(rights[n], answers[n], strict=True))]
    return write(folder, tasks, items, [Group("all", "All", {"acc": 0.5}, {}, tuple(answers), len(items))])


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """B gains five items of x and loses one; y is the same in both."""
    rights = {"x": [0] * 20, "y": [1] * 10}
    a = {"x": [0] * 10 + [1] * 10, "y": [1, 2] * 5}
    b = {"x": [1] + [0] * 14 + [1] * 5, "y": [1, 2] * 5}
    return subjects(tmp_path / "a", a, rights), subjects(tmp_path / "b", b, rights)


# ---- statistics


@pytest.mark.parametrize(
    ("a", "b", "p"), [(0, 0, 1.0), (0, 1, 1.0), (0, 6, 2 / 64), (1, 5, 14 / 64), (5, 1, 14 / 64), (4, 4, 1.0)]
)
def test_mcnemar_by_hand(a: int, b: int, p: float) -> None:
    assert compare.mcnemar(a, b) == pytest.approx(p, abs=1e-15)


def test_mcnemar_is_scipys_binomial_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    for a, b in [(0, 3), (7, 19), (120, 177), (1000, 1200), (4000, 4001), (0, 2000)]:
        assert compare.mcnemar(a, b) == pytest.approx(stats.binomtest(a, a + b, 0.5).pvalue, rel=1e-9, abs=1e-300)


def test_exchange_is_scipys_permutation_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    difference = np.random.default_rng(0).normal(0.4, 1, 12)
    exact = stats.permutation_test(
        (difference,), np.sum, permutation_type="samples", n_resamples=10_000
    ).pvalue  # all 4096
    # 10,000 random ones estimate it with an error of sqrt(p (1 - p) / 10,000); 4 of those
    assert 0.02 < exact < 0.9
    assert compare.exchange(difference, "x") == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000))


def test_holm_by_hand() -> None:
    assert compare.holm([0.04, 0.01, 0.03, 0.5]) == pytest.approx([0.09, 0.04, 0.09, 0.5])
    assert compare.holm([0.6, 0.7]) == [1.0, 1.0]


def test_bootstrap_has_the_paired_standard_error_and_repeats() -> None:
    rng = np.random.default_rng(1)
    a = (rng.random(4000) < 0.6).astype(np.float64)
    b = np.where(rng.random(4000) < 0.9, a, 1 - a)
    low, high = compare.bootstrap(a, b, np.ones(4000), lambda mean: mean, "x")
    error = (b - a).std() / math.sqrt(4000)
    assert (low + high) / 2 == pytest.approx((b - a).mean(), abs=0.1 * error)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert (low, high) == compare.bootstrap(a, b, np.ones(4000), lambda mean: mean, "x")
    assert (low, high) != compare.bootstrap(a, b, np.ones(4000), lambda mean: mean, "y")


def test_few_kinds_of_items_are_drawn_as_many_are() -> None:
    """Both ways of drawing: sums of 40 items of two kinds, and of the same with each made distinct by next to nothing."""
    table = np.repeat(np.array([[0.0, 1.0], [3.0, 1.0]]), [10, 30], axis=0)
    apart = table + np.linspace(0, 1e-9, 40)[:, None]
    for kind in (table, apart):
        sums = np.concatenate(list(compare.resampled(kind, np.random.default_rng(0))))
        assert len(sums) == compare.DRAWS
        assert sums[:, 0].mean() == pytest.approx(90, abs=0.4)  # error of the mean: 0.08
        assert sums[:, 0].var() == pytest.approx(40 * 9 * 0.25 * 0.75, rel=0.06)
        assert sums[:, 1] == pytest.approx(40)


def test_bootstrap_of_texts_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(2)
    size = rng.integers(100, 5000, 60).astype(np.float64)
    a, b = -size * rng.normal(1.0, 0.1, 60), -size * rng.normal(0.95, 0.1, 60)

    def difference(a: Any, b: Any, size: Any, axis: int = -1) -> Any:
        return (a.sum(axis) - b.sum(axis)) / size.sum(axis)

    theirs = stats.bootstrap(
        (a, b, size), difference, paired=True, n_resamples=10_000, method="percentile", rng=0
    ).confidence_interval
    ours = compare.bootstrap(a, b, size, lambda mean: -mean, "x")
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.05 * (theirs.high - theirs.low))


# ---- two runs


def test_a_comparison_counts_what_was_won_and_lost(two: tuple[Path, Path]) -> None:
    [found] = compare.compare(two)
    whole, x, y = found.differences
    assert (whole.name, whole.items, whole.headline) == ("all", 30, True)
    assert (x.only_a, x.only_b, x.a, x.b) == (1, 5, 0.5, 0.7)
    assert whole.difference == pytest.approx(4 / 30)
    assert whole.p == x.p == pytest.approx(14 / 64)
    assert whole.p_holm == pytest.approx(14 / 64)  # a family of one; the subjects are another of two
    assert x.p_holm == pytest.approx(28 / 64)
    assert not x.headline
    assert whole.low < whole.difference < whole.high
    assert (y.difference, y.low, y.high, y.p) == (0, 0, 0, 1)
    assert sorted(f.doc for f in found.flips if f.gained) == [10, 11, 12, 13, 14]
    assert [(f.doc, f.target, f.a, f.b, f.swing) for f in found.flips if not f.gained] == [(0, "A", "A", "B", -2.0)]


def test_the_same_answers_flip_nothing(two: tuple[Path, Path]) -> None:
    [found] = compare.compare([two[0], two[0]])
    assert not found.flips
    assert all(d.p == 1 and d.difference == 0 and d.verdict == "no difference shown" for d in found.differences)


def test_holm_is_over_all_runs(two: tuple[Path, Path]) -> None:
    first, second = compare.compare([*two, two[1]])
    assert first.differences[0].p_holm == second.differences[0].p_holm == pytest.approx(2 * 14 / 64)


def test_bits_per_byte_weigh_texts_by_their_bytes(tmp_path: Path) -> None:
    def run(name: str, nats: Sequence[float]) -> Path:
        tasks = [task("t", len(nats), "bits_per_byte", higher=False)]
        return write(
            tmp_path / name,
            tasks,
            [text("t", i, n, s) for i, (n, s) in enumerate(zip(nats, (100, 300, 50), strict=True))],
        )

    [found] = compare.compare([run("a", (-100, -300, -60)), run("b", (-90, -200, -50))])
    [row] = found.differences
    assert row.a == pytest.approx(460 / 450 / math.log(2), abs=1e-12)
    assert row.b == pytest.approx(340 / 450 / math.log(2), abs=1e-12)
    assert row.only_a is None
    assert row.p > 0.2  # of 8 ways to sign three differences, two reach this sum
    assert replace(row, p_holm=0.01).verdict == "better"  # lower is


REFUSALS: dict[str, tuple[Callable[[list[Item]], list[Item]], str]] = {
    "an item is missing": (lambda items: items[:-1], "do not have the same items: 1 are in one alone, the first is 19 of x"),
    "another item": (lambda items: [replace(items[0], doc_hash="other"), *items[1:]], "do not have the same items: 2 are"),
    "another prompt": (lambda items: [replace(items[0], prompt_hash="other"), *items[1:]], "item 0 of x has another prompt"),
    "another target": (lambda items: [*items[:4], replace(items[4], target="3"), *items[5:]], "item 4 of x has another target"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_other_items_or_prompts_are_refused(tmp_path: Path, case: str) -> None:
    items = [chosen("x", i, 0, i % 2) for i in range(20)]
    a = write(tmp_path / "a", [task("x", 20)], items)
    b = write(tmp_path / "b", [task("x", 20)], REFUSALS[case][0](items))
    with pytest.raises(ValueError, match=REFUSALS[case][1]):
        compare.compare([a, b])


def test_other_tasks_and_other_shots_are_refused(tmp_path: Path) -> None:
    items = [chosen("x", i, 0, 0) for i in range(3)]
    a = write(tmp_path / "a", [task("x", 3)], items)
    with pytest.raises(ValueError, match="has the task y"):
        compare.compare([a, write(tmp_path / "b", [task("x", 3), task("y", 0)], items)])
    with pytest.raises(ValueError, match=r"x has 5 examples in the prompts of .* and 0 in"):
        compare.compare([a, write(tmp_path / "c", [replace(task("x", 3), fewshot=0)], items)])


def test_acc_norm_is_judged_before_acc_and_answers_by_length() -> None:
    item = replace(chosen("x", 0, 1, 1), choices=("a", "four words are long"), logprobs=(-3.0, -9.0), target="1")
    assert compare.answer(item, "acc_norm") == "four words are long"
    assert compare.answer(item, "acc") == "a"
    assert compare.right(item) == "four words are long"
    both = replace(item, scores={"acc": 0.0, "acc_norm": 1.0})
    part = replace(task("x", 1), metrics={"acc": 0.0, "acc_norm": 1.0})
    run = Evaluation(model("a"), "suite", "", {}, {}, "", 1.0, {}, {"x": part})
    judged = compare.judged_by(part, run, [(both, both)])
    assert judged is not None and judged[0] == "acc_norm"


def test_long_answers_are_shown_where_they_differ() -> None:
    long = "the same beginning of a sentence that goes on for a while until "
    a, b, c = compare.apart((long + "here", long + "there", long + "nowhere at all, whatever comes after it"))
    assert a.startswith("…") and a.endswith("until here") and b.endswith("there") and "nowhere" in c
    assert max(len(a), len(b), len(c)) <= compare.WIDTH
    assert compare.apart(("A", "B")) == ["A", "B"]


def test_nothing_is_no_minus_nothing() -> None:
    assert compare.signed(-1e-9, "bits_per_byte") == "+0.0000"
    assert compare.signed(-0.00001, "acc") == "+0.00"
    assert compare.signed(-0.0001, "acc") == "-0.01"


# ---- training runs


def log(folder: Path, flops: float, losses: dict[int, float], tokens: int = 100) -> Path:
    """A step is `tokens` tokens."""
    folder.mkdir()
    rows: list[dict[str, Any]] = [{"step": step, "valid/code/loss": loss} for step, loss in losses.items()]
    for row in rows[1:]:
        done = row["step"] * tokens
        row |= {"tokens": done, "loss": 3.0, "flops": flops * done}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_losses_at_equal_tokens_and_equal_flops(tmp_path: Path) -> None:
    dense = log(tmp_path / "dense", 10.0, {0: 5.0, 10: 4.0, 20: 3.0})
    moe = log(tmp_path / "moe", 20.0, {0: 5.0, 10: 3.5, 30: 1.5})
    found = compare.compare_losses([dense, moe])
    assert (found.tokens, found.flops) == (2000, 20_000)
    [tokens], [flops] = found.at_equal_tokens["moe"], found.at_equal_flops["moe"]
    assert (tokens.a, tokens.b, tokens.difference) == pytest.approx((3.0, 2.5, -0.5))
    assert (flops.a, flops.b, flops.difference) == pytest.approx((3.0, 3.5, 0.5))  # half the tokens


def test_losses_of_other_sets_are_refused(tmp_path: Path) -> None:
    a = log(tmp_path / "a", 1.0, {0: 5.0, 10: 4.0})
    b = log(tmp_path / "b", 1.0, {0: 5.0, 10: 4.0})
    (b / "metrics.jsonl").write_text((b / "metrics.jsonl").read_text().replace("code", "law"))
    with pytest.raises(ValueError, match=r"a and b have no validation set in common \(code; law\)"):
        compare.compare_losses([a, b])


# ---- the command


def test_the_command_prints_and_writes(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([*map(str, two), f"output={tmp_path / 'out.json'}"]) == 0
    said = capsys.readouterr().out
    assert "1 headline and 2 part comparisons, p corrected by Holm" in said
    assert "| All | acc % | 30 | 50.00 | 63.33 | +13.33 |" in said
    assert "6 items flipped: 5 gained, 1 lost" in said
    assert json.loads((tmp_path / "out.json").read_text())["comparisons"][0]["differences"][1]["only_b"] == 5


def test_folders_of_two_kinds_are_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    run = log(tmp_path / "run", 1.0, {0: 5.0, 10: 4.0})
    with pytest.raises(ValueError, match="are not all of one kind"):
        compare.main([str(two[0]), str(run)])
    with pytest.raises(ValueError, match="compare needs two runs or more"):
        compare.main([str(run)])


def test_the_command_line_finds_its_commands(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(["compare", *map(str, two)]) == 0
    assert "items flipped" in capsys.readouterr().out
    assert evaluate(["compare", str(two[0])]) == 2
    assert capsys.readouterr().err.startswith("evaluation: compare needs two runs or more")
    assert evaluate(["comp"]) == 2
    assert evaluate([]) == 0
    assert "routing CHECKPOINT TEXT" in capsys.readouterr().out
