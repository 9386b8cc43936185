"""Find the forms that make our prose hard to read: python -m tests.docs.style [PATH ...]

A short list, not a grammar. It reads pages, YAML comments, and the docstrings, comments and sentences of Python files.
A line of a page that quotes such a form on purpose can be excused with `<!-- style: off -->` at its end.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ["README.md", "SECURITY.md", "CONTRIBUTING.md", "docs", "configs", "upcycle", "training", "evaluation",
          "benchmarks", "examples"]  # fmt: skip
# a form, and what to write instead
FORMS = {
    r"\bof which\b": "start a new sentence",
    r"\bbesides?\b": '"next to", "also" or "except"',
    r"(?<![:,] )\b(?:That|Those|These) of\b": "name the thing",
    r"(?:^|[.:;] )What (?:is|are|was|a|an|the|it|this|that|they|each|no|has|does)\b[^?]*$": "begin with the subject",
    r"(?:^|[.] )Of (?:a|an|all|each|the|this|that|those|these|two|what|which)\b": "begin with the subject",
    r"\bsome [0-9]": '"about"',
    r"\b(?:is|are|was|were) to be\b": '"must be", "will be", or an active verb',
    r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|better\b|worse\b|faster\b)": '"is not a"',
    r"\b(?:[Aa]ll|[Nn]one|[Nn]othing|[Nn]obody|[Ee]verything|[Nn]o one) but\b": '"except" or "only"',
    r"\b(?:therein|thereof|wherein|whereof|herein|whereby|thereby|anew)\b": "plain words",
    r"\b(?:goes|go|going|went) on\b(?! to\b| top\b| the\b| one\b| a\b)": '"continue"',
    r"\bin (?:its|their) stead\b": '"instead"',
    r"\b(?:that|those|these|them) alike\b|\balike is\b|\bare alike\b": '"the same"',
    r"\b(?:so many|as many) as there are\b": '"one for each"',
    r"\bhas it that\b|\bit is what\b|\bis what (?:is|it|makes|the)\b": "say the thing itself",
}
# a function's docstring begins with a verb: "Return the width", not "The width"
NO_VERB = {"a", "an", "the", "all", "any", "each", "every", "how", "if", "in", "it", "no", "of", "one", "our", "that",
           "these", "this", "those", "what", "when", "where", "whether", "which", "whose", "with"}  # fmt: skip
PROSE = re.compile(r"[A-Za-z]+(?: [a-z0-9]+){3}")  # a string of this kind is a sentence, not a key or a format


def wrong(text: str) -> Iterator[str]:
    """Yield each form of the list that a line of prose has, with the advice."""
    for form, advice in FORMS.items():
        for found in re.finditer(form, text):
            yield f"{found[0].strip()!r}: {advice}"


def of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the fault of each docstring, comment and sentence of a Python file."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(node)):
            first = doc.split()[0].strip(",:;'\"`").lower()
            if first in NO_VERB or first.endswith("'s"):
                yield node.lineno, f"docstring of {node.name} begins with {doc.split()[0]!r}: begin with a verb"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PROSE.search(node.value):
            for number, line in enumerate(node.value.splitlines() or [""]):
                for fault in wrong(line.strip()):
                    yield node.lineno + number, fault
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            for fault in wrong(token.string.lstrip("# ")):
                yield token.start[0], fault


def of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the fault of each line of a page outside of code blocks."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code and "<!-- style: off -->" not in line:
            for fault in wrong(re.sub(r"`[^`]*`", "``", line).lstrip("#*-| ")):
                yield number, fault


def of_yaml(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the fault of each comment of a YAML file."""
    for number, line in enumerate(text.splitlines(), 1):
        if "#" in line:
            for fault in wrong(line.partition("#")[2].strip()):
                yield number, fault


READERS = {".py": of_python, ".md": of_page, ".yaml": of_yaml, ".sbatch": of_yaml}


def faults(places: list[str]) -> list[str]:
    """List the faults of all files in these places, one line each."""
    lines = []
    for place in places:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in READERS):
            if file.parent.name == "results":  # logs of measurements, kept as they were written
                continue
            for number, fault in sorted(set(READERS[file.suffix](file.read_text()))):
                lines.append(f"{file.relative_to(ROOT)}:{number}: {fault}")
    return lines


if __name__ == "__main__":
    found = faults(sys.argv[1:] or PLACES)
    print("\n".join(found) or "plain")
    sys.exit(1 if found else 0)
