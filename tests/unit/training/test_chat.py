"""Conversations to tokens and labels: as transformers' template and assistant mask say, and TRL, which trains on them.

TRL is not installed here. Its published rule (SFTTrainer, assistant_only_loss, with the `*_training.jinja` templates that
carry {% generation %} marks): ids and mask of apply_chat_template(return_assistant_tokens_mask=True); labels are the ids
where the mask is 1 and -100 elsewhere, shifted by one in the model; of packed rows the first label of each part is -100.
`by_hand` says the same without jinja and without the tokenizer's own account of which token covers what.
"""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.parity import tiny
from tests.unit.training.test_data import cached, make_tokenizer, texts
from training.checkpoint import layout
from training.cli.prepare import main
from training.config.reading import read_config
from training.config.schema import TrainConfig
from training.data.batch import IGNORE
from training.data.mixture import Mixture, Talks, Validation
from training.data.packing import packed
from training.data.prepare import PrepareConfig, prepare
from training.data.shards import TokenShards, read_meta
from training.model.decoder import Decoder
from training.optim.schedule import schedule
from training.parallel.mesh import ParallelMesh
from training.run.build import learner
from training.run.step import train_step, validate
from upcycle.io import publish

TEMPLATES = Path(__file__).parent / "chat_templates"
NAMES = ("chatml", "llama3", "qwen3", "smollm2")
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip
MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
Messages = list[dict[str, str]]
CPU = torch.device("cpu")


# ---- tokenizers with templates


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def chat_tokenizer(folder: Path, *, trims: bool = False) -> Path:
    make_tokenizer(folder, bos=False)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # with tokens of several ends of lines, which lie across the border between a prompt and its answer
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([*texts(50), "a\n\nb\n\n\nc \n" * 200], trainer)
    made.add_special_tokens(["<eos>", *SPECIAL])
    made.add_tokens(["<think>", "</think>"])
    if trims:
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    made.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<|begin_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def with_template(plain: Path, folder: Path, template: str) -> Path:
    shutil.copytree(plain, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def template(name: str, *, marked: bool = True) -> str:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return source if marked else MARKS.sub("", source)


# ---- what it should be


def pieces(name: str, messages: Messages) -> list[tuple[str, bool]]:
    """The conversation's text in parts, and whether each is the assistant's: the four formats, without jinja."""
    found: list[tuple[str, bool]] = []
    last = max((i for i, said in enumerate(messages) if said["role"] == "user"), default=-1)
    if name == "llama3":
        found.append(("<|begin_of_text|>", False))
    if name == "smollm2" and messages[0]["role"] != "system":
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        found.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for i, said in enumerate(messages):
        role, content = said["role"], said["content"]
        if name == "qwen3" and role == "assistant":
            thought = ""
            if "</think>" in content:
                thought = content.split("</think>")[0].split("<think>")[-1].strip("\n")
                content = content.split("</think>")[-1].lstrip("\n")
            if i > last and (i == len(messages) - 1 or thought):
                stripped = content.lstrip("\n")
                content = f"<think>\n{thought}\n</think>\n\n{stripped}"
        head, body = f"<|im_start|>{role}\n", f"{content}<|im_end|>\n"
        if name == "llama3":
            head, body = f"<|start_header_id|>{role}<|end_header_id|>\n\n", f"{content.strip()}<|eot_id|>"
        found += [(head, False), (body, role == "assistant")]
    return found


def by_hand(tokenizer: Tokenizer, parts: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Ids, and which tokens have a byte of a part that is learned; a token's bytes are counted, not asked for."""
    ids = tokenizer.encode("".join(text for text, _ in parts), add_special_tokens=False).ids
    wanted = np.concatenate([np.full(len(text.encode()), learned) for text, learned in parts])
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    sizes = [len(t) if set(t) <= letters else len(t.encode()) for t in map(tokenizer.id_to_token, ids)]
    assert sum(sizes) == len(wanted), "the tokenizer changes the text"
    ends = np.cumsum(sizes)
    return ids, [int(wanted[end - size : end].any()) for end, size in zip(ends, sizes, strict=True)]


def conversations(count: int, seed: int = 0) -> list[Messages]:
    chance = random.Random(seed)
    known = iter(texts(12 * count, seed))

    def said() -> str:
        extra = chance.choice(["", "", "", "\n", " ", "\n\n", " 雨☂", "<|im_end|>", "🌍"])
        return chance.choice(["", extra]) + next(known)[: chance.randint(0, 90)] + extra

    def answer() -> str:
        return chance.choice(["", "", f"<think>\n{said()}\n</think>\n\n"]) + said()

    found = []
    for _ in range(count):
        talk = [{"role": "system", "content": said()}] if chance.random() < 0.3 else []
        for _ in range(chance.randint(1, 3)):
            talk += [{"role": "user", "content": said()}, {"role": "assistant", "content": answer()}]
        found.append(talk[:-1] if chance.random() < 0.1 else talk)
    return found


def rows(path: Path, values: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def sharegpt(talk: Messages) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {"conversations": [{"from": names[said["role"]], "value": said["content"]} for said in talk]}


def run(output: Path, tokenizer: Path, *sources: Path, sequence: int = 4096, **more: Any) -> TokenShards:
    words = tuple(map(str, sources))
    return TokenShards.open(
        prepare(PrepareConfig(str(output), str(tokenizer), words, kind="chat", sequence=sequence, **more), quiet=True)
    )


def stored(shards: TokenShards) -> list[tuple[list[int], list[int]]]:
    found = []
    for shard in shards.shards:
        assert shard.scored is not None
        for a, b in zip(shard.starts[:-1].tolist(), shard.starts[1:].tolist(), strict=True):
            found.append((shard.tokens[a:b].tolist(), shard.scored[a:b].tolist()))
    return found


def cut(found: tuple[list[int], list[int]], sequence: int = 4096) -> tuple[list[int], list[int]]:
    ids, scored = found
    return ids[:sequence], [0, *scored[1:sequence]]


# ---- masks


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_labels_are_those_of_transformers_and_by_hand(name: str, plain: Path, tmp_path: Path) -> None:
    folder, talks = with_template(plain, tmp_path / "tokenizer", template(name)), conversations(500)
    values = [{"messages": talk} if i % 2 else sharegpt(talk) for i, talk in enumerate(talks)]
    shards = run(tmp_path / "out", folder, rows(tmp_path / "a.jsonl", values), shard_tokens=9000)
    shards.verify()
    assert len(shards.shards) > 3
    found, meta = stored(shards), read_meta(shards.folder)
    raw, theirs = Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    wanted = [by_hand(raw, pieces(name, talk)) for talk in talks]
    masked = [
        theirs.apply_chat_template(t, tokenize=True, return_dict=True, return_assistant_tokens_mask=True) for t in talks
    ]
    assert wanted == [(each["input_ids"], each["assistant_masks"]) for each in masked]
    left = [each for each in wanted if any(each[1])]
    assert found == left and 5 < len(talks) - len(left) == meta["silent"]
    assert meta["scored"] == sum(sum(scored) for _, scored in left) and not meta["refused"] and not meta["truncated"]
    said = ["".join(text for text, learned in pieces(name, talk) if learned) for talk in talks]
    assert shards.bytes == sum(len(text.encode()) for text in said)
    # twins: another template, and a mask that is a token off
    other = [by_hand(raw, pieces(NAMES[NAMES.index(name) - 1], talk)) for talk in talks]
    assert [each for each in other if any(each[1])] != left
    assert any([0, *scored[:-1]] != scored for _, scored in left)


@pytest.mark.parametrize("name", ["chatml", "llama3", "smollm2"])
def test_without_marks_the_answer_is_found_by_rendering(name: str, plain: Path, tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", [{"messages": talk} for talk in conversations(60)])
    marked, bare = (
        run(tmp_path / str(on), with_template(plain, tmp_path / f"t{on}", template(name, marked=on)), source)
        for on in (True, False)
    )
    assert stored(marked) == stored(bare) and marked.bytes == bare.bytes
    assert digest(marked.folder, "tokens") == digest(bare.folder, "tokens")


def digest(folder: Path, kind: str) -> list[str]:
    return [row[kind]["sha256"] for row in read_meta(folder)["shards"]]


def test_without_marks_what_cannot_be_known_is_refused(plain: Path, tmp_path: Path) -> None:
    """Qwen 3 shows an answer with its thought while it is the last one, and without it once another question follows."""
    folder = with_template(plain, tmp_path / "tokenizer", template("qwen3", marked=False))
    ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}
    once = run(tmp_path / "one", folder, rows(tmp_path / "one.jsonl", [{"messages": [ask, answer]}]))
    marked = with_template(plain, tmp_path / "marked", template("qwen3"))
    assert stored(once) == stored(run(tmp_path / "same", marked, tmp_path / "one.jsonl"))
    twice = rows(tmp_path / "two.jsonl", [{"messages": [ask, answer]}, {"messages": [ask, answer, ask, answer]}])
    with pytest.raises(
        ValueError, match=r"line 2 of .*two\.jsonl: the chat template of .* renders a turn otherwise once another"
    ):
        run(tmp_path / "two", folder, twice)
    assert run(tmp_path / "all", folder, twice, loss="all").documents == 2
    assert run(tmp_path / "marks", marked, twice).documents == 2
    # and with marks the same is so of a prompt in which there is an answer already
    given = rows(tmp_path / "given.jsonl", [{"prompt": [ask, answer, ask], "completion": [answer]}])
    assert sum(stored(run(tmp_path / "given", marked, given))[0][1]) < sum(
        stored(run(tmp_path / "x", marked, twice))[1][1]
    )
    odd = rows(tmp_path / "odd.jsonl", [{"prompt": [ask, {**answer, "content": "c"}], "completion": [answer]}])
    with pytest.raises(ValueError, match=r"line 1 of .*odd\.jsonl: .* write it as messages, or write loss=all"):
        run(tmp_path / "odd", marked, odd)


def test_a_tokenizer_that_leaves_spaces_out_of_its_offsets(tmp_path: Path) -> None:
    """transformers then finds no token at the answer's first space, and scores nothing from there on; we do."""
    (tmp_path / "plain").mkdir()
    folder = with_template(chat_tokenizer(tmp_path / "plain", trims=True), tmp_path / "tokenizer", template("chatml"))
    talks = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": " \n b\n"}] * 2]
    shards = run(tmp_path / "out", folder, rows(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks]))
    wanted = by_hand(Tokenizer.from_file(str(folder / "tokenizer.json")), pieces("chatml", talks[0]))
    assert stored(shards) == [cut(wanted)]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        talks[0], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert theirs["input_ids"] == wanted[0] and theirs["assistant_masks"] != wanted[1]


# ---- what rows may say


def test_formats_of_rows(plain: Path, tmp_path: Path) -> None:
    folder = with_template(plain, tmp_path / "tokenizer", template("chatml"))
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ask, answer = {"role": "user", "content": "how"}, {"role": "assistant", "content": "so"}
    talk = [ask, answer, ask, answer]
    same: list[dict[str, Any]] = [
        {"messages": talk},
        {"messages": talk, "text": "other", "tools": None},
        sharegpt(talk),
        {"dialogue": talk},
    ]
    wanted = cut(by_hand(raw, pieces("chatml", talk)))
    sources = [rows(tmp_path / "same.jsonl", same[:3]), f"{rows(tmp_path / 'named.jsonl', same[3:])}#dialogue"]
    assert stored(run(tmp_path / "same", folder, *map(Path, sources))) == [wanted] * 4
    asked: list[dict[str, Any]] = [
        {"prompt": "how", "completion": "so"},
        {"prompt": [*talk, ask], "completion": [answer]},
        {"prompt": talk, "completion": "so"},
    ]
    parts = [pieces("chatml", [ask, answer]), pieces("chatml", [*talk, ask, answer]), pieces("chatml", [*talk, answer])]
    only = [[(text, learned and i == len(part) - 1) for i, (text, learned) in enumerate(part)] for part in parts]
    got = run(tmp_path / "asked", folder, rows(tmp_path / "asked.jsonl", asked))
    assert stored(got) == [cut(by_hand(raw, part)) for part in only]
    unmarked = with_template(plain, tmp_path / "bare", template("chatml", marked=False))
    assert stored(run(tmp_path / "asked2", unmarked, tmp_path / "asked.jsonl")) == stored(got)
    whole = run(tmp_path / "every", folder, tmp_path / "asked.jsonl", loss="all")
    assert all(scored == [0] + [1] * (len(ids) - 1) for ids, scored in stored(whole))
    assert whole.bytes == sum(len(raw.decode(ids[1:], skip_special_tokens=False).encode()) for ids, _ in stored(whole))


def test_parquet_and_the_hub(plain: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    folder = with_template(plain, tmp_path / "tokenizer", template("smollm2"))
    talks = conversations(20)
    wanted = stored(run(tmp_path / "want", folder, rows(tmp_path / "a.jsonl", [{"messages": t} for t in talks])))
    (tmp_path / "set").mkdir()
    columns = {"n": list(range(20)), "messages": talks, "source": ["x"] * 20}
    parquet.write_table(pyarrow.table(columns), tmp_path / "set" / "train.parquet")
    assert stored(run(tmp_path / "parquet", folder, tmp_path / "set")) == wanted
    config = PrepareConfig(str(tmp_path / "hub"), str(folder), (f"hf:{tmp_path / 'set'}",), kind="chat")
    assert stored(TokenShards.open(prepare(config, quiet=True))) == wanted


ASK = {"role": "user", "content": "a"}
BAD: list[tuple[Any, str]] = [
    ([1], r"line 1 of .*a\.jsonl is \[1\]; it must have keys"),
    (
        {"text": "x"},
        "has no messages, conversations or prompt with completion, only text; name the conversation's column, FILE#COLUMN",
    ),
    ({"prompt": "x"}, "has no messages"),
    ({"messages": "x"}, r"line 1 of .*, messages, is 'x'; it must be a list of messages"),
    ({"messages": []}, r"is \[\]; it must be a list"),
    ({"messages": ["x"]}, r"message 1 is 'x'; it must be \{role, content\} or \{from, value\}"),
    ({"messages": [{"content": "x"}]}, "message 1 has no role"),
    ({"messages": [ASK, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]}, "message 2 has content"),
    ({"messages": [{"role": "assistant"}]}, "message 1 has content None; it must be text"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "message 1 is from 'alien'; it must be one of human"),
    ({"messages": [ASK], "tools": "x"}, "has tools 'x'; they must be a list"),
]


@pytest.mark.parametrize(("row", "says"), BAD, ids=lambda x: str(x)[:40])
def test_bad_rows_are_a_sentence(row: Any, says: str, plain: Path, tmp_path: Path) -> None:
    folder = with_template(plain, tmp_path / "tokenizer", template("chatml"))
    with pytest.raises(ValueError, match=says):
        run(tmp_path / "out", folder, rows(tmp_path / "a.jsonl", [row]))


def test_bad_requests_are_a_sentence(plain: Path, tmp_path: Path) -> None:
    good = rows(tmp_path / "a.jsonl", [{"messages": [ASK, {"role": "assistant", "content": "b"}]}])
    with pytest.raises(ValueError, match="has no chat template; give that of a chat model"):
        run(tmp_path / "out", plain, good)
    broken = with_template(plain, tmp_path / "broken", "{% for %}")
    with pytest.raises(ValueError, match=r"the chat template of .*broken cannot be read"):
        run(tmp_path / "out", broken, good)
    folder = with_template(plain, tmp_path / "tokenizer", template("chatml"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"a\.txt is plain text; conversations are read from \.jsonl"):
        run(tmp_path / "out", folder, tmp_path / "a.txt")
    silent = rows(tmp_path / "silent.jsonl", [{"messages": [ASK]}])
    with pytest.raises(ValueError, match=r"there is no conversation to learn from in silent\.jsonl"):
        run(tmp_path / "silent", folder, silent)
    for words, says in (
        ({"kind": "chats"}, "kind is 'chats'; it must be one of text, chat"),
        ({"kind": "chat", "loss": "user"}, "loss is 'user'; it must be one of assistant, all"),
        ({"kind": "chat", "sequence": 1}, "sequence is 1; it must be at least 2"),
    ):
        with pytest.raises(ValueError, match=says):
            PrepareConfig("out", str(folder), (str(good),), **words)  # type: ignore[arg-type]


def test_code_of_a_tokenizer_is_not_run_and_templates_are_in_a_sandbox(plain: Path, tmp_path: Path) -> None:
    """What reaches for Python's insides is refused by the sandbox, conversation by conversation."""
    good = rows(tmp_path / "a.jsonl", [{"messages": [ASK, {"role": "assistant", "content": "b"}]}])
    reaching = with_template(plain, tmp_path / "reaching", "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with (
        pytest.warns(UserWarning, match=r"line 1 of .* is left out: the chat template refuses it, access to attribute"),
        pytest.raises(ValueError, match="there is no conversation to learn from"),
    ):
        run(tmp_path / "reach", reaching, good)
    evil, seen = with_template(plain, tmp_path / "evil", template("chatml")), tmp_path / "seen"
    (evil / "evil.py").write_text(f"open({str(seen)!r}, 'w').close()\nclass Evil:\n    pass\n")
    words = json.loads((evil / "tokenizer_config.json").read_text())
    (evil / "tokenizer_config.json").write_text(
        json.dumps({**words, "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}})
    )
    assert run(tmp_path / "fine", evil, good).documents == 1 and not seen.exists()


# ---- rules and counts


LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
WITHOUT_END = {
    "loops in loops": LOOPS,
    "loops in a loop that writes": LOOPS.replace("{% endfor", "{% set b = a %}{% endfor", 1),
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a text that doubles": "{% set a = namespace(b='x' * 99) %}{% for i in range(60) %}{% set a.b = a.b ~ a.b %}{% endfor %}",
    "a text that is long": "{{ 'x' * 10 ** 12 }}",
}  # fmt: skip


@pytest.mark.parametrize("way", WITHOUT_END)
def test_a_template_that_does_not_end_is_stopped(
    way: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upcycle.text.templates.SECONDS", 0.2)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    always = with_template(plain, tmp_path / "always", WITHOUT_END[way])
    later = with_template(
        plain, tmp_path / "later", "{% if messages[0].content == 'go' %}" + WITHOUT_END[way] + "{% endif %}"
    )
    source = rows(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "go"}]}])
    for folder in (always, later):
        with pytest.raises(ValueError, match=r"the chat template of .* (computes|needs) .*; correct it"):
            run(tmp_path / "out", folder, source)
    assert before == (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF))
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_what_is_cut_and_left_out_is_counted(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than the sequence: its end is cut off. Without anything to learn, or refused by the template: left out."""
    strict_roles = "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user begins') }}{% endif %}"
    folder = with_template(plain, tmp_path / "tokenizer", strict_roles + template("chatml"))
    long = [ASK, {"role": "assistant", "content": "harbour " * 30}]
    talks = [
        [ASK, {"role": "assistant", "content": "b"}],
        [ASK],
        [{"role": "assistant", "content": "b"}],
        long,
        [{"role": "user", "content": "boats " * 30}, {"role": "assistant", "content": "all its answer is cut off"}],
        [{"role": "assistant", "content": "c"}],
    ]
    source = rows(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])
    words = [f"tokenizer={folder}", f"sources=[{source}]", "kind=chat", "sequence=40", "shard_tokens=1"]
    with pytest.warns(UserWarning, match="line 3 of .* is left out: the chat template refuses it, the user begins"):
        assert main([str(tmp_path / "out"), *words]) == 0
    assert main([str(tmp_path / "out"), "check=true"]) == 0
    shards, raw = TokenShards.open(tmp_path / "out"), Tokenizer.from_file(str(folder / "tokenizer.json"))
    wanted = [cut(by_hand(raw, pieces("chatml", talk)), 40) for talk in (talks[0], long)]
    assert stored(shards) == wanted and len(wanted[1][0]) == 40
    meta = read_meta(shards.folder)
    assert {key: meta[key] for key in ("documents", "truncated", "silent", "refused")} == {
        "documents": 2, "truncated": 1, "silent": 2, "refused": 2,
    }  # fmt: skip
    learned, total = sum(sum(s) for _, s in wanted), sum(len(ids) for ids, _ in wanted)
    said = f"2 conversations, {total} tokens, of which {learned} are learned ({learned / total:.0%}); 1 truncated after 40 "
    assert said + "tokens; 4 dropped (2 with nothing to learn, 2 that the template refuses)" in capsys.readouterr().out
    text = raw.decode(wanted[1][0], skip_special_tokens=False)
    assert shards.bytes == len("b<|im_end|>\n") + len(text.partition("assistant\n")[2])


def test_the_template_of_a_hub_id_is_a_folders(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_template(plain, tmp_path / "tokenizer", template("chatml"))
    cached(folder, "org/tokenizer", monkeypatch, tmp_path / "cache")
    source = rows(tmp_path / "a.jsonl", [{"messages": talk} for talk in conversations(20)])
    words = ["tokenizer=org/tokenizer", f"sources=[{source}]", "kind=chat"]
    assert main([str(tmp_path / "there"), *words]) == 0
    assert stored(TokenShards.open(tmp_path / "there")) == stored(run(tmp_path / "here", folder, source))


def test_killed_between_parts_it_ends_with_the_same_bytes(plain: Path, tmp_path: Path) -> None:
    folder = with_template(plain, tmp_path / "tokenizer", template("llama3"))
    source = rows(tmp_path / "a.jsonl", [{"messages": talk} for talk in [[ASK], *conversations(60), [ASK]]])
    whole = run(tmp_path / "whole", folder, source, shard_tokens=700).folder
    from training.data import encoding
    from training.data import prepare as module

    real, count = module.write_part, [0]

    def dies(*inputs: Any, **more: Any) -> Any:
        count[0] += 1
        if count[0] % 3 == 0:
            raise KeyboardInterrupt
        return real(*inputs, **more)

    for _ in range(30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "write_part", dies)
            patch.setattr(encoding, "TALKS", 7)  # that are tokenised together, which changes nothing
            try:
                parts = run(tmp_path / "parts", folder, source, shard_tokens=700).folder
                break
            except KeyboardInterrupt:
                continue
    assert count[0] > 6
    assert {p.name: p.read_bytes() for p in whole.iterdir()} == {p.name: p.read_bytes() for p in parts.iterdir()}


def test_damaged_folders_are_a_sentence(plain: Path, tmp_path: Path) -> None:
    folder = with_template(plain, tmp_path / "tokenizer", template("chatml"))
    out = run(tmp_path / "out", folder, rows(tmp_path / "a.jsonl", [{"messages": t} for t in conversations(9)])).folder
    scored, meta = out / "scored-00000-00000.bin", json.loads((out / "meta.json").read_text())
    kept = scored.read_bytes()

    def refused(says: str, *, whole: bool = False, **changes: Any) -> None:
        (out / "meta.json").write_bytes(publish.signed({**meta, **changes}))
        with pytest.raises(ValueError, match=says):
            shards = TokenShards.open(out)
            if whole:
                shards.verify()
        scored.write_bytes(kept)
        (out / "meta.json").write_text(json.dumps(meta))
        TokenShards.open(out).verify()

    scored.write_bytes(kept[:-1] + b"\2")
    refused("scored-00000-00000.bin has changed", whole=True)
    scored.write_bytes(b"\1" + kept[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.data.shards.check_file", lambda path, sha: None)
        refused("scored-00000-00000.bin scores a first token", whole=True)
        scored.write_bytes(kept[:-1] + b"\2")
        refused("scored-00000-00000.bin scores a first token, or holds other values than 0 and 1", whole=True)
    scored.write_bytes(kept[:-1])
    refused("scored-00000-00000.bin has .* bytes and should have")
    scored.write_bytes(kept[:-1])
    rows_ = [{**meta["shards"][0], "scored": {**meta["shards"][0]["scored"], "bytes": len(kept) - 1}}]
    refused(r"scored-00000-00000.bin covers \d+ tokens and tokens-00000-00000.bin has", shards=rows_)
    refused("lacks a description of its token shards", chat=None)
    refused("lacks a description of its token shards", silent=-1)
    refused("lacks a description of its token shards", shards=[{k: v for k, v in rows_[0].items() if k != "scored"}])
    # what reads text never learns what should only be read
    scored.unlink()
    refused("scored-00000-00000.bin is missing")


# ---- rows of whole conversations


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 50))
def test_packed_rows_are_whole_and_few(sizes: list[int], room: int) -> None:
    order, begins = packed(np.array(sizes), room)
    assert sorted(order.tolist()) == list(range(len(sizes))) and begins[0] == 0 and begins[-1] == len(sizes)
    filled = [sum(sizes[i] for i in order[a:b]) for a, b in pairwise(begins)]
    assert all(0 < each <= room for each in filled)
    assert sum(1 for each in filled if 2 * each <= room) <= 1  # or the two would have been one


def test_many_conversations_fill_their_rows() -> None:
    sizes = np.random.default_rng(0).integers(10, 200, 2000)
    _, begins = packed(sizes, 512)
    assert len(begins) - 1 <= 1.01 * sizes.sum() / 512


def test_rows_hold_what_was_stored_and_masks_keep_it_apart(plain: Path, tmp_path: Path) -> None:
    folder = with_template(plain, tmp_path / "tokenizer", template("llama3"))
    source = rows(tmp_path / "a.jsonl", [{"messages": talk} for talk in conversations(50)])
    shards = run(tmp_path / "out", folder, source, sequence=90, shard_tokens=900)
    known = {tuple(ids): scored for ids, scored in stored(shards)}
    talks = Talks(shards, 300, True, "a", 0)
    seen = []
    for n in range(2 * talks.count):
        tokens, labels, documents, positions = talks.row(n)
        for number in range(documents.max() + 1):
            part = documents == number
            assert (positions[part] == np.arange(part.sum())).all() and (np.diff(np.flatnonzero(part)) == 1).all()
            ids = tuple(tokens[part].tolist())
            if ids not in known:  # what is left of the row
                assert set(ids) == {shards.start} and (labels[part] == IGNORE).all() and number == documents.max()
                continue
            scored = known[ids]
            wanted = [id if s else IGNORE for id, s in zip(ids[1:], scored[1:], strict=True)]
            assert labels[part].tolist() == [*wanted, IGNORE]
            seen.append(ids)
    assert sorted(seen) == sorted([*known, *known]) and shards.tokens / talks.count > 250
    orders = [[talks.row(e * talks.count + n)[0].tolist() for n in range(talks.count)] for e in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    together = Talks(shards, 300, False).row(0)
    assert (together[3] == np.arange(300))[: int((together[1] >= 0).nonzero()[0].max())].all()
    with pytest.raises(ValueError, match=r"a conversation of 90 tokens and data.sequence is 89; prepare it with seq"):
        Talks(shards, 89)
    head = shards.head(200)
    (batch,) = Validation("head", head, 90 * head.documents).batches(1)
    assert head.documents < shards.documents
    assert int(batch.scored.sum()) == sum(sum(scored) for _, scored in stored(shards)[: head.documents])


# ---- training


@pytest.fixture(scope="module")
def place(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    with_template(plain, folder / "tokenizer", template("smollm2"))
    tiny.make("llama", folder / "dense", vocab_size=420)
    for name, seed in (("data", 0), ("valid", 1)):
        source = rows(folder / f"{name}.jsonl", [{"messages": talk} for talk in conversations(60, seed)])
        run(folder / name, folder / "tokenizer", source, sequence=112)
    return folder


def config(place: Path, *words: str) -> TrainConfig:
    data = [f"data.train=[{place / 'data'}]", f"data.valid=[{place / 'valid'}]", "data.sequence=112"]
    more = ["steps=30", "batch=2", "micro_batch=1", "schedule.warmup=3", "schedule.peak=1e-3", "model.dtype=float64"]
    return read_config("", [f"model.source={place / 'dense'}", *data, *more, *words])


def talks_of(batch: Any, known: dict[tuple[int, ...], list[int]]) -> list[tuple[list[int], list[int]]]:
    """The conversations in a batch, each with the mask that transformers gives it."""
    found = []
    for tokens, documents in zip(batch.tokens, batch.documents, strict=True):
        for number in range(int(documents.max()) + 1):
            ids = tokens[documents == number].tolist()
            found += [(ids, known[tuple(ids)])] if tuple(ids) in known else []
    return found


def test_losses_are_those_of_a_plain_loop(place: Path) -> None:
    """30 steps, packed and in two micro-batches, against transformers, one conversation at a time, with torch's AdamW."""
    words = config(place)
    mesh, rate = ParallelMesh(words.mesh, device_type="cpu"), schedule(words.schedule, words.steps)
    with layout.opened(place / "dense") as origin:
        model = layout.load(Decoder(origin.spec, experts="reference", compute=torch.float64).double(), origin)
    run_ = learner(words, [model], mesh, CPU)
    samples = Mixture([("data", TokenShards.open(place / "data"), 1.0)], 112, words.data.seed)

    theirs = AutoModelForCausalLM.from_pretrained(place / "dense", dtype=torch.float64, attn_implementation="eager")
    groups = [
        {"params": [p for p in theirs.parameters() if (p.ndim > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    tokenizer = AutoTokenizer.from_pretrained(place / "tokenizer")
    render = partial(tokenizer.apply_chat_template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    rendered = [render(talk, truncation=True, max_length=112) for talk in conversations(60)]
    known = {tuple(each["input_ids"]): each["assistant_masks"] for each in rendered}

    ours, wanted, equal, valid = [], [], [], Validation("valid", TokenShards.open(place / "valid"), 112)
    for step in range(words.steps):
        batches = [samples.batch(2 * step, 1), samples.batch(2 * step + 1, 1)]
        ours.append(float(train_step(run_, batches, rate(step))["loss"]))
        parts = []  # of each micro-batch: the sum over what is learned, and how many tokens that are
        for batch in batches:
            nats, count = torch.zeros((), dtype=torch.float64), 0
            for ids, mask in talks_of(batch, known):
                labels = torch.tensor([id if on else -100 for id, on in zip(ids, mask, strict=True)][1:])
                logits = theirs(torch.tensor([ids])).logits[0, :-1]
                nats = nats + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                count += int((labels >= 0).sum())
            parts.append((nats, count))
        loss = sum(nats for nats, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = rate(step)
        adam.step()
        adam.zero_grad()
        wanted.append(loss.item())
        equal.append(sum(nats.item() / count for nats, count in parts) / 2)
    assert ours == pytest.approx(wanted, rel=1e-6)
    assert ours != pytest.approx(equal, rel=1e-4)  # twin: micro-batches that count equally, whatever is learned in them
    assert wanted[-1] < wanted[0] - 0.3, "nothing was learned"
    said = validate(run_, [valid], lambda: None)
    assert said["valid/valid/loss"] == pytest.approx(held_out(theirs, render, place), rel=1e-6)


@torch.no_grad()
def held_out(model: Any, render: Callable[..., Any], place: Path) -> float:
    """Loss a token that the assistant says."""
    nats, count = 0.0, 0
    for talk in conversations(60, 1):
        found = render(talk, truncation=True, max_length=112)
        mask = torch.tensor(found["assistant_masks"][1:]) > 0
        logits = model(torch.tensor([found["input_ids"]])).logits[0, :-1].log_softmax(-1)
        labels = torch.tensor(found["input_ids"][1:])
        nats -= float(logits[range(len(labels)), labels][mask].sum())
        count += int(mask.sum())
    return nats / count
