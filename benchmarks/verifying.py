"""Count false alarms and missed breaks of `upcycle verify` on conversions of a real checkpoint (a Llama, such as SmolLM2).

  python -m benchmarks.verifying SOURCE WORK                # 40 intact conversions and 40 planted breaks
  python -m benchmarks.verifying SOURCE WORK layers=6       # of the source's first 6 layers
  python -m benchmarks.verifying SOURCE WORK first=0 last=10 part=intact    # a piece: intact or broken

WORK is an empty folder for one conversion at a time, and for the shortened source.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import upcycle
from upcycle.cli import frame
from upcycle.verifying.verify import Report

TARGETS = ("mixtral", "qwen2_moe", "granitemoe", "glm4_moe", "upcycled", "granitemoeshared", "solar_open")
SIGMOID = ("glm4_moe", "solar_open")
SHAPES = ((4, 1, 1), (4, 3, 6), (2, 2, 2), (8, 1, 2), (4, 3, 3), (2, 4, 8), (3, 6, 6), (5, 2, 4))  # experts, G, top_k
DTYPES = ("bfloat16", "float32", "float16")
INEXACT = (
    "method=drop experts=4 target=qwen2_moe", "method=noise experts=4 target=mixtral",
    "method=split experts=8 top_k=2 target=mixtral", "method=drop experts=4 shared=0.25 target=granitemoeshared",
    "method=virtual_group experts=4 granularity=4 top_k=4 scale=published target=upcycled",
    "method=virtual_group experts=4 granularity=4 top_k=6 router.choice=parts target=qwen2_moe",
    "method=split experts=6 top_k=3 target=upcycled dtype=float32", "method=noise experts=3 target=glm4_moe"
    " router.score=sigmoid",
)  # fmt: skip
BROKEN = (
    "method=virtual_group experts=4 granularity=3 top_k=6 target=mixtral dtype=bfloat16",
    "method=virtual_group experts=2 granularity=2 top_k=2 target=qwen2_moe dtype=float32",
    "method=virtual_group experts=2 granularity=4 top_k=4 target=glm4_moe router.score=sigmoid dtype=bfloat16",
    "method=drop experts=4 target=upcycled dtype=float32",
    "method=split experts=4 top_k=2 target=mixtral dtype=bfloat16",
)
LAYER = 2  # the layer that is broken


@dataclass(frozen=True)
class Keys:
    source: str = ""  # the dense model; the first word
    work: str = ""  # a folder for the conversions; the second word
    layers: int = 0  # use only the source's first layers; 0: all
    part: str = "both"  # intact | broken | both
    first: int = 0  # the first case of a part
    last: int = 40  # one more than the last case of a part


def intact() -> Iterator[str]:
    """Yield the words of 40 conversions."""
    for i in range(32):
        (experts, parts, top_k), target = SHAPES[i % 8], TARGETS[i % 7]
        words = f"experts={experts} granularity={parts} top_k={top_k} target={target} dtype={DTYPES[i % 3]}"
        words += " method=virtual_group" if parts > 1 else ""
        yield words + (" router.score=sigmoid" if target in SIGMOID else "")
    yield from INEXACT


def shortened(source: Path, folder: Path, layers: int) -> Path:
    """Write the source with its first layers only."""
    if not folder.exists():
        shutil.copytree(source, folder)
        tensors = load_file(folder / "model.safetensors")
        kept = {n: t for n, t in tensors.items() if ".layers." not in n or int(n.split(".")[2]) < layers}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    return folder


# ---- breaks: each changes tensors of one layer in place


class Weights:
    """The tensors of a folder with one file, which can be changed in place."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "model.safetensors"
        with self.file.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self.header = {k: v for k, v in json.loads(file.read(size)).items() if k != "__metadata__"}
        self.start, self.before = 8 + size, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        entry = self.header[name]
        first, last = entry["data_offsets"]
        raw = torch.from_numpy(np.memmap(self.file, np.uint8, "r+", self.start + first, (last - first,)))
        tensor = raw.view({"BF16": torch.bfloat16, "F32": torch.float32}[entry["dtype"]]).view(entry["shape"])
        self.before.setdefault(name, tensor.clone())
        return tensor

    def expert(self, index: int) -> list[Tensor]:
        """Return the matrices of an expert: gate, down, up or w1, w2, w3."""
        return [
            self[name] for name in sorted(self.header) if f"layers.{LAYER}." in name and f".experts.{index}." in name
        ]

    def named(self, end: str) -> Tensor:
        return self[
            next(n for n in self.header if f"layers.{LAYER}." in n and n.endswith(end) and ".experts." not in n)
        ]

    def restore(self) -> None:
        for name, tensor in self.before.items():
            self[name].copy_(tensor)


def flip(tensor: Tensor, bit: int) -> None:
    """Flip a bit of one weight, counted from the last of the mantissa."""
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).view(-1)
    bits[tensor.numel() // 2] ^= 1 << bit


def swapped(w: Weights) -> None:
    for one, other in zip(w.expert(0), w.expert(1), strict=True):
        kept = one.clone()
        one.copy_(other), other.copy_(kept)


BREAKS: Mapping[str, Callable[[Weights], object]] = {
    "one row of an expert x 1.01": lambda w: w.expert(1)[0][7].mul_(1.01),
    "two experts swapped": swapped,
    "router's rows moved by one": lambda w: (g := w.named("gate.weight")).copy_(g.clone().roll(1, 0)),
    "an expert's down x 1.5": lambda w: w.expert(0)[1].mul_(1.5),
    "one exponent's last bit flipped": lambda w: flip(w.expert(1)[2], 7 if w.expert(1)[2].element_size() == 2 else 23),
    "one mantissa's last bit flipped": lambda w: flip(w.expert(0)[0], 0),
    "one element of a norm + 1/16": lambda w: w.named("input_layernorm.weight")[5].add_(1 / 16),
}
THETA = "rope_theta x 2 in config.json"


def broken(folder: Path) -> Iterator[str]:
    """Plant the breaks one after the other; yield the name of each while it is there."""
    for name, change in BREAKS.items():
        weights = Weights(folder)
        change(weights)
        yield name
        weights.restore()
    config = folder / "config.json"
    text = json.loads(config.read_text())
    rope = {**text["rope_parameters"], "rope_theta": 2 * text["rope_parameters"]["rope_theta"]}
    config.write_text(json.dumps({**text, "rope_parameters": rope, "rope_theta": rope["rope_theta"]}))
    yield THETA


# ---- the table


def row(number: int, words: str, report: Report, seconds: float) -> str:
    exact = report.promised == "exact"
    computed = any("logits" in fault or "FFN" in fault for fault in report.faults)
    verdict = "held" if report.held else f"BROKEN (faults: {len(report.faults)}{', seen in outputs too' * computed})"
    return f"| {number} | {words} | {'exact' if exact else 'not exact'} | {report.relative:.1e} | {verdict} | {seconds:.0f} s |"


@frame.command()
def main(words: Sequence[str]) -> int:
    keys = frame.named(Keys, words, "source", "work")
    work, source = Path(keys.work), Path(keys.source)
    work.mkdir(parents=True, exist_ok=True)
    if keys.layers:
        source = shortened(source, work / f"dense-{keys.layers}", keys.layers)

    def converted(words: str) -> Path:
        folder = work / "moe"
        shutil.rmtree(folder, ignore_errors=True)
        asked = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in words.split())}
        return upcycle.convert({**asked, "source": str(source), "output": str(folder)}, quiet=True)

    def verified(number: int, words: str, folder: Path) -> bool:
        start = time.perf_counter()
        report = upcycle.verify(source, folder)
        print(row(number, words, report, time.perf_counter() - start), flush=True)
        return report.held

    chosen, wrong = range(keys.first, keys.last), 0
    for number, case in enumerate(intact()):
        if number in chosen and keys.part != "broken":
            wrong += not verified(number, case, converted(case))
    for group, case in enumerate(BROKEN):
        numbers = range(group * (len(BREAKS) + 1), (group + 1) * (len(BREAKS) + 1))
        if keys.part != "intact" and set(numbers) & set(chosen):
            folder = converted(case)
            for number, name in zip(numbers, broken(folder), strict=True):
                if number in chosen:
                    wrong += verified(number, f"{name}; {case}", folder)
    shutil.rmtree(work / "moe", ignore_errors=True)
    print(f"{wrong} wrong verdicts")
    return int(wrong > 0)


if __name__ == "__main__":
    frame.program("benchmarks.verifying")
