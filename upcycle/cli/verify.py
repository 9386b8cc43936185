"""Check a converted folder against its plan: files and slices of weights bit for bit, and both models' logits.

usage: upcycle verify DENSE MOE [key=value ...]

  upcycle verify ./llama ./moe
  upcycle verify ./llama ./moe text=book.txt tokens=2048 sequence=512 dtype=bfloat16
  upcycle verify ./llama ./moe tolerance=1e-4    # any two models with one vocabulary
  upcycle verify parts/book                      # the files of a part, or of a model with parts
  upcycle verify ./llama parts/book               # also whether the part fits this base

The exit code is 0 if the plan's promise held, 1 if not, and 3 if nothing was promised (a trained or foreign model).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from upcycle.cli import frame
from upcycle.config.values import LENGTH, at_least, check_values, finite

PROMISE_BROKEN = 1
NOTHING_PROMISED = 3


@dataclass(frozen=True)
class VerifyKeys:
    dense: str = ""  # the dense model's folder or Hub id; the first word
    moe: str = ""  # the converted folder; the second word
    text: tuple[str, ...] = ()  # .txt, .jsonl or .jsonl.zst files; []: random tokens
    tokens: int = 256  # tokens to compare
    sequence: int = 256  # tokens of a sequence
    dtype: str = "float64"  # float64 | float32 | bfloat16 | float16; the bound on logits is 1e-9 | 1e-3 | 0.1 | 0.1
    tolerance: float | None = None  # compare only the logits, of any two models: largest |difference| / largest |logit|
    device: str = "cpu"  # the device that computes: cpu, cuda, cuda:1, ...
    json: bool = False  # print the report as one JSON object

    def __post_init__(self) -> None:
        rules = {"tokens": at_least(2, most=LENGTH), "sequence": at_least(2, most=LENGTH), "tolerance": finite()}
        check_values(self, "", rules)


@frame.command()
def main(words: Sequence[str]) -> int:
    from upcycle.api import verify
    from upcycle.converting import part
    from upcycle.verifying import inspect
    from upcycle.verifying.parts import is_joined, verify_part

    names, keys = frame.names_and_words(words)
    of_part = len(names) in (1, 2) and part.is_part(names[-1])
    if of_part or (len(names) == 1 and is_joined(names[0])):
        if keys:
            raise ValueError(f"verify got {keys[0]}; the files of parts are compared byte for byte, so leave it out")
        if of_part:
            return verify_part(names[-1], *names[:-1])
        return 0 if inspect.check(Path(names[0])) else PROMISE_BROKEN
    asked = asdict(frame.named(VerifyKeys, words, "dense", "moe"))
    as_json = asked.pop("json")
    report = verify(**asked)
    print(json.dumps(asdict(report), indent=1) if as_json else report)
    if report.nothing:
        print(
            f"upcycle: {asked['moe']} has no upcycle.json of a conversion, so nothing was promised and nothing was "
            "held; tolerance=1e-4 compares any two models",
            file=sys.stderr,
        )
        return NOTHING_PROMISED
    return 0 if report.held else PROMISE_BROKEN
