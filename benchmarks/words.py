"""Show random docstrings and error sentences before and after a change: python -m benchmarks.words REVISION

It writes benchmarks/results/words.md. REVISION is the commit before the change, and the working tree is after it. The
page shows "gone" where a function or its sentence no longer exists.
"""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("upcycle/", "training/", "evaluation/")
SEED, DOCSTRINGS, ERRORS = 2611, 60, 40
Texts = dict[tuple[str, str], str]  # (file, qualified name and, for an error, its number) -> text


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def sentences(node: ast.Raise) -> str:
    """Return the sentence that a `raise` gives its exception, or an empty string."""
    given = node.exc.args[:1] if isinstance(node.exc, ast.Call) else []
    if given and isinstance(given[0], ast.Constant | ast.JoinedStr):
        text = ast.unparse(given[0])
        return text if len(text.split()) > 4 else ""
    return ""


def walk(node: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield each function and class of a module with its qualified name."""
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}".lstrip(".")
            yield name, child
        yield from walk(child, name)


def texts(file: str, source: str) -> tuple[Texts, Texts]:
    """Return the docstrings and the error sentences of a file."""
    docs: Texts = {}
    errors: Texts = {}
    for name, node in walk(ast.parse(source)):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if doc := ast.get_docstring(node):
            docs[file, name] = doc
        if not isinstance(node, ast.ClassDef):
            found = [said for part in ast.walk(node) if isinstance(part, ast.Raise) and (said := sentences(part))]
            errors |= {(file, f"{name}, error {number}"): said for number, said in enumerate(found, 1)}
    return docs, errors


def before(revision: str) -> tuple[Texts, Texts]:
    """Return all docstrings and error sentences of a commit."""
    docs: Texts = {}
    errors: Texts = {}
    for file in git("ls-tree", "-r", "--name-only", revision, *PACKAGES).split():
        if file.endswith(".py"):
            found = texts(file, git("show", f"{revision}:{file}"))
            docs, errors = docs | found[0], errors | found[1]
    return docs, errors


def rows(old: Texts, kind: int, count: int) -> Iterator[str]:
    """Yield a table row for each of `count` texts drawn at random."""
    for file, name in sorted(random.Random(SEED).sample(sorted(old), count)):
        path = ROOT / file
        new = texts(file, path.read_text())[kind].get((file, name), "gone") if path.is_file() else "gone"
        cells = (" ".join(text.split()).replace("|", "\\|") for text in (old[file, name], new))
        yield f"| {file} `{name}` | {' | '.join(cells)} |"


def page(revision: str) -> str:
    """Return the page: a table of docstrings and a table of error sentences."""
    docs, errors = before(revision)
    head = "| where | before | after |\n|---|---|---|"
    return "\n".join([
        "# Prose before and after",
        "",
        f"Drawn with seed {SEED} from {len(docs)} docstrings and {len(errors)} error sentences of commit {revision}:",
        f"`python -m benchmarks.words {revision}`.",
        "", f"## {DOCSTRINGS} docstrings", "", head, *rows(docs, 0, DOCSTRINGS),
        "", f"## {ERRORS} error sentences", "", head, *rows(errors, 1, ERRORS), "",
    ])  # fmt: skip


if __name__ == "__main__":
    (ROOT / "benchmarks" / "results" / "words.md").write_text(page(sys.argv[1]))
