"""Who may import whom. Read from the sources alone: imports inside functions, under TYPE_CHECKING and by name count."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("upcycle", "training", "evaluation")
SINGLE_DEVICE = ("training.model", "training.experts", "training.dispatch", "training.kernels")
Graph = Mapping[str, set[str]]


def graph(root: Path) -> Graph:
    """Module -> the modules of the three packages that it imports."""
    files = {name_of(path, root): path for package in PACKAGES for path in (root / package).rglob("*.py")}
    return {name: imported(path.read_text(), name, files.keys()) - {name} for name, path in files.items()}


def name_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported(source: str, name: str, modules: Collection[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{name} has a relative import"
            # a name of a package is a module of it, or something that its __init__ has
            parts = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in modules else node.module for part in parts.values()}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found.add(node.value)  # for import_module
    return {each for each in found if each in modules}


def test_no_module_imports_itself_through_others() -> None:
    found = graph(ROOT)
    assert len(found) > 150
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_training_and_evaluation_look_at_upcycle_and_never_back() -> None:
    """One way up: who starts a run fetches the suite that it asks."""
    below = {"upcycle": {"upcycle"}, "training": {"upcycle", "training"}, "evaluation": set(PACKAGES)}
    up = {
        (name, other)
        for name, others in graph(ROOT).items()
        for other in others
        if other.partition(".")[0] not in below[name.partition(".")[0]]
    }
    up = {pair for pair in up if pair[0] != "upcycle.cli.main"}  # the table of commands
    assert up == {("training.config.suite", "evaluation.ask.run")}


def test_what_computes_on_one_device_knows_no_mesh() -> None:
    for name, others in graph(ROOT).items():
        if name.startswith(SINGLE_DEVICE):
            assert not [other for other in others if other.startswith("training.parallel")], name


def test_nothing_of_ours_imports_the_plug_in_for_vllm() -> None:
    found = graph(ROOT)
    assert {"upcycle.serving", "upcycle.serving.vllm"} <= found.keys()
    users = {name for name, others in found.items() if any(other.startswith("upcycle.serving") for other in others)}
    assert users <= {"upcycle.serving", "upcycle.serving.vllm"}


def test_only_the_interface_imports_the_loop() -> None:
    assert [name for name, others in graph(ROOT).items() if "training.run.loop" in others] == ["training.api"]


def test_every_kind_of_import_is_seen(tmp_path: Path) -> None:
    sources = {
        "upcycle/__init__.py": "",
        "upcycle/a.py": "from upcycle import b",
        "upcycle/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from upcycle.c import thing",
        "upcycle/c.py": "def f():\n    import upcycle.d",
        "upcycle/d.py": "from importlib import import_module\ndef f():\n    return import_module('upcycle.a')",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    want = {"": set(), "a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"a"}}
    assert graph(tmp_path) == {f"upcycle.{k}".rstrip("."): {f"upcycle.{each}" for each in v} for k, v in want.items()}
