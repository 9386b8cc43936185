"""Hold the sizes that keep the product readable: short functions, flat nesting, small folders, a loop of one page."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUG_INS = {  # a folder whose files are found by their name
    "upcycle/arch/families", "upcycle/arch/targets", "upcycle/arch/natives", "upcycle/planning/methods",
    "training/experts", "training/dispatch", "training/islands/rules",
}  # fmt: skip
NESTING = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef)
SOURCES = sorted(
    path
    for place in ("upcycle", "training", "evaluation", "benchmarks", "examples")
    for path in (ROOT / place).rglob("*.py")
)


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def depth(node: ast.AST) -> int:
    """Return how many blocks lie inside each other; `elif` adds none."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, depth(child) + (isinstance(child, NESTING) and not is_elif))
    return deepest


@pytest.mark.parametrize(
    ("limit", "measure"), [(80, lambda f: f.end_lineno - f.lineno + 1), (5, depth)], ids=["lines", "depth"]
)
def test_no_function_is_long_or_deep(limit: int, measure: object) -> None:
    assert callable(measure)
    over = [f"{p.relative_to(ROOT)} {f.name} {n}" for p in SOURCES for f in functions(p) if (n := measure(f)) > limit]
    assert not over


def test_folders_are_small() -> None:
    folders = {path.parent for path in SOURCES}
    counts = {folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) for folder in folders}
    assert len(counts) > 20
    assert not {name: count for name, count in counts.items() if count > 12 and name not in PLUG_INS}


def test_the_loop_is_one_page() -> None:
    path = ROOT / "training" / "run" / "loop.py"
    assert len(path.read_text().splitlines()) < 60
    assert max(map(depth, functions(path))) <= 3


def test_depth_counts_blocks_and_not_elif() -> None:
    source = "def f():\n if a:\n  for b in c:\n   pass\n elif d:\n  pass\n"
    assert depth(ast.parse(source).body[0]) == 2


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)


def hidden(function: ast.FunctionDef) -> set[str]:
    """Return the names that one comprehension of a function binds, and that another one calls as a global function.

    Python 3.12.1 looks for such a name among the local variables, and fails.
    """
    loops = [node for node in ast.walk(function) if isinstance(node, COMPREHENSIONS)]
    targets = [part for loop in loops for each in loop.generators for part in ast.walk(each.target)]
    bound = {part.id for part in targets if isinstance(part, ast.Name)}
    calls = [node.func for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return bound & {func.id for func in calls if isinstance(func, ast.Name)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_comprehension_hides_a_function_from_another(path: Path) -> None:
    top = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert not {f"{each.name}: {name}" for each in functions(path) for name in hidden(each) & top}
