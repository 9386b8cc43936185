"""Check docs/config.md: every key of every command, with its default and the comment in its source.

python -m tests.docs.test_keys        writes the page again
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import tokenize
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from benchmarks import evaluation as evaluation_bench
from evaluation.ask import harness
from evaluation.ask.run import RunConfig
from evaluation.chat import ChatConfig
from evaluation.cli.compare import CompareConfig
from evaluation.cli.report import ReportConfig
from evaluation.cli.watch import WatchConfig
from evaluation.facts.results import ScoreConfig
from evaluation.facts.suite import WriteConfig
from evaluation.judge.experts.routing import RoutingConfig
from evaluation.studies.facts import FactsConfig
from evaluation.studies.plan import StudyConfig
from evaluation.studies.sample import SampleConfig
from examples import demo
from training.cli.export import ExportKeys
from training.cli.join import JoinKeys
from training.cli.launch import LaunchKeys
from training.cli.prepare import PrepareKeys
from training.cli.remove import RemoveKeys
from training.config.schema import StageConfig, TrainConfig
from training.data.mixture import TrainSource, ValidSource
from training.data.prepare import PrepareConfig
from training.estimating.bench import BenchConfig
from training.estimating.estimate import EstimateConfig
from training.estimating.measure import MeasureConfig
from training.estimating.recommend import RecommendConfig
from training.parts.add import AddConfig
from training.parts.upgrade import UpgradeConfig
from upcycle import plugin
from upcycle.cli.inspect import InspectKeys
from upcycle.cli.main import COMMANDS
from upcycle.cli.plan import PlanKeys
from upcycle.cli.push import PushKeys
from upcycle.cli.quantize import QuantizeKeys
from upcycle.cli.verify import VerifyKeys
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import grow

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
# title, what is said above the table, the class; keys of a part that an earlier table has are not listed again
TABLES: list[tuple[str, str, type[Any]]] = [
    ("upcycle plan, upcycle convert", "Training has the same keys in `model.upcycle`.", UpcycleConfig),
    ("upcycle plan", "In addition to the keys above.", PlanKeys),
    ("upcycle verify", "", VerifyKeys),
    ("upcycle inspect", "", InspectKeys),
    ("upcycle quantize", "", QuantizeKeys),
    ("upcycle push", "", PushKeys),
    ("upcycle prepare", "", PrepareConfig),
    ("upcycle prepare OUTPUT", "In addition to the keys above.", PrepareKeys),
    ("upcycle train", "`upcycle estimate` has the same keys.", TrainConfig),
    ("upcycle train: one of stages", "A stage takes the keys that it leaves out from the run.", StageConfig),
    ("upcycle train: one of data.train", "A folder name alone sets `path`.", TrainSource),
    ("upcycle train: one of data.valid", "A folder name alone sets `path`.", ValidSource),
    ("upcycle launch", "", LaunchKeys),
    ("upcycle export", "", ExportKeys),
    ("upcycle add", "In addition to the keys of training.", AddConfig),
    ("upcycle join", "", JoinKeys),
    ("upcycle remove", "", RemoveKeys),
    ("upcycle upgrade", "", UpgradeConfig),
    ("upcycle recommend", "", RecommendConfig),
    ("upcycle estimate", "In addition to the keys of training.", EstimateConfig),
    ("upcycle estimate measure=FILE", "", MeasureConfig),
    ("upcycle bench", "In addition to the keys of training.", BenchConfig),
    ("upcycle eval", "", RunConfig),
    ("python -m evaluation lm-eval", "For `--model upcycle --model_args key=value,key=value`.", harness.ModelConfig),
    ("upcycle chat", "", ChatConfig),
    ("upcycle compare", "", CompareConfig),
    ("upcycle facts write", "", WriteConfig),
    ("upcycle facts score", "", ScoreConfig),
    ("upcycle watch", "", WatchConfig),
    ("upcycle routing", "", RoutingConfig),
    ("upcycle report", "", ReportConfig),
    ("upcycle study", "An arm has the keys of training.", StudyConfig),
    ("upcycle study: facts", "In addition to the keys of `upcycle facts write`.", FactsConfig),
    ("upcycle study: sample", "The keys that make OUTPUT/sample.", SampleConfig),
    ("benchmarks.evaluation", "", evaluation_bench.BenchConfig),
    ("examples.demo", "In addition to the keys of a sample.", demo.DemoConfig),
]
HEAD = """# Config keys

This page lists every key of every command, with its default. Write keys in a YAML file or as `key=value` words on the command line:
`a.b=1` on the command line is `a: {b: 1}` in a file, `[a,b]` is a list, and nothing after `=` is the empty text. An unknown key is
refused with the nearest right one. `nproc=8` starts 8 processes of convert, prepare, train, export, estimate, bench or eval.

Ready configs are in `configs/`; name one without its folder: `upcycle train slices`. `python -m tests.docs.test_keys` writes this
page from the source.
"""


def meanings(kind: type[Any]) -> dict[str, str]:
    """Return the comment of each field, inherited ones included: the lines above it, then the end of its own line."""
    before = [meanings(base) for base in kind.__bases__ if dataclasses.is_dataclass(base)]
    source = inspect.getsource(kind)
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {name: said for each in before for name, said in each.items()}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            last = node.end_lineno or node.lineno
            found[node.target.id] = " ".join(comments[at] for at in range(first, last + 1) if at in comments)
    return found


def default_of(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def rows(kind: type[Any], known: set[type[Any]], before: str = "") -> list[tuple[str, str, str]]:
    """List key, default and meaning; the keys of a nested config begin with its name."""
    known.add(kind)
    found, hints, said = [], get_type_hints(kind), meanings(kind)
    tables = {kind for _, _, kind in TABLES}
    above = {name for base in kind.__mro__[1:] if base in tables for name in get_type_hints(base)}
    own_first = sorted(dataclasses.fields(kind), key=lambda field: field.name not in kind.__annotations__)
    for field in [field for field in own_first if field.name not in above or field.name in kind.__annotations__]:
        part = hints[field.name]
        if not dataclasses.is_dataclass(part):
            found.append((before + field.name, default_of(field), said[field.name]))
        elif part in known:
            found.append((f"{before}{field.name}.*", "", said[field.name] or "as above"))
        else:
            assert isinstance(part, type)
            found += rows(part, known, f"{before}{field.name}.")
    return found


def table(found: list[tuple[str, str, str]]) -> list[str]:
    cells = ([f"`{key}`", f"`{default}`" if default else "", said] for key, default, said in found)
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells)
    return ["key | default | meaning", "---|---|---", *lines, ""]


def methods() -> dict[str, type[Any]]:
    files = {
        name: plugin.load("upcycle.planning.methods", name).Options for name in plugin.names("upcycle.planning.methods")
    }
    return files | grow.METHODS


def page() -> str:
    lines, known = [HEAD], set[type[Any]]()
    for title, about, kind in TABLES:
        lines += [f"## {title}", "", *([about, ""] if about else []), *table(rows(kind, known))]
        if kind is UpcycleConfig:
            options = {name: rows(options, set(), "method.") for name, options in methods().items()}
            found = [(f"method.name={name} {key}", *rest) for name, its in options.items() for key, *rest in its]
            without = ", ".join(f"`{name}`" for name, its in options.items() if not its)
            lines += [f"Keys of single methods ({without} have none):", "", *table(found)]
    return "\n".join(lines).rstrip() + "\n"


@pytest.mark.parametrize("kind", [kind for _, _, kind in TABLES], ids=[title for title, _, _ in TABLES])
def test_every_key_says_what_it_means(kind: type[Any]) -> None:
    assert not [key for key, _, said in rows(kind, set()) if not said]


def test_every_command_is_there() -> None:
    titles = " ".join(title for title, _, _ in TABLES)
    assert not [name for name in COMMANDS if f"upcycle {name}" not in titles and name != "export"]


@pytest.mark.parametrize("name", [*plugin.names("upcycle.planning.methods"), *grow.METHODS])
def test_every_key_of_a_method_says_what_it_means(name: str) -> None:
    assert not [key for key, _, said in rows(methods()[name], set()) if not said]


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(), "docs/config.md is out of date; run python -m tests.docs.test_keys"


if __name__ == "__main__":
    PAGE.write_text(page())
