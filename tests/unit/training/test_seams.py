"""What is put into a model from outside goes into declared attributes, which training/model lists; and no module names
a backend of experts or a dispatcher but that one itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import training.model
from training.dispatch import Dispatcher
from training.dispatch.alltoall import AllToAll
from training.experts import Backend, Capabilities, reference
from training.model.attention import Seen
from training.model.decoder import Decoder, Layer
from training.model.moe import MoE
from upcycle import plugin
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.planning.rng import normal

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


KEYS = {"transformer_engine", "local"}  # words of configs too, which alone name no plug-in
# who may write a plug-in's name besides its own file: the package's door, and configs that have it as a default
NAMED = {
    "training/experts/__init__.py": {"grouped", "reference"},
    "training/dispatch/__init__.py": {"alltoall"},
    "training/parallel/mesh.py": {"alltoall"},
    "upcycle/cli/frame.py": {"grouped_gemm", "quack"},  # packages
    "upcycle/arch/remote/modeling_upcycled.py": {"grouped_gemm"},  # transformers' own word
}


def plugins_named(file: str, tree: ast.AST) -> Iterator[str]:
    """Yield the backends and dispatchers that a module imports, or has as a word or after `=` in a string."""
    for package in ("training.experts", "training.dispatch"):
        for name in plugin.names(package):
            for node in ast.walk(tree):
                imported = isinstance(node, ast.ImportFrom) and (
                    node.module == f"{package}.{name}"
                    or (node.module == package and name in [alias.name for alias in node.names])
                )
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                named = name not in KEYS and text == name
                named = named or re.search(rf"(experts|backend|dispatcher)={name}\b", text) is not None
                if (imported or named) and file != f"{package.replace('.', '/')}/{name}.py":
                    yield name


def test_no_module_names_a_backend_or_a_dispatcher_but_its_own() -> None:
    found: dict[str, set[str]] = {}
    for package in ("upcycle", "training", "evaluation"):
        for path in (ROOT / package).rglob("*.py"):
            file = str(path.relative_to(ROOT))
            if names := set(plugins_named(file, ast.parse(path.read_text()))):
                found[file] = names
    assert found == NAMED


@pytest.mark.parametrize("line", [
    "from training.experts import quack", "from training.experts.quack import ffn", "x = name == 'nvlink'",
    "raise ValueError('use expert_backend=reference')",
])  # fmt: skip
def test_a_module_that_names_one_is_seen(line: str) -> None:
    assert list(plugins_named("training/model/moe.py", ast.parse(line)))


def layer_of(dispatcher: Dispatcher | None = None, fits: bool = True) -> tuple[Layer, MoE, list[str]]:
    """A layer whose backend says that it goes from tokens to tokens, its block, and what was called of it."""
    calls: list[str] = []

    def rows(*given: Any) -> Tensor:
        calls.append("rows")
        return reference.experts(*given)

    def tokens(x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, w: Any, act: str, onto_TD: Any, left: Any) -> Tensor:
        calls.append("tokens")
        return 2 * x_TD + (0 if onto_TD is None else onto_TD)

    assert MODEL.moe is not None
    spec, can = replace(MODEL.moe, shared=0, shared_gate=False), Capabilities(fused=lambda *_: tokens if fits else None)
    layer = Layer(spec.dense, spec, 1, Backend(rows, can))
    assert isinstance(layer.ffn, MoE)
    layer.ffn.dispatcher = dispatcher or layer.ffn.dispatcher
    for name, parameter in layer.named_parameters():
        parameter.data = normal(tuple(parameter.shape), 0, name) / 4
    return layer, layer.ffn, calls


@pytest.mark.parametrize("travels", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_tokens_that_travel_are_never_fused(travels: bool, fits: bool) -> None:
    """All-to-all is there without groups too, as where experts are on several ranks."""
    _, block, calls = layer_of(AllToAll(4, None, None) if travels else None, fits)
    x, stream = (normal((1, 5, 16), 0, name) for name in ("x", "stream"))
    assert torch.equal(block.added(x, stream), stream + block(x))
    assert set(calls) == {"tokens" if fits and not travels else "rows"} and block.joins(x) == (fits and not travels)


HOOKS = [f"register_{each}hook" for each in ("forward_", "forward_pre_", "full_backward_", "full_backward_pre_")]


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_of_fused_experts_are_called(register: str) -> None:
    _, block, calls = layer_of()
    x = normal((1, 5, 16), 0, "x").requires_grad_()
    assert torch.equal(block(x), x * 2), "nobody looks"
    handle = getattr(block.experts, register)(lambda *_: calls.append("hook"))
    block(x).sum().backward()
    assert sorted(calls) == ["hook", "rows", "tokens"]
    handle.remove()
    assert torch.equal(block(x), x * 2) and calls[-1] == "tokens"


@pytest.mark.parametrize("register", HOOKS)
def test_a_block_that_somebody_looks_at_leaves_the_sum_to_its_layer(register: str) -> None:
    layer, block, calls = layer_of()
    x = normal((1, 5, 16), 0, "x").requires_grad_()
    assert block.joins(x)
    handle = getattr(block, register)(lambda *_: calls.append("hook"))
    assert not block.joins(x)
    looked = layer(x, None, None, Seen())
    looked.sum().backward()
    handle.remove()
    assert "hook" in calls and block.joins(x) and torch.equal(layer(x, None, None, Seen()), looked)
