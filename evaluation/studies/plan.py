"""Plan a study (`read_study`): each arm and seed is a training config, and mistakes are found before training.

A trial is an arm with a seed. Its config starts from `config` (a ready one, if the arm or the base names it). The keys
of `base` replace it, the arm's own replace those, and then the study sets output, seeds, and the steps of a matched
arm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import OmegaConf

from evaluation.judge.seeds import check_margin
from evaluation.studies.facts import FactsConfig
from evaluation.studies.sample import SampleConfig
from training.config.resume import QUIET, flat
from training.config.schema import TrainConfig
from training.observe.metrics import FILE as METRICS
from upcycle.config.reading import build, keys_of, literal, read
from upcycle.config.ready import STUDY, TRAIN, UPCYCLE
from upcycle.config.values import SEED, at_least, check_values
from upcycle.io import strict
from upcycle.io.disk import sweep, write_atomic
from upcycle.plugin import nearest

MATCHES = ("flops", "seconds")
WORKERS = 1024  # runs at once, at most: each is a process
QUESTIONS = {"tokens": "equal tokens", "flops": "equal FLOPs", "seconds": "equal seconds"}
OWN = ("config", "match", "of")  # keys of an arm that are not training keys
SET = ("output", "export", "seed", "data.seed", "model.upcycle.seed")  # the study sets these for each trial
NAME = re.compile(r"\w[\w.-]*")
ABOUT = """\
# {name} of a study. To run it alone: upcycle train {file}
# data.seed alone decides the order of the samples (training/data/mixture.py), so all arms of a seed read the same ones;
# seed is for random weights, model.upcycle.seed for the routers' rows and the method's random numbers.
"""


@dataclass(frozen=True)
class StudyConfig:
    ELSEWHERE: ClassVar = {"tokens": "data, and ${data} where a config says ${tokens}"} | dict.fromkeys(
        ("model", "steps", "schedule", "batch"), "this below base or an arm; a config of one run is for upcycle train"
    )

    output: str = ""  # the study's folder: study.html, study.json, and in runs/ARM/seed-N each run
    title: str = ""  # the page's title; "": the folder's name
    source: str = ""  # the dense checkpoint, a folder or hub id; other keys write it as ${source}
    data: str = ""  # a folder of folders of token shards; other keys write it as ${data}
    documents: str = ""  # your own documents, which arms learn instead of made-up facts; other keys: ${documents}
    # keys of `upcycle facts write` and of studies/facts.py; they make OUTPUT/facts and OUTPUT/facts-tokens, and each
    # model is asked that suite before and after training
    facts: Any = field(default_factory=dict)
    sample: Any = field(default_factory=dict)  # keys of sample.py, which makes OUTPUT/sample/dense and .../tokens
    base: Any = field(default_factory=dict)  # training keys of all arms; `config` names a ready one to start from
    # name: training keys, and `config`; `match: flops` (or seconds) and `of: ARM` take the steps from another arm
    arms: Any = field(default_factory=dict)
    control: str = ""  # the others are compared with this arm; "": the first
    seeds: tuple[int, ...] = (0, 1, 2)  # seeds for the order of the data and for routers; an interval needs three
    # name: validation sets, whose mean is a headline; {}: one mean of all sets
    means: Any = field(default_factory=dict)
    # the one comparison whose p is not corrected, named before training: {arm: ARM, at: tokens | flops | seconds,
    # mean: a name of `means`}; {}: correct all
    primary: Any = field(default_factory=dict)
    # name of a mean or a validation set: a margin in nats, named before training; arms are equivalent if two one-sided
    # t-tests show a smaller difference
    equivalent: Any = field(default_factory=dict)
    suites: tuple[Any, ...] = ()  # suites of `upcycle eval`, before and after training: names, or keys with `suite`
    timing: int = 30  # steps of the run that measures an arm's speed, for match: seconds
    workers: int = 1  # runs at once
    devices: tuple[str, ...] = ()  # a CUDA_VISIBLE_DEVICES for each worker, in turn; (): leave it as it is
    # keep the last checkpoints; false: remove them after a run; a suite that is added later trains again
    keep: bool = True
    judge: bool = False  # only make the page from the runs so far; works while the study runs

    def __post_init__(self) -> None:
        check_values(self, "", {"workers": at_least(1, most=WORKERS), "timing": at_least(1)})
        for number in self.seeds:
            if not 0 <= number <= SEED:
                raise ValueError(f"seeds has {number}; each must be from 0 to {SEED:,}")
        values = {
            name: getattr(self, name) for name in ("sample", "facts", "base", "arms", "means", "primary", "equivalent")
        }
        alike = len(set(self.seeds)) < len(self.seeds)
        wrong = {
            "output is not set; write output=FOLDER for the study's runs and its page": not self.output,
            f"seeds is {[*self.seeds]}; give different numbers, three or more for an interval": alike or not self.seeds,
        }
        wrong |= {f"{k} is {v!r}; it must be keys and values": not isinstance(v, Mapping) for k, v in values.items()}
        if said := next((sentence for sentence, is_so in wrong.items() if is_so), ""):
            raise ValueError(said)
        if self.sample:
            sample_config(self)
        if self.facts:
            facts_config(self)
        elif self.documents:
            raise ValueError(f"documents={self.documents} is set, and this study has no facts; write: study facts")


def sample_config(config: StudyConfig) -> SampleConfig:
    """Return the config that makes `sample`."""
    return build(SampleConfig, {**config.sample, "output": str(Path(config.output) / "sample")}, "sample.")


def facts_config(config: StudyConfig) -> FactsConfig:
    """Return the config that makes `facts`."""
    values = {**config.facts, "output": str(Path(config.output) / "facts"), "documents": config.documents}
    return build(FactsConfig, values, "facts.")


@dataclass(frozen=True)
class Arm:
    name: str
    values: Mapping[str, Any]  # training keys, except those that a trial sets
    match: str = ""  # flops | seconds: the steps follow from the arm `of`
    of: str = ""

    @cached_property
    def config(self) -> TrainConfig:
        try:
            return build(TrainConfig, self.values)
        except ValueError as error:
            raise ValueError(f"arm {self.name}: {error}") from None


@dataclass(frozen=True)
class Trial:
    arm: str
    seed: int
    folder: Path  # the run's
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def file(self) -> Path:
        return self.folder.with_suffix(".yaml")

    @cached_property
    def config(self) -> TrainConfig:
        return build(TrainConfig, self.values)

    def write(self) -> None:
        """Write the config next to the run's folder; raise a ValueError if the run has begun with another one."""
        if (self.folder / METRICS).exists() and self.file.exists():
            before, now = asdict(build(TrainConfig, strict.read_yaml(self.file))), asdict(self.config)
            if key := changed(before, now):
                raise ValueError(
                    f"{self.folder} was trained with {key}={found(before, key)} and the study now has "
                    f"{found(now, key)}; change it back, or remove that folder"
                )
        self.file.parent.mkdir(parents=True, exist_ok=True)
        sweep(self.file.parent, {self.file.name})
        about = ABOUT.format(name=self.name, file=self.file)
        write_atomic(self.file, (about + yaml.safe_dump(dict(self.values), sort_keys=False)).encode())


@dataclass(frozen=True)
class Plan:
    config: StudyConfig
    arms: Mapping[str, Arm]
    control: str
    means: Mapping[str, tuple[str, ...]]

    @property
    def margins(self) -> dict[str, float]:
        return {str(name): float(margin) for name, margin in self.config.equivalent.items()}

    @property
    def folder(self) -> Path:
        return Path(self.config.output)

    def run_folder(self, arm: str, seed: int) -> Path:
        return self.folder / "runs" / arm / f"seed-{seed}"

    def lasting(self, tokens: int) -> Plan:
        """Return the plan with as many steps as read these tokens, for arms that name no steps."""
        arms = {}
        for name, arm in self.arms.items():
            steps = max(1, round(tokens / tokens_of_step(arm.config)))
            arms[name] = arm if "steps" in arm.values else replace(arm, values={**arm.values, "steps": steps})
        return replace(self, arms=arms)

    def trial(self, arm: str, seed: int, **more: Any) -> Trial:
        folder, values = self.run_folder(arm, seed), self.arms[arm].values
        model, data = values["model"], values["data"]
        if isinstance(model.get("upcycle"), Mapping):
            model = {**model, "upcycle": {**model["upcycle"], "seed": seed}}
        chosen = {"output": str(folder), "seed": seed, "model": model, "data": {**data, "seed": seed}}
        return Trial(arm, seed, folder, {**values, **chosen, **more})


# ---- from a config to a plan


def read_study(file: str, words: Sequence[str] = ()) -> Plan:
    return planned(read(StudyConfig, file, words, STUDY))


def planned(config: StudyConfig) -> Plan:
    """Return the plan of a config. Raise a ValueError about the first thing that is wrong."""
    if len(config.arms) < 2:
        raise ValueError(f"arms has {len(config.arms)} entries; a study compares two or more")
    arms = {name: arm_of(config, str(name), own) for name, own in config.arms.items()}
    control = config.control or next(iter(arms))
    check_name("control", control, arms, "arm")
    for arm in arms.values():
        check_arm(arm, arms, control)
    sets = [valid.name for valid in arms[control].config.data.valid]
    if not sets:
        raise ValueError(
            "base.data.valid names no validation set, and a study judges arms by validation; write "
            "base.data.valid=[FOLDER]"
        )
    means = {str(name): tuple(map(str, inside)) for name, inside in config.means.items()} or {"all": tuple(sets)}
    for name, inside in means.items():
        for valid in inside or ("",):
            check_name(f"means.{name}", valid, sets, "validation set of data.valid")
    if config.primary:
        known: dict[str, Any] = {"arm": arms, "at": QUESTIONS, "mean": means}
        if config.primary.keys() != known.keys():
            raise ValueError(f"primary is {dict(config.primary)}; write primary={{arm: ARM, at: tokens, mean: MEAN}}")
        for key, names in known.items():
            check_name(f"primary.{key}", config.primary[key], names, "question" if key == "at" else key)
    for name, margin in config.equivalent.items():
        shown = [*means, *(valid for valid in sets if (valid,) not in means.values())]
        check_name("equivalent", str(name), shown, "mean or validation set")
        check_margin(f"equivalent.{name}", margin)
    return Plan(config, arms, control, means)


def check_name(key: str, name: Any, known: Any, what: str) -> None:
    """Raise a ValueError unless a key names one of those that are known."""
    if name not in known:
        raise ValueError(
            f"{key} is {name!r}, and there is no such {what} ({', '.join(known)}){nearest(str(name), list(known))}"
        )


def check_arm(arm: Arm, arms: Mapping[str, Arm], control: str) -> None:
    """Raise a ValueError unless the arm can be compared with the control."""
    if arm.match:
        check_name(f"arms.{arm.name}.of", arm.of, arms, "arm")
        if arms[arm.of].match:
            raise ValueError(
                f"arms.{arm.name}.of is {arm.of}, whose steps follow from {arms[arm.of].of}; write of: "
                f"{arms[arm.of].of}"
            )
    if arm.config.stages:
        raise ValueError(f"arm {arm.name} has stages, and a study compares arms step by step; train it by itself")
    ours, theirs = (asdict(arms[name].config.data) for name in (arm.name, control))
    if key := changed(theirs, ours):
        raise ValueError(
            f"arm {arm.name} has data.{key}={found(ours, key)} and {control} has {found(theirs, key)}; arms of a seed "
            "read the same samples: write data in base"
        )


def arm_of(config: StudyConfig, name: str, own: Any) -> Arm:
    """Merge an arm's keys over the base's keys and over the ready config that either names."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be an arm's name, because a folder gets it; use letters, digits, '-', '_' and '.'"
        )
    check_keys("base", config.base)
    check_keys(f"arms.{name}", own)
    match, of = str(own.get("match", "")), str(own.get("of", ""))
    if (match or of) and (match not in MATCHES or not of or "steps" in own):
        raise ValueError(
            f"arms.{name} has match={match!r}, of={of!r}{' and steps' if 'steps' in own else ''}; its steps "
            f"follow from another arm: write match: {' or '.join(MATCHES)} and of: ARM, and no steps"
        )
    ready = own.get("config", config.base.get("config", ""))
    parts = [keys_of(ready, TRAIN) if ready else {}, *(without(keys, OWN) for keys in (config.base, own))]
    merged: Any = OmegaConf.to_container(OmegaConf.merge(*map(literal, parts)), resolve=True)
    values = {"model": {}, "data": {}, **without(merged, SET)}
    for key in ("model", "data"):
        if not isinstance(values[key], dict):
            raise ValueError(f"{key} of arm {name} is {strict.short(values[key])}; it must be keys and values")
    model = values["model"]
    upcycle = model.get("upcycle")
    if (
        isinstance(upcycle, str) and upcycle
    ):  # a ready config: replace its name by its keys, because a seed is added to them
        model["upcycle"] = keys_of(upcycle, UPCYCLE)
    begins = model.get("upcycle") or model
    if not (begins.get("source") or begins.get("donors")):
        raise ValueError(
            f"arm {name} begins with no model; write source=FOLDER where the config says ${{source}}, or "
            f"arms.{name}.model.source=FOLDER"
        )
    return Arm(name, values, match, of)


def check_keys(where: str, keys: Any) -> None:
    """Raise a ValueError unless these are keys and values, without keys that a trial sets."""
    if not isinstance(keys, Mapping):
        raise ValueError(f"{where} is {keys!r}; it must be training keys and values")
    for key in SET:
        if found(keys, key) is not None:
            raise ValueError(f"{where}.{key} is set, and the study sets it for each run; leave it out and use seeds")


def without(keys: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


def trials(plan: Plan, lengths: Mapping[str, int]) -> list[Trial]:
    """List the trials seed by seed, so that a study that is cut short has whole seeds."""
    return [plan.trial(arm, seed, steps=lengths[arm]) for seed in plan.config.seeds for arm in plan.arms]


def tokens_of_step(config: TrainConfig) -> int:
    return config.batch * config.data.sequence


# ---- keys


def found(values: Any, key: str) -> Any:
    """Return a dotted key's value in nested mappings, or None."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Name the first key that differs and changes what is learned; "" if none does."""
    ours, theirs = flat(without(a, QUIET)), flat(without(b, QUIET))
    return next((key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)), "")
