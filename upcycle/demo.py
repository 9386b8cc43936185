"""make demo: a dense model made on the spot, planned, converted and verified, with the commands a person would type."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from upcycle.__main__ import main
from upcycle.sample import make_llama

FOLDER = Path("runs/demo")


def step(about: str, *words: str) -> int:
    print(f"\n\033[1m{about}\033[0m\n$ upcycle {' '.join(words)}\n", flush=True)
    return main(words)


def demo() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    print("\033[1m1. A dense Llama of 14 M parameters with random weights\033[0m", flush=True)
    dense, moe = str(make_llama(FOLDER / "dense")), str(FOLDER / "moe")
    return (
        step("2. What would upcycling make of it?", "plan", "tiny")
        or step("3. And with the cube-root scale of the paper?", "plan", "tiny", "scale=published")
        or step("4. Convert (exact)", "convert", "tiny")
        or step("5. Is the MoE the same function?", "verify", dense, moe)
        or step("6. What is in the folder, and is it what was written?", "inspect", moe, "--check")
    )


if __name__ == "__main__":
    sys.exit(demo())
