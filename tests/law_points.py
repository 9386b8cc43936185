"""The law of upcycling, held to runs of our own: (size, D1, D2) points of small models on real text.

  python -m tests.law_points run TOKENS POINTS 150  # on GPUs: one process a (size, D1), at most 150 s; a line a point
  python -m tests.law_points fit POINTS             # keeps them in tests/law_points.json; says how far the law is off
  python -m tests.law_points check TOKENS POINTS 75 # 12 other points, and two that were run before with other seeds
  python -m tests.law_points judge POINTS           # keeps those in tests/law_checks.json; says how far off they were

A dense model of each size learns from D1 tokens, to a rate of zero; each FFN becomes eight copies with top-2, which go on
for D2 tokens. The rate is constant but for the last fifth of D2, so that one run has all its D2s: each ends in a fifth of
its own, after which the run goes on where that began. Loss is in nats a token of text that was held out.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from upcycle import law

HERE = Path(__file__).parent / "law_points.json"
CHECKS = HERE.with_name("law_checks.json")
SEQUENCE, BATCH = 512, 32
# hidden, layers, heads: 7, 18 and 43 million parameters, of which the embedding has 6, 13 and 22
SIZES = ((128, 4, 4), (256, 6, 4), (448, 8, 7))
FIRST, MORE = (256, 512, 1024), (96, 192, 384, 768)  # steps of 16,384 tokens
# between those: 10 and 25 million parameters; chosen, and the form of the law too, before any of them was run
BETWEEN, MORE_BETWEEN = ((192, 5, 3), (320, 7, 5)), (128, 256, 576)
# (size, D1, which seed)
CHAINS = {
    "run": [(size, first, 0) for size in range(len(SIZES)) for first in FIRST],
    "check": [(3, 384, 0), (3, 768, 0), (4, 384, 0), (4, 768, 0), (1, 512, 1), (1, 512, 2)],
}
RATE, WARM, COOL = 3e-3, 20, 0.2  # the rate of the smallest; they fall with the root of the width


# ---- runs


def spec_of(size: int) -> Any:
    from upcycle.spec import DenseSpec

    hidden, layers, heads = (*SIZES, *BETWEEN)[size]
    return DenseSpec(
        family="llama", layers=layers, hidden=hidden, ffn=hidden * 3, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=49152, context=SEQUENCE, tied=True,
    )  # fmt: skip


def chain(tokens: Path, points: Path, size: int, first: int, again: int = 0) -> None:
    """All points of a size and a D1."""
    import torch

    from training.balance import BalanceConfig
    from training.build import Learner, learner, room
    from training.checkpoint import layout
    from training.config import ModelConfig, TrainConfig
    from training.data.batch import Batch
    from training.data.mixture import DataConfig
    from training.model.decoder import Decoder
    from training.parallel.mesh import MeshConfig, ParallelMesh
    from training.parallel.processes import processes
    from training.step import nll, train_step
    from upcycle import rng
    from upcycle.size import dense_parameters
    from upcycle.spec import DenseSpec, MoESpec

    short = "LAW_SHORT" in os.environ  # does it run at all?
    began, dense = time.monotonic(), spec_of(size)
    if short:
        dense = replace(dense, hidden=32, ffn=64, layers=1, head_dim=8, heads=4, kv_heads=4)
    torch.set_num_threads(2)
    folders = sorted(folder for folder in tokens.iterdir() if (folder / "meta.json").exists())
    texts = {folder.name: np.memmap(next(folder.glob("tokens-*.bin")), np.uint16, "r") for folder in folders}
    learned = [text for name, text in texts.items() if not name.endswith("-val")]
    held = [text for name, text in texts.items() if name.endswith("-val")]
    batch_size = 2 if short else BATCH

    def batch(rows: list[Any]) -> Batch:
        row_BS = torch.from_numpy(np.stack(rows).astype(np.int64))
        position_BS = torch.arange(SEQUENCE).expand(len(rows), -1).contiguous()
        made = Batch(
            row_BS[:, :-1].contiguous(), row_BS[:, 1:].contiguous(), torch.zeros_like(position_BS).int(), position_BS
        )
        return made.pinned() if torch.cuda.is_available() else made

    def train_batch(seed: int, step: int) -> Batch:
        drawn = np.random.default_rng((seed, step))
        which = drawn.integers(len(learned), size=batch_size)
        return batch([cut(learned[i], int(drawn.integers(len(learned[i]) - SEQUENCE - 1))) for i in which])

    def cut(text: Any, start: int) -> Any:
        return text[start : start + SEQUENCE + 1]

    def made(spec: DenseSpec | MoESpec, device: torch.device) -> Learner:
        cuda = device.type == "cuda"
        config = TrainConfig(
            model=ModelConfig(
                source="x", random=True, experts="grouped" if cuda else "reference",
                compute="bfloat16" if cuda else "float32",
            ),
            data=DataConfig(sequence=SEQUENCE, mask_documents=False), balance=BalanceConfig(aux_weight=0.01),
            mesh=MeshConfig(), batch=batch_size, micro_batch=batch_size,
        )  # fmt: skip
        mesh = ParallelMesh(config.mesh, device_type=device.type)
        with torch.device("meta"):
            model = Decoder(spec, experts=config.model.experts, compute=getattr(torch, config.model.compute))
        model = room(model.to(torch.float32), config.model, mesh, device)
        for tensor in model.buffers():
            tensor.zero_()
        return learner(config, [model], mesh, device)

    with processes() as device:
        valid = [batch([cut(text, i * (SEQUENCE + 1)) for i in range(n, n + 16)]) for text in held for n in (0, 16, 32)]
        valid = valid[:1] if short else valid
        seed = 100 * size + first + 10_000 * again

        def judged(run: Learner) -> float:
            with torch.no_grad():
                nats = sum(nll(run, part.to(device)).double() for part in valid)
            return float(nats) / sum(part.labels.numel() for part in valid)

        def steps(run: Learner, begin: int, end: int, stream: int, peak: float, cool: int = 0) -> None:
            for number in range(begin, end):
                rate = peak * min(1, (number + 1) / WARM, (end - number) / (end - cool) if cool else 1)
                train_step(run, [train_batch(stream, number)], rate)

        def told(run: Learner, **row: Any) -> None:
            row = {
                "hidden": dense.hidden, "layers": dense.layers, "parameters": dense_parameters(dense),
                "first": first * BATCH * SEQUENCE, **row, "seed": again, "loss": judged(run), "seconds": time.monotonic() - began,
                "texts": [f"{name}: {len(text):,}" for name, text in texts.items()],  # points compare on the same ones
            }  # fmt: skip
            with points.open("a") as file:  # a line at a time, by nine processes
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

        peak = RATE * (SIZES[0][0] / dense.hidden) ** 0.5
        every = MORE if size < len(SIZES) else MORE_BETWEEN
        first_steps, more_steps = (first, every) if not short else (6, (2, 4))
        run = made(dense, device)
        layout.initialise(run.model, seed)
        steps(run, 0, first_steps, 2 * seed, peak, round(first_steps * (1 - COOL)))
        told(run, more=0)
        moe = MoESpec(dense, tuple(range(dense.layers)), (dense.ffn,) * 8, top_k=2, copies=8)
        sparse = made(moe, device)
        copy(run.model, sparse.model, seed, rng)
        before = judged(run), judged(sparse)
        assert abs(before[0] - before[1]) < 0.02, f"copies compute another function: {before}"
        del run
        done, peak = 0, peak / 2
        for more in more_steps:
            cool = max(done, round(more * (1 - COOL)))
            steps(sparse, done, cool, 2 * seed + 1, peak)
            live = [*sparse.model.parameters(), *sparse.model.buffers()]
            live += [each for each in sparse.optimizer.state_dict().values() if isinstance(each, torch.Tensor)]
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
        words = [sys.executable, "-m", "tests.law_points", "chain", str(tokens), str(points), *map(str, each)]
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


def along(points: Any, loss: Any) -> Any:
    """A law of another form, of the same six constants: what is upcycled goes on along a dense curve, as if D1 had been
    longer by a share of D2. ln(L - floor) is quadratic in ln(D1 + share * D2), and larger models fall faster. Returns
    its predictions as a function of points."""

    def terms(at: Any, share: float) -> Any:
        size, tokens = np.log(at[:, 0] / 1.8e7), np.log((at[:, 1] + share * at[:, 2]) / 1.5e7)
        return np.stack([np.ones(len(at)), size, tokens, size * tokens, tokens**2], 1)

    best = None
    for share in np.arange(0.3, 1.5, 0.01):
        x, y = terms(points, share), np.log(loss - law.FLOOR)
        constants = np.linalg.lstsq(x, y, rcond=None)[0]
        left = np.square(x @ constants - y).sum()
        best = (left, share, constants) if best is None or left < best[0] else best
    assert best is not None
    return lambda at: np.exp(terms(at, best[1]) @ best[2]) + law.FLOOR


def checked(rows: list[dict[str, Any]]) -> tuple[float, Any, Any]:
    """(the factor by which losses of the rows' texts differ from those of the 36 points, how far `along`, fitted to the
    36 alone, is off on each new row as it is, and with that factor). The factor is of what both have, size, D1 and D2,
    with another seed: 1 to within noise where the texts are the same."""
    points, loss, _ = read()
    before = {(r["hidden"], r["first"], r["more"]): r["loss"] for r in json.loads(HERE.read_text())}
    both = [math.log(r["loss"] / before[place(r)]) for r in rows if r["more"] and r["seed"] and place(r) in before]
    factor = math.exp(sum(both) / len(both))
    new = fresh(rows)
    values = np.array([[row[key] for key in ("parameters", "first", "more")] for row in new], float)
    said = along(points, loss)(values) / np.array([row["loss"] for row in new])
    return factor, said - 1, said * factor - 1


def place(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["hidden"], row["first"], row["more"]


def fresh(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the 12 points that are there."""
    return [row for row in rows if row["more"] and not row["seed"]]


def noise(rows: list[dict[str, Any]]) -> dict[tuple[int, int, int], float]:
    """How far apart runs are that differ by their seed alone, as a share of the lower."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for row in rows:
        if row["seed"]:
            found.setdefault(place(row), []).append(row["loss"])
    return {key: max(losses) / min(losses) - 1 for key, losses in found.items() if len(losses) > 1}


def judged(rows: list[dict[str, Any]]) -> list[str]:
    """How far off the law is on the new points, in lines."""
    factor, plain, carried = checked(rows)
    found = [f"{place(row)}: {a:+.1%}, {b:+.1%}" for row, a, b in zip(fresh(rows), plain, carried, strict=True)]
    found.append(f"these texts have {factor:.3f} of the loss; of {len(plain)}, as they are and with that factor:")
    found += [f"  {np.abs(off).mean():.1%} on average, {np.abs(off).max():.1%} at most" for off in (plain, carried)]
    return [*found, *(f"{key}: seeds are {apart:.1%} apart" for key, apart in noise(rows).items())]


def read(file: Path = HERE) -> tuple[Any, Any, Any]:
    """(parameters, D1 and D2 of each point; its loss; which third it is of: of each size, D1 and D2 there are as many)"""
    rows = [row for row in json.loads(file.read_text()) if row["more"]]
    places = [sorted({row[key] for row in rows}) for key in ("parameters", "first", "more")]
    values = np.array([[row[key] for key in ("parameters", "first", "more")] for row in rows], float)
    third = [sum(place.index(value) for place, value in zip(places, each, strict=True)) % 3 for each in values]
    return values, np.array([row["loss"] for row in rows]), np.array(third)


def held_out(file: Path = HERE) -> list[tuple[float, float]]:
    """(mean, most) that the law refitted on two thirds of the points is off on the other 12, for each third."""
    points, loss, third = read(file)
    found = []
    for held in range(3):
        constants = refitted(points[third != held], loss[third != held])
        off = np.abs(losses(constants, points[third == held]) / loss[third == held] - 1)
        found.append((float(off.mean()), float(off.max())))
    return found


def main() -> int:
    match sys.argv[1:]:
        case ["run" | "check" as which, tokens, points, limit]:
            return run(Path(tokens), Path(points), float(limit), CHAINS[which])
        case ["chain", tokens, points, *numbers]:
            chain(Path(tokens), Path(points), *map(int, numbers))
            return 0
        case ["judge", points]:
            rows = sorted(
                map(json.loads, Path(points).read_text().splitlines()), key=lambda row: list(row.values())[:6]
            )
            CHECKS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            for found in judged(rows):
                print(found)
            return 0
        case ["fit", points]:
            rows = sorted(
                map(json.loads, Path(points).read_text().splitlines()), key=lambda row: list(row.values())[:5]
            )
            HERE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            values, loss, _ = read()
            off = losses(PUBLISHED, values) / loss - 1
            print(f"as published {off.mean():+.1%}, {np.abs(off).max():.1%} at most; refitted on two thirds, held out:")
            print("".join(f"  {mean:.1%}, {most:.1%} at most\n" for mean, most in held_out()))
            return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
