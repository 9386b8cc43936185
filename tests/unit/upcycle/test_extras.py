"""Each package that is not always installed has an extra, and the sentence about a missing package names it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from training.experts.common import absent
from upcycle.cli import frame

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {  # module -> its distribution, where the names differ or another distribution brings it
    "yaml": "pyyaml", "quack": "quack-kernels", "cutlass": "nvidia-cutlass-dsl", "compressed_tensors": "llmcompressor",
    "markupsafe": "jinja2", "mlflow": "mlflow-skinny",
}  # fmt: skip
# module -> why no extra has it
WITHOUT = {
    "deep_ep": "it is on no index; the Dockerfile builds it",
    "triton": "torch's CUDA builds bring it",
    "loguru": "llmcompressor brings it",
    "transformer_engine_torch": "transformer_engine brings it",
}
# command -> why it names no extra
COMMANDS = {
    "pip install --upgrade": "a dependency is too old",
    "pip install gguf sentencepiece": "llama.cpp's converter has its own requirements",
    "which is not installed: pip install it": "the Python of a task names its packages itself",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in frame.OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def names(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield all strings; an f-string with "{}" in place of each value, and the command that `install` returns."""
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else value(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.value


def value(part: ast.expr) -> str:
    called = {node.func.id for node in ast.walk(part) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return "<install>" if "install" in called else "{}"


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Call) and isinstance(node.args[0] if node.args else None, ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "find_spec"):
                yield str(node.args[0].value)  # type: ignore[attr-defined]


def test_every_import_is_a_dependency_or_has_an_extra() -> None:
    always = names(PROJECT["dependencies"])
    found = {module.partition(".")[0] for _, tree in sources() for module in imported(tree)}
    found -= {*sys.stdlib_module_names, *frame.OURS, *WITHOUT, ""}
    assert len(found) > 15
    for module in found:
        name = canonicalize_name(DISTRIBUTIONS.get(module, module))
        if name not in always:
            assert module in frame.EXTRAS and name in names(EXTRAS[frame.EXTRAS[module]]), module


def test_every_sentence_names_an_extra_that_exists() -> None:
    """Walk all strings of the code that tell how to install a package."""
    commands = 0
    for path, tree in sources():
        for text in strings(tree):
            for extra in re.findall(r"upcycle\[([\w,{}-]+)\]", text):
                assert extra in EXTRAS or "{" in extra, f"{path} names the extra {extra}"
            rest = text
            for known in COMMANDS:
                rest = rest.replace(known, "")
            assert "pip install" not in re.sub(r'pip install "upcycle\[', "", rest), f"{path}: {text}"
            commands += "<install>" in text
    assert commands >= 4


def test_every_package_of_an_extra_is_named_with_it() -> None:
    for package, extra in frame.EXTRAS.items():
        assert canonicalize_name(DISTRIBUTIONS.get(package, package)) in names(EXTRAS[extra]), package
        assert frame.missing(package).endswith(f'pip install "upcycle[{extra}]"')
    assert frame.install("deep_ep") == "" and frame.missing("deep_ep").endswith("is not installed")


def test_a_backend_names_its_extra() -> None:
    for package in ("transformer_engine", "grouped_gemm"):
        extra = frame.EXTRAS[package]
        why = absent("expert_backend=x", f"{package}.pytorch", "use grouped")
        assert why.endswith(f'which is not installed; pip install "upcycle[{extra}]", or use grouped'), why


def test_extras_of_extras_exist() -> None:
    inside = [line for lines in EXTRAS.values() for line in lines if Requirement(line).name == PROJECT["name"]]
    assert inside and all(Requirement(line).extras <= EXTRAS.keys() for line in inside)
