"""A suite of a stranger asks for texts and for no commands: its templates are in a sandbox, its metrics are lm-eval's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval.api.model
import lm_eval.utils
import pytest
import yaml

from evaluation.ask import run, tasks
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


@pytest.mark.parametrize("way", ["a file", "a file that it includes", "a folder"])
def test_python_next_to_a_task_runs_only_if_it_is_trusted(tmp_path: Path, way: str) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n\ndef f(docs):\n    return docs\n")
    own = yaml.safe_dump(written(tmp_path)) + "process_docs: !function evil.f\n"
    (tmp_path / "x.yaml").write_text(own)
    given: dict[str, Any] = {"name": suite(tmp_path, str(tmp_path / "x.yaml"))}
    if way == "a file that it includes":
        (tmp_path / "x.yaml").write_text("task: writes\ninclude: inner.yaml\n")
        (tmp_path / "inner.yaml").write_text(own)
    elif way == "a folder":
        (tmp_path / "own.yaml").unlink()
        given = {"name": "", "names": ("writes",), "include_path": (str(tmp_path),)}
    with pytest.raises(ValueError, match=r"names the Python function 'evil\.f'.*; read it, then write trust_code=true"):
        tasks.load(**given)
    assert not ran.exists()
    assert tasks.load(**given, trust_code=True).loaded["tasks"] and ran.exists()


LOOPS = {
    "loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a constant": "{{ 9 ** (9 ** 9) }}",
    "a regex": "{{ ('a' * 40 ~ '!') | regex_replace('(a+)+$', '') }}",
    "a text": "{{ 'x' * 10 ** 11 }}",
}


@pytest.mark.parametrize("way", LOOPS)
def test_a_template_that_does_not_end_is_stopped(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upcycle.text.templates.SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"a template of the suite (computes|needs|asks for) .*; "):
        tasks.load(suite(tmp_path, written(tmp_path) | {"doc_to_text": LOOPS[way]}))


class Writes(lm_eval.api.model.LM):  # type: ignore[misc]
    """A model that always writes one text."""

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        return ["a" * 40 + "!"] * len(requests)

    loglikelihood = loglikelihood_rolling = generate_until


def test_a_filter_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upcycle.text.templates.SECONDS", 0.2)
    regex = [{"name": "f", "filter": [{"function": "regex", "regex_pattern": "(a+)+$"}]}]
    found = tasks.load(suite(tmp_path, written(tmp_path) | {"filter_list": regex}))
    with pytest.raises(ValueError, match="a filter of writes computes for more than"):
        run.ask(Writes(), found, 0)


WRONG = [
    *[(key, value) for key in ("dataset_path", "dataset_name", "test_split", "output_type", "description", "gen_prefix")
      for value in (3, ["x"], {"x": 1})],
    *[(key, value) for key in ("metric_list", "filter_list") for value in (3, "x", [3], [None], {"metric": "acc"})],
    *[(key, value) for key in ("num_fewshot", "repeats") for value in ("x", -1, 10**12, 1.5, [1])],
    *[(key, value) for key in ("generation_kwargs", "metadata", "fewshot_config", "dataset_kwargs") for value in (3, "x", [1])],
    ("filter_list", [{"name": "f"}]), ("filter_list", [{"name": "f", "filter": [{"function": "none"}]}]),
    ("metric_list", [{"metric": "exact_match", "aggregation": "none"}]), ("a_key_of_tomorrow", 1), ("task", 7),
    ("fewshot_config", {"samples": 3}), ("fewshot_config", {"sampler": "none"}), ("test_split", "none"),
    ("doc_to_text", [1]), ("doc_to_target", {}), ("doc_to_choice", 3), ("unsafe_code", "no"), ("tag", 1),
    ("doc_to_text", "{{ nothing.at.all }}"), ("doc_to_text", "{{"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda x: str(x)[:30])
def test_a_wrong_value_of_a_suite_is_one_sentence(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        found = tasks.load(suite(tmp_path, written(tmp_path) | {"num_fewshot": 1} | {key: value}))
        run.ask(Writes(), found, 0)
    assert "Traceback" not in str(caught.value) and 20 < len(" ".join(str(caught.value).split())) < 700


def test_an_error_of_the_model_is_not_called_one_of_the_suite(tmp_path: Path) -> None:
    class Breaks(Writes):
        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run.ask(Breaks(), tasks.load(suite(tmp_path, written(tmp_path))), 0)
