"""A study: what it refuses, how long its arms are, what is skipped, resumed and stopped, and what its figures say."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evaluation.__main__ import main as evaluate
from evaluation.judge.results import Evaluation, Item, Model, Task
from evaluation.judge.seeds import paired
from evaluation.show.study import judgement, sentences, tiles
from evaluation.studies import lengths, study
from evaluation.studies.judging import LOSS, Contrast, Judged, corrected, judge, outcome
from evaluation.studies.lengths import timed
from evaluation.studies.plan import Plan, StudyConfig, changed, planned, read_study, trials
from evaluation.studies.running import Job, Workers
from evaluation.studies.suites import suite_of
from tests.unit.evaluation.test_report import Tags
from tests.unit.evaluation.written import save
from training.config.schema import TrainConfig
from training.data.shards import META
from upcycle.arch.sample import make_llama
from upcycle.config.reading import build
from upcycle.io.publish import acquire, opened

STUDY: dict[str, Any] = {
    "base": {
        "data": {"train": ["d/train"], "valid": ["d/x", "d/y", "d/z"], "sequence": 10},
        "steps": 100, "batch": 2, "micro_batch": 2, "schedule": {"warmup": 5},
    },
    "arms": {
        "dense": {"model": {"source": "dense"}},
        "moe": {"model": {"upcycle": {"source": "dense", "experts": 4}}, "optim": {"router_lr": 0.1}},
        "long": {"model": {"source": "dense"}, "match": "flops", "of": "moe"},
    },
    "means": {"in": ["x", "y"], "out": ["z"]},
}  # fmt: skip
LENGTHS = {"dense": 100, "moe": 100, "long": 150, "third": 100}
COST = {"dense": 2.0, "moe": 3.0, "long": 2.0, "third": 5.0}


def written(tmp_path: Path, **more: Any) -> str:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({**STUDY, "output": str(tmp_path / "study"), **more}, sort_keys=False))
    return str(file)


def plan_of(tmp_path: Path, *words: str, **more: Any) -> Plan:
    return read_study(written(tmp_path, **more), words)


# ---- configs


def test_a_trial_is_a_training_config_of_its_own(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "base.optim.weight_decay=0.5", "seeds=[3,5]")
    some = trials(plan, LENGTHS)
    assert [(t.arm, t.seed) for t in some] == [(arm, seed) for seed in (3, 5) for arm in STUDY["arms"]]
    for trial in some:
        trial.write()
        config = build(TrainConfig, yaml.safe_load(trial.file.read_text()))
        assert (config.seed, config.data.seed) == (trial.seed, trial.seed)
        assert config.output == str(trial.folder) == str(tmp_path / "study" / "runs" / trial.arm / f"seed-{trial.seed}")
        assert config.steps == LENGTHS[trial.arm]
        assert config.optim.weight_decay == 0.5
        assert config.optim.router_lr == (0.1 if trial.arm == "moe" else None)
        if trial.arm == "moe":
            assert config.model.upcycle["seed"] == trial.seed
    assert "data.seed alone" in some[0].file.read_text()


def test_a_killed_study_leaves_no_half_config(tmp_path: Path) -> None:
    [trial, *_] = trials(plan_of(tmp_path), LENGTHS)
    trial.file.parent.mkdir(parents=True)
    (trial.file.parent / f"{trial.file.name}.123-0123abcd.upcycle.tmp").write_text("batch")
    trial.write()
    assert [path.name for path in trial.file.parent.iterdir()] == [trial.file.name]


def test_a_ready_config_is_where_an_arm_starts(tmp_path: Path) -> None:
    """Under the base, and without what a trial sets: its output would be one folder for all."""
    arms = {"dense": {"model": {"source": "s", "upcycle": ""}}, "moe": {"model": {"upcycle": {"source": "s"}}}}
    base = {"config": "stories", "data": {"train": ["d"]}, "batch": 16}
    plan = plan_of(tmp_path, base=base, arms=arms, means={})
    config = plan.trial("moe", 0).config
    assert (config.batch, config.micro_batch, config.steps, config.data.train[0].path) == (16, 8, 200, "d")
    assert config.model.upcycle["target"] == "mixtral"
    assert config.output == str(plan.run_folder("moe", 0))
    assert plan.means == {"all": ("stories-valid",)}


def test_an_upcycle_config_by_name_has_its_keys_and_a_seed(tmp_path: Path) -> None:
    arms = {"dense": {"model": {"source": "s"}}, "moe": {"model": {"upcycle": "tiny"}}}
    upcycle = plan_of(tmp_path, arms=arms).trial("moe", 7).config.model.upcycle
    assert (upcycle["granularity"], upcycle["seed"]) == (4, 7)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("output=", "output is not set; write output=FOLDER"),
        ("control=moo", "control is 'moo', and there is no such arm (dense, moe, long); did you mean 'moe'?"),
        ("seeds=[0,0]", "give different numbers"),
        ("seeds=[]", "give different numbers"),
        ("workers=0", "workers is 0"),
        ("base=3", "base is 3; it must be keys and values"),
        ("wrokers=2", "unknown key 'wrokers'; did you mean 'workers'?"),
        ("base.seed=3", "base.seed is set, and the study sets it"),
        ("arms.moe.data.seed=3", "arms.moe.data.seed is set"),
        ("arms.moe.output=x", "arms.moe.output is set"),
        ("arms.moe.model.upcycle.seed=1", "arms.moe.model.upcycle.seed is set"),
        ("arms.moe.setps=3", "arm moe: unknown key 'setps'; did you mean 'steps'?"),
        ("arms.moe.batch=3", "arm moe: micro_batch=2 must divide batch=3"),
        ("arms.dense.model.source=", "arm dense begins with no model; write source=FOLDER"),
        ("arms.moe.model.upcycle.source=", "arm moe begins with no model"),
        ("arms.moe.model.source=dense", "arm moe: the model comes from model.source (a checkpoint) or model.upcycle"),
        ("arms.moe.data.sequence=11", "arm moe has data.sequence=11 and dense has 10"),
        ("arms.long.steps=3", "arms.long has match='flops', of='moe' and steps; its steps follow from another arm:"),
        ("arms.long.match=flop", "arms.long has match='flop'"),
        ("arms.long.of=", "arms.long has match='flops', of=''"),
        ("arms.long.of=mow", "arms.long.of is 'mow', and there is no such arm"),
        ("arms.moe.match=seconds", "arms.moe has match='seconds', of=''"),
        ("arms.dense={model: {source: s}, match: flops, of: long}", "arms.dense.of is long, whose steps follow"),
        ("arms.moe.model=3", "model of arm moe is 3; it must be keys and values"),
        ("arms={a b: {model: {source: s}}, c: {}}", "'a b' cannot be an arm's name"),
        (
            "means.in=[x,yy]",
            "means.in is 'yy', and there is no such validation set of data.valid (x, y, z); did you mean 'y'?",
        ),
        ("means.in=[]", "means.in is '', and there is no such validation set"),
        (
            "primary={arm: mow, at: tokens, mean: in}",
            "primary.arm is 'mow', and there is no such arm (dense, moe, long)",
        ),
        ("primary={arm: moe, at: token, mean: in}", "primary.at is 'token', and there is no such question"),
        ("equivalent={la: 0.1}", "equivalent is 'la', and there is no such mean or validation set"),
        ("equivalent={in: 0}", "equivalent.in is 0; write a margin above 0"),
        ("primary={arm: moe}", "write primary={arm: ARM, at: tokens, mean: MEAN}"),
        ("tokens=x", "unknown key 'tokens'; write data, and ${data} where a config says ${tokens}"),
        ("base.data.valid=[]", "base.data.valid names no validation set"),
        ("sample.hiden=3", "unknown key 'sample.hiden'; did you mean 'hidden'?"),
        ("suites=[{data: x}]", "no key `suite`"),
        ("suites=[{suite: tiny, output: x}]", "the key output, which the study sets"),
        ("suites=[tiny,{suite: tiny, limit: 3}]", "suites has two named 'tiny'"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    assert evaluate(["study", written(tmp_path), word]) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1
    assert not (tmp_path / "study" / "runs").exists()


def test_one_arm_has_nothing_next_to_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arms has 1 entries; a study compares two or more"):
        plan_of(tmp_path, arms={"dense": STUDY["arms"]["dense"]})


def test_data_and_models_that_are_not_there_are_found_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(["study", written(tmp_path)]) == 2
    assert "data.train: d/train is not a folder of token shards" in capsys.readouterr().err
    shards = tmp_path / "d"
    shards.mkdir()
    (shards / META).touch()
    data = {"train": [str(shards)], "valid": [{"name": n, "path": str(shards)} for n in "xyz"], "sequence": 10}
    make_llama(tmp_path / "dense", {**SHAPE})
    base = {**STUDY["base"], "data": data}
    assert evaluate(["study", written(tmp_path, base=base), f"arms.dense.model.source={tmp_path / 'dense'}"]) == 2
    assert "arm moe: model.upcycle.source: 'dense' is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "study" / "runs").exists()


SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "dtype": "float32",
}  # fmt: skip


def test_the_page_shows_a_config_that_is_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "evaluating.md").read_text()
    shown = page.split("```yaml\n")[1].split("```")[0]
    plan = planned(build(StudyConfig, yaml.safe_load(shown)))
    assert plan.trial("dense-flops", 2).config.data.seed == 2
    assert suite_of(plan.config.suites[0]).name == "core"


# ---- how long


def test_an_arm_of_equal_flops_or_seconds_has_a_whole_schedule_of_its_own(tmp_path: Path) -> None:
    arms = {**STUDY["arms"], "slow": {"model": {"source": "dense"}, "match": "seconds", "of": "moe", "batch": 4}}
    plan = plan_of(tmp_path, arms=arms)
    costs = {"dense": 2.0, "moe": 3.1, "long": 2.0, "slow": 2.0}
    found = lengths.steps(plan, costs, {"slow": 0.25, "moe": 0.5})
    assert found == {"dense": 100, "moe": 100, "long": 155, "slow": 200}
    assert [t.config.steps for t in trials(plan, found) if t.arm == "long"] == [155] * 3
    wider = plan_of(tmp_path, "arms.long.batch=4", arms=arms)  # twice the tokens a step: half the steps
    assert lengths.steps(wider, costs, {"slow": 0.25, "moe": 0.5})["long"] == 78
    with pytest.raises(ValueError, match=r"arm long: schedule\.warmup=5 is not below steps=5"):
        lengths.steps(plan, {**costs, "long": 62.0}, {"slow": 0.25, "moe": 0.5})


def test_flops_are_those_that_training_logs(tmp_path: Path) -> None:
    """2 of 4 copies: twice the FFN's; the control's is what upcycle.planning.size has for it."""
    make_llama(tmp_path / "dense", SHAPE)
    shards = tmp_path / "d"
    shards.mkdir()
    (shards / META).touch()
    data = {"train": [str(shards)], "valid": [{"name": n, "path": str(shards)} for n in "xyz"], "sequence": 10}
    words = [f"arms.{arm}.model.source={tmp_path / 'dense'}" for arm in ("dense", "long")]
    plan = plan_of(
        tmp_path, *words, f"arms.moe.model.upcycle.source={tmp_path / 'dense'}", base={**STUDY["base"], "data": data}
    )
    costs = lengths.flops(plan)
    assert costs["moe"] - costs["dense"] == 6 * 3 * 32 * 64
    assert costs["long"] == costs["dense"]


def test_runs_of_other_data_or_of_another_model_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, other, teacher, shards = (tmp_path / name for name in ("dense", "other", "teacher", "d"))
    for model in (dense, other, teacher):
        make_llama(model, SHAPE)
    shards.mkdir()
    (shards / META).touch()
    data = {"train": [str(shards)], "valid": [{"name": n, "path": str(shards)} for n in "xyz"], "sequence": 10}
    words = [f"arms.{arm}.model.source={dense}" for arm in ("dense", "long")]
    words += [f"arms.moe.model.upcycle.source={other}", "seeds=[0]"]
    words += [f"arms.long.teacher={{source: {teacher}, weight: 1.0}}"]
    file = written(tmp_path, base={**STUDY["base"], "data": data})
    monkeypatch.setattr(study.Workers, "run", lambda *_: {})

    def said() -> str:
        code = evaluate(["study", file, *words])
        shown = capsys.readouterr().err
        assert (code, shown.count("\n")) == ((2, 1) if shown else (0, 0))
        return shown

    assert not said()
    (shards / META).write_text("made again")
    assert not said()  # nothing had begun
    log(tmp_path / "study" / "runs" / "dense" / "seed-0", [{"step": 10}])
    assert not said()
    (shards / META).write_text("and again")
    assert f"{shards} differs from the one that the runs in {tmp_path / 'study'} began with" in said()
    (shards / META).write_text("made again")
    assert not said()
    for model in (dense, other, teacher):
        make_llama(model, SHAPE, seed=1)
        assert f"{model} differs from the one that the runs" in said()
        make_llama(model, SHAPE)
    assert not said()


def test_speed_is_measured_by_a_short_run_without_validation(tmp_path: Path) -> None:
    trial = timed(plan_of(tmp_path, "timing=9"), "moe")
    config = trial.config
    assert (config.steps, config.log_every, config.data.valid, config.checkpoint.every) == (9, 3, (), 0)
    assert config.model.upcycle["experts"] == 4
    assert trial.folder == tmp_path / "study" / "timing" / "moe"
    assert (
        timed(plan_of(tmp_path, "timing=9", "seeds=[3,4]"), "moe").values == trial.values
    )  # it stays when seeds change


# ---- runs by hand


def log(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ran(plan: Plan, arm: str, seed: int, x: float, y: float, z: float, *, until: int = 0, pace: float = 0.5) -> None:
    """A run whose losses fall to these, and its config; `until`: only so far."""
    trial = plan.trial(arm, seed, steps=LENGTHS[arm])
    trial.write()
    steps, rows = LENGTHS[arm], []
    for step in (0, steps // 2, steps):
        if until and step > until:
            break
        more = 1 - step / steps
        row: dict[str, Any] = {"step": step} | {
            f"valid/{n}/loss": v + more for n, v in zip("xyz", (x, y, z), strict=True)
        }
        if step:
            row |= {"tokens": 20 * step, "flops": 20 * step * COST[arm], "seconds_per_step": pace, "memory_gb": 1.5}
            row |= {"tokens_per_s": 20 / pace}
        if step and arm == "moe":
            row |= {
                "balance/0/whole": 0.5 + seed / 10,
                "balance/1/whole": 1.0,
                "balance/whole": 0.75,
                "balance/0/entropy": 0.9,
            }
        rows.append(row)
    log(trial.folder, rows)


def told(judged: Judged, question: str, what: str, arm: str) -> Contrast:
    (found,) = [c for c in judged.contrasts if (c.question, c.what, c.arm) == (question, what, arm)]
    return found


@pytest.fixture
def done(tmp_path: Path) -> Plan:
    """moe is 0.02, 0.03, 0.04 below dense on x and y, 0.3 above on z; long is 0.1 below moe."""
    plan = plan_of(tmp_path)
    for seed in (0, 1, 2):
        base = 2.0 + seed  # seeds differ by much more than arms do, which pairing takes out
        gain = 0.02 + 0.01 * seed
        ran(plan, "dense", seed, base, base + 0.2, base)
        ran(plan, "moe", seed, base - gain, base + 0.2 - gain, base + 0.3, pace=0.75)
        ran(plan, "long", seed, base - gain - 0.1, base + 0.2 - gain - 0.1, base + 0.2)
    return plan


def test_seeds_are_paired_and_each_question_has_its_own_arm(done: Plan) -> None:
    judged = judge(done)
    tokens = told(judged, "tokens", "in", "moe")
    assert (tokens.against, tokens.seeds, tokens.headline, tokens.ratio) == ("dense", (0, 1, 2), True, 1.0)
    assert tokens.difference.mean == pytest.approx(-0.03)
    reach = 4.302652729 * 0.01 / 3**0.5
    assert tokens.difference.low == pytest.approx(-0.03 - reach) and tokens.difference.high == pytest.approx(
        -0.03 + reach
    )
    assert (tokens.value, tokens.other) == (pytest.approx(3.07), pytest.approx(3.1))
    assert tokens.verdict == "better"
    assert told(judged, "tokens", "out", "moe").verdict == "worse"
    flops = told(judged, "flops", "in", "moe")
    assert (flops.against, flops.ratio) == ("long", 1.0) and flops.difference.mean == pytest.approx(0.1)
    assert {(c.question, c.arm, c.against) for c in judged.contrasts} == {
        ("tokens", "moe", "dense"),
        ("flops", "moe", "long"),
    }
    assert {c.what for c in judged.contrasts if not c.headline} == {"x", "y"}  # z alone is `out`


def test_an_arm_whose_tokens_cost_as_much_is_at_equal_flops_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COST, "moe", 2.01)
    plan = plan_of(tmp_path)
    for arm in ("dense", "moe"):
        ran(plan, arm, 0, 1.0, 1.0, 1.0)
    judged = judge(plan)
    assert told(judged, "flops", "in", "moe").against == "dense"
    assert told(judged, "flops", "in", "moe").ratio == pytest.approx(1.005)
    assert told(judged, "flops", "in", "moe").verdict == "one run each: no verdict"


def test_only_whole_runs_count_and_only_seeds_that_both_have(done: Plan) -> None:
    ran(done, "moe", 2, 0.0, 0.0, 0.0, until=50)
    judged = judge(done)
    found = told(judged, "tokens", "in", "moe")
    assert (found.seeds, found.verdict) == ((0, 1), "2 runs each: no verdict")
    assert found.difference.mean == pytest.approx(-0.025)
    assert any("2 runs each: no verdict" in sentence for sentence in sentences(judged))
    assert [one.finished for one in judged.arms["moe"]] == [True, True, False]


def test_a_loss_that_is_no_number_is_no_result(done: Plan) -> None:
    folder = done.run_folder("moe", 1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["valid/y/loss"] = None
    log(folder, rows)
    judged = judge(done)
    assert told(judged, "tokens", "in", "moe").seeds == (0, 2)
    assert told(judged, "tokens", "out", "moe").seeds == (0, 1, 2)


def test_tokens_flops_and_seconds_of_training(done: Plan) -> None:
    judged = judge(done)
    (moe, *_) = judged.arms["moe"]
    assert (moe.spent.tokens, moe.spent.flops, moe.spent.seconds) == (2000, 6000, 75)
    assert (moe.flops_per_token, moe.memory_gb) == (3.0, 1.5)
    assert moe.tokens_per_s == pytest.approx(2000 / 75)
    (band,) = [band for band in judged.curves["in"] if band.arm == "moe"]
    assert [at.seconds for at in band.spent] == [0, 37.5, 75] and [at.tokens for at in band.spent] == [0, 1000, 2000]
    assert (
        band.mean[-1] == pytest.approx(3.07)
        and band.low[-1] == pytest.approx(2.08)
        and band.high[-1] == pytest.approx(4.06)
    )
    (beside,) = judged.differences["in"]
    assert beside.arm == "moe" and beside.mean[-1] == pytest.approx(-0.03)
    assert beside.low[-1] == pytest.approx(told(judged, "tokens", "in", "moe").difference.low)
    assert judged.layers["whole"] == {"moe": {0: pytest.approx(0.6), 1: 1.0}}
    assert judged.overall["whole"][0].mean == (0.75, 0.75)


def test_one_rule_corrects_all_but_what_was_named(tmp_path: Path) -> None:
    """On its own each p is below 0.05; of two means the larger p stays, and three comparisons of one arm leave nothing."""

    def verdicts(**more: Any) -> dict[str, str]:
        plan = plan_of(tmp_path, arms={arm: {"model": {"source": arm}} for arm in ("dense", "moe", "third")}, **more)
        for seed in (0, 1, 2):
            gain = (0.020, 0.014, 0.026)[seed]
            for arm, lower in (("dense", 0.0), ("moe", gain), ("third", 1.1 * gain)):
                ran(plan, arm, seed, 2.0 - lower, 2.0 - lower, 3.0)
        judged = judge(plan)
        return {arm: told(judged, "tokens", "in", arm).verdict for arm in ("moe", "third")}

    none = dict.fromkeys(("moe", "third"), "no difference shown")
    assert verdicts() == none
    assert verdicts(primary={"arm": "moe", "at": "tokens", "mean": "in"}) == none | {"moe": "better"}


def test_arms_are_equivalent_only_within_a_margin_that_the_study_named(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, equivalent={"in": 0.05, "x": 0.0001})
    for seed, noise in ((0, 0.002), (1, -0.003), (2, 0.001)):
        for arm, more in (("dense", 0.0), ("moe", noise)):
            ran(plan, arm, seed, 2.0 + more, 2.0 + more, 3.0 + more)
    judged = judge(plan)
    near, far = (judgement(told(judged, "tokens", what, "moe")) for what in ("in", "x"))
    assert "no difference shown; equivalent within 0.05 (p " in near
    assert "no difference shown; not shown to be equivalent within 0.0001" in far
    assert all("equivalent" not in judgement(c) for c in judged.contrasts if c.what not in ("in", "x"))


def test_a_null_study_calls_an_arm_better_at_most_one_time_in_twenty() -> None:
    """Three arms next to a control on two means, all of them noise: one study is wrong if any contrast is called."""
    rng, wrong, studies = np.random.default_rng(0), 0, 1500
    config = StudyConfig(output="x", base={}, arms={})
    for _ in range(studies):
        noise = rng.normal(scale=0.01, size=(4, 2, 3))
        made = [
            Contrast("tokens", f"{mean}", LOSS, True, False, f"{arm}", "dense", (0, 1, 2), 0.0, 0.0,
                     paired([*(noise[arm, mean] - noise[0, mean])]), 1.0)
            for arm in (1, 2, 3) for mean in (0, 1)
        ]  # fmt: skip
        wrong += any(c.verdict == "better" for c in corrected(made, Plan(config, {}, "dense", {})))
    assert 0.005 < wrong / studies <= 0.05  # sampling error: 0.005


def test_a_layer_that_only_a_later_seed_has_logged_is_shown(done: Plan) -> None:
    folder = done.run_folder("moe", 0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    log(folder, [{key: value for key, value in row.items() if key != "balance/1/whole"} for row in rows])
    assert judge(done).layers["whole"] == {"moe": {0: pytest.approx(0.6), 1: 1.0}}


def test_a_run_that_resumed_has_the_seconds_of_its_lines(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    trial = plan.trial("dense", 0, steps=100)
    trial.write()
    lines = [(30, 1.0), (40, 3.0), (100, 0.5)]
    log(trial.folder, [{"step": s, "tokens": 20 * s, "seconds_per_step": p} for s, p in lines])
    found = outcome("dense", 0, trial.folder)
    assert found is not None and found.spent.seconds == 30 + 30 + 30 and not found.finished


def test_the_page_the_json_and_the_table_say_the_same(
    done: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study.show(done, "upcycle study <my>.yaml", {"moe, seed 9": "moe, seed 9 failed: a & b"})
    shown, tags = capsys.readouterr().out, Tags()
    page = (done.folder / "study.html").read_text()
    tags.feed(page)
    text = html.unescape(re.sub(r"<[^>]*>", " ", page))
    assert not tags.open and not tags.fetched
    figures = json.loads((done.folder / "study.json").read_text())
    (first,) = [c for c in figures["contrasts"] if (c["question"], c["what"], c["arm"]) == ("tokens", "in", "moe")]
    assert first["verdict"] == "better" and first["difference"]["mean"] == pytest.approx(-0.03)
    for said in ("-0.0300", "-0.0548 to -0.0052", "better", "equal tokens", "equal FLOPs"):
        assert said in shown
        assert said.replace("-0", "−0") in text
    for said in (
        "a & b", "study <my>.yaml", "Whole FFNs", "seconds of training", "in is the mean of x, y",
        f"upcycle train {done.run_folder('moe', 2)}.yaml", "moe, seed 2", "1.50",
    ):  # fmt: skip
        assert said in text
    for each in (shown, text):
        assert "p is corrected by Holm for 4 comparisons" in each, "in and out, at equal tokens and at equal FLOPs"
    assert figures["failures"] == ["moe, seed 9 failed: a & b"]


def test_what_was_not_as_equal_as_it_should_be_is_said(done: Plan) -> None:
    """Two at once on a device, or a host that was busy while speed was measured."""
    judged = judge(done)
    assert "not equal" not in " ".join(sentences(judged))
    slower = tuple(replace(c, ratio=0.742) if c.question == "flops" else c for c in judged.contrasts)
    judged = replace(judged, contrasts=slower)
    said = "not equal: 0.742 : 1"
    of_tiles = [f"{tile.about} {tile.detail}" for tile in tiles(judged)]
    for lines in (list(sentences(judged)), of_tiles):
        assert [said in line for line in lines if "equal FLOPs" in line] == [True, True]
        assert not [line for line in lines if "equal tokens" in line and said in line]


def test_a_study_that_has_just_begun_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path)
    assert evaluate(["study", file, "judge=true"]) == 0
    assert "nothing is compared yet" in capsys.readouterr().out
    plan = read_study(file)
    ran(plan, "dense", 0, 1.0, 1.0, 1.0, until=1)
    ran(plan, "moe", 0, 1.0, 1.0, 1.0, until=50)
    assert evaluate(["study", file, "judge=true"]) == 0
    page = (tmp_path / "study" / "study.html").read_text()
    assert "step 50 of 100" in page and "step 0 of 100" in page


def scored(folder: Path, value: float, command: str = "c", apart: float = 0.0) -> None:
    task = Task("last", "Last word", {"acc": value}, {}, {"acc": True}, 10, 10, 0, "1", "multiple_choice")
    model = Model("m", "m", "f", "llama", 1, 1, "float32")
    items = [Item("last", doc, f"{doc}", "p", "x", {"acc": value + apart * (doc - 4.5)}) for doc in range(10)]
    save(folder, Evaluation(model, "tiny", command, {}, {}, "2026-01-01T00:00:00Z", 1.0, {}, {"last": task}), items)


def test_suites_before_and_after(done: Plan) -> None:
    plan = replace(done, config=replace(done.config, suites=("tiny",)))
    scored(plan.folder / "before" / "0-dense" / "tiny", 0.5)
    runs = [plan.run_folder(arm, seed) for arm in plan.arms for seed in (0, 1, 2)]
    for seed in (0, 1, 2):
        scored(plan.run_folder("dense", seed) / "suites" / "tiny", 0.5 + 0.01 * seed)
        scored(plan.run_folder("moe", seed) / "suites" / "tiny", 0.8 + 0.01 * seed, apart=0.02)
        scored(plan.run_folder("long", seed) / "suites" / "tiny", 0.7 + 0.01 * seed)
    judged = judge(plan)
    found = told(judged, "tokens", "Last word (tiny)", "moe")
    assert (found.unit, found.higher_is_better, found.verdict) == ("acc", True, "better")
    assert found.difference.mean == pytest.approx(0.3) and not found.headline
    assert found.over_items == "+25.67 to +34.33"  # 0.3 +- 2.262 (Student's t, 9) * 0.0606 / sqrt(10)
    # one item of ten more in each seed, with no spread at all between them
    assert told(judged, "flops", "Last word (tiny)", "moe").verdict == "no difference shown"
    (kept,) = judged.kept
    assert kept.before == {"dense": 0.5, "moe": 0.5, "long": 0.5}
    assert kept.change["moe"].mean == pytest.approx(0.31) and kept.change["moe"].verdict(True) == "better"
    assert kept.change["dense"].verdict(True) == "no difference shown"
    study.show(plan, "c", {})
    page = (plan.folder / "study.html").read_text()
    assert "Last word (tiny)" in page and "+31.00" in page and "alone: +25.67 to +34.33" in page
    for checkpoint, folder in (("dense", plan.folder / "before" / "0-dense"), *((r, r / "suites") for r in runs)):
        assert f"upcycle eval tiny {checkpoint} output={folder / 'tiny'}" in page


# ---- running


def test_a_trial_goes_from_training_to_its_suites_to_nothing(done: Plan) -> None:
    trial, suite = done.trial("moe", 0, steps=100), suite_of({"suite": "tiny", "limit": 3, "dtype": "bfloat16"})
    weights = trial.folder / "checkpoints" / "step-00000100"
    assert study.left(trial, [], True) is None
    # a suite needs the weights, and this run has none
    assert study.left(trial, [suite], True) == ["upcycle", "train", str(trial.file)]
    weights.mkdir(parents=True)
    asked = study.left(trial, [suite], True)
    out = f"output={trial.folder / 'suites' / 'tiny'}"
    assert asked == ["upcycle", "eval", "tiny", str(trial.folder), "limit=3", "dtype=bfloat16", out]
    scored(trial.folder / "suites" / "tiny", 0.5, " ".join(asked))
    assert study.left(trial, [suite], True) is None and weights.is_dir()
    other = suite_of({"suite": "tiny", "limit": 4})
    assert study.left(trial, [other], True) is not None  # those are answers to something else
    assert study.left(trial, [suite], False) is None and not weights.exists()
    ran(done, "moe", 0, 1.0, 1.0, 1.0, until=50)
    assert study.left(trial, [], True) == ["upcycle", "train", str(trial.file)]


def test_a_begun_run_keeps_its_config(done: Plan) -> None:
    arms = {**STUDY["arms"], "moe": {**STUDY["arms"]["moe"], "optim": {"router_lr": 0.2}}}
    folder = done.folder.parent
    other = plan_of(folder, arms=arms).trial("moe", 0, steps=100)
    before = other.file.read_text()
    with pytest.raises(
        ValueError, match=r"seed-0 was trained with optim\.router_lr=0\.1 and the study now has 0\.2; ch"
    ):
        other.write()
    assert other.file.read_text() == before
    plan_of(folder, "base.valid_every=3", "base.checkpoint.every=7").trial(
        "moe", 0, steps=100
    ).write()  # learns no other
    (other.folder / "metrics.jsonl").unlink()
    other.write()  # nothing had begun


def test_the_first_key_that_differs_is_named() -> None:
    a = {"x": {"y": [1], "z": 2}, "steps": 3, "log_every": 5}
    assert changed(a, a) == changed(a, {**a, "log_every": 6}) == ""
    assert changed(a, {**a, "x": {"y": [1], "z": 3}}) == "x.z"
    assert changed(a, {**a, "new": 1}) == "new"


CODE = """
import json, os, pathlib, signal, sys, time
folder, mode, pause = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
(folder / "began").open("a").write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
signal.signal(signal.SIGINT, lambda *_: ((folder / "saved").touch(), sys.exit(0)))
(folder / "ready").touch()
time.sleep(pause)
if mode == "bad":
    print("upcycle: it went\\n\\n", file=sys.stderr); sys.exit(2)
if mode == "killed":
    print("step 3/24  loss 5.4", flush=True); os.kill(os.getpid(), signal.SIGKILL)
if mode == "good":
    (folder / "done").touch()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that a child finds as it finds training, and jobs that run it."""
    (tmp_path / "fake_training.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def job(name: str, mode: str = "good", pause: float = 0.0) -> Job:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        command = ["fake_training", str(folder), mode, str(pause)]
        return Job(name, folder, lambda: None if (folder / "done").exists() else command)

    return job


def began(job: Job) -> list[list[str]]:
    return [line.split() for line in (job.folder / "began").read_text().splitlines()]


def test_one_that_fails_is_a_sentence_and_does_not_stop_the_others(script: Any) -> None:
    jobs = [script("a"), script("b", "bad"), script("c", "idle"), script("d"), script("e")]
    failures = Workers(2, ["5", "7"]).run(jobs)
    assert failures == {
        "b": f"b failed: upcycle: it went ({jobs[1].log})",
        "c": f"c did not finish:  ({jobs[2].log})",  # exit code 0, and nothing there
    }
    assert all((job.folder / "done").exists() for job in (jobs[0], jobs[3], jobs[4]))
    assert {began(job)[0][1] for job in jobs} == {"5", "7"}
    # once more: what is done is not done again
    assert set(Workers(1).run(jobs)) == {"b", "c"}
    assert [len(began(job)) for job in jobs] == [1, 2, 2, 1, 1]


def test_one_that_is_killed_did_not_fail_by_its_last_line(script: Any) -> None:
    """A machine without memory kills it, and what it logged last says nothing of that."""
    job = script("a", "killed")
    (said,) = Workers(1).run([job]).values()
    assert said == f"a was ended by signal 9 (Killed, as where memory runs out), after: step 3/24  loss 5.4 ({job.log})"


def test_a_run_that_an_earlier_study_left_behind_is_not_run_twice(script: Any) -> None:
    job = script("a", pause=60)
    workers = Workers(1)
    workers.start(0, job)
    child = workers.children[0]
    wait_for(job.folder / "ready")
    child.lock.close()  # as if this process had died: its lock is the child's now
    try:
        (said,) = Workers(1).run([job]).values()
        assert said.startswith("a was not started: another process is writing")
    finally:
        child.process.kill()
        child.process.wait()
    again = script("a")
    assert Workers(1).run([again]) == {} and len(began(again)) == 2


def test_the_lock_of_a_run_that_was_killed_at_its_very_end_goes_unless_it_is_held(script: Any) -> None:
    job = script("a")
    (job.folder / "done").touch()
    with opened(job.folder / ".lock") as lock:
        acquire(lock, "a")
        assert Workers(1).run([job]) == {} and (job.folder / ".lock").exists()
    assert Workers(1).run([job]) == {} and not (job.folder / ".lock").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_all_save_and_starts_no_other(script: Any, number: int) -> None:
    jobs = [script(name, pause=60) for name in "abc"]

    def interrupt() -> None:
        for job in jobs[:2]:
            wait_for(job.folder / "ready")
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        Workers(2).run(jobs)
    sender.join()
    assert [(job.folder / "saved").exists() for job in jobs] == [True, True, False]
    assert signal.getsignal(signal.SIGTERM) is before
    for job in jobs[:2]:
        with pytest.raises(ProcessLookupError):
            os.kill(int(began(job)[0][0]), 0)


def wait_for(file: Path) -> None:
    limit = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < limit, file
        time.sleep(0.02)


def test_two_studies_do_not_write_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path)
    code = "import sys; from pathlib import Path; from evaluation.studies.running import alone\nwith alone(Path(sys.argv[1])): print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "study")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert evaluate(["study", file]) == 2
        assert "another process is writing" in capsys.readouterr().err
        assert evaluate(["study", file, "judge=true"]) == 0  # looking is free
        other.communicate()
