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

from evaluation.ask.harness import UpcycleLM
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
TAKEN: list[tuple[Any, set[str]]] = [
    (lm_eval.evaluator.evaluate, {"lm", "task_dict", "limit", "bootstrap_iters", "log_samples", "samples"}),
    (lm_eval.evaluator.evaluate, {"system_instruction", "apply_chat_template", "fewshot_as_multiturn"}),
    (lm_eval.evaluator._process_results, {"eval_results_acc"}),
    (lm_eval.tasks.TaskManager, {"include_path", "include_defaults"}),
    (lm_eval.tasks._yaml_loader.load_yaml, {"resolve_func"}),
    (lm_eval.api.task.ConfigurableTask.set_config, {"key", "value", "update"}),
    (EvaluationTracker.save_results_aggregated, {"results", "samples"}),
    (EvaluationTracker.save_results_samples, {"task_name", "samples"}),
    (LM.create_from_arg_obj, {"arg_dict", "additional_config"}),
]


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


def test_functions_take_what_they_are_given() -> None:
    for function, names in TAKEN:
        assert names <= set(inspect.signature(function).parameters), function
    assert callable(HarnessCLI().parse_args) and callable(HarnessCLI.execute)


def test_the_model_is_in_lm_evals_table_and_answers_all_that_it_asks() -> None:
    assert lm_eval.api.registry.get_model("upcycle") is UpcycleLM
    assert "hf" in lm_eval.api.registry.model_registry  # ours did not keep lm-eval from filling its table
    assert not UpcycleLM.__abstractmethods__
    for name in ("apply_chat_template", "chat_template", "loglikelihood", "generate_until", "loglikelihood_rolling"):
        base = list(inspect.signature(getattr(TemplateLM, name)).parameters)
        mine = list(inspect.signature(getattr(UpcycleLM, name)).parameters)
        assert mine[: len(base)] == base, name
    names = {"mean", "f1", "matthews_corrcoef", "bleu", *measures.RATIOS} - {measures.OF_ALL, measures.PER_UNIT}
    assert names <= lm_eval.api.registry.AGGREGATION_REGISTRY.keys()
