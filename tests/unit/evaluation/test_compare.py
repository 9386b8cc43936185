"""Runs compared seed by seed: against scipy and by hand, null studies, refusals, losses at equal tokens and FLOPs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from evaluation.__main__ import main as evaluate
from evaluation.judge import intervals, logged, suites, words
from evaluation.judge.compare import compare, group_words, loss_table
from evaluation.judge.losses import Losses
from evaluation.judge.results import Evaluation, Group, Item, Model, Task
from evaluation.judge.seeds import holm
from evaluation.judge.suites import Comparison, Difference, compared
from tests.unit.evaluation.written import save

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
    ids = (f"doc-{name}-{doc}", f"prompt-{name}-{doc}")
    return Item(name, doc, *ids, str(right), {"acc": float(answer == right)}, logprobs, (False,) * 4, "", CHOICES)


def text(name: str, doc: int, nats: float, size: float) -> Item:
    return Item(name, doc, f"d{doc}", f"p{doc}", "", {"bits_per_byte": (nats, size)}, (nats,))


def write(folder: Path, tasks: Sequence[Task], items: Sequence[Item], groups: Sequence[Group] = ()) -> Path:
    named = {t.name: t for t in tasks}, {g.name: g for g in groups}
    run = Evaluation(model(folder.name), "suite", "command", {}, {}, "2026-01-01T00:00:00Z", 1.0, {}, *named)
    return save(folder, run, items)


def subjects(folder: Path, answers: dict[str, Answers], rights: dict[str, Answers]) -> Path:
    tasks = [task(name, len(found), groups=("all",)) for name, found in answers.items()]
    items = [chosen(n, i, r, a) for n in answers for i, (r, a) in enumerate(zip(rights[n], answers[n], strict=True))]
    return write(folder, tasks, items, [Group("all", "All", {"acc": 0.5}, {}, tuple(answers), len(items))])


def differences(*groups: Any, cluster: str = "") -> list[Difference]:
    """The first difference of each group to the first one."""
    return [found.differences[0] for found in compare(groups, cluster).comparisons]


def losses(*groups: Any) -> Losses:
    found = compare(groups).losses
    assert found is not None
    return found


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """B gains five items of x and loses one; y is the same in both."""
    rights = {"x": [0] * 20, "y": [1] * 10}
    a = {"x": [0] * 10 + [1] * 10, "y": [1, 2] * 5}
    b = {"x": [1] + [0] * 14 + [1] * 5, "y": [1, 2] * 5}
    return subjects(tmp_path / "a", a, rights), subjects(tmp_path / "b", b, rights)


# ---- a score's interval


def mean(values: intervals.Array) -> intervals.Array:
    return values


def test_a_bootstrap_has_the_standard_error_and_repeats() -> None:
    right = (np.random.default_rng(1).random(4000) < 0.6).astype(np.float64)
    low, high = intervals.bootstrap(right, np.ones(4000), mean, "x")
    error = right.std() / math.sqrt(4000)
    assert (low + high) / 2 == pytest.approx(right.mean(), abs=0.1 * error)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert (low, high) == intervals.bootstrap(right, np.ones(4000), mean, "x")
    assert (low, high) != intervals.bootstrap(right, np.ones(4000), mean, "y")


def test_few_kinds_of_items_are_drawn_as_many_are() -> None:
    """Both ways of drawing: sums of 40 items of two kinds, and of the same with each made distinct by next to nothing."""
    table = np.repeat(np.array([[0.0, 1.0], [3.0, 1.0]]), [10, 30], axis=0)
    for kind in (table, table + np.linspace(0, 1e-9, 40)[:, None]):
        sums = np.concatenate(list(intervals.resampled(kind, "x")))
        assert len(sums) == intervals.DRAWS
        assert sums[:, 0].mean() == pytest.approx(90, abs=0.4)  # error of the mean: 0.08
        assert sums[:, 0].var() == pytest.approx(40 * 9 * 0.25 * 0.75, rel=0.06)
        assert sums[:, 1] == pytest.approx(40)


def test_a_bootstrap_of_texts_is_scipys() -> None:
    rng = np.random.default_rng(2)
    size = rng.integers(100, 5000, 60).astype(np.float64)
    nats = -size * rng.normal(1.0, 0.1, 60)
    theirs = stats.bootstrap(
        (nats, size), lambda a, n, axis=-1: -a.sum(axis) / n.sum(axis), paired=True, n_resamples=10_000,
        method="percentile", rng=0,
    ).confidence_interval  # fmt: skip
    ours = intervals.bootstrap(nats, size, lambda mean: -mean, "x")
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.05 * (theirs.high - theirs.low))


# ---- answers to suites


def test_a_comparison_counts_what_was_won_and_lost_and_one_run_each_has_no_verdict(two: tuple[Path, Path]) -> None:
    [found] = compare(two).comparisons
    whole, x, y = found.differences
    assert (whole.name, whole.items, whole.clusters, whole.headline) == ("all", 30, 30, True)
    assert (x.only_a, x.only_b, x.a, x.b) == (1, 5, 0.5, 0.7)
    assert whole.difference == pytest.approx(4 / 30)
    assert not x.headline
    assert whole.items_low < whole.difference < whole.items_high
    assert y.difference == 0 and y.items_low == -y.items_high < -0.2  # ten items that agree do not say 0.00 to 0.00
    for d in found.differences:
        assert (d.verdict, d.seeds) == ("one run each: no verdict", 1)
        assert all(map(math.isnan, (d.low, d.high, d.p, d.p_holm)))
    assert sorted(f.doc for f in found.flips if f.gained) == [10, 11, 12, 13, 14]
    assert [(f.doc, f.target, f.a, f.b, f.swing) for f in found.flips if not f.gained] == [(0, "A", "A", "B", -2.0)]
    [same] = compare([two[0], two[0]]).comparisons
    assert not same.flips
    assert all(d.difference == 0 and d.items_low <= 0 <= d.items_high for d in same.differences)


def of_seeds(place: Path, name: str, right: Sequence[int], items: int = 40) -> list[Path]:
    """A run a seed, of which the first items are right, as many as are given."""
    return [
        write(place / f"{name}-{seed}", [task("x", items)], [chosen("x", i, 0, int(i >= count)) for i in range(items)])
        for seed, count in enumerate(right)
    ]


def test_seeds_decide_and_items_do_not(tmp_path: Path) -> None:
    a = of_seeds(tmp_path, "a", (20, 21, 22))
    one, two_, better, noisy, worse = (
        of_seeds(tmp_path, name, right)
        for name, right in (("o", (40,)), ("t", (40, 40)), ("b", (30, 31, 29)), ("n", (20, 38, 28)), ("w", (10, 11, 9)))
    )
    [row] = differences(a[0], one[0])
    assert row.difference == 0.5 and row.items_low > 0.3  # however sure about the items
    assert row.verdict == "one run each: no verdict"
    assert differences(a[:2], two_)[0].verdict == "2 runs each: no verdict"
    report = compare([a, better, noisy, worse])
    found = [c.differences[0] for c in report.comparisons]
    assert [d.verdict for d in found] == ["better", "no difference shown", "worse"]
    hand = [(30 - 20) / 40, (31 - 21) / 40, (29 - 22) / 40]
    row = found[0]
    assert (row.a, row.b, row.difference) == pytest.approx((63 / 120, 90 / 120, sum(hand) / 3))
    reach = stats.t.ppf(0.975, 2) * np.std(hand, ddof=1) / math.sqrt(3)
    assert (row.low, row.high) == pytest.approx((row.difference - reach, row.difference + reach))
    assert row.p == pytest.approx(stats.ttest_1samp(hand, 0).pvalue)
    assert row.p_holm == holm([d.p for d in found])[0] >= 2 * row.p  # three next to the first
    assert report.comparisons[0].a.name == "a-0, a-1, a-2" and not report.comparisons[0].flips and row.only_a is None
    assert noisy and found[1].low < 0


def test_one_item_more_in_each_seed_is_no_difference(tmp_path: Path) -> None:
    """Three differences that are equal to the last digit, because a test has no smaller ones."""
    groups = [of_seeds(tmp_path, name, [right] * 3) for name, right in (("a", 20), ("b", 21), ("c", 26))]
    one, six = differences(*groups)
    assert one.low < 0 < one.difference < one.high and one.verdict == "no difference shown"
    assert six.verdict == "better"


def test_items_of_one_passage_count_once(tmp_path: Path) -> None:
    """Ten items a passage, all of which go the same way: ten times the items say no more."""

    def run(name: str, key: str, passages: int, answers: Sequence[int], each: int) -> Path:
        found = [
            replace(chosen("x", p * each + n, 0, answers[p]), clusters={key: f"{p}"} if key else {})
            for p in range(passages)
            for n in range(each)
        ]
        return write(tmp_path / name, [task("x", len(found))], found)

    right, wrong, width = [0] * 20, [1, 1, 1, 1, 1, *[0] * 15], dict[str, float]()
    for label, key, each in (("alone", "", 1), ("as if alone", "", 10), ("clustered", "passage", 10)):
        [row] = differences(run(f"{label} a", key, 20, right, each), run(f"{label} b", key, 20, wrong, each))
        width[label] = row.items_high - row.items_low
        assert row.clusters == (200 if label == "as if alone" else 20)
    assert width["clustered"] == pytest.approx(width["alone"], rel=0.15)  # and Student's t instead of z
    assert width["as if alone"] < 0.4 * width["alone"]
    both = [tmp_path / "clustered a", tmp_path / "clustered b"]
    assert differences(*both, cluster="passage")[0].clusters == 20
    with pytest.raises(ValueError, match=r"cluster=file: no document of .* has that key \(its keys are: passage\)"):
        compare(both, "file")
    [row] = differences(*(run(f"few {name}", "passage", 9, found, 10) for name, found in (("a", right), ("b", wrong))))
    assert (row.items, row.clusters, row.over_items) == (90, 9, "too few (9)") and math.isnan(row.items_low)


def test_an_arm_next_to_itself_is_hardly_ever_called_better() -> None:
    """The null study: 20 pairs of three seeds each of one arm, judged on 10 tasks. Items differ in how hard they are, and
    between two seeds one answer in seven does, as between two trainings that differ in the order of their data."""
    better, called, changed = null_study(pairs=20, seed=0)
    assert better <= 1 and called <= 2
    assert 0.1 < changed < 0.2
    assert null_study(pairs=5, seed=1, gain=2.5)[0] == 5  # and what is better is found


def null_study(pairs: int, seed: int, gain: float = 0.0, tasks: int = 10, items: int = 60) -> tuple[int, int, float]:
    """(pairs of which B is better on any task, better or worse on any, the share of answers that two seeds of A change)."""
    rng = np.random.default_rng(seed)
    known = {f"t{t}": task(f"t{t}", items) for t in range(tasks)}
    better = called = 0
    changed = []
    for _ in range(pairs):
        hard = rng.normal(0.0, 2.5, (tasks, items))
        answers = [
            hard + rng.normal(0, 1.0, hard.shape) + rng.normal(0, 0.15) + gain * (run > 2) + rng.normal(0, 0.2, (tasks, 1)) > 0
            for run in range(6)
        ]  # fmt: skip
        changed.append(float((answers[0] != answers[1]).mean()))
        runs = []
        for number, right in enumerate(answers):
            made = [chosen(f"t{t}", i, 0, int(not right[t, i])) for t in range(tasks) for i in range(items)]
            blank = Evaluation(model(f"{number}"), "s", "c", {}, {}, "2026", 1.0, {}, known)
            runs.append(replace(blank, items=tuple(made)))
        [found] = compared([runs[:3], runs[3:]])
        verdicts = {d.verdict for d in found.differences}
        better += "better" in verdicts
        called += bool(verdicts & {"better", "worse"})
    return better, called, float(np.mean(changed))


def test_bits_per_byte_weigh_texts_by_their_bytes(tmp_path: Path) -> None:
    def run(name: str, nats: Sequence[float], seeds: int = 1) -> list[Path]:
        found = [text("t", i, n, s) for i, (n, s) in enumerate(zip(nats, (100, 300, 50), strict=True))]
        return [
            write(tmp_path / f"{name}{seed}", [task("t", 3, "bits_per_byte", higher=False)], found)
            for seed in range(seeds)
        ]

    [row] = differences(run("a", (-100, -300, -60), 3), run("b", (-90, -200, -50), 3))
    assert row.a == pytest.approx(460 / 450 / math.log(2), abs=1e-12)
    assert row.b == pytest.approx(340 / 450 / math.log(2), abs=1e-12)
    assert (row.only_a, row.over_items, row.verdict) == (None, "too few (3)", "better")  # lower is


def test_acc_norm_is_judged_before_acc_and_answers_by_length() -> None:
    item = replace(chosen("x", 0, 1, 1), choices=("a", "four words are long"), logprobs=(-3.0, -9.0), target="1")
    assert suites.answer(item, "acc_norm") == "four words are long"
    assert suites.answer(item, "acc") == "a"
    assert suites.right(item) == "four words are long"
    both = replace(item, scores={"acc": 0.0, "acc_norm": 1.0})
    part = replace(task("x", 1), metrics={"acc": 0.0, "acc_norm": 1.0})
    run = Evaluation(model("a"), "suite", "", {}, {}, "", 1.0, {}, {"x": part})
    judged = suites.judged_by(part, run, [both, both])
    assert judged is not None and judged[0] == "acc_norm"


# ---- what is refused


REFUSALS: dict[str, tuple[Callable[[list[Item]], list[Item]], str]] = {
    "an item is missing": (lambda items: items[:-1], "have different items: 1 are in only one of them, the first is 19 of x"),
    "another item": (lambda items: [replace(items[0], doc_hash="other"), *items[1:]], "have different items: 2 are"),
    "another prompt": (lambda items: [replace(items[0], prompt_hash="other"), *items[1:]], "item 0 of x has another prompt"),
    "another target": (lambda items: [*items[:4], replace(items[4], target="3"), *items[5:]], "item 4 of x has another target"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_other_items_or_prompts_are_refused(tmp_path: Path, case: str) -> None:
    items = [chosen("x", i, 0, i % 2) for i in range(20)]
    changed = REFUSALS[case][0](items)
    both = [write(tmp_path / "a", [task("x", 20)], items), write(tmp_path / "b", [task("x", len(changed))], changed)]
    with pytest.raises(ValueError, match=REFUSALS[case][1]):
        compare(both)


def test_other_tasks_and_other_shots_are_refused(tmp_path: Path) -> None:
    items = [chosen("x", i, 0, 0) for i in range(3)]
    a = write(tmp_path / "a", [task("x", 3)], items)
    with pytest.raises(ValueError, match="has the task y"):
        compare([a, write(tmp_path / "b", [task("x", 3), task("y", 0)], items)])
    with pytest.raises(ValueError, match=r"x has 5 examples in the prompts of .* and 0 in"):
        compare([a, write(tmp_path / "c", [replace(task("x", 3), fewshot=0)], items)])


def test_groups_that_cannot_be_paired_are_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = of_seeds(tmp_path, "p", (20, 21, 20)), of_seeds(tmp_path, "q", (20, 21, 20))
    again, run = tmp_path / "elsewhere", log(tmp_path / "run", 1.0, {0: 5.0, 10: 4.0})
    save(again, logged.load(b[0]), logged.load(b[0]).items)
    law = log(tmp_path / "law", 1.0, {0: 5.0, 10: 4.0})
    (law / "metrics.jsonl").write_text((law / "metrics.jsonl").read_text().replace("code", "law"))
    cases: dict[str, Any] = {
        r"are 3 and .* are 2; give as many runs of each": [a, b[:2]],
        "is there twice in one group": [a, [b[0], b[1], b[0]]],
        r"q-0 and .*elsewhere have the same weights": [a, [b[0], b[1], again]],
        "are not all of one kind": [two[0], run],
        r"^\S*nowhere: there is no such folder": [two[0], tmp_path / "nowhere"],
        "compare needs two runs or more": [run],
        r"run and law share no validation set \(code; law\)": [run, law],
    }
    for sentence, groups in cases.items():
        with pytest.raises(ValueError, match=sentence):
            compare(groups)


# ---- as text


def test_words_are_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "with,comma").mkdir()
    wanted = [["a", "b"], ["c", "d"]]
    for typed in ("a,b -- c,d", "a,b c,d", "a b -- c d", "a, b -- c,d --"):
        assert group_words(typed.split()) == wanted, typed
    assert group_words(["a", "with,comma", "c"]) == [["a"], ["with,comma"], ["c"]]


def test_long_answers_are_shown_where_they_differ() -> None:
    long = "the same beginning of a sentence that goes on for a while until "
    a, b, c = words.apart((long + "here", long + "there", long + "nowhere at all, whatever comes after it"))
    assert a.startswith("…") and a.endswith("until here") and b.endswith("there") and "nowhere" in c
    assert max(len(a), len(b), len(c)) <= words.WIDTH
    assert words.apart(("A", "B")) == ["A", "B"]


def test_nothing_is_no_minus_nothing() -> None:
    shown = [words.signed(*each) for each in ((-1e-9, "bits_per_byte"), (-0.00001, "acc"), (-0.0001, "acc"))]
    assert shown == ["+0.0000", "+0.00", "-0.01"]


def test_the_command_prints_and_writes(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(["compare", *map(str, two), f"output={tmp_path / 'out.json'}"]) == 0
    said = capsys.readouterr().out
    assert "one run each: no verdict; 1 headline and 2 part comparisons, p over seeds corrected by Holm" in said
    assert "| All | acc % | 50.00 | 63.33 | +13.33 |  |  | one run each: no verdict | 30 | 30 |" in said
    assert (
        "All: +13.33 is 2.1 times the largest noise measured (6.29); showing a difference of that size takes 4 seeds"
        in said
    )
    assert "standard deviation over three seeds of 0.16 to 1.00 points" in said
    assert "better" not in said and "worse" not in said
    assert "6 items flipped: 5 gained, 1 lost" in said
    kept = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert kept["comparisons"][0]["differences"][1]["only_b"] == 5
    assert evaluate(["compare", str(two[0])]) == 2
    assert "compare needs two runs or more" in capsys.readouterr().err


# ---- training runs


def log(folder: Path, flops: float, ends: dict[int, float], tokens: int = 100, steps: int = 0) -> Path:
    """A run with validation losses by step. A step is `tokens` tokens. `steps`: that the schedule has."""
    folder.mkdir()
    rows: list[dict[str, Any]] = [{"step": step, "valid/code/loss": loss} for step, loss in ends.items()]
    for row in rows[1:]:
        done = row["step"] * tokens
        row |= {"tokens": done, "loss": 3.0, "flops": flops * done}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if steps:
        (folder / "run.json").write_text(json.dumps({"steps": steps}))
    return folder


def logs(place: Path, ends: dict[str, tuple[float, ...]], costly: str = "") -> list[list[Path]]:
    """Arms of seeds that are validated at step 10; a token of the costly one takes twice the FLOPs."""
    return [
        [log(place / f"{arm}{n}", 20.0 if arm == costly else 10.0, {0: 5.0, 10: end}, steps=10) for n, end in enumerate(found)]
        for arm, found in ends.items()
    ]  # fmt: skip


def test_losses_at_equal_tokens_and_equal_flops(tmp_path: Path) -> None:
    dense = log(tmp_path / "dense", 10.0, {0: 5.0, 10: 4.0, 20: 3.0}, steps=20)
    moe = log(tmp_path / "moe", 20.0, {0: 5.0, 10: 3.5, 30: 1.5}, steps=30)
    found = losses(dense, moe)
    assert (found.tokens, found.flops) == (2000, 20_000)
    [tokens], [flops] = found.at_equal_tokens["moe"], found.at_equal_flops["moe"]
    assert (tokens.a, tokens.b, tokens.difference) == pytest.approx((3.0, 2.5, -0.5))
    assert (flops.a, flops.b, flops.difference) == pytest.approx((3.0, 3.5, 0.5))  # half the tokens
    assert found.midway == {"tokens": ("moe",), "FLOPs": ("moe",)}  # it went on to 3000 tokens
    said = loss_table(found)
    assert "loss at equal FLOPs, interpolated (2e+04 FLOPs" in said and "moe is read before the end" in said
    assert "Mean of sets: -0.5000, one run each: no verdict; that is 185.2 times the largest noise measured" in said
    assert "showing a difference of that size takes 3 seeds" in said and said.count("Noise between runs") == 1
    assert "better" not in said and "worse" not in said


def test_a_run_that_ends_there_is_no_interpolation(tmp_path: Path) -> None:
    moe = log(tmp_path / "moe", 20.0, {0: 5.0, 10: 3.5}, steps=10)
    own = log(tmp_path / "own", 10.0, {0: 5.0, 20: 3.4}, steps=20)  # as many FLOPs, by a schedule of its own
    found = losses(own, moe)
    assert found.midway == {"tokens": ("own",), "FLOPs": ()} and found.equal("FLOPs") == "equal FLOPs"
    said = loss_table(found)
    assert "at equal FLOPs (2e+04" in said and "at equal tokens, interpolated" in said
    stopped = log(tmp_path / "stopped", 10.0, {0: 5.0, 20: 3.4}, steps=40)  # killed half way: its rate has not fallen
    assert losses(stopped, moe).midway["FLOPs"] == ("stopped",)


def test_losses_of_seeds_have_an_interval(tmp_path: Path) -> None:
    found = losses(*logs(tmp_path, {"a": (3.0, 3.1, 2.9), "b": (2.5, 2.61, 2.4), "c": (3.0, 3.0, 3.0)}))
    assert found.runs == ("a0, a1, a2", "b0, b1, b2", "c0, c1, c2")
    [b] = found.at_equal_tokens["b0, b1, b2"]
    assert b.by_seed == pytest.approx((-0.5, -0.49, -0.5)) and (b.a, b.b) == pytest.approx((3.0, 7.51 / 3))
    both = (
        "p < 0.001, corrected by Holm for 2 comparisons: better",
        "p 1.000, corrected by Holm for 2 comparisons: no difference shown",
    )
    said = found.verdict("tokens", "b0, b1, b2"), found.verdict("FLOPs", "c0, c1, c2")
    assert [one.endswith(end) for one, end in zip(said, both, strict=True)] == [True, True]
    assert "95 % interval over 3 seeds -0.51" in loss_table(found)


def test_equivalence_is_claimed_within_a_margin_and_not_from_a_null(tmp_path: Path) -> None:
    a, b, c = logs(tmp_path, {"a": (3.0, 3.1, 2.9), "b": (3.001, 3.102, 2.9), "c": (3.05, 3.06, 2.9)})
    found = compare([a, b, c], equivalent={"code": 0.01})
    near, far = (said for _, _, said in found.equivalences())
    assert near.startswith(
        "+0.0010, equivalent within 0.01 (p 0.00"
    ) and "code, b0, b1, b2: +0.0010, equivalent" in str(found)
    assert "not shown to be equivalent within 0.01" in far  # no difference is shown either
    assert [each[0] for each in found.json()["equivalences"]] == ["code", "code"]
    alone = compare([a[:1], b[:1]], equivalent={"code": 0.01})
    assert "no verdict, that needs 3 seeds" in str(alone)
    with pytest.raises(ValueError, match="equivalent names 'y', and nothing of that name is compared"):
        compare([a, b], equivalent={"y": 0.01})


def test_losses_are_judged_together(tmp_path: Path) -> None:
    """Better by its interval alone, and not next to others; equal FLOPs are another comparison where a token costs more."""
    ends = {"a": (3.0, 3.0, 3.0), "b": (2.975, 2.95, 2.955), "c": (3.01, 2.99, 3.02), "d": (3.0, 3.1, 3.0)}
    groups = logs(tmp_path, ends, costly="d")
    # only d is read elsewhere at equal FLOPs, and there it is worse with a p below that of b, which is second of four
    for arms, count, place in ((2, 1, 1), (3, 2, 1), (4, 4, 2)):
        found = losses(*groups[:arms])
        b = found.over_sets["tokens", "b0, b1, b2"]
        assert len(found.over_sets) == 2 * (arms - 1) and b.p is not None and b.low is not None and b.high is not None
        assert b.high < 0 and 0.025 < b.p < 0.05
        assert b.p_holm == pytest.approx((count - place + 1) * b.p)
        assert b.verdict() == ("better" if count == 1 else "no difference shown")
        said = f"Mean of sets: -0.0400, 95 % interval over 3 seeds {b.low:+.4f} to {b.high:+.4f}, p {b.p_holm:.3f}"
        more = f", corrected by Holm for {count} comparisons" * (count > 1)
        assert f"{said}{more}: {b.verdict()}" in loss_table(found)


def test_a_seed_belongs_to_the_seed_of_the_same_place(tmp_path: Path) -> None:
    """Seeds differ by far more than arms do, which pairing takes out; paired otherwise nothing could be shown."""
    a, b = logs(tmp_path, {"a": (3.0, 4.0, 5.0), "b": (2.9, 3.91, 4.89)})
    over = [
        losses(a, group).over_sets["tokens", ", ".join(run.name for run in group)] for group in (b, [b[1], b[2], b[0]])
    ]
    assert over[0].mean == pytest.approx(over[1].mean) and over[0].verdict() == "better"
    assert over[1].verdict() == "no difference shown"


def test_a_comparison_is_a_value_that_prints_as_text(two: tuple[Path, Path]) -> None:
    found = compare(two)
    assert isinstance(found.comparisons[0], Comparison) and found.losses is None
    assert "| All | acc % |" in str(found) and set(found.json()) == {"comparisons"}
