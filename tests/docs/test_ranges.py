"""Every numeric key of every command has a range, which its config checks before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from benchmarks import evaluation
from evaluation.cli.compare import CompareConfig
from evaluation.studies.plan import StudyConfig
from tests.docs.test_keys import TABLES, methods
from training.config.checks import largest_divisor
from training.config.schema import StageConfig, TrainConfig
from training.data.mixture import DataConfig, TrainSource, ValidSource
from training.optim.config import OptimConfig, ParameterGroup
from upcycle.config.reading import build
from upcycle.config.schema import UpcycleConfig
from upcycle.planning.methods import Sizes

# keys without which a config is refused before its numbers are checked
NEEDED: dict[type[Any], dict[str, Any]] = {evaluation.BenchConfig: {"checkpoint": "a"}, StudyConfig: {"output": "a"}}
PARTS = {  # config -> the one that reads it as an item of a list, and the list
    TrainSource: (DataConfig, "train", {"path": "a"}),
    ValidSource: (DataConfig, "valid", {"path": "a"}),
    ParameterGroup: (OptimConfig, "groups", {"match": "router"}),
    StageConfig: (TrainConfig, "stages", {}),  # without `steps`, because a stage has either steps or tokens
}
TOO_MUCH: dict[type, tuple[float, ...]] = {
    int: (-(10**30), -(2**63), 2**63, 10**19, 10**30),
    float: (float("nan"), float("inf"), float("-inf"), -1e30, 1e30, 1e300, 10**400),
}


def numbers(kind: type[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type]]:
    """Yield the path and the type of each number of a config and its parts, lists of numbers included."""
    hints = get_type_hints(kind)
    for name in (field.name for field in dataclasses.fields(kind)):
        if isinstance(hint := hints[name], type) and dataclasses.is_dataclass(hint):
            yield from numbers(hint, (*path, name))
        for each in (hint, *get_args(hint)):
            if each in (int, float):
                yield (*path, name), each


def config(kind: type[Any], path: tuple[str, ...], value: Any) -> Any:
    """Return the config of a kind with one number."""
    hints = get_type_hints(kind)
    made: Any = [value] if str(hints[path[0]]).startswith("tuple") else value
    for name in reversed(path):
        made = {name: made}
    if kind in PARTS:
        outer, key, rest = PARTS[kind]
        return build(outer, ({"model": {"source": "a"}} if outer is TrainConfig else {}) | {key: [{**rest, **made}]})
    return build(kind, NEEDED.get(kind, {}) | made)


ALL = {kind: title for title, _, kind in TABLES} | {kind: f"method {name}" for name, kind in methods().items()}
ALL[ParameterGroup] = "one of optim.groups"
KEYS = [(kind, path, each) for kind in ALL for path, each in numbers(kind)]


@pytest.mark.parametrize(("kind", "path", "each"), KEYS, ids=[f"{ALL[k]}: {'.'.join(p)}" for k, p, _ in KEYS])
def test_a_number_that_nothing_can_hold_is_refused_by_its_key(
    kind: type[Any], path: tuple[str, ...], each: type
) -> None:
    for value in TOO_MUCH[each]:
        with pytest.raises(ValueError, match=rf"{path[-1]}\b"):
            made = config(kind, path, value)
            if hasattr(made, "check"):  # options of a method, which are checked with the sizes
                made.check(Sizes(8, 1))


def test_the_walk_finds_the_numbers() -> None:
    assert len(KEYS) > 150


@pytest.mark.parametrize("value", ["law", 0.005, ["law"], None])
def test_margins_have_names(value: Any) -> None:
    with pytest.raises(ValueError, match=r"equivalent is .*; (write names and margins|it must be keys and values)"):
        build(CompareConfig, {"equivalent": value})


@pytest.mark.parametrize("item", [["a"], {"a": 1}])
def test_an_item_of_a_list_of_texts_is_a_text(item: Any) -> None:
    with pytest.raises(ValueError, match=r"donors has .*; its items must be plain text"):
        build(UpcycleConfig, {"donors": [item]})


@pytest.mark.parametrize(("number", "most", "found"), [(12, 5, 4), (2**20, 3, 2), (97, 96, 1), (1, 1, 1), (36, 36, 36)])
def test_the_largest_divisor(number: int, most: int, found: int) -> None:
    assert largest_divisor(number, most) == found
