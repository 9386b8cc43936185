"""Compare the scaling law of upcycling with our own runs: (size, D1, D2) points of small models on real text.

  python -m benchmarks.law_points all TOKENS POINTS 150  # run all on GPUs, one process for each (size, D1), up to 150 s
  python -m benchmarks.law_points fit POINTS             # write 36 points to benchmarks/data/law_points.json; fit
  python -m benchmarks.law_points judge POINTS           # write 12 points to benchmarks/data/law_checks.json; judge
  python -m benchmarks.law_points run TOKENS POINTS 150  # run only the 36
  python -m benchmarks.law_points check TOKENS POINTS 75 # run only the 12, and two chains of the 36 with other seeds

`all`, `run` and `check` append each point to the file POINTS, a line each. `fit` and `judge` print the law's errors.

A dense model of each size trains on D1 tokens, and its learning rate falls to zero at the end. Then each FFN becomes
eight copies with top-2 routing, and the MoE trains on D2 tokens. The rate is constant except in the last fifth of D2.
So one run gives the points of all its D2s: in the last fifth of each D2 the rate falls, the loss is measured, and the
run continues from the state before the fall. The loss is in nats a token of held-out text.
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
# runs of an earlier day: nine of the 12, and two other seeds of a chain of the 36; their texts are not known
BEFORE = HERE.with_name("law_before.json")
SEQUENCE, BATCH = 512, 32
# hidden, layers, heads: 7, 18 and 43 million parameters, including an embedding of 6, 13 and 22 million
SIZES = ((128, 4, 4), (256, 6, 4), (448, 8, 7))
FIRST, MORE = (256, 512, 1024), (96, 192, 384, 768)  # steps of 16,384 tokens
# sizes between those: 12 and 25 million parameters; these and the form of the law were chosen before they ran
BETWEEN, MORE_BETWEEN = ((192, 5, 3), (320, 7, 5)), (128, 256, 576)
# (index of the size, steps of D1, number of the seed)
CHAINS = {
    "run": [(size, first, 0) for size in range(len(SIZES)) for first in FIRST],
    "check": [(3, 384, 0), (3, 768, 0), (4, 384, 0), (4, 768, 0), (1, 512, 1), (1, 512, 2)],
}
CHAINS["all"] = CHAINS["run"] + CHAINS["check"][:4]
# the smallest model's rate (it falls with the root of the width), steps of warm-up, share of steps in which it falls
RATE, WARM, COOL = 3e-3, 20, 0.2


# ---- runs


def spec_of(size: int) -> Any:
    from upcycle.arch.spec import DenseSpec

    hidden, layers, heads = (*SIZES, *BETWEEN)[size]
    return DenseSpec(
        family="llama", layers=layers, hidden=hidden, ffn=hidden * 3, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=49152, context=SEQUENCE, tied=True,
    )  # fmt: skip


class Texts:
    """Hold the texts of a folder of token shards, and draw batches from them."""

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
        """Return the batch of a step, drawn at random from the training texts."""
        drawn = np.random.default_rng((seed, step))
        which = drawn.integers(len(self.learned), size=self.batch_size)
        starts = [(self.learned[i], int(drawn.integers(len(self.learned[i]) - SEQUENCE - 1))) for i in which]
        return batch_of([cut(text, start) for text, start in starts])

    def valid_batches(self) -> list[Any]:
        """Return three batches of each held-out text."""
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
    """Return a learner for a model of this spec, whose weights are not set yet."""
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
    """Train the models of one size and one D1, and append all their points to a file."""
    import torch

    from training.checkpoint import layout
    from training.parallel.processes import processes
    from training.run.step import nll, train_step
    from upcycle.arch.spec import MoESpec
    from upcycle.planning import rng
    from upcycle.planning.size import dense_parameters

    short = "LAW_SHORT" in os.environ  # a tiny run that only shows that the program works
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
                "texts": texts.said,  # points are comparable only on the same texts
            }  # fmt: skip
            with points.open("a") as file:  # several processes append to it, a line at a time
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
        assert abs(before[0] - before[1]) < 0.02, f"the copies compute another function than the dense model: {before}"
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
    """Copy the dense FFN into every expert, and draw the routers at random."""
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
    """Run all chains at once, the longest first, each on the GPU with the least work; end those past the limit."""
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
    print(f"{sum(code == 0 for code in codes)} of {len(codes)} chains finished, in {time.monotonic() - began:.0f} s")
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
    """Return the losses that a law of the published form predicts for points (parameters, D1, D2)."""
    ln_a, a1, a2, a3, ln_b, b = constants
    size, first, more = np.log(points).T
    return np.exp(ln_a - a1 * first + (a3 * first - a2) * more) + np.exp(ln_b - b * size) + law.FLOOR


def refitted(points: Any, loss: Any) -> Any:
    """Return the constants with the least squares of relative errors, searched from the published constants."""
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
    """Return the losses that `law.continued` predicts with these constants."""
    return np.exp(terms(constants[0], at) @ constants[1:]) + law.FLOOR


def along(points: Any, loss: Any) -> Any:
    """Return constants of `law.continued`, as many as the published form has, with the least squares of ln(L - floor)."""
    best = None
    for share in np.arange(0.3, 1.5, 0.01):
        x, y = terms(share, points), np.log(loss - law.FLOOR)
        constants = np.linalg.lstsq(x, y, rcond=None)[0]
        left = np.square(x @ constants - y).sum()
        best = (left, [share, *constants]) if best is None or left < best[0] else best
    assert best is not None
    return np.array(best[1])


# form -> (fit constants to points, predict the losses of points with constants)
FORMS = {"along": (along, continued), "refitted": (refitted, losses)}


def place(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["hidden"], row["first"], row["more"]


def noise() -> dict[tuple[int, int, int], tuple[float, float]]:
    """Return by place how far apart its runs are, as a share of the lowest: (all runs, runs of the first seed)."""
    rows = [row for file in (HERE, CHECKS, BEFORE) for row in known(file)[0] if row["more"]]
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(place(row), []).append(row)

    def apart(of: list[dict[str, Any]]) -> float:
        return float(max(row["loss"] for row in of) / min(row["loss"] for row in of) - 1)

    return {key: (apart(of), apart([row for row in of if not row["seed"]])) for key, of in found.items() if len(of) > 1}


def known(file: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return (the points of a file, the texts that all of them trained and were judged on; empty: not known)."""
    found = json.loads(file.read_text())
    return found["points"], found["texts"]


def values(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Return (the parameters, D1 and D2 of each row; the loss of each row)."""
    at = np.array([[row[key] for key in ("parameters", "first", "more")] for row in rows], float)
    return at, np.array([row["loss"] for row in rows])


def read(file: Path | None = None) -> tuple[Any, Any, Any]:
    """Return (parameters, D1 and D2; loss; third) of each point. A third has as many points of each size, D1 and D2."""
    at, loss = values([row for row in known(file or HERE)[0] if row["more"]])
    places = [sorted(set(column)) for column in at.T]
    third = [sum(place.index(value) for place, value in zip(places, each, strict=True)) % 3 for each in at]
    return at, loss, np.array(third)


def held_out(form: str, file: Path | None = None) -> list[tuple[float, float]]:
    """Return for each third (the mean, the largest) error on it of a form that is fitted to the other two thirds."""
    (points, loss, third), (fit, say) = read(file), FORMS[form]
    found = []
    for held in range(3):
        constants = fit(points[third != held], loss[third != held])
        off = np.abs(say(constants, points[third == held]) / loss[third == held] - 1)
        found.append((float(off.mean()), float(off.max())))
    return found


def checked() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (the 12 points, the errors on them of each form fitted only to the 36, and of the published law)."""
    points, loss, _ = read()
    rows, texts = known(CHECKS)
    same(texts)
    new = [row for row in rows if row["more"]]
    at, real = values(new)
    found = {name: say(fit(points, loss), at) / real - 1 for name, (fit, say) in FORMS.items()}
    return new, {**found, "as published": losses(PUBLISHED, at) / real - 1}


def same(texts: dict[str, str], which: str = CHECKS.name) -> None:
    """Raise ValueError unless these are the texts of the 36 points."""
    if texts != known(HERE)[1]:
        raise ValueError(
            f"{which} has the texts {texts} and {HERE.name} has {known(HERE)[1]}; losses compare only on the same texts: "
            "run all points in one go (python -m benchmarks.law_points all), and call fit before judge"
        )


def keep(file: Path, points: Path, between: bool) -> None:
    """Write the points of a run to which a law is fitted, or (`between`) those that judge it, and their texts. Write
    nothing if the points of the run have different texts, or if the 12 have other texts than the 36."""
    sizes = {hidden for hidden, *_ in (BETWEEN if between else SIZES)}
    every = [json.loads(line) for line in points.read_text().splitlines()]
    texts = [row.pop("texts") for row in every]
    rows = [row for row in every if row["hidden"] in sizes and not row["seed"]]
    if not rows or any(each != texts[0] for each in texts):
        raise ValueError(
            f"{points} has {len(rows)} points of hidden {sorted(sizes)}; it must have at least one, and all its points must have "
            "the same texts; run them in one go (python -m benchmarks.law_points all)"
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
            print(f"{len(loss)} points; published law: {off.mean():+.1%} on average, {np.abs(off).max():.1%} at most")
            for form, (fit, _) in FORMS.items():
                thirds = ", ".join(f"{mean:.1%} ({most:.1%})" for mean, most in held_out(form))
                print(f"{form}: mean (largest) error on each held-out third {thirds}; constants fitted to all points:")
                print("  " + ", ".join(f"{number:.6g}" for number in fit(points, loss)))
            return 0
        case ["judge", file]:
            keep(CHECKS, Path(file), between=True)
            rows, off = checked()
            for number, row in enumerate(rows):
                print(f"{place(row)}: " + ", ".join(f"{form} {of[number]:+.1%}" for form, of in off.items()))
            for form, of in off.items():
                print(f"{form}: off by {np.abs(of).mean():.1%} on average, by {np.abs(of).max():.1%} at most")
            for key, (apart, same) in noise().items():
                print(f"{key}: runs are {apart:.1%} apart, those with the same seed {same:.1%}")
            return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
