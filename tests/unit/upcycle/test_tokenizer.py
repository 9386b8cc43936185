"""The class in tokenizer_config.json is replaced in the text, and a file in which it cannot be stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from upcycle.arch import tokenizer
from upcycle.arch.tokenizer import FILE, read

NAME = "PreTrainedTokenizerFast"


def written(folder: Path, text: str | bytes, name: str = FILE) -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


@pytest.mark.parametrize(
    "text",
    [
        '{"tokenizer_class": "OLD"}',
        '\r\n\t{ "a" : 1e3 ,\r\n"tokenizer_class"\t:\n\n "OLD" , "z":[ ] }\n\n',
        '{"tokenizer_class":"OLD","é":"\\u00e9 OLD","x":NaN}',
        '{"deep": {"tokenizer_class": "LlamaTokenizer"}, "tokenizer_class": "OLD", "x": {"tokenizer_class": "OTHER"}}',
        '{"chat_template": "{\\"tokenizer_class\\": \\"LlamaTokenizer\\"}", "tokenizer_class": "OLD"}',
        '{"a": "tokenizer_class", "b": "LlamaTokenizer", "tokenizer_class": "OLD", "auto_map": {"AutoProcessor": "x.X"}}',
        '{"auto_map": null, "tokenizer_class": "OLD"}',
    ],
)
def test_the_value_alone_is_replaced(text: str, tmp_path: Path) -> None:
    path = written(tmp_path, text.replace("OLD", "LlamaTokenizer"))
    assert read(path, NAME).decode() == text.replace('"OLD"', f'"{NAME}"').replace("OLD", "LlamaTokenizer")
    assert read(path, "") == path.read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '"tokenizer_class"', b"\xff\xfe{", "[" * 100_000, "{}",
        '{"tokenizer_class": null}', '{"tokenizer_class": 7}', '{"tokenizer_class": ["LlamaTokenizer"]}',
        '{"deep": {"tokenizer_class": "LlamaTokenizer"}}',
        '{"deep": {"tokenizer_class": "LlamaTokenizer"}, "tokenizer_class": "PreTrainedTokenizerFast"}',
        '{"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["x.X", null]}}',
        '{"tokenizer_class": "LlamaTokenizer", "auto_map": ["x.X", null]}',
        '{"tokenizer_class": "LlamaTokenizer", "tokenizer_class": "LlamaTokenizer"}',
        '{"x": [' + ",".join(['{"tokenizer_class": "LlamaTokenizer"}'] * 20_000) + '], "tokenizer_class": "A\\"B"}',
    ],
)  # fmt: skip
def test_anything_else_stays_and_nothing_fails(text: str | bytes, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    assert read(path, NAME) == path.read_bytes()


def test_the_same_class_by_its_other_name_stays(tmp_path: Path) -> None:
    path = written(tmp_path, '{"tokenizer_class": "Qwen2TokenizerFast"}')
    assert read(path, "Qwen2Tokenizer") == path.read_bytes()


def test_only_this_file_is_read_for_a_class(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"tokenizer_class": "LlamaTokenizer"}), "special_tokens_map.json")
    assert read(path, NAME) == path.read_bytes()


def test_a_folder_without_the_file_is_copied_as_it_is(tmp_path: Path) -> None:
    import upcycle
    from tests.parity import tiny

    dense = tiny.make("mistral", tmp_path / "dense")
    words = {"experts": 2, "top_k": 1, "target": "upcycled"}
    folder = upcycle.convert(words, source=dense, output=tmp_path / "moe", quiet=True)
    assert not (folder / FILE).exists() and "mistral" in tokenizer.CLASSES
