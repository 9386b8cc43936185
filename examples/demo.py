"""Show that upcycling is real: from nothing to a report in minutes on a laptop's CPU, without network (`make demo`).

usage: python -m examples.demo [key=value ...]

  python -m examples.demo
  python -m examples.demo output=runs/again seed=1

A small dense Llama learns Python's standard library, which every machine has. Two conversions follow. `copies` has 8
whole copies of each FFN, and a token uses 2. `groups` has 4 copies cut into 4 parts; for each part a token uses the
copy that its router likes best, so it uses one whole FFN. Then the dense model and both MoEs train on the same tokens
with the same settings, except for those that a choice in each slice changes; the last lines name them. The report
compares loss on files that no model has seen, lm-eval's items, and the use of experts.

Each stage prints its commands before it runs them, so that a person can type them. A finished stage is skipped; an
interrupted one continues where it stopped. The function `demo` below is the table of contents.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import sys

from upcycle.cli import frame as cli

if __name__ == "__main__":  # before the imports below, because they take seconds
    cli.program("examples.demo")

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from evaluation.studies import sample
from evaluation.studies.sample import DOMAINS, SampleConfig, Stages, Stopped, texts, training
from upcycle.cli import main as door
from upcycle.config.reading import read
from upcycle.config.values import at_least, check_values
from upcycle.io.disk import write_atomic

if TYPE_CHECKING:
    from training.optim.config import OptimConfig

DENSE, COPIES, GROUPS = ARMS = (sample.DENSE, "copies", "groups")


@dataclass(frozen=True)
class DemoConfig(SampleConfig):
    output: str = "runs/demo"  # the folder for everything that the demo writes
    steps: int = 200  # steps of the training that follows the conversion

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "", {"steps": at_least(1)})


def demo(config: DemoConfig) -> int:
    here = Path(config.output)
    stage, dense, suite, unseen = Stages(here, config), here / DENSE, here / "suite.yaml", texts(here, "valid")
    # the ready config tiny: 4 copies of 4 slices, and the router chooses a copy for each slice
    learned = ",".join(map(str, texts(here, "train")))
    groups = ["tiny", f"calibration.texts=[{learned}]"]
    ways = {COPIES: ["experts=8", "top_k=2"], GROUPS: groups}
    routing = {arm: here / f"routing-{arm}.json" for arm in ways}
    sample.dense_model(stage, config)
    for arm, words in ways.items():
        convert_words = [f"source={dense}", f"output={here / arm}", f"seed={config.seed}"]
        verify_words = [dense, here / arm, f"text=[{','.join(map(str, unseen))}]"]
        stage(f"convert {arm}", f"Upcycle it: {arm}", call, "convert", *words, *convert_words)
        stage(f"verify {arm}", "Is it the same function?", call, "verify", *verify_words)
    stage("train", f"Continue, side by side: {', '.join(ARMS)}", go_on, config)
    stage("suite", "lm-eval's tiny suite, and the text held out", write_suite, here, suite)
    for arm in ARMS:
        run_words = [suite, here / "trained" / arm, f"output={here / 'results' / arm}", "forward_tokens=4096"]
        stage(f"ask {arm}", f"Ask {arm}", call, "eval", *run_words)
    for arm in ways:
        options = [f"start={here / arm}", f"output={routing[arm]}", "tokens=8192", f"sequence={config.sequence}"]
        routing_words = [here / "trained" / arm, *unseen, *options]
        stage(f"routing {arm}", f"Which experts does {arm} use?", call, "routing", *routing_words)
    report_words = [here / kind / arm for kind in ("results", "runs") for arm in ARMS]
    report_words += [path for arm in ways for path in (routing[arm], here / arm)]
    report_keys = [f"output={here / 'report.html'}", "title=A dense Llama and its upcycled twins"]
    stage("report", "All of it on one page", call, "report", *report_words, *report_keys)
    print("\n".join(["", *summary(here, config, stage)]))
    return 0


def call(verb: str, *words: object) -> None:
    sample.call(lambda given: door.main([verb, *given]), verb, *words)


def side_by_side(program: str, commands: Mapping[str, Sequence[str]]) -> None:
    """Run each command in its own process with its share of the cores, since small models hardly gain by a second.

    Each line of output begins with the command's name, and a signal is passed to each process once. Raises Stopped if a
    command fails.
    """
    import torch

    root = Path(__file__).parent.parent
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    threads = max(1, torch.get_num_threads() // max(1, len(commands)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
    started: dict[str, subprocess.Popen[str]] = {}

    def pass_on(number: int, frame: object) -> None:
        for process in started.values():
            process.send_signal(number)

    def repeat(name: str) -> int:
        lines = started[name].stdout
        assert lines is not None
        for line in lines:
            print(f"{name:>8} | {line}", end="", flush=True)
        return started[name].wait()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for name, words in commands.items():
            print(f"$ {program} {shlex.join(words)}", flush=True)
            started[name] = subprocess.Popen(
                [sys.executable, "-u", "-m", program, *words], env=environment, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        with ThreadPoolExecutor(max(1, len(started))) as readers:
            codes = list(readers.map(repeat, started))
    except OSError:  # a command could not start: the others would continue without a reader
        for process in started.values():
            process.terminate()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if any(codes):
        raise Stopped(max(codes) if max(codes) > 0 else 130)


def go_on(config: DemoConfig) -> None:
    """Train the arms that are not finished, each from its last checkpoint."""
    here = Path(config.output)
    ends = {arm: here / "trained" / arm for arm in ARMS}
    left = {arm: training(config, arm, here / arm, end, config.steps) for arm, end in ends.items() if not end.is_dir()}
    side_by_side("upcycle", {arm: ["train", *words] for arm, words in left.items()})


def write_suite(here: Path, file: Path) -> None:
    """Write a suite of the tiny suite's tasks and a text of each domain."""
    from evaluation.ask.tasks import SUITES, text_task

    tiny = yaml.safe_load((SUITES / "tiny.yaml").read_text())["tasks"]
    own = [{**task, "dataset_name": str(SUITES / task["dataset_name"])} for task in tiny]
    own += [text_task(str(path)) for path in texts(here, "valid")]
    write_atomic(file, yaml.safe_dump({"tasks": own}, sort_keys=False).encode())
    print(f"{file}: {len(own)} tasks")


# ---- the result


def summary(here: Path, config: DemoConfig, stage: Stages) -> list[str]:
    """Return five lines on the result. One run of each gives no verdict."""
    from evaluation.judge.logged import load
    from evaluation.judge.losses import compare_losses
    from evaluation.judge.runs import mean, read_runs
    from training.observe.metrics import read as read_metrics

    losses = compare_losses(read_runs([[here / "runs" / arm] for arm in ARMS]))
    start = read_metrics(here / "runs" / DENSE)[0]
    before = mean(start[f"valid/{domain}/loss"] for domain in DOMAINS)
    models = {arm: load(here / "results" / arm).model for arm in ARMS}
    first = config.first * config.batch * config.sequence
    sizes = {arm: f"{model.parameters / 1e6:.2f} M parameters" for arm, model in models.items()}
    cost = dict(zip(losses.runs, losses.flops_per_token, strict=True))
    control = mean(row.a for row in losses.at_equal_tokens[COPIES])

    def against_control(by_run: Any, arm: str) -> str:
        rows = by_run[arm]
        return (
            f"{arm} {mean(r.b for r in rows):.4f} ({mean(r.difference for r in rows):+.4f}, lower on "
            f"{sum(r.difference < 0 for r in rows)} of {len(rows)} domains)"
        )

    at_flops = ", ".join(
        f"{arm} {mean(r.difference for r in losses.at_equal_flops[arm]):+.4f} against dense" for arm in (COPIES, GROUPS)
    )
    ratios = " and ".join(f"{(cost[arm] or 0) / (cost[DENSE] or 1):.2f}" for arm in (COPIES, GROUPS))
    settings = {arm: asdict(settings_of(here / arm)) for arm in (COPIES, GROUPS)}
    own = " ".join(f"optim.{key}={value}" for key, value in settings[GROUPS].items() if value != settings[COPIES][key])
    return [
        f"1. A dense Llama ({sizes[DENSE]}) read {first:,} tokens of the standard library: held-out loss {before:.4f} "
        "nats a token.",
        f"2. Upcycled to {COPIES} ({sizes[COPIES]}) and {GROUPS} ({sizes[GROUPS]}), each the same function at the "
        "start (verify).",
        f"3. All read the same {losses.tokens:,.0f} tokens more: dense {control:.4f}, "
        f"{against_control(losses.at_equal_tokens, COPIES)}, {against_control(losses.at_equal_tokens, GROUPS)}: "
        "no verdict, because each has one run and one rate. "
        f"All settings are the same, except the defaults of {GROUPS}: {own}.",
        f"4. A token of {COPIES} and {GROUPS} costs {ratios} times the FLOPs; at {losses.equal('FLOPs')}: {at_flops}.",
        f"5. {here / 'report.html'} shows everything; the demo took {stage.total('seconds'):.0f} s, "
        f"{stage.total('cpu_seconds'):.0f} s of CPU.",
    ]


def settings_of(folder: Path) -> OptimConfig:
    """Return the optimiser's default settings for the model in a folder."""
    from training.checkpoint.layout import opened
    from training.optim.config import OptimConfig, settled
    from upcycle.arch.spec import MoESpec

    with opened(folder) as origin:
        return settled(OptimConfig(), origin.spec if isinstance(origin.spec, MoESpec) else None)


@cli.command(resumes=True)
def main(words: Sequence[str]) -> int:
    try:
        return demo(read(DemoConfig, "", words))
    except Stopped as stopped:
        cli.say_stopped(resumes=True)
        return int(stopped.args[0])
