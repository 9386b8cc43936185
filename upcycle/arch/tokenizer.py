"""Name a tokenizer's class for the folder of an `upcycled` model, so that its ids are those of the dense model.

transformers' AutoTokenizer ignores the class in tokenizer_config.json for some model types. It does not know `upcycled`
and would take that class there: a LlamaTokenizer, for example, builds itself instead of what tokenizer.json describes.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

from upcycle.io import disk, strict

FILE = "tokenizer_config.json"
PLAIN = "PreTrainedTokenizerFast"  # reads tokenizer.json as it is; older versions of transformers know this name too
# dense family -> the class that AutoTokenizer takes whatever the file names
CLASSES = {
    **dict.fromkeys(("granite", "mistral", "nemotron", "olmo2", "olmo3", "phi3"), PLAIN),
    "qwen2": "Qwen2Tokenizer",
}
NAMED = re.compile(rb'"tokenizer_class"\s*:\s*("[^"]*")')
TRIES = 8  # keys of this name that are tried, because one may lie deeper in the file


def copy(path: Path, target: Path, name: str) -> None:
    """Copy a file as `read` reads it; only tokenizer_config.json is held in memory as a whole."""
    if name and path.name == FILE:
        disk.write_atomic(target, read(path, name))
    else:
        disk.copy(path, target)


def read(path: Path, name: str) -> bytes:
    """Return the bytes of a file. If it is tokenizer_config.json and `name` is not empty, `name` replaces the class."""
    with strict.naming(path):
        data = path.read_bytes()
    if not name or path.name != FILE:
        return data
    try:
        found = strict.parse_object(data, path, constants=True)
        named, code = found.get("tokenizer_class"), found.get("auto_map")
        is_code = code.get("AutoTokenizer") if isinstance(code, dict) else code  # then AutoTokenizer takes the class
        if is_code or not isinstance(named, str) or named.removesuffix("Fast") == name.removesuffix("Fast"):
            return data
        for match in islice(NAMED.finditer(data), TRIES):
            made = data[: match.start(1)] + json.dumps(name).encode() + data[match.end(1) :]
            if strict.parse_object(made, path, constants=True)["tokenizer_class"] == name:
                return made
    except ValueError:  # transformers may still read it
        pass
    return data
