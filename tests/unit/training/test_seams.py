"""What is put into a model from outside goes into declared attributes, and training/model says which, by whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import training.model
from training.model.decoder import Decoder
from upcycle.arch.spec import DenseSpec, MoESpec

ROOT = Path(__file__).parents[3]
DENSE = DenseSpec("llama", 2, 16, 12, 2, 2, 8, 23, 64, qk_norm="head", qkv_bias=True)
MODEL = Decoder(MoESpec(DENSE, (1,), (6,) * 4, top_k=2, copies=2, shared=4, shared_gate=True), experts="reference")
LM_EVALS = {("evaluation", "tasks", "?"), ("evaluation", "bench", "?")}  # setattr on its objects


def stated() -> Iterator[tuple[str, str, str]]:
    """(class, attribute, file) of each row of the table."""
    for line in (training.model.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in ("class", "---"):
            yield from ((cells[0], attribute, cells[2]) for attribute in cells[1].split(", "))


def assigned(tree: ast.AST) -> Iterator[str]:
    """Attributes that are set on others than oneself; a name that is only known when it runs is `?`."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in (part for each in targets for part in ast.walk(each)):
            owner = target.value if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store) else None
            if owner is not None and not (isinstance(owner, ast.Name) and owner.id in ("self", "ctx")):
                assert isinstance(target, ast.Attribute)
                yield target.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            name = node.args[1]
            yield str(name.value) if isinstance(name, ast.Constant) else "?"


def test_nothing_is_put_into_a_model_but_what_is_declared() -> None:
    """Whatever has the name of something that a module of the model has counts as put into it."""
    known = {"?"} | {name for module in MODEL.modules() for name in dir(module)}
    found = {
        (path.stem, name)
        for package in ("training", "evaluation")
        for path in (ROOT / package).rglob("*.py")
        for name in assigned(ast.parse(path.read_text()))
        if name in known and (package, path.stem, name) not in LM_EVALS
    }
    assert found == {(file, attribute) for _, attribute, file in stated()}


def test_what_is_stated_is_declared_by_its_class() -> None:
    classes = {type(module).__name__: type(module) for module in MODEL.modules()}
    for owner, attribute, _ in stated():
        assert attribute in classes[owner].__annotations__, f"{owner}.{attribute}"


def test_what_a_model_starts_with_is_not_of_its_own_instance() -> None:
    """A default that holds its module would keep it, and its memory, until a collection of cycles."""
    for module in MODEL.modules():
        for name, value in vars(module).items():
            assert getattr(value, "__self__", None) is not module, f"{type(module).__name__}.{name}"
