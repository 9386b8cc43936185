"""`upcycle chat` says what transformers' generate says, keeps a conversation, and runs no code that it was not told to."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import chat
from evaluation.chat import ChatConfig, Talk, read_config
from tests.parity import asked
from tests.unit.training.test_data import cached
from upcycle.__main__ import main

ROOT = Path(__file__).parents[3]
MADE = {
    "mixtral": ["target=mixtral", "experts=4", "top_k=2", "method.name=drop", "router.init.std=0.3"],
    "upcycled": ["target=upcycled", "experts=8", "granularity=2", "top_k=2", "method.name=virtual_group"],
}
TEMPLATE = (
    asked.END + "{% for m in messages %}{{ m.role }} says {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant says {% endif %}"
)
WORDS = ("device=cpu", "tokens=12")
PROMPT = "The cat: is it {here} # or ${there}? It"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    asked.make(folder / "llama")
    for name, words in MADE.items():
        assert main(["convert", f"source={folder / 'llama'}", f"output={folder / name}", *words]) == 0
    shutil.copytree(folder / "llama", folder / "talker")
    (folder / "talker" / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_file(
        str(folder / "talker" / "tokenizer.json")
    )  # puts a token first, as the template does
    first = processors.TemplateProcessing(single=f"{asked.END} $A", special_tokens=[(asked.END, 0)])
    tokenizer.post_processor = first
    tokenizer.save(str(folder / "talker" / "tokenizer.json"))
    sampling = {"do_sample": True, "temperature": 5.0, "top_k": 50, "eos_token_id": 0}
    (folder / "talker" / "generation_config.json").write_text(json.dumps(sampling))
    return folder


def generated(folder: Path, said: str, tokens: int = 12, **options: Any) -> str:
    """Return the text that transformers' own generate gives, on the folder alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    inputs = tokenizer(said, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


# ---- answers


@pytest.mark.parametrize("name", ["llama", *MADE])
def test_greedy_answers_are_those_of_generate(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = generated(place / name, PROMPT)
    assert len(wanted) > 5
    for more in ([], ["temperature=0"]):
        capsys.readouterr()
        assert main(["chat", str(place / name), f"prompt={PROMPT}", *WORDS, *more]) == 0
        said = capsys.readouterr()
        assert said.out == wanted + "\n"
        assert said.err.startswith(f"{place / name}: {name}, ") and said.err.count("\n") == 1
        assert "float32 on cpu, no chat template, so it continues what you write" in said.err


def test_a_conversation_is_rendered_by_the_chat_template(place: Path) -> None:
    talk, said = Talk(ChatConfig(str(place / "talker"), system="Be kind.", tokens=8, temperature=0, device="cpu")), ""
    begin = "system says Be kind.\n"
    for _ in range(2):  # the second time after a reset
        whole = begin
        for line in ("Where is the cat?", "And the dog?"):
            whole += f"user says {line}\n"
            said = talk.answer(line)
            assert said and said == generated(place / "talker", whole + "assistant says ", 8)
            whole += f"assistant says {said}\n"
        talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be kind."}]
    assert talk.encode(talk.messages)["input_ids"][0].tolist().count(0) == 1  # the template's own first token alone


def test_without_a_template_the_text_goes_on(place: Path) -> None:
    talk = Talk(ChatConfig(str(place / "mixtral"), tokens=6, device="cpu"))
    first = talk.answer("the cat")
    assert talk.answer("the dog") == generated(place / "mixtral", f"the cat{first}\nthe dog", 6)


def test_draws_follow_the_folder_the_keys_and_the_seed(place: Path) -> None:
    def said(**keys: Any) -> str:
        return Talk(ChatConfig(str(place / "talker"), device="cpu", tokens=20, **keys)).answer("the cat")

    greedy = said(temperature=0)
    assert said(seed=1) == said(seed=1) != said(seed=2)  # generation_config.json draws
    assert greedy not in (said(seed=1), said(seed=2)) and said(seed=1, top_p=1e-6) == greedy
    assert said(seed=1, temperature=1e-4) == greedy


def test_a_question_in_a_pipe_is_answered(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(["chat", str(place / "llama"), *WORDS]) == 0
    assert capsys.readouterr().out == generated(place / "llama", PROMPT) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", str(place / "llama"), *WORDS]) == 2
    assert 'prompt is empty and so is standard input; write prompt="..."' in capsys.readouterr().err


def test_on_a_terminal_it_answers_line_after_line(place: Path) -> None:
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "upcycle", "chat", str(place / "llama"), *WORDS]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, close_fds=True)
    os.close(its)
    shown = ""

    def until(mark: str, times: int) -> None:
        nonlocal shown
        while shown.count(mark) < times:
            shown += os.read(ours, 4096).decode(errors="replace").replace("\r\n", "\n")

    try:
        for number, line in enumerate(("the cat", "/reset", "the cat"), 1):
            until("> ", number)
            os.write(ours, f"{line}\n".encode())
        until("> ", 4)
        os.write(ours, b"\x04")  # Ctrl-D
        assert child.wait() == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    answer = generated(place / "llama", "the cat")
    assert "/reset starts over, Ctrl-D leaves\n" in shown and shown.count(answer) == 2


def test_ctrl_c_ends_an_answer_and_then_the_conversation(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, real = Talk(ChatConfig(str(place / "llama"), tokens=40, device="cpu")), chat.Printer.put
    lines: list[str] = ["the cat"]

    def typed(_: str) -> str:
        if lines:
            return lines.pop()
        raise KeyboardInterrupt

    def put(printer: chat.Printer, value: Any) -> None:
        real(printer, value)
        if len(printer.said) == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(chat.Printer, "put", put)
    chat.converse(talk)
    kept = talk.messages[1]["content"]
    assert kept and capsys.readouterr().out == f"{kept}\n\n"
    assert generated(place / "llama", "the cat", 40).startswith(kept)
    with pytest.raises(KeyboardInterrupt):  # which ends a command that answers once
        talk.answer("the dog")


def test_what_is_longer_than_the_context_is_a_sentence_and_forgotten(place: Path) -> None:
    talk = Talk(ChatConfig(str(place / "llama"), tokens=10_000, device="cpu"))
    with pytest.raises(
        ValueError, match=r"tokens with the conversation so far, and the model's context is \d+; write less"
    ):
        talk.answer("the cat " * 500)
    assert talk.messages == [] and talk.answer("the cat")  # and no more tokens are asked for than there is room


def test_text_that_commands_a_terminal_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    chat.Printer(None).on_finalized_text("a\x1b]0;b\x07\x9b31m\n\tc \u200d\u05d0", stream_end=True)
    assert capsys.readouterr().out == "a]0;b31m\n\tc \u200d\u05d0\n"


# ---- from a name to a model


def test_code_of_a_folder_runs_only_where_it_is_ours_or_trusted(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ran = shutil.copytree(place / "upcycled", tmp_path / "moe"), tmp_path / "ran"
    file = folder / "modeling_upcycled.py"
    file.write_text(f"{file.read_text()}\nopen({str(ran)!r}, 'w').close()\n")
    words = ["chat", str(folder), "prompt=the cat", *WORDS]
    assert main(words) == 2 and not ran.exists()
    assert (
        "modeling_upcycled.py is not the file that this version of upcycle ships; read the code"
        in capsys.readouterr().err
    )
    file.unlink()
    assert main(words) == 2 and "write trust_remote_code=true to run it" in capsys.readouterr().err
    shutil.copy(place / "upcycled" / file.name, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "another"}))
    assert main(words) == 2 and "which only the folder's own code can load" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(config))
    file.write_text(f"{file.read_text()}\nopen({str(ran)!r}, 'w').close()\n")
    assert main([*words, "trust_remote_code=true"]) == 0 and ran.exists()
    assert capsys.readouterr().out == generated(place / "upcycled", "the cat") + "\n"


@pytest.mark.parametrize("name", MADE)
def test_a_hub_id_is_a_folder(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached(place / name, "org/moe", monkeypatch, tmp_path)
    assert main(["chat", "org/moe", "prompt=the cat", *WORDS]) == 0
    assert capsys.readouterr().out == generated(place / name, "the cat") + "\n"


def test_a_run_stands_for_its_export(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    for export in (None, "", str(tmp_path / "gone")):
        (run / "run.json").write_text(json.dumps({"export": export}))
        assert main(["chat", str(run), "prompt=the cat", *WORDS]) == 2
        assert f"write upcycle export {run} FOLDER, then upcycle chat FOLDER" in capsys.readouterr().err
    (run / "run.json").write_text(json.dumps({"export": str(place / "mixtral")}))
    for name in (run, run / "checkpoints" / "step-00000002"):
        assert main(["chat", str(name), "prompt=the cat", *WORDS]) == 0
        said = capsys.readouterr()
        assert said.out == generated(place / "mixtral", "the cat") + "\n"
        assert f"{name} (its {place / 'mixtral'}): mixtral" in said.err


def test_a_model_that_is_not_whole_is_a_sentence(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would fill in random numbers."""
    folder = shutil.copytree(place / "llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert main(["chat", str(folder), "prompt=the cat", *WORDS]) == 2
    assert "lacks 1 tensors of its model, the first is 'model.layers.1.mlp.up_proj.weight'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "write MODEL [key=value ...]"),
        (["{llama}", "and"], "write MODEL [key=value ...]"),
        (["{llama}", "nproc=2"], "chat runs in one process; leave nproc out"),
        (["{llama}", "temprature=0"], "did you mean 'temperature'"),
        (["{llama}", "temperature=-1"], "temperature is -1.0; it must be a number of at least 0"),
        (["{llama}", "tokens=0"], "tokens is 0; it must be at least 1"),
        (["{llama}", "dtype=int8"], "dtype is 'int8'; it must be one of"),
        (["{llama}", "device=gpu"], "device is 'gpu'; write device=cpu, or device=cuda"),
        (["{llama}", "system=Be kind."], "has no chat template, and system= needs one"),
        (["nowhere"], "'nowhere' is not a folder or a hub id"),
        (["nowhere"], f"; name one (a relative name starts in {Path.cwd()}), or download"),
    ],
)
def test_a_mistake_is_a_sentence(words: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *(word.format(llama=place / "llama") for word in words), "prompt=x"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_prompt_is_taken_as_it_stands() -> None:
    config = read_config(["./moe", f"prompt={PROMPT}", "system=[1, 2]", "tokens=3"])
    assert (config.model, config.prompt, config.system, config.tokens) == ("./moe", PROMPT, "[1, 2]", 3)
