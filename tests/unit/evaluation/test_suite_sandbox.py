"""A suite of a stranger asks for texts and for no commands: its templates are in a sandbox, its metrics are lm-eval's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval.utils
import pytest

from evaluation.ask import tasks
from tests.unit.evaluation.test_tasks import suite, written

COMMAND = "__init__.__globals__.__builtins__.__import__('os').system('touch {}')"
WAYS = {
    "a global": "{{{{ cycler." + COMMAND + " }}}}",
    "an attribute": "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
    "the undefined": "{{{{ self._TemplateReference__context." + COMMAND.replace("__init__", "cycler.__init__", 1) + " }}}}",
    "a format": "{{{{ '{{0.__class__.__init__.__globals__}}'.format(cycler) }}}}",
    "room": "{{{{ range(10000000) | list }}}}",
}  # fmt: skip


@pytest.mark.parametrize("key", ["doc_to_text", "doc_to_target"])
@pytest.mark.parametrize("way", WAYS)
def test_a_template_runs_no_command(tmp_path: Path, way: str, key: str) -> None:
    template = WAYS[way].format(tmp_path / "ran")
    with pytest.raises(ValueError, match="a template of the suite asks for more than text"):
        tasks.load(suite(tmp_path, written(tmp_path) | {key: template}))
    assert not (tmp_path / "ran").exists()


def test_templates_are_lm_evals_else_and_its_own_environment_is_left_as_it_was(tmp_path: Path) -> None:
    before = lm_eval.utils.env
    template = "a${{text}} {{ text | regex_replace('a', 'c') }}\n"  # OmegaConf would read ${ as its own
    loaded = tasks.load(suite(tmp_path, written(tmp_path) | {"doc_to_text": template})).loaded
    with tasks.alone():
        [doc] = loaded["tasks"]["writes"].test_docs()
        assert loaded["tasks"]["writes"].doc_to_text(doc) == "a$a c\n"
    assert lm_eval.utils.env is before


@pytest.mark.parametrize(
    "entry", [{"metric": "acc", "hf_evaluate": True}, {"metric": "org/metric"}, {"metric": ["acc"]}]
)
def test_a_metric_that_would_be_fetched_is_refused(
    tmp_path: Path, entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = pytest.importorskip("evaluate")
    monkeypatch.setattr(evaluate, "load", lambda *_: pytest.fail("fetched"))
    own = written(tmp_path) | {"metric_list": [entry]}
    for given in (own, {"group": "all", "task": [own]}):
        with pytest.raises(ValueError, match=r"own\.yaml has the metric .* is code that lm-eval would fetch and run"):
            tasks.load(suite(tmp_path, given))
