"""Quantise a model's folder, and measure by how much its loss on your text changes.

usage: upcycle quantize MODEL output=FOLDER method=fp8|nvfp4|awq|gguf [key=value ...]

  upcycle quantize ./moe output=./moe-fp8 method=fp8 data=[book.txt]
  upcycle quantize ./moe output=./moe-awq method=awq data=[book.txt]
  upcycle quantize ./moe output=./moe-gguf method=gguf type=q8_0 data=[book.txt]

fp8, nvfp4 and awq need llm-compressor (pip install "upcycle[quantize]"); gguf needs llama.cpp's convert_hf_to_gguf.py.
Routers, norms, embeddings and the head keep their numbers, except that GGUF rounds all large matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from upcycle.cli import frame
from upcycle.config.values import LENGTH, at_least, check_values, one_of

METHODS = ("fp8", "nvfp4", "awq", "gguf")
TYPES = ("q8_0", "bf16", "f16")


@dataclass(frozen=True)
class QuantizeKeys:
    ELSEWHERE: ClassVar = dict.fromkeys(("format", "scheme", "bits"), "method=" + "|".join(METHODS))

    model: str = ""  # a folder or a Hub id; the first word
    output: str = ""  # the folder to make
    method: str = ""  # fp8 | nvfp4 | awq | gguf
    data: tuple[str, ...] = ()  # texts to measure on; nvfp4 and awq also calibrate on them
    tokens: int = 4096  # tokens to measure on, and to calibrate on
    type: str = "q8_0"  # of gguf: q8_0 | bf16 | f16
    converter: str = ""  # llama.cpp's convert_hf_to_gguf.py; "": from the PATH

    def __post_init__(self) -> None:
        rules = {"method": one_of(("", *METHODS)), "type": one_of(TYPES), "tokens": at_least(2, most=LENGTH)}
        check_values(self, "", rules)


@frame.command()
def main(words: Sequence[str]) -> int:
    from upcycle.converting.quantize import quantize

    asked = asdict(frame.named(QuantizeKeys, words, "model"))
    for key, example in (("output", "FOLDER"), ("method", "|".join(METHODS))):
        if not asked[key]:
            raise ValueError(f"{key} is not set; write {key}={example}")
    done = quantize(**asked)
    print(done.sentence)
    print(f"{done.folder} is complete")
    return 0
