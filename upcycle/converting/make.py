"""Compute any tensor of the plan, or a slice of it, bit-identical to the converted file (`Maker`).

`convert` asks for every part in file order; a training rank asks for the slices that it owns (online upcycling).
Recently read and computed tensors are cached, so the source is read once although each neuron is written E times.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from upcycle.arch.families.common import Source
from upcycle.arch.ffn import FFN, scale
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning import routers
from upcycle.planning.methods import Place
from upcycle.planning.outputs import Output, Recipe
from upcycle.planning.plan import UpcyclePlan

CACHE = 512 << 20  # default size of the cache in bytes, without tensors in use; convert passes its own


class Kept:
    """A cache of recently used tensors, up to `limit` bytes; threads that need the same tensor compute it once."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.tensors: OrderedDict[Hashable, Future[Tensor]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        with self.lock:
            future = self.tensors.get(key)
            if future is not None:
                self.tensors.move_to_end(key)
            else:
                new = self.tensors[key] = Future()
        if future is not None:
            return future.result()
        try:
            tensor = make()
        except BaseException as error:
            with self.lock:
                self.tensors.pop(key, None)
            new.set_exception(error)
            raise
        new.set_result(tensor)
        with self.lock:
            self.bytes += tensor.nbytes
            for old in [k for k, f in self.tensors.items() if f.done() and k != key]:
                if self.bytes <= self.limit:
                    break
                self.bytes -= self.tensors.pop(old).result().nbytes
        return tensor


Piece = tuple[int, str, tuple[int, int] | None]  # (donor, tensor, rows or None for all), read at once


class Maker:
    """Compute tensors of `plan` from the base and the donors.

    `cache` is the size of the cache in bytes; `sums` collects the sha256 of everything read for whole parts.
    """

    def __init__(
        self,
        plan: UpcyclePlan,
        checkpoints: Sequence[Checkpoint],
        cache: int = CACHE,
        sums: dict[Piece, str] | None = None,
    ) -> None:
        self.plan, self.checkpoints, self.kept, self.sums = plan, checkpoints, Kept(cache), sums

    # ---- whole outputs and slices

    def tensor(self, name: str) -> Tensor:
        """Compute the whole output `name`."""
        output = self.output(name)
        return torch.cat([self.part(part).flatten() for part in output.parts]).view(output.shape)

    def slice(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Compute output[index] from only the parts that rows `index[0]` touch; a step raises a ValueError.

        Do not write to the result: it may share memory with the cache.
        """
        output = self.output(name)
        if not output.shape or not index:
            return self.tensor(name)
        row = prod(output.shape[1:])
        start, stop, step = index[0].indices(output.shape[0])
        if step != 1:
            raise ValueError(f"a slice of {name} has step {step}; only step 1 is supported")
        pieces, first = [], 0  # first: the offset of the part in the flattened output
        for part in output.parts:
            size = prod(part.shape)
            low, high = max(start * row, first), min(stop * row, first + size)
            if low < high:
                pieces.append(self.flat(part, low - first, high - first))
            first += size
        pieces = pieces or [torch.empty(0, dtype=getattr(torch, output.dtype))]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole.view(max(stop - start, 0), *output.shape[1:])[(slice(None), *index[1:])]

    def flat(self, part: Recipe, low: int, high: int) -> Tensor:
        """Compute elements low to high of a flattened part; for a `keep` part read only the rows needed."""
        width = prod(part.shape[1:])
        if part.kind == "keep" and not part.sources[0].rows and width:
            first, last = low // width, -(-high // width)
            rows = self.read(part.sources[0], (first, last))
            flat = self.finish(part, rows + part.add if part.add else rows).flatten()
            return flat[low - first * width : high - first * width]
        return self.part(part).flatten()[low:high]

    def output(self, name: str) -> Output:
        if name not in self.plan.by_name:
            raise ValueError(f"the plan has no tensor {name!r}; it has for instance {self.plan.outputs[0].name!r}")
        return self.plan.by_name[name]

    def alike(self, name: str) -> Hashable | None:
        """Return a key that is the same for outputs with equal values (copies of a slice); None if unknown."""
        recipe, *more = self.output(name).parts
        return None if more or recipe.kind != "expert" else self.made_of(recipe)

    # ---- one part

    def part(self, recipe: Recipe) -> Tensor:
        """Compute the tensor of a recipe, in its shape and dtype, contiguous."""
        if recipe.kind == "expert":
            return self.expert(recipe)
        if recipe.kind == "keep":
            source = recipe.sources[0]
            raw = self.cached(source) if source.rows else self.read(source)
        elif recipe.kind == "average":
            raw = self.mean([self.read(source) for source in recipe.sources])
        elif recipe.kind == "shared":
            ffn = self.held(self.carved(self.ffn(recipe, recipe.sources), recipe.layer, shared=True))
            raw = filled(scale(ffn[recipe.matrix], recipe.factor), recipe.shape)
        elif recipe.kind == "router":
            raw = routers.repeated(self.router_rows(recipe.layer), recipe.shape[0])
        else:
            raw = torch.full(recipe.shape, recipe.add)
            return self.finish(recipe, raw)
        return self.finish(recipe, raw.to(torch.float32) + recipe.add if recipe.add else raw)

    def finish(self, recipe: Recipe, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            narrow = tensor.to(getattr(torch, recipe.dtype))
            if recipe.dtype == "float16" and tensor.dtype != torch.float16 and not bool(torch.isfinite(narrow).all()):
                raise ValueError(f"{recipe} has values beyond float16's 65504; write dtype=bfloat16 or dtype=float32")
            tensor = narrow
        return tensor.contiguous()

    @staticmethod
    def mean(tensors: list[Tensor]) -> Tensor:
        total = tensors[0].double()
        for tensor in tensors[1:]:
            total += tensor
        return (total / len(tensors)).float() if tensors[0].dtype != torch.float64 else total / len(tensors)

    # ---- experts

    def expert(self, recipe: Recipe) -> Tensor:
        plan, place = self.plan, self.place(recipe)

        def make() -> Tensor:
            donors = [self.carved(self.ffn(recipe, [source]), recipe.layer, shared=False) for source in recipe.sources]
            ffn = plan.method.expert(donors, place)
            w = self.held(ffn).scaled(plan.factors(recipe.layer))[recipe.matrix]
            return self.finish(recipe, filled(w, recipe.shape))

        made_of = self.made_of(recipe)
        return make() if made_of is None else self.kept.get(made_of, make)

    def place(self, recipe: Recipe) -> Place:
        moe = self.plan.moe
        return Place(recipe.layer, recipe.expert, moe.copies, moe.granularity, moe.cut_widths, self.plan.config.seed)

    def made_of(self, recipe: Recipe) -> Hashable | None:
        """Return a key that is the same for equal matrices of experts; None if no other is equal."""
        same = self.plan.method.same
        return same and ("expert", recipe.layer, same(self.place(recipe)), recipe.matrix, recipe.shape, recipe.dtype)

    def ffn(self, recipe: Recipe, sources: Sequence[Source]) -> FFN:
        """Return the layer's dense FFN, or the mean of several FFNs, with only the matrix that the recipe needs."""
        dense = self.plan.dense
        matrix = recipe.matrix if dense.gated else recipe.matrix.replace("gate", "up")  # see held()

        def read(name: str) -> Tensor:
            assert name == matrix, name
            tensors = [self.cached(source) for source in sources]
            return tensors[0] if len(tensors) == 1 else self.mean(tensors)

        return FFN(dense.ffn, dense.hidden, (matrix,), read)

    def held(self, ffn: FFN) -> FFN:
        """Return the FFN in the target's form; a donor without gate gets gate = up last, so both have noise."""
        return ffn if self.plan.dense.gated else ffn.with_gate_as_up()

    def carved(self, ffn: FFN, layer: int, *, shared: bool) -> FFN:
        """Return the shared expert's neurons (the first, or the most active if measured), or all other neurons."""
        cut = self.plan.moe.cut_shared
        order = self.plan.observed.get(f"layers.{layer}.order")
        if order is None:
            assert not self.plan.method.needs.order, "call measure() before computing tensors"
            return ffn.neurons(slice(cut)) if shared else ffn if not cut else ffn.neurons(slice(cut, None))
        return ffn.neurons(order[:cut] if shared else order[cut:])

    def router_rows(self, layer: int) -> Tensor:
        return router_rows(self.plan, layer, self.plan.observed.get(f"layers.{layer}.rows"))

    # ---- sources

    def cached(self, source: Source) -> Tensor:
        return self.kept.get(("source", source.donor, source.name, source.rows), lambda: self.read(source))

    def read(self, source: Source, rows: tuple[int, int] | None = None) -> Tensor:
        if rows is not None:
            return self.checkpoints[source.donor].read(source.name, rows)
        if len(source.rows) < 2:
            return self.summed(piece(source))
        # many ranges (q, k, v interleaved in one tensor): read the tensor once for q, k and v
        whole = self.kept.get(("whole", source.donor, source.name), lambda: self.summed(piece(source)))
        return torch.cat([whole[start:stop] for start, stop in source.rows])

    def summed(self, what: Piece) -> Tensor:
        tensor = self.checkpoints[what[0]].read(what[1], what[2])
        if self.sums is not None and what not in self.sums:
            self.sums[what] = sha256(tensor)
        return tensor


def filled(w: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad `w` with zero neurons to the stored width of an expert (MoESpec.padding)."""
    more = [want - have for want, have in zip(shape, w.shape, strict=True)]
    return functional.pad(w, [count for missing in reversed(more) for count in (0, missing)]) if any(more) else w


def piece(source: Source) -> Piece:
    return (source.donor, source.name, source.rows[0] if len(source.rows) == 1 else None)


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).hexdigest()


def router_rows(plan: UpcyclePlan, layer: int, measured: Tensor | None = None) -> Tensor:
    """Return the distinct float32 rows of a layer's router: one per copy, or one per expert if each has its own."""
    init, moe = plan.config.router.init, plan.moe
    if init.name in routers.MEASURED:
        assert measured is not None, "call measure() before computing tensors"
        return measured.float() if init.name in routers.AS_MEASURED else routers.centred(measured, init.std)
    own = init.name == "independent" or moe.disjoint
    return routers.normal(moe.experts if own else moe.copies, moe.dense.hidden, init.std, plan.config.seed, layer)
