"""What this project uses of lm-eval beyond its documented interface: all that may move with its next version. Where one
of these fails, look at the place in evaluation/ that it names, and then raise the upper bound in pyproject.toml."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.metrics
import lm_eval.api.registry
import lm_eval.api.task
import lm_eval.evaluator
import lm_eval.evaluator_utils
import lm_eval.tasks
import lm_eval.utils
import pytest
import tqdm
from jinja2 import Environment
from lm_eval._cli import HarnessCLI
from lm_eval.api.model import LM, TemplateLM
from lm_eval.loggers import EvaluationTracker
from packaging.requirements import Requirement

from evaluation.ask import run, tasks
from evaluation.ask.harness import UpcycleLM
from evaluation.judge import logged
from evaluation.judge import metrics as measures

ROOT = Path(__file__).parents[3]
# what evaluation/ replaces while lm-eval works -> who must look it up there, when it is called
REPLACED: dict[tuple[Any, str], Any] = {
    (lm_eval.evaluator, "_process_results"): lm_eval.evaluator.evaluate,
    (lm_eval.evaluator_utils, "stderr_for_metric"): lm_eval.evaluator_utils._compute_task_aggregations,
    (datasets, "load_dataset"): lm_eval.api.task.ConfigurableTask.download,
    (lm_eval.utils, "env"): lm_eval.utils.apply_template,
    (lm_eval.utils.env, "from_string"): lm_eval.utils.apply_template,
    (lm_eval.api.task, "tqdm"): lm_eval.api.task.Task.build_all_requests,
    (tqdm, "tqdm"): lm_eval.api.metrics.bootstrap_stderr,
}


def test_the_version_is_within_what_was_read() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("eval", "test"):
        lines = [Requirement(line) for line in project["optional-dependencies"][extra]]
        [found] = [line for line in lines if line.name.replace("_", "-") == "lm-eval"]
        assert {each.operator for each in found.specifier} == {">=", "<"}, "an upper bound, because internals are used"
        assert version("lm_eval") in found.specifier


@pytest.mark.parametrize(("owner", "name"), REPLACED, ids=[name for _, name in REPLACED])
def test_what_is_replaced_is_where_lm_eval_looks_it_up(owner: Any, name: str) -> None:
    assert callable(getattr(owner, name)) or isinstance(getattr(owner, name), Environment)
    assert re.search(
        rf"\b{name}{r'[.]from_string' if name == 'env' else ''}\(", inspect.getsource(REPLACED[owner, name])
    )


def test_nothing_else_is_replaced() -> None:
    found = set()
    for module in (run, tasks):
        found |= set(re.findall(r'replaced\((?!owner)([\w.]+), "(\w+)"', inspect.getsource(module)))
    assert {name for _, name in found} == {name for _, name in REPLACED} and len(found) == len(REPLACED)


def test_functions_take_what_they_are_given() -> None:
    def takes(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    wanted = {"lm", "task_dict", "limit", "bootstrap_iters", "log_samples", "samples", "system_instruction"}
    assert wanted | {"apply_chat_template", "fewshot_as_multiturn"} <= takes(lm_eval.evaluator.evaluate)
    assert next(iter(inspect.signature(lm_eval.evaluator._process_results).parameters)) == "eval_results_acc"
    assert {"include_path", "include_defaults"} <= takes(lm_eval.tasks.TaskManager)
    assert {"resolve_func"} <= takes(lm_eval.tasks._yaml_loader.load_yaml)
    assert {"key", "value", "update"} <= takes(lm_eval.api.task.ConfigurableTask.set_config)
    assert {"results", "samples"} <= takes(EvaluationTracker.save_results_aggregated)
    assert {"task_name", "samples"} <= takes(EvaluationTracker.save_results_samples)
    assert {"arg_dict", "additional_config"} <= takes(LM.create_from_arg_obj)
    assert callable(HarnessCLI().parse_args) and callable(HarnessCLI.execute)


def test_the_model_is_in_lm_evals_table_and_answers_all_that_it_asks() -> None:
    assert lm_eval.api.registry.get_model("upcycle") is UpcycleLM
    assert "hf" in lm_eval.api.registry.model_registry  # ours did not keep lm-eval from filling its table
    assert not UpcycleLM.__abstractmethods__
    for name in ("apply_chat_template", "chat_template", "loglikelihood", "generate_until", "loglikelihood_rolling"):
        base = list(inspect.signature(getattr(TemplateLM, name)).parameters)
        mine = list(inspect.signature(getattr(UpcycleLM, name)).parameters)
        assert mine[: len(base)] == base, name


def test_what_logs_are_read_by_is_what_lm_eval_writes() -> None:
    source = inspect.getsource(EvaluationTracker)
    assert 'f"results_{self.date_id}.json"' in source and 'f"samples_{task_name}_{self.date_id}.jsonl"' in source
    assert {"mean", "f1", "matthews_corrcoef", "bleu"} <= lm_eval.api.registry.AGGREGATION_REGISTRY.keys()
    for name in measures.RATIOS.keys() - {measures.OF_ALL}:
        assert name in lm_eval.api.registry.AGGREGATION_REGISTRY, name
    assert logged.time_of(Path("results_2026-01-02T03-04-05.678.json")) == "2026-01-02T03-04-05.678"
