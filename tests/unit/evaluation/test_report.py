"""The page says what the numbers say, stands alone, and gives nobody's text the power to be markup."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evaluation.judge.logged import load
from evaluation.judge.metrics import Measure
from evaluation.judge.results import Evaluation
from evaluation.judge.suites import Part
from evaluation.show import facts
from evaluation.show import pictures as draw
from evaluation.show.facts import MEAN, shared
from evaluation.show.page import drawn
from evaluation.show.pictures import Curve, Forest, ForestRow, Heat, Mark
from evaluation.show.report import report
from evaluation.show.sections import tiles
from evaluation.show.sentences import opening
from tests.parity import tiny
from tests.unit.evaluation.test_compare import chosen, log, model, subjects, task, text, write
from tests.unit.evaluation.written import save
from training.checkpoint.storage import FORMAT, encode, sealed
from training.config.reading import read_config
from training.config.schema import TrainConfig
from upcycle.__main__ import main as upcycle
from upcycle.config.reading import build
from upcycle.io import publish

EVIL = '<script>alert("1")</script>'


class Tags(HTMLParser):
    """Every tag is closed in order; what is read from elsewhere is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.fetched += [
            str(value) for name, value in attrs if name in ("src", "href", "srcset", "xlink:href", "action")
        ]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.getpos() and self.open:
            assert self.open.pop() == tag, (tag, self.getpos())

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)


def routed(folder: Path, name: str = "moe") -> Path:
    """As routing.py writes it: two layers of four experts, two domains."""
    row: dict[str, Any] = {
        "max_over_mean": 1.5, "entropy": 0.9, "unused": 1, "router_entropy": 0.8, "specialisation": 0.1, "spread": [0.1] * 4,
        "pairs": [], "moved": [0.1, 0.2, 0.3, 0.4], "router_moved": 0.1, "whole_groups": 0.5, "whole": 0.6,
        "missing": 0.25, "doubled": 0.125,
    }  # fmt: skip
    found = {
        "kind": "routing", "experts": 4, "top_k": 2, "granularity": 2, "chance_of_whole_groups": 1 / 3, "checkpoint": name, "start": "",
        "layers": [{"layer": 1} | row, {"layer": 3} | row], "tokens": {"code": 100, "law": 200},
        "load": {"code": [[1, 1, 0, 2], [1, 1, 1, 1]], "law": [[4, 0.1, 0.2, 0.3], [1, 1, 1, 1]]},
        "together": [[[None, 1, 2, 0.5], [1, None, 1, 1], [2, 1, None, 1], [0.5, 1, 1, None]]] * 2,
    }  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def all_of_it(tmp_path: Path) -> list[str]:
    """Two runs of a suite, two trainings, one routing: y flips five up and one down in x."""
    rights = {"x": [0] * 20, "y": [1] * 10}
    a = subjects(tmp_path / "dense", {"x": [0] * 10 + [1] * 10, "y": [1, 2] * 5}, rights)
    b = subjects(tmp_path / "moe", {"x": [1] + [0] * 14 + [1] * 5, "y": [1, 2] * 5}, rights)
    runs = tmp_path / "runs"
    runs.mkdir()
    dense = log(runs / "dense", 10.0, {0: 5.0, 10: 4.0, 20: 3.0})
    moe = log(runs / "moe", 20.0, {0: 5.0, 10: 3.5, 30: 1.5})
    return [*map(str, (a, b, dense, moe)), str(routed(tmp_path))]


def made(tmp_path: Path, paths: Sequence[str | Sequence[str]], title: str = "t") -> tuple[str, str, dict[str, Any]]:
    out = tmp_path / "out" / "report.html"
    report(paths, out, title)
    strict = json.loads(out.with_suffix(".json").read_text(), parse_constant=pytest.fail)
    return out.read_text(), out.with_suffix(".md").read_text(), strict


def words_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page[page.index("<body>") :]))


# ---- the page


def test_the_page_says_what_the_numbers_say(tmp_path: Path, all_of_it: list[str]) -> None:
    page, markdown, data = made(tmp_path, all_of_it, "Tiny")
    said = words_of(page)
    for words in (
        "moe next to dense on All: 50.00 to 63.33 % (+13.33, over items, for these models only:",
        "one run each: no verdict",
        "5 items that dense had wrong are right, 1 the other way round",
        "At equal tokens, interpolated, the validation loss of moe is lower than that of dense on 1 of 1 sets; mean 3.0000 to 2.5000",
        "At equal FLOPs, interpolated, the validation loss of moe is lower than that of dense on 0 of 1 sets; mean 3.0000 to 3.5000",
        "corrected by Holm for 1 headline and 2 part comparisons",
    ):
        assert words in said
        assert words in markdown or "Holm for" in words
    assert not re.search(r"\b(better|worse) than\b", said)  # of one run each
    assert "Loss at equal FLOPs, interpolated, moe − dense +0.5000 nats a token; lower on 0 of 1 sets" in said
    assert "Fullest expert, moe 1.50× the mean load, in the worst layer; 2 of 8 experts unused" in said
    assert "lost x 0 A B −2.00" in said  # A is right; moe went from A to B
    assert "<title>Tiny</title>" in page and "print-of-moe" in said
    assert data["comparisons"][0]["differences"][0]["only_b"] == 5
    assert data["scores"]["moe"][0]["value"] == pytest.approx(19 / 30) and data["scores"]["moe"][0]["chance"] == 0.25
    assert data["losses"]["at_equal_flops"]["moe"][0]["difference"] == pytest.approx(0.5)


def test_the_page_shows_what_islands_told_each_other(tmp_path: Path, all_of_it: list[str]) -> None:
    folder = log(tmp_path / "island-0", 10.0, {0: 5.0, 10: 4.0, 20: 3.0})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows[1:], 1):
        row |= {"islands/bytes_up": 1e6 * number, "islands/bytes_down": 3e6 * number, "islands/stale": 2.0 + number}
        row |= {"islands/unsent": 0.01, "tokens_per_s": 900.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "At each exchange with their server" not in made(tmp_path, all_of_it)[0]
    page = made(tmp_path, [all_of_it[2], str(folder)])[0]
    for picture in ("Sent: island-0 from 1e+06 to 2e+06", "Received: island-0 from 3e+06 to 6e+06",
                    "Staleness: island-0 from 3 to 4", "Waiting to be sent: island-0 from 0.01 to 0.01",
                    "Speed: island-0 from 900 to 900"):  # fmt: skip
        assert picture in page, picture


def test_the_page_shows_what_runs_logged_of_their_choices(tmp_path: Path, all_of_it: list[str]) -> None:
    assert "Experts in training" not in made(tmp_path, all_of_it)[0]
    folder = log(tmp_path / "routed", 10.0, {0: 5.0, 10: 4.0, 20: 3.0})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row, whole in zip(rows[1:], (1.0, 0.25), strict=True):
        row |= {"balance/whole": whole} | {f"balance/{n}/max_over_mean": 1.5 for n in range(11)}
        row |= {f"balance/{n}/{name}": whole + n for n in range(11) for name in ("whole", "missing", "doubled")}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = words_of(made(tmp_path, [all_of_it[2], str(folder)])[0])
    start = said.index("Experts in training")
    for title in ("Fullest expert", "Whole FFNs", "Slices missing", "Slices doubled", "Whole FFNs, all layers"):
        assert title in said[start:]
    layers = facts.gather([str(folder)], "").layers["whole"]["routed"]
    assert list(layers.items()) == [(n, 0.25 + n) for n in range(11)]  # the last line's, layer 10 behind 9


def test_the_page_stands_alone_and_closes_what_it_opens(tmp_path: Path, all_of_it: list[str]) -> None:
    page = made(tmp_path, all_of_it)[0]
    tags = Tags()
    tags.feed(page)
    assert not tags.open and not tags.fetched
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(tags.seen)
    assert "default-src 'none'" in page and "@import" not in page and "url(" not in page and "http://" not in page
    assert len(tags.seen) > 300 and tags.seen.count("section") == 7  # all but the plan and configs, which are not given


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    folder = subjects(tmp_path / "a", {"x": [0, 1]}, {"x": [0, 0]})
    run = load(folder)
    evil = Evaluation(**{**vars(run), "model": model(EVIL), "command": EVIL, "options": {EVIL: EVIL}, "notes": (EVIL,)})
    save(folder, evil, load(folder).items)
    bad = json.loads(routed(tmp_path).read_text())
    bad |= {"load": {EVIL: bad["load"]["code"]}, "tokens": {EVIL: 1}, "checkpoint": "<i>"}
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    page = made(tmp_path, [str(folder), str(tmp_path / "bad.json")], "</title><i>")[0]
    assert "<script" not in page and "<i>" not in page
    assert "&lt;script&gt;alert" in page


def test_two_suites_and_two_runs_of_one_name_are_all_on_the_page(tmp_path: Path) -> None:
    """A model's suites stand together; another model, dtype or plan of the same name does not take its place."""
    answers = {"a": [0, 0, 1, 1], "b": [0, 1, 1, 1]}
    first = [subjects(tmp_path / side, {"x": found}, {"x": [0] * 4}) for side, found in answers.items()]
    second = [subjects(tmp_path / "other" / side, {"z": found}, {"z": [0] * 4}) for side, found in answers.items()]
    narrow = subjects(tmp_path / "narrow" / "a", {"x": [1] * 4}, {"x": [0] * 4})
    for folder in second:
        save(folder, replace(load(folder), suite="another"), load(folder).items)
    found = facts.gather([str(folder) for folder in (*first, *second)], "")
    assert {name: [s.name for s in mine] for name, mine in found.scores.items()} == {
        name: ["all", "x", "all", "z"] for name in "ab"
    }
    assert [one.suite for one in found.comparisons] == ["suite", "another"]
    run = load(narrow)
    save(narrow, replace(run, model=replace(run.model, dtype="bfloat16")), load(narrow).items)
    found = facts.gather([str(first[0]), str(narrow)], "")
    assert [mine[0].value for mine in found.scores.values()] == [0.5, 0.0]


def test_tiles_are_the_suites_first_headlines_and_not_the_surest(tmp_path: Path) -> None:
    rights = {name: [0] * 20 for name in ("calm", "quiet", "loud")}
    a = {name: [0] * 10 + [1] * 10 for name in rights}
    for side, changed in (("a", a), ("b", a | {"loud": [0] * 20})):
        tasks = [task(name, 20) for name in rights]
        write(tmp_path / side, tasks, [chosen(n, i, 0, changed[n][i]) for n in rights for i in range(20)])
    found = facts.gather([str(tmp_path / "a"), str(tmp_path / "b")], "")
    shown = " ".join(tile.about for tile in tiles(found))
    assert "calm, b" in shown and "quiet, b" in shown and "loud" not in shown


def trained(folder: Path, flops: float, ends: tuple[float, float], **config: Any) -> str:
    """A run of 20 steps of 100 tokens, validated at 0, 10 and 20; `ends`: losses at the end."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for step in (0, 10, 20):
        rows.append(
            {"step": step} | {f"valid/{k}/loss": 5 - (5 - e) * step / 20 for k, e in zip("xy", ends, strict=True)}
        )
        if step:
            rows[-1] |= {"tokens": 100 * step, "flops": flops * 100 * step, "loss": 3.0}
            rows[-1] |= {"seconds_per_step": flops / 10, "memory_gb": flops / 20}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = build(TrainConfig, {"output": str(folder), "steps": 20, "data": {"train": ["d"]}, **config})
    (folder / "run.json").write_text(json.dumps(asdict(start)))
    return str(folder)


def arms(place: Path, **more: Any) -> list[list[str]]:
    """dense, moe and groups in three seeds: moe is 0.1, 0.11, 0.12 below dense, groups 0.2 above and below."""
    ends = {"dense": (0.0, 0.0, 0.0), "moe": (-0.1, -0.11, -0.12), "groups": (-0.2, 0.2, 0.0)}
    return [
        [
            trained(place / arm / f"seed-{seed}", 10.0 + 5 * (arm == "moe"), (3 + seed + end, 3 + seed + end), seed=seed,
                    data={"train": ["d"], "seed": seed}, model={"source": f"./{arm}"}, **more)
            for seed, end in enumerate(found)
        ]
        for arm, found in ends.items()
    ]  # fmt: skip


def test_one_sentence_opens_the_page_with_effect_interval_and_cost(tmp_path: Path) -> None:
    page, markdown, data = made(tmp_path, arms(tmp_path))
    reach = 4.302652729 * 0.01 / 3**0.5
    opening = re.search(r'<p class="lead">(.*?)</p>', page)
    assert opening is not None and opening[1].count(". ") == 0
    said = (
        f"moe is better than dense: validation loss −0.1100 nats a token at equal tokens, 95 % interval over 3 seeds "
        f"−{0.11 + reach:.4f} to −{0.11 - reach:.4f}, for 1.50 times the FLOPs (3e+04), 1.50 times the seconds "
        f"(0:00:30) and 1.50 times the memory (0.75 GB); groups is not shown to differ from dense"
    )
    assert opening[1].startswith(said)
    assert said.replace("−", "-") in markdown and data["opening"] in markdown
    assert 'class="tile good"' in page and "lower on 2 of 2 sets; better" in words_of(page)
    assert 'class="tile bad"' not in page and "equal tokens, interpolated" not in page
    flops = "the validation loss of"  # a token of moe costs more, so that it is read before its end, and groups is not
    assert f"At equal FLOPs, interpolated, {flops} moe is" in page and f"At equal FLOPs, {flops} groups is" in page


def test_one_run_a_side_cannot_call_anything_better(tmp_path: Path) -> None:
    dense, moe, groups = arms(tmp_path)
    page, _, data = made(tmp_path, [dense[0], moe[0], groups[0]])
    assert data["opening"].endswith("; one run a side cannot call anything better.")
    assert (
        "moe/seed-0 next to dense/seed-0: validation loss -0.1000 nats a token at equal tokens, for 1.50"
        in data["opening"]
    )
    assert 'class="tile good"' not in page and 'class="tile bad"' not in page
    assert not re.search(r"\b(better|worse) than\b", words_of(page))
    two = made(tmp_path, [dense[:2], moe[:2]])[2]
    assert two["opening"].endswith("; 2 runs a side cannot call anything better.")
    with pytest.raises(ValueError, match="give as many runs of each"):
        made(tmp_path, [dense, moe[:2]])


def test_differences_of_validation_loss_have_a_band_over_seeds(tmp_path: Path) -> None:
    found = facts.gather(arms(tmp_path), "")
    assert set(found.curves) == {MEAN, "x", "y"}
    assert [band.arm for band in found.curves[MEAN]] == ["dense", "moe", "groups"]
    moe, groups = found.differences[MEAN]
    reach = 4.302652729 * 0.01 / 3**0.5
    assert [at.tokens for at in moe.spent] == [0, 1000, 2000] and moe.mean == pytest.approx((0, -0.055, -0.11))
    assert moe.low[-1] == pytest.approx(-0.11 - reach) and moe.high[-1] == pytest.approx(-0.11 + reach)
    assert groups.low[-1] < -0.4 < 0.4 < groups.high[-1]
    page = made(tmp_path, arms(tmp_path / "again"))[0]
    assert f"Difference, {MEAN}" in page and "dense is 0, nats a token" in page
    assert re.search(r'class="band s1" d="M[^"]+"', page[page.index(f"Difference, {MEAN}") :])
    assert "Each validation set by itself: x, y" in page


def test_every_key_that_differs_is_there_and_the_command_makes_the_run(tmp_path: Path) -> None:
    groups = arms(tmp_path, optim={"eps": 1e-16, "beta2": 0.9}, log={"project": "@on"}, schedule={"peak": 2e-3})
    upcycle = {"source": "./a b", "experts": 4, "router": {"init": {"std": 1e-16}}, "layers": "all"}
    groups[1] = [
        trained(tmp_path / "moe2" / f"seed-{n}", 15.0, (3.0, 3.0), model={"upcycle": upcycle | {"seed": n}}, seed=n)
        for n in range(3)
    ]
    found = facts.gather(groups, "")
    keys = {row[0]: row[1:] for row in found.keys}
    assert keys["seed"] == ("0, 1, 2",) * 3 and keys["model.source"] == ("./dense", "unset", "./groups")
    assert keys["model.upcycle.experts"] == ("unset", "4", "unset")
    assert keys["model.upcycle.seed"] == ("unset", "0, 1, 2", "unset")
    assert keys["optim.eps"] == ("1e-16", "1e-08", "1e-16") and "steps" not in keys and "output" in keys
    for (name, arm), folders in zip(found.arms.items(), groups, strict=True):
        for command, folder in zip(arm.commands, folders, strict=True):
            first, _, keys = command.partition("\n")
            door, verb, file, *more = shlex.split(first)
            assert (door, verb, more) == ("upcycle", "train", ["output=AGAIN"]), name
            wanted = json.loads((Path(folder) / "run.json").read_text())
            (tmp_path / "again.yaml").write_text(keys)
            for config in (read_config(file, []), read_config(str(tmp_path / "again.yaml"), [])):
                assert json.loads(json.dumps(asdict(config))) == wanted
    step = tmp_path / "moe2" / "seed-0" / "checkpoints" / "step-00000020"
    step.mkdir(parents=True)
    (step / "manifest.json").write_bytes(
        sealed(encode({"format": FORMAT, "step": 20, "world": 8, "tensors": {}, "files": {}}))
    )
    page = made(tmp_path, groups)[0]
    assert "nproc=8" in words_of(page)
    assert '<th scope="row">model.upcycle.experts</th>' in page


def test_seeds_of_a_suite_are_one_model_of_the_page(tmp_path: Path) -> None:
    """In two suites, with a name that their folders or their side's trainings give them."""
    sides: list[list[str]] = [[], []]
    for seed in range(3):
        for side, name in enumerate(("dense", "moe")):
            for suite, task_name in (("one", "x"), ("two", "z")):
                right = 10 + seed + 4 * side + seed % 2
                place = tmp_path / suite / name / f"seed-{seed}"
                folder = subjects(place, {task_name: [0] * right + [1] * (20 - right)}, {task_name: [0] * 20})
                run = load(folder)
                mark = f"{name} {seed}"
                other = replace(run.model, fingerprint=mark, identity=mark, source=f"runs/{name}/seed-{seed}")
                save(folder, replace(run, model=other, suite=suite), load(folder).items)
                sides[side].append(str(folder))
    found = facts.gather(sides, "")
    assert {name: [(s.suite, s.name, s.seeds) for s in mine] for name, mine in found.scores.items()} == {
        name: [("one", "all", 3), ("one", "x", 3), ("two", "all", 3), ("two", "z", 3)] for name in ("dense", "moe")
    }
    score = found.scores["dense"][0]
    assert (score.low, score.high) == (0.5, 0.6) and score.value == pytest.approx((10 + 12 + 12) / 60)
    one, two = found.comparisons
    assert (one.suite, two.suite, one.b.name) == ("one", "two", "moe")
    head = one.differences[0]
    assert head.seeds == 3 and head.p_holm == pytest.approx(2 * head.p)  # both suites' headlines are one family
    assert opening(found).startswith("moe is better than dense: All +20.00 points, 95 % interval over 3 seeds")
    assert "cost that is not known" in opening(found)
    page, markdown, _ = made(tmp_path, sides)
    said = words_of(page)
    assert "| All (two) | acc % |" in markdown
    for words in (
        "two: moe is better than dense on All: ",
        "moe − dense (one)",
        "moe − dense (two)",
        "All (two), moe − dense",
        "56.67 (50.00 to 60.00, 3 seeds)",
    ):
        assert words in said, words
    named = [
        trained(tmp_path / "t" / arm / f"seed-{n}", 1.0, (3.0, 3.0), model={"source": "a"})
        for arm in "ab"
        for n in range(3)
    ]
    found = facts.gather([sides[0] + named[:3], sides[1] + named[3:]], "")
    assert list(found.scores) == list(found.arms) == ["a", "b"]  # one colour for what is of one side


def test_one_name_with_another_config_is_another_model(tmp_path: Path) -> None:
    """Of the same weights: top-2 and top-1 of one conversion."""
    for place, identity in (("p", "top-2"), ("q", "top-1")):
        folder = subjects(tmp_path / place / "moe", {"x": [0, 1]}, {"x": [0, 0]})
        run = load(folder)
        save(folder, replace(run, suite=place, model=replace(run.model, identity=identity)), load(folder).items)
    found = facts.gather([str(tmp_path / "p" / "moe"), str(tmp_path / "q" / "moe")], "")
    assert list(found.scores) == [f"moe ({tmp_path / place / 'moe'})" for place in "pq"]


def test_names_of_seeds_have_a_name_in_common() -> None:
    for names, common in (
        (["moe"], "moe"), (["copies/seed-0", "copies/seed-1"], "copies"), (["e8-10", "e8-11"], "e8"),
        (["dense_run1", "dense_run2"], "dense"), (["rerun-a", "rerun-b"], "rerun"), (["x", "y"], "x, y"),
        (["seed-0", "seed-1"], "seed-0, seed-1"), (["m", "m"], "m"),
    ):  # fmt: skip
        assert shared(names) == common


def test_any_number_of_models_are_told_apart(tmp_path: Path) -> None:
    paths = [trained(tmp_path / f"m{n}x", 1.0, (3.0 + n, 3.0), model={"source": "a"}) for n in range(9)]
    page, _, data = made(tmp_path, paths)
    assert {f"line s{n}" for n in range(9)} <= set(re.findall(r"line s\d+", page))
    style = (Path(draw.__file__).with_name("page.css")).read_text()
    for n in range(draw.SERIES):
        assert f".s{n} {{ stroke:" in style and f".t{n} {{ color:" in style and f".band.s{n} {{ fill:" in style
    assert "; 5 more below; one run a side" in data["opening"]


def test_of_many_experts_the_strongest_pairs_are_named(tmp_path: Path) -> None:
    found = json.loads(routed(tmp_path).read_text()) | {"together": [None, None]}
    found["layers"][1]["pairs"] = [[0, 3, 2.51], [1, 2, 1.5]]
    (tmp_path / "moe.json").write_text(json.dumps(found))
    said = words_of(made(tmp_path, [str(tmp_path / "moe.json")])[0])
    assert "layer 3 0 and 3 2.5 times" in said and "Pairs in layer" not in said


def test_one_run_is_shown_without_comparison(tmp_path: Path) -> None:
    texts = [text("t", i, -70.0, 100.0) for i in range(3)]
    folder = write(tmp_path / "a", [task("t", 3, "bits_per_byte", higher=False)], texts)
    page, _, data = made(tmp_path, [str(folder)])
    assert "Differences" not in words_of(page) and "lower is better" in page
    [score] = data["scores"]["a"]
    assert score["value"] == score["low"] == score["high"] == pytest.approx(0.7 / 0.6931471805599453)
    assert data["comparisons"] == [] and data["losses"] is None


def test_perplexities_and_what_is_not_finite(tmp_path: Path) -> None:
    def run(name: str, worst: float) -> str:
        found = [
            replace(chosen("x", i, 0, i), scores={"acc": float(i == 0), "perplexity": (-i - 1.0, 2.0)})
            for i in range(2)
        ]
        broken = replace(
            found[1], scores=found[1].scores | {"acc": float(worst < -1)}, logprobs=(-1.0, worst, worst, worst)
        )
        return str(write(tmp_path / name, [task("x", 2)], [found[0], broken]))

    page, _, data = made(tmp_path, [run("a", -1.0), run("b", -9.0)])
    assert data["comparisons"][0]["flips"][0]["swing"] == 8.0 and "+8.00" in page
    assert data["comparisons"][0]["differences"][0]["p"] is None  # JSON has no nan
    measure = Measure({"x": "weighted_perplexity"})
    part = Part(task("x", 2), ("x",), True, "perplexity", measure, False)
    score = facts.score(part, load(tmp_path / "a").items)
    assert score.value == pytest.approx(math.exp(3 / 4))
    assert (score.low, score.high) == pytest.approx(
        (math.exp(1 / 2), math.exp(1))
    )  # of two texts: one twice, or the other


def test_the_plan_is_that_of_upcycle_plan_while_the_dense_model_is_there(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path / "dense")
    assert upcycle(["convert", f"source={tmp_path / 'dense'}", f"output={tmp_path / 'moe'}", "experts=4"]) == 0
    there = dict(facts.plan_rows(tmp_path / "moe"))
    assert "4 routed of" in there["experts"] and there["function"].startswith("exact")
    (tmp_path / "dense").rename(tmp_path / "elsewhere")
    left = dict(facts.plan_rows(tmp_path / "moe"))
    assert left["experts"] == "4" and "sizes are left out" in left["note"]
    assert "The plan" in made(tmp_path, [str(tmp_path / "moe")])[0]


@pytest.mark.parametrize("dense", ["dense", "elsewhere"])
def test_a_manifests_key_of_older_versions_is_named(tmp_path: Path, dense: str) -> None:
    tiny.make("llama", tmp_path / "dense")
    assert upcycle(["convert", f"source={tmp_path / 'dense'}", f"output={tmp_path / 'moe'}", "experts=4"]) == 0
    (tmp_path / "dense").rename(tmp_path / dense)
    file = tmp_path / "moe" / "upcycle.json"
    manifest = json.loads(file.read_text())
    manifest["config"]["mesh"] = {"gpus": 64}
    file.write_text(json.dumps(manifest))
    notes = [text for name, text in facts.plan_rows(tmp_path / "moe") if name == "note"]
    assert any("unknown key 'mesh'" in note for note in notes), notes


def test_refusals_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}")
    cases: dict[str, tuple[list[str], str]] = {
        "is not something that a report shows": ([str(tmp_path / "empty")], "x.html"),
        "is not a file of `upcycle routing`": ([str(tmp_path / "other.json")], "x.html"),
        "must end in .html": ([str(tmp_path / "empty")], "x.doc"),
    }
    for sentence, (paths, output) in cases.items():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            report(paths, output)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_of_trainings_is_drawn_where_the_output_is_one(tmp_path: Path, kind: str) -> None:
    run = log(tmp_path / "run", 1.0, {0: 5.0, 1: 4.0})
    report([[str(run)]], tmp_path / f"loss.{kind}")
    assert (tmp_path / f"loss.{kind}").stat().st_size > 1000


# ---- the pictures


def test_ticks_are_round_and_inside() -> None:
    assert draw.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert draw.ticks(2.31, 2.62) == pytest.approx([2.4, 2.5, 2.6])
    assert draw.ticks(-0.03, 0.011, 4) == pytest.approx([-0.02, 0, 0.02][:2])
    assert draw.ticks(5, 5) == [5]


def test_a_curve_falls_where_its_values_fall() -> None:
    fell = draw.curves("t", "u", "x", [Curve("a", 0, [0, 1, 2], [3.0, 2.0, 1.0])])
    points = re.search(r'class="line s0" d="M(.*?)"', drawn(fell))
    assert points is not None and fell is not None
    at = [tuple(map(int, point.split())) for point in points[1].split("L")]
    assert [x for x, _ in at] == [0, 500, 1000]
    assert at[0][1] < at[1][1] == 500 < at[2][1]  # SVG counts down
    assert draw.curves("t", "u", "x", [Curve("a", 0, [], [])]) is None
    steep = [Curve("a", 0, range(21), [50.0, 40.0, *range(20, 1, -1)])]
    cut = drawn(draw.curves("t", "u", "x", steep))
    assert "u ↑" in cut and 'd="M0 -' in cut and "↑" not in drawn(fell)
    layers = drawn(draw.curves("t", "u", "layer", steep, start=False))
    assert "↑" not in layers and 'd="M0 -' not in layers
    assert len(draw.thinned(Curve("a", 0, range(10_001), range(10_001))).x) <= draw.POINTS + 1


def test_an_interval_lies_around_its_value_and_zero_is_drawn() -> None:
    shown = drawn(Forest([ForestRow("r", "", [Mark(1, 2.0, 1.0, 4.0, "two")])], zero=True))
    bar = re.search(r'class="bar s1" d="M([\d.]+) 6H([\d.]+)"', shown)
    spot = re.search(r'class="spot s1" d="M([\d.]+) 6h0"', shown)
    zero = re.search(r'class="zero" d="M(\d+) ', shown)
    assert bar and spot and zero
    low, high, value, none = float(bar[1]), float(bar[2]), float(spot[1]), float(zero[1])
    assert none < low < value < high
    assert (value - low) / (high - low) == pytest.approx(1 / 3, abs=0.01)


def test_a_heat_map_has_a_cell_a_number_in_its_colour() -> None:
    assert [draw.diverging(v) for v in (0, 0.01, 0.25, 0.5, 1, 1.1, 2, 4, 99)] == [0, 0, 0, 2, 4, 4, 6, 8, 8]
    assert [draw.sequential(2.0)(v) for v in (0, 1, 2)] == [0, 4, 8]
    shown = drawn(Heat("t", "u", [[1, 1, 4], [None, 0, 1]], ["0", "1"], draw.diverging, "h", 2))
    cells = {level: found.count("z") for level, found in re.findall(r'class="h(\d)" d="(.*?)"', shown)}
    assert cells == {"0": 1, "4": 3, "8": 1}
    assert 'class="hair" d="M2 0V2"' in shown
    rows = re.findall(r'<tr><th scope="row">(\d)</th>(.*?)</tr>', shown)
    values = {row: re.findall(r">([\d.]*)</td>", cells) for row, cells in rows}
    assert values == {"0": ["1", "1", "4"], "1": ["", "0", "1"]}


def test_one_process_writes_a_page_and_its_json_says_what_it_wrote(tmp_path: Path) -> None:
    folder, output = log(tmp_path / "run", 1.0, {0: 5.0, 1: 4.0}), tmp_path / "report.html"
    with (
        publish.alone(tmp_path / ".report.html.lock", output),
        pytest.raises(ValueError, match=r"another process is writing .*report\.html \(process \d+ on "),
    ):
        report([str(folder)], output)
    assert not output.exists()
    (tmp_path / "report.md.7-0123abcd.upcycle.tmp").touch()  # of one that was killed
    (tmp_path / "report.b.md.7-0123abcd.upcycle.tmp").touch()  # of another page, which somebody may be writing
    report([str(folder)], output)
    for name, line in json.loads((tmp_path / "report.json").read_text())["files"].items():
        assert line == publish.listed([tmp_path / name])[name]
    assert {p.name for p in tmp_path.iterdir() if "report" in p.name} == {
        *("report.html", "report.md", "report.json", "report.b.md.7-0123abcd.upcycle.tmp")
    }
