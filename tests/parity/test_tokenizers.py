"""Next to an `upcycled` config, AutoTokenizer gives the class and the ids that it gives for the dense model.

AutoTokenizer chooses by the config's model type, and each version of transformers has its own list. A list that no
longer fits upcycle/arch/tokenizer.py fails here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

import upcycle
from tests.parity import tiny
from tests.unit.training import test_data
from tests.unit.upcycle import test_quantize
from upcycle.arch import tokenizer
from upcycle.cli.main import main
from upcycle.converting import quantize

TEXT, TALK = "b a ab  a", [{"role": "user", "content": "b a"}]
WORDS: dict[str, Any] = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>", "add_bos_token": True,
    "add_eos_token": False, "padding_side": "left", "model_max_length": 77,
    "chat_template": "{% for each in messages %}{{ each.content }}{% endfor %} b",
}  # fmt: skip
# each class gives TEXT other ids
CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "TokenizerOfNobody")


def make_tokenizer(folder: Path, **words: Any) -> Path:
    """Write a tokenizer that splits words before its merges could cross them, which LlamaTokenizer does not."""
    vocab = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b", "b▁a", "ab", "▁b▁a"]
    merges = [("▁", "b"), ("▁", "a"), ("a", "b"), ("b", "▁a"), ("▁b", "▁a")]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocab)}, merges=merges, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(split=True), decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    (folder / tokenizer.FILE).write_text(json.dumps(WORDS | words, indent=2))
    return folder


def facts(folder: Path) -> dict[str, Any]:
    """Return all that a user of AutoTokenizer sees of a folder's tokenizer."""
    made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return {
        "class": type(made).__name__,
        "ids": made(TEXT).input_ids,
        "bare": made(TEXT, add_special_tokens=False).input_ids,
        "padded": dict(made([TEXT, "a"], padding=True)),
        "talk": made.apply_chat_template(TALK, tokenize=False),
        "special": made.special_tokens_map,
        "words": made.decode(made(TEXT).input_ids),
        **{key: getattr(made, key) for key in ("add_bos_token", "add_eos_token", "padding_side", "model_max_length")},
        "template": made.chat_template,
    }


def upcycled(dense: Path, output: Path) -> Path:
    return upcycle.convert({"experts": 2, "top_k": 1, "target": "upcycled"}, source=dense, output=output, quiet=True)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_an_upcycled_folder_has_the_tokenizer_of_its_dense_model(family: str, tmp_path: Path) -> None:
    dense = make_tokenizer(tiny.make(family, tmp_path / "dense"))
    for name in CLASSES:
        made = make_tokenizer(dense, tokenizer_class=name)
        folder = upcycled(made, tmp_path / name)
        assert facts(folder) == facts(dense), (
            f"AutoTokenizer gives a {family} model another tokenizer than its upcycled folder; look at CLASSES in "
            "upcycle/arch/tokenizer.py"
        )
        before, after = ((each / tokenizer.FILE).read_text() for each in (dense, folder))
        taken = json.loads(after)["tokenizer_class"]
        assert after == before.replace(name, taken)  # nothing else has changed
        assert family in tokenizer.CLASSES or taken == name
        assert (folder / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()


def test_the_classes_of_this_test_give_other_ids(tmp_path: Path) -> None:
    dense, found = tiny.make("llama", tmp_path / "dense"), []
    for name in CLASSES:
        found.append(facts(make_tokenizer(dense, tokenizer_class=name))["ids"])
    llama, llama_too, plain, qwen, plain_too = found
    assert llama == llama_too and plain == plain_too and llama != plain != qwen != llama


@pytest.mark.parametrize("family", ["llama", *tokenizer.CLASSES])
def test_a_class_that_is_code_stays(family: str, tmp_path: Path) -> None:
    """AutoTokenizer takes the named class of a folder whose code may not run, whatever the family."""
    dense = tiny.make(family, tmp_path / "dense")
    make_tokenizer(dense, tokenizer_class="LlamaTokenizer", auto_map={"AutoTokenizer": ["code.Own", None]})
    folder = upcycled(dense, tmp_path / "moe")
    assert facts(folder) == facts(dense)
    assert (folder / tokenizer.FILE).read_bytes() == (dense / tokenizer.FILE).read_bytes()


def test_verify_and_a_second_conversion_accept_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = make_tokenizer(tiny.make("mistral", tmp_path / "dense"), tokenizer_class="LlamaTokenizer")
    folder = upcycled(dense, tmp_path / "moe")
    assert upcycled(dense, folder) == folder  # it is complete, and current
    assert main(["verify", str(dense), str(folder), "tokens=64"]) == 0
    assert main(["inspect", str(folder), "check=true"]) == 0
    capsys.readouterr()
    (folder / tokenizer.FILE).write_bytes((dense / tokenizer.FILE).read_bytes())
    assert main(["verify", str(dense), str(folder), "tokens=64"]) == 1
    assert f"{tokenizer.FILE} differs from the copy" in capsys.readouterr().out


def test_another_target_keeps_the_file(tmp_path: Path) -> None:
    dense = make_tokenizer(tiny.make("mistral", tmp_path / "dense"), tokenizer_class="LlamaTokenizer")
    words = {"experts": 2, "top_k": 1, "target": "mixtral"}
    folder = upcycle.convert(words, source=dense, output=tmp_path / "moe", quiet=True)
    assert (folder / tokenizer.FILE).read_bytes() == (dense / tokenizer.FILE).read_bytes()


def test_every_command_that_writes_an_upcycled_folder_writes_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convert, train, export (of a run without its dense model), train again and quantize."""
    dense = test_data.make_tokenizer(tiny.make("mistral", tmp_path / "dense", vocab_size=400), bos=False)
    (dense / tokenizer.FILE).write_text('{ "tokenizer_class":"LlamaTokenizer", "eos_token":"<eos>"\n}')
    want = b'{ "tokenizer_class":"PreTrainedTokenizerFast", "eos_token":"<eos>"\n}'
    source = test_data.jsonl(tmp_path / "data.jsonl", test_data.texts(40))
    assert main(["prepare", str(tmp_path / "data"), f"tokenizer={dense}", f"sources=[{source}]"]) == 0
    words = [
        f"data.train=[{tmp_path / 'data'}]", "data.sequence=24", "batch=2", "micro_batch=2", "steps=1", "device=cpu",
        "schedule.warmup=0", "model.dtype=float32",
    ]  # fmt: skip

    def made(name: str, *command: str) -> Path:
        assert main([*command]) == 0, command
        return tmp_path / name

    model = json.dumps({"source": str(dense), "experts": 2, "top_k": 1, "target": "upcycled"})
    run, trained = tmp_path / "run", tmp_path / "trained"
    folders = [
        upcycled(dense, tmp_path / "converted"),
        made("trained", "train", *words, f"model.upcycle={model}", f"output={run}", f"export={trained}"),
    ]
    dense.rename(tmp_path / "elsewhere")
    folders += [
        run / "origin",
        made("exported", "export", str(run), str(tmp_path / "exported")),
        made("again", "train", *words, f"model.source={trained}", f"output={run}-2", f"export={tmp_path / 'again'}"),
    ]
    monkeypatch.setattr(quantize, "compressed", test_quantize.halved)
    monkeypatch.setattr(quantize, "need_llmcompressor", lambda: None)
    folders.append(made("fp8", "quantize", str(trained), f"output={tmp_path / 'fp8'}", "method=fp8"))
    assert {folder.name: (folder / tokenizer.FILE).read_bytes() for folder in folders} == {
        folder.name: want for folder in folders
    }
