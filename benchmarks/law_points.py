"""The law of upcycling, held to runs of our own: (size, D1, D2) points of small models on real text.

  python -m benchmarks.law_points all TOKENS POINTS 150  # on GPUs: one process a (size, D1), at most 150 s; a line a point
  python -m benchmarks.law_points fit POINTS             # keeps the 36 in benchmarks/data/law_points.json; says how far the law is off
  python -m benchmarks.law_points judge POINTS           # keeps the 12 in benchmarks/data/law_checks.json; says how far off they were
  python -m benchmarks.law_points run TOKENS POINTS 150  # the 36 alone
  python -m benchmarks.law_points check TOKENS POINTS 75 # the 12 alone, and two chains of the 36 with other seeds

A dense model of each size learns from D1 tokens, to a rate of zero; each FFN becomes eight copies with top-2, which go on
for D2 tokens. The rate is constant but for the last fifth of D2, so that one run has all its D2s: each ends in a fifth of
its own, after which the run goes on where that began. Loss is in nats a token of text that was held out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from training.estimating import law

HERE = Path(__file__).parent / "data" / "law_points.json"
CHECKS = HERE.with_name("law_checks.json")
# of an earlier day, nine of the 12, and two other seeds of a chain of the 36; nobody wrote their texts down
BEFORE = HERE.with_name("law_before.json")
SEQUENCE, BATCH = 512, 32
# hidden, layers, heads: 7, 18 and 43 million parameters, of which the embedding has 6, 13 and 22
SIZES = ((128, 4, 4), (256, 6, 4), (448, 8, 7))
FIRST, MORE = (256, 512, 1024), (96, 192, 384, 768)  # steps of 16,384 tokens
# between those: 12 and 25 million parameters; chosen, and the form of the law too, before any of them was run
BETWEEN, MORE_BETWEEN = ((192, 5, 3), (320, 7, 5)), (128, 256, 576)
# (size, D1, which seed)
CHAINS = {
    "run": [(size, first, 0) for size in range(len(SIZES)) for first in FIRST],
    "check": [(3, 384, 0), (3, 768, 0), (4, 384, 0), (4, 768, 0), (1, 512, 1), (1, 512, 2)],
}
CHAINS["all"] = CHAINS["run"] + CHAINS["check"][:4]
RATE, WARM, COOL = 3e-3, 20, 0.2  # the rate of the smallest; they fall with the root of the width


# ---- runs


def spec_of(size: int) -> Any:
    from upcycle.arch.spec import DenseSpec

    hidden, layers, heads = (*SIZES, *BETWEEN)[size]
    return DenseSpec(
        family="llama", layers=layers, hidden=hidden, ffn=hidden * 3, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=49152, context=SEQUENCE, tied=True,
    )  # fmt: skip


class Texts:
    """The texts of a folder of token shards, and the batches that are drawn from them."""

    def __init__(self, tokens: Path, batch_size: int) -> None:
        folders = sorted(folder for folder in tokens.iterdir() if (folder / "meta.json").exists())
        found = {folder.name: np.memmap(next(folder.glob("tokens-*.bin")), np.uint16, "r") for folder in folders}
        self.said = {
            name: f"{len(text):,} tokens, sha256 {hashlib.sha256(text.data).hexdigest()}"
            for name, text in found.items()
        }
        self.learned: list[Any] = [text for name, text in found.items() if not name.endswith("-val")]
        self.held: list[Any] = [text for name, text in found.items() if name.endswith("-val")]
        self.batch_size = batch_size

    def train_batch(self, seed: int, step: int) -> Any:
        """Return the batch of a step, drawn from the texts that are learned."""
        drawn = np.random.default_rng((seed, step))
        which = drawn.integers(len(self.learned), size=self.batch_size)
        starts = [(self.learned[i], int(drawn.integers(len(self.learned[i]) - SEQUENCE - 1))) for i in which]
        return batch_of([cut(text, start) for text, start in starts])

    def valid_batches(self) -> list[Any]:
        """Return three batches of each text that is held out."""
        rows = SEQUENCE + 1
        return [batch_of([cut(text, i * rows) for i in range(n, n + 16)]) for text in self.held for n in (0, 16, 32)]


def cut(text: Any, start: int) -> Any:
    return text[start : start + SEQUENCE + 1]


def batch_of(rows: list[Any]) -> Any:
    import torch

    from training.data.batch import Batch

    row_BS = torch.from_numpy(np.stack(rows).astype(np.int64))
    position_BS = torch.arange(SEQUENCE).expand(len(rows), -1).contiguous()
    made = Batch(
        row_BS[:, :-1].contiguous(), row_BS[:, 1:].contiguous(), torch.zeros_like(position_BS).int(), position_BS
    )
    return made.pinned() if torch.cuda.is_available() else made


def learner_of(spec: Any, device: Any, batch_size: int) -> Any:
    """Return what trains a model of this spec, without its weights."""
    import torch

    from training.config.schema import ModelConfig, TrainConfig
    from training.data.mixture import DataConfig
    from training.model.decoder import Decoder
    from training.optim.balance import BalanceConfig
    from training.parallel.mesh import MeshConfig, ParallelMesh
    from training.run.build import learner
    from training.run.parts import room

    cuda = device.type == "cuda"
    backend, dtype = ("grouped", "bfloat16") if cuda else ("reference", "float32")
    config = TrainConfig(
        model=ModelConfig(source="x", random=True, expert_backend=backend, dtype=dtype),
        data=DataConfig(sequence=SEQUENCE, mask_documents=False), balance=BalanceConfig(aux_weight=0.01),
        mesh=MeshConfig(), batch=batch_size, micro_batch=batch_size,
    )  # fmt: skip
    mesh = ParallelMesh(config.mesh, device_type=device.type)
    with torch.device("meta"):
        model = Decoder(spec, experts=backend, compute=getattr(torch, dtype))
    model = room(model.to(torch.float32), config.model, mesh, device)
    for tensor in model.buffers():
        tensor.zero_()
    return learner(config, [model], mesh, device)


def chain(tokens: Path, points: Path, size: int, first: int, again: int = 0) -> None:
    """Write all points of a size and a D1."""
    import torch

    from training.checkpoint import layout
    from training.parallel.processes import processes
    from training.run.step import nll, train_step
    from upcycle.arch.spec import MoESpec
    from upcycle.planning import rng
    from upcycle.planning.size import dense_parameters

    short = "LAW_SHORT" in os.environ  # does it run at all?
    began, dense = time.monotonic(), spec_of(size)
    if short:
        dense = replace(dense, hidden=32, ffn=64, layers=1, head_dim=8, heads=4, kv_heads=4)
    torch.set_num_threads(2)
    batch_size = 2 if short else BATCH
    texts = Texts(tokens, batch_size)
    with processes() as device:
        valid = texts.valid_batches()[: 1 if short else None]
        seed = 100 * size + first + 10_000 * again

        def judged(run: Any) -> float:
            with torch.no_grad():
                nats = sum(nll(run, part.to(device)).double() for part in valid)
            return float(nats) / float(sum(part.labels.numel() for part in valid))

        def steps(run: Any, begin: int, end: int, stream: int, peak: float, cool: int = 0) -> None:
            for number in range(begin, end):
                rate = peak * min(1, (number + 1) / WARM, (end - number) / (end - cool) if cool else 1)
                train_step(run, [texts.train_batch(stream, number)], rate)

        def told(run: Any, **row: Any) -> None:
            row = {
                "hidden": dense.hidden, "layers": dense.layers, "parameters": dense_parameters(dense),
                "first": first * BATCH * SEQUENCE, **row, "seed": again, "loss": judged(run), "seconds": time.monotonic() - began,
                "texts": texts.said,  # points compare on the same ones
            }  # fmt: skip
            with points.open("a") as file:  # a line at a time, by nine processes
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

        peak = RATE * (SIZES[0][0] / dense.hidden) ** 0.5
        every = MORE if size < len(SIZES) else MORE_BETWEEN
        first_steps, more_steps = (first, every) if not short else (6, (2, 4))
        run = learner_of(dense, device, batch_size)
        layout.initialise(run.model, seed)
        steps(run, 0, first_steps, 2 * seed, peak, round(first_steps * (1 - COOL)))
        told(run, more=0)
        moe = MoESpec(dense, tuple(range(dense.layers)), (dense.ffn,) * 8, top_k=2, copies=8)
        sparse = learner_of(moe, device, batch_size)
        copy(run.model, sparse.model, seed, rng)
        before = judged(run), judged(sparse)
        assert abs(before[0] - before[1]) < 0.02, f"copies compute another function: {before}"
        del run
        done, peak = 0, peak / 2
        for more in more_steps:
            cool = max(done, round(more * (1 - COOL)))
            steps(sparse, done, cool, 2 * seed + 1, peak)
            live = [*sparse.model.parameters(), *sparse.model.buffers()]
            live += [each for slot in sparse.optimizer.slots for each in slot.state.values()]
            kept = [each.detach().clone() for each in live]
            steps(sparse, cool, more, 2 * seed + 1, peak, cool)
            told(sparse, more=more * BATCH * SEQUENCE)
            with torch.no_grad():
                for each, old in zip(live, kept, strict=True):
                    each.copy_(old)
            done = cool


def copy(dense: Any, moe: Any, seed: int, rng: Any) -> None:
    """Every expert is the dense FFN; routers are drawn."""
    import torch

    found = dict(dense.named_parameters())
    with torch.no_grad():
        for name, tensor in moe.named_parameters():
            stem = name.removesuffix("experts.up").removesuffix("experts.down")
            if name.endswith("experts.up"):
                tensor.copy_(torch.stack([found[f"{stem}gate.weight"], found[f"{stem}up.weight"]]).expand_as(tensor))
            elif name.endswith("experts.down"):
                tensor.copy_(found[f"{stem}down.weight"].expand_as(tensor))
            elif name.endswith("router.weight"):
                tensor.copy_(0.02 * rng.normal(tuple(tensor.shape), seed, name))
            else:
                tensor.copy_(found[name])


def run(tokens: Path, points: Path, limit: float, every: list[tuple[int, int, int]]) -> int:
    """All chains at once, the dearest first, each on the GPU with the least to do; ends those that take too long."""
    import subprocess

    import torch

    gpus = max(1, torch.cuda.device_count())
    cost = {each: (2 + min(each[0], 2)) * (each[1] * 0.4 + 900) for each in every}
    busy, started, began = [0.0] * gpus, [], time.monotonic()
    for each in sorted(every, key=lambda each: -cost[each]):
        gpu = busy.index(min(busy))
        busy[gpu] += cost[each]
        own = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": own[gpu], "OMP_NUM_THREADS": "2"}
        words = [sys.executable, "-m", "benchmarks.law_points", "chain", str(tokens), str(points), *map(str, each)]
        started.append(subprocess.Popen(words, env=environ))
        if "LAW_SHORT" in os.environ:
            started[-1].wait()
    codes = []
    for process in started:
        try:
            codes.append(process.wait(max(1.0, limit - (time.monotonic() - began))))
        except subprocess.TimeoutExpired:
            process.terminate()
            codes.append(process.wait())
    print(f"{sum(code == 0 for code in codes)} of {len(codes)} chains whole in {time.monotonic() - began:.0f} s")
    return 0


# ---- the fit

Law = tuple[float, float, float, float, float, float]  # ln A, a1, a2, a3, ln B, b
PUBLISHED: Law = (
    math.log(law.UPCYCLED[0]),
    law.UPCYCLED[2],
    law.SECOND,
    law.TOGETHER,
    math.log(law.UPCYCLED[1]),
    law.UPCYCLED[3],
)


def losses(constants: Any, points: Any) -> Any:
    """What a law of the published form says of points, whose columns are parameters, D1 and D2."""
    ln_a, a1, a2, a3, ln_b, b = constants
    size, first, more = np.log(points).T
    return np.exp(ln_a - a1 * first + (a3 * first - a2) * more) + np.exp(ln_b - b * size) + law.FLOOR


def refitted(points: Any, loss: Any) -> Any:
    """The constants with the least squares of relative errors, by Levenberg and Marquardt from the published ones."""
    found, damping = np.array(PUBLISHED), 1e-2

    def off(constants: Any) -> Any:
        return np.log(losses(constants, points) / loss)

    for _ in range(2000):
        now = off(found)
        steps = np.diag(1e-6 * np.maximum(np.abs(found), 1e-3))
        slope = np.stack([(off(found + step) - now) / step.sum() for step in steps], 1)
        square = slope.T @ slope
        trial = found - np.linalg.solve(square + damping * np.diag(np.diag(square)), slope.T @ now)
        with np.errstate(over="ignore"):
            better = np.square(off(trial)).sum() < np.square(now).sum()
        found, damping = (trial, damping / 3) if better else (found, damping * 5)
        if damping > 1e12:
            break
    return found


def terms(share: float, at: Any) -> Any:
    size, tokens = np.log(at[:, 0] / law.MIDDLE[0]), np.log((at[:, 1] + share * at[:, 2]) / law.MIDDLE[1])
    return np.stack([np.ones(len(at)), size, tokens, size * tokens, tokens**2], 1)


def continued(constants: Any, at: Any) -> Any:
    """What `law.continued` says with these constants."""
    return np.exp(terms(constants[0], at) @ constants[1:]) + law.FLOOR


def along(points: Any, loss: Any) -> Any:
    """The constants of `law.continued`, of as many as the published form has, with the least squares of ln(L - floor)."""
    best = None
    for share in np.arange(0.3, 1.5, 0.01):
        x, y = terms(share, points), np.log(loss - law.FLOOR)
        constants = np.linalg.lstsq(x, y, rcond=None)[0]
        left = np.square(x @ constants - y).sum()
        best = (left, [share, *constants]) if best is None or left < best[0] else best
    assert best is not None
    return np.array(best[1])


# (constants from points, what they say of others)
FORMS = {"along": (along, continued), "refitted": (refitted, losses)}


def place(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["hidden"], row["first"], row["more"]


def noise() -> dict[tuple[int, int, int], tuple[float, float]]:
    """(how far apart runs of one place are, as a share of the lowest; those of them that share the seed too)"""
    rows = [row for file in (HERE, CHECKS, BEFORE) for row in known(file)[0] if row["more"]]
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(place(row), []).append(row)

    def apart(of: list[dict[str, Any]]) -> float:
        return float(max(row["loss"] for row in of) / min(row["loss"] for row in of) - 1)

    return {key: (apart(of), apart([row for row in of if not row["seed"]])) for key, of in found.items() if len(of) > 1}


def known(file: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(points, the texts that all of them learned and were held to; none: nobody wrote them down)"""
    found = json.loads(file.read_text())
    return found["points"], found["texts"]


def values(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    """(parameters, D1 and D2 of each; its loss)"""
    at = np.array([[row[key] for key in ("parameters", "first", "more")] for row in rows], float)
    return at, np.array([row["loss"] for row in rows])


def read(file: Path | None = None) -> tuple[Any, Any, Any]:
    """(parameters, D1 and D2 of each point; its loss; which third it is of: of each size, D1 and D2 there are as many)"""
    at, loss = values([row for row in known(file or HERE)[0] if row["more"]])
    places = [sorted(set(column)) for column in at.T]
    third = [sum(place.index(value) for place, value in zip(places, each, strict=True)) % 3 for each in at]
    return at, loss, np.array(third)


def held_out(form: str, file: Path | None = None) -> list[tuple[float, float]]:
    """(mean, most) that a form fitted to two thirds of the points is off on the other 12, for each third."""
    (points, loss, third), (fit, say) = read(file), FORMS[form]
    found = []
    for held in range(3):
        constants = fit(points[third != held], loss[third != held])
        off = np.abs(say(constants, points[third == held]) / loss[third == held] - 1)
        found.append((float(off.mean()), float(off.max())))
    return found


def checked() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the 12 points, how far off on each the law is that was fitted to the 36 alone: by form, and as published)"""
    points, loss, _ = read()
    rows, texts = known(CHECKS)
    same(texts)
    new = [row for row in rows if row["more"]]
    at, real = values(new)
    found = {name: say(fit(points, loss), at) / real - 1 for name, (fit, say) in FORMS.items()}
    return new, {**found, "as published": losses(PUBLISHED, at) / real - 1}


def same(texts: dict[str, str], which: str = CHECKS.name) -> None:
    """ValueError unless these are the texts of the 36."""
    if texts != known(HERE)[1]:
        raise ValueError(
            f"{which} is of the texts {texts} and {HERE.name} of {known(HERE)[1]}; losses compare on the same ones: "
            "run all points in one go (python -m benchmarks.law_points all), and write fit before judge"
        )


def keep(file: Path, points: Path, between: bool) -> None:
    """Writes those points of a run that a law is fitted to, or those that judge it, and once the texts they have. Nothing
    is written if texts differ: those of any of the run's points, or of the 12 from the 36's."""
    sizes = {hidden for hidden, *_ in (BETWEEN if between else SIZES)}
    every = [json.loads(line) for line in points.read_text().splitlines()]
    texts = [row.pop("texts") for row in every]
    rows = [row for row in every if row["hidden"] in sizes and not row["seed"]]
    if not rows or any(each != texts[0] for each in texts):
        raise ValueError(
            f"{points} has {len(rows)} points of hidden {sorted(sizes)}, which must be some, and all that it has of the "
            "same texts; run them in one go (python -m benchmarks.law_points all)"
        )
    if between:
        same(texts[0], str(points))
    rows.sort(key=lambda row: (row["parameters"], row["first"], row["more"]))
    lines = ",\n".join(map(json.dumps, rows))
    file.write_text(f'{{"texts": {json.dumps(texts[0], indent=1)},\n"points": [\n{lines}\n]}}\n')


def main() -> int:
    match sys.argv[1:]:
        case ["run" | "check" | "all" as which, tokens, points, limit]:
            return run(Path(tokens), Path(points), float(limit), CHAINS[which])
        case ["chain", tokens, points, *numbers]:
            chain(Path(tokens), Path(points), *map(int, numbers))
            return 0
        case ["fit", file]:
            keep(HERE, Path(file), between=False)
            points, loss, _ = read()
            off = losses(PUBLISHED, points) / loss - 1
            print(f"{len(loss)} points; as published {off.mean():+.1%}, {np.abs(off).max():.1%} at most")
            for form, (fit, _) in FORMS.items():
                thirds = ", ".join(f"{mean:.1%} ({most:.1%})" for mean, most in held_out(form))
                print(f"{form}: on a third that was held out, on average (at most) {thirds}; constants of all:")
                print("  " + ", ".join(f"{number:.6g}" for number in fit(points, loss)))
            return 0
        case ["judge", file]:
            keep(CHECKS, Path(file), between=True)
            rows, off = checked()
            for number, row in enumerate(rows):
                print(f"{place(row)}: " + ", ".join(f"{form} {of[number]:+.1%}" for form, of in off.items()))
            for form, of in off.items():
                print(f"{form}: {np.abs(of).mean():.1%} on average, {np.abs(of).max():.1%} at most")
            for key, (apart, same) in noise().items():
                print(f"{key}: runs are {apart:.1%} apart, {same:.1%} with the same seed")
            return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
