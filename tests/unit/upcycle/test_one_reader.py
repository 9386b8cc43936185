"""Nothing in the product parses JSON or YAML but upcycle/io/strict.py: a new file would be read without its bounds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PARSERS = {
    ("json", "load"), ("json", "loads"), ("yaml", "safe_load"), ("yaml", "load"), ("yaml", "full_load"), ("np", "load"),
    ("OmegaConf", "load"), ("pickle", "load"), ("pickle", "loads"), ("torch", "load"),
}  # fmt: skip
# what is no file: a value made anew, what ranks tell each other, a child's standard output
ALLOWED = {
    "upcycle/io/strict.py": 2, "upcycle/converting/convert.py": 1, "benchmarks/converting.py": 1, "training/run/build.py": 1, "training/checkpoint/standalone.py": 1,
    "training/parallel/collectives.py": 2, "training/parallel/processes.py": 1, "training/parallel/watch.py": 1,
    "training/data/shards.py": 1,  # numpy's own files, without pickles; sizes and types are checked after it
    "examples/demo.py": 2,  # texts and a suite that it has written itself a moment before
}  # fmt: skip


def calls(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        owner = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Attribute) and isinstance(owner, ast.Name) and (owner.id, node.attr) in PARSERS:
            yield f"{owner.id}.{node.attr}"


def test_nothing_else_parses() -> None:
    found = {}
    for package in ("upcycle", "training", "evaluation"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if count := len(list(calls(path.read_text()))):
                found[str(path.relative_to(ROOT))] = count
    assert found == ALLOWED


def test_twin_a_planted_parser_is_seen() -> None:
    assert list(calls("import json\nx = json.loads(path.read_text())\ny = map(json.load, files)")) == [
        "json.loads",
        "json.load",
    ]
