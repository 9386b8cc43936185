"""The tensors of the MoE checkpoint as data: each Output has parts, and a Recipe says how to compute one part."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from upcycle.arch.families.common import Source
from upcycle.arch.registry import AnyTarget
from upcycle.arch.slots import Slot
from upcycle.arch.spec import BYTES, MoESpec
from upcycle.planning.methods import Method

# The value of every weight of a shared gate. Its sigmoid is exactly 1/2, like that of 0; but llama.cpp computes the
# sigmoid as silu(x) / x, which is NaN for x = 0. (In float16 this value rounds to zero.)
TINY = 1e-20


class Recipe(NamedTuple):  # not a dataclass: a large plan has tens of thousands, and a NamedTuple is faster to create
    """How to compute one part of an output. The kinds:

    keep     the source                             average  the mean of the sources
    expert   matrix `matrix` of expert `expert`     shared   matrix `matrix` of the shared expert
    router   the router's rows                      fill     a constant
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[Source, ...] = ()
    layer: int = -1
    expert: int = -1
    matrix: str = ""
    factor: float = 1.0  # multiplies a matrix of the shared expert: 2 undoes a shared gate of sigmoid(0)
    add: float = 0.0  # added to every element: 1 if a gain-minus-one norm becomes a plain norm; for `fill` the constant

    def __str__(self) -> str:
        def name(source: Source) -> str:
            rows = f"{list(source.rows[0])}" if len(source.rows) == 1 else " (rows)" if source.rows else ""
            return (f"donor {source.donor}: " if source.donor else "") + source.name + rows

        read = " + ".join(map(name, self.sources))
        what = {
            "expert": f"expert {self.expert}'s {self.matrix} of ",
            "shared": f"shared {self.matrix} of ",
            "average": "mean of ",
            "keep": "",
        }
        if self.kind in ("router", "fill"):
            return "router rows" if self.kind == "router" else f"all {self.add:g}"
        factor = f" x {self.factor:g}" if self.factor != 1 else ""
        return f"{what[self.kind]}{read}{factor}{f' + {self.add:g}' if self.add else ''}"


class Output(NamedTuple):
    """One tensor on disk: its parts, stacked along dim 0 and viewed as `shape`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Recipe, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


class Recipes:
    """Turn the slots of a target into outputs with recipes. `dense` fills roles that the donor does not have."""

    def __init__(self, moe: MoESpec, method: Method, sources: list[dict[str, Source]], chosen: AnyTarget) -> None:
        self.moe, self.needs, self.sources = moe, method.needs, sources
        self.one_p = moe.dense.norm == "rms1p" and "rms1p" not in chosen.can.norms
        self.slots: list[Slot] = list(chosen.slots(moe))
        self.shared_factor = 2.0 if any(".shared_gate." in role for slot in self.slots for role in slot.roles) else 1.0

    def outputs(self) -> tuple[Output, ...]:
        found = tuple(self.output(slot) for slot in self.slots)
        check_outputs(found)
        return found

    def output(self, slot: Slot) -> Output:
        dtype, single = slot.dtype or self.moe.dtype, len(slot.roles) == 1
        parts = (self.recipe(role, slot.shape if single else self.moe.shape(role), dtype) for role in slot.roles)
        return Output(slot.name, slot.shape, dtype, tuple(parts))

    def recipe(self, role: str, shape: tuple[int, ...], dtype: str) -> Recipe:
        path = role.split(".")
        layer, part = (int(path[1]), path[2]) if path[0] == "layers" else (-1, path[0])
        if part == "router" and path[-1] == "weight":
            return Recipe("router", shape, dtype, layer=layer)
        if part == "experts":
            return self.neurons(role, shape, dtype, layer, int(path[3]))
        if part == "shared" and self.moe.shared and path[-2:] != ["down", "bias"]:  # the routed experts add that bias
            return self.neurons(role, shape, dtype, layer, -1)
        return self.dense(role, shape, dtype, layer, part)

    def neurons(self, role: str, shape: tuple[int, ...], dtype: str, layer: int, index: int) -> Recipe:
        """Return the recipe of a matrix of routed expert `index`, or of the shared expert if `index` is -1."""
        *_, matrix, kind = role.split(".")
        key = f"layers.{layer}.{self.donor_matrix(matrix)}.{kind}"
        name = matrix if kind == "weight" else f"{matrix}_bias"
        if index >= 0:
            donor = {"source": 0, "own": 1 + index // self.moe.granularity}
            sources = tuple(self.sources[donor[which]][key] for which in self.needs.donors)
            return Recipe("expert", shape, dtype, sources, layer, index, name)
        factor = self.shared_factor if matrix == "down" else 1.0
        return Recipe("shared", shape, dtype, self.rest(key), layer, -1, name, factor)

    def dense(self, role: str, shape: tuple[int, ...], dtype: str, layer: int, part: str) -> Recipe:
        key = role
        if role not in self.sources[0]:
            if role == "head.weight":
                key = "embed.weight"  # a tied model in a target that does not tie
            elif part == "gate" and role.endswith(".weight"):
                key = role.replace(".gate.", f".{self.donor_matrix('gate')}.")
            else:  # the target requires a tensor that the donor lacks: zeros change nothing
                assert role.endswith(".bias") or part in ("shared", "shared_gate"), role
                return Recipe("fill", shape, dtype, layer=layer, add=TINY if part == "shared_gate" else 0.0)
        add = 1.0 if self.one_p and "norm" in part else 0.0
        sources = self.rest(key)
        return Recipe("average" if len(sources) > 1 else "keep", shape, dtype, sources, layer, add=add)

    def donor_matrix(self, matrix: str) -> str:
        return "up" if matrix == "gate" and not self.moe.dense.gated else matrix  # relu2_as_gated

    def rest(self, key: str) -> tuple[Source, ...]:
        return tuple(s[key] for s in self.sources[1:]) if self.needs.rest == "mean" else (self.sources[0][key],)


def check_outputs(outputs: Sequence[Output]) -> None:
    """Assert that output names are unique and that the parts of each output fill it exactly."""
    names: set[str] = set()
    for out in outputs:
        assert out.name not in names, f"{out.name} is made twice"
        names.add(out.name)
        assert sum(prod(part.shape) for part in out.parts) == prod(out.shape), out.name
