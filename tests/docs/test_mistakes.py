"""100 typical mistakes: each is answered with one sentence that leads to the fix, and nothing on the disk changes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.parity import tiny
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from upcycle.__main__ import main

# what the user did; the words that were typed; what of the sentence leads to the fix, between two bars
PLAN = [
    ("a typo in the folder", "plan source=./lama", ""),
    ("a file in place of its folder", "plan source=llama/model.safetensors", ""),
    ("an empty folder", "plan source=empty", ""),
    ("config.json was not copied", "plan source=no-config", ""),
    ("only config.json was copied", "plan source=no-weights", ""),
    ("a shard is missing", "plan source=missing-shard", ""),
    ("the download was cut off", "plan source=truncated", ""),
    ("a checkpoint of .bin files", "plan source=pickle", ""),
    ("a folder of GGUF", "plan source=gguf", ""),
    ("a GGUF file", "plan source=gguf/model-q4.gguf", ""),
    ("an MoE in place of a dense model, with copies", "plan source=moe method=drop", ""),
    ("an encoder", "plan source=bert", ""),
    ("adapters of peft", "plan source=adapter", ""),
    ("a quantised checkpoint", "plan source=gptq", ""),
    ("config.json is broken", "plan source=broken-config", ""),
    ("the key of another tool", "plan source=llama num_experts=8", ""),
    ("a typo in a key", "plan source=llama expert=8", ""),
    ("a word for a number", "plan source=llama experts=eight", ""),
    ("no experts at all", "plan source=llama experts=0", ""),
    ("more chosen than there are", "plan source=llama experts=4 top_k=16", ""),
    ("slices that do not divide the FFN", "plan source=llama method=virtual_group experts=4 granularity=5 top_k=5", ""),
    ("top_k is no multiple of the slices", "plan source=llama target=upcycled method=virtual_group granularity=4 top_k=2", ""),
    ("a typo in the method", "plan source=llama method=copies", ""),
    ("a typo in the target", "plan source=llama target=mixtrall", ""),
    ("a typo in the layers", "plan source=llama layers=evry:2", ""),
    ("a layer that is not there", "plan source=llama layers=[0,99]", ""),
    ("a flag", "plan source=llama --experts 8", ""),
    ("spaces around =", "plan source = llama", ""),
    ("a typo in a ready config", "plan llama3-8b-e8t3", ""),
    ("no network", "plan source=meta-llama/Llama-3.1-8B", ""),
    ("a dtype that is none", "plan source=llama dtype=fp8", ""),
    ("a size without a unit", "plan source=llama max_shard=5", ""),
    ("a tab in the YAML", "plan tab.yaml", ""),
    ("= in the YAML", "plan equals.yaml", ""),
    ("a list as YAML", "plan list.yaml", ""),
    ("a config of training", "plan training.yaml", ""),
    ("a typo in the command", "plann source=llama", ""),
    ("the name of another tool's command", "finetune source=llama", ""),
    ("the router's keys in one word", "plan source=llama router=sigmoid", ""),
    ("a key of a method without it", "plan source=llama method.name=drop ratio=0.5", ""),
]
CONVERT = [
    ("no output", "convert source=llama", ""),
    ("the output is the source", "convert source=llama output=llama", ""),
    ("the output is full of other things", "convert source=llama output=notes", ""),
    ("the output is another plan's", "convert source=llama output=moe experts=8", ""),
    ("no source", "convert output=new", ""),
    ("a typo in output", "convert source=llama ouptut=new", ""),
    ("nproc is a word", "convert source=llama output=new nproc=all", ""),
    ("more than the disk holds", "convert source=llama output=new experts=200000 top_k=1", ""),
    ("a path of Windows", r"convert 'source=C:\models\llama' output=new", ""),
    ("a scale that is none", "convert source=llama output=new scale=exactly", ""),
    ("a measured split without text", "convert source=llama output=new granularity=2 method.name=split method.by=activation", ""),
    ("no donors", "convert source=llama output=new method=branch_train_mix", ""),
    ("donors of another shape", "convert output=new method=branch_train_mix donors=[llama,wide] experts=2", ""),
    ("a text that is not there", "convert source=llama output=new scale=calibrated calibration.texts=[bok.txt]", ""),
]
MODELS = [
    ("one folder to verify", "verify llama", ""),
    ("the two in the wrong order", "verify moe llama", ""),
    ("a folder that is not there", "verify llama mo", ""),
    ("a dtype by another name", "verify llama moe dtype=fp32", ""),
    ("no GPU", "verify llama moe device=cuda", ""),
    ("nothing to inspect", "inspect", ""),
    ("a training run to inspect", "inspect run", ""),
    ("no name on the hub", "push moe", ""),
    ("a name without an owner", "push moe my-moe", ""),
    ("a training run to push", "push run org/name dry_run=true", ""),
]
PREPARE = [
    ("no output folder", "prepare tokenizer=llama sources=[book.txt]", ""),
    ("no sources", "prepare new tokenizer=llama", ""),
    ("no tokenizer", "prepare new sources=[book.txt]", ""),
    ("a folder without a tokenizer", "prepare new tokenizer=plain sources=[book.txt]", ""),
    ("an empty text", "prepare new tokenizer=llama sources=[empty.txt]", ""),
    ("a text that is not UTF-8", "prepare new tokenizer=llama sources=[latin1.txt]", ""),
    ("a PDF", "prepare new tokenizer=llama sources=[paper.pdf]", ""),
    ("a PDF named .txt", "prepare new tokenizer=llama sources=[paper.txt]", ""),
    ("the text is in another field", "prepare new tokenizer=llama sources=[content.jsonl]", ""),
    ("a broken line", "prepare new tokenizer=llama sources=[broken.jsonl]", ""),
    ("a file that is not there", "prepare new tokenizer=llama sources=[bok.txt]", ""),
    ("a folder without texts", "prepare new tokenizer=llama sources=[notes]", ""),
    ("a table of commas", "prepare new tokenizer=llama sources=[table.csv]", ""),
    ("chats without a template", "prepare new tokenizer=llama sources=[talks.jsonl] kind=chat", ""),
    ("chats as texts", "prepare new tokenizer=llama sources=[talks.jsonl]", ""),
    ("texts as chats", "prepare new tokenizer=chat sources=[book.jsonl] kind=chat", ""),
    ("an output that has other texts", "prepare data tokenizer=llama sources=[valid.jsonl]", ""),
    ("two files without brackets", "prepare new tokenizer=llama sources=book.txt,valid.jsonl", ""),
    ("a list with a space, without quotes", "prepare new tokenizer=llama sources=[book.txt, valid.jsonl]", ""),
    ("the hub's data without a network", "prepare new tokenizer=llama sources=[hf:org/name]", ""),
]
TRAIN = [
    ("nothing said", "train", ""),
    ("a learning rate as elsewhere", "train t.yaml output=new learning_rate=1e-4", ""),
    ("a short learning rate", "train t.yaml output=new lr=1e-4", ""),
    ("a batch size as elsewhere", "train t.yaml output=new batch_size=8", ""),
    ("a batch size as Trainer has it", "train t.yaml output=new per_device_train_batch_size=8", ""),
    ("accumulation as Trainer has it", "train t.yaml output=new gradient_accumulation_steps=8", ""),
    ("epochs", "train t.yaml output=new epochs=3", ""),
    ("bf16 as Trainer has it", "train t.yaml output=new bf16=true", ""),
    ("output_dir as Trainer has it", "train t.yaml output_dir=new", ""),
    ("max_steps as Trainer has it", "train t.yaml output=new max_steps=10", ""),
    ("tokens in place of steps", "train t.yaml output=new tokens=10b", ""),
    ("steps as a word", "train t.yaml output=new steps=ten", ""),
    ("steps with a unit", "train t.yaml output=new steps=1k", ""),
    ("a flag with a dash", "train t.yaml --output new", ""),
    ("no data", "train model.source=llama output=new", ""),
    ("a text in place of shards", "train t.yaml output=new data.train=[book.txt]", ""),
    ("a typo in the data's folder", "train t.yaml output=new data.train=[dta]", ""),
    ("data of another tokenizer", "train t.yaml output=new model.source=small-vocabulary", ""),
    ("a sequence beyond the context", "train t.yaml output=new data.sequence=4096", ""),
    ("the output is the model", "train t.yaml output=llama", ""),
    ("other data for a run that is there", "train t.yaml output=run data.train=[other-text]", ""),
    ("another model for a run that is there", "train t.yaml output=run model.source=wide", ""),
    ("a mesh of more than there are", "train t.yaml output=new model.source=moe mesh.ep=4", ""),
    ("a GPU that is not there", "train t.yaml output=new device=cuda", ""),
    ("half precision", "train t.yaml output=new model.dtype=float16", ""),
    ("a typo in the backend", "train t.yaml output=new model.source=moe model.expert_backend=groupd", ""),
    ("a micro-batch that does not divide", "train t.yaml output=new batch=5 micro_batch=2", ""),
    ("the export is there", "train t.yaml output=new export=llama", ""),
    ("a model and an upcycled one", "train t.yaml output=new model.upcycle.source=llama", ""),
    ("a schedule that is none", "train t.yaml output=new schedule.shape=cosin", ""),
    ("a warm-up longer than the run", "train t.yaml output=new schedule.warmup=100", ""),
    ("no adapters' names", "train t.yaml output=new lora.rank=8 lora.match=[q_proj]", ""),
    ("wandb as a switch, which is not installed", "train t.yaml output=new log.wandb=me", ""),
    ("an optimiser that is none", "train t.yaml output=new optim.name=adam", ""),
    ("the Python of YAML", "train t.yaml output=new checkpoint.asynchronous=yes_please", ""),
]
AFTER = [
    ("export without a folder", "export run", ""),
    ("export of a model", "export llama new", ""),
    ("export to a folder that is there", "export run llama", ""),
    ("recommend without GPUs", "recommend llama tokens=10B", ""),
    ("recommend for a card by number alone", "recommend llama gpus=8 tokens=10B", ""),
    ("recommend for a card that is not known", "recommend llama gpus=8xa100 tokens=10B", ""),
    ("recommend with words for numbers", "recommend llama gpus=8xh100 'tokens=10 billion'", ""),
    ("recommend for an MoE", "recommend moe gpus=8xh100 tokens=10B", ""),
    ("estimate without GPUs", "estimate t.yaml", ""),
    ("estimate for a card that is not known", "estimate t.yaml gpus=8 hardware=a100", ""),
    ("estimate with a budget in words", "estimate t.yaml gpus=8 hardware=h100 'budget=100 billion'", ""),
    ("bench of nothing", "bench", ""),
    ("bench of a model's folder", "bench llama", ""),
    ("a typo in the suite", "eval tny llama", ""),
    ("suite and model the wrong way round", "eval llama tiny", ""),
    ("no model", "eval tiny", ""),
    ("a model that is not there", "eval tiny ./lama", ""),
    ("a typo in lm-eval's task", "eval llama tasks=[arc_esy]", ""),
    ("a suite of the hub without a network", "eval mmlu llama", ""),
    ("float16", "eval tiny llama dtype=float16", ""),
    ("a model without a tokenizer", "eval tiny plain", ""),
    ("fewshot as a word", "eval tiny llama fewshot=five", ""),
    ("perplexity without texts", "eval perplexity llama", ""),
    ("results of another suite are there", "eval perplexity llama texts=[book.txt] output=results", ""),
    ("one thing to compare", "compare run", ""),
    ("a folder that is no run to compare", "compare run llama", ""),
    ("a run against results", "compare run results", ""),
    ("a comma and a space", "compare run, other-run", ""),
    ("runs that read other data", "compare run other-data", ""),
    ("routing of a dense model", "routing llama book.txt", ""),
    ("routing without texts", "routing moe", ""),
    ("a report of nothing", "report", ""),
    ("a report as a PDF page", "report results output=report.docx", ""),
    ("a report of a text", "report book.txt", ""),
    ("a typo in the study", "study tny", ""),
    ("a study without arms", "study no-arms.yaml", ""),
    ("a config of training as a study", "study t.yaml", ""),
]
ROWS = [*PLAN, *CONVERT, *MODELS, *PREPARE, *TRAIN, *AFTER]
FILES = {
    "notes/todo.md": "call the dentist\n",
    "tab.yaml": "source: llama\nrouter:\n\tscore: softmax\n",
    "equals.yaml": "source = llama\nexperts = 8\n",
    "list.yaml": "- source: llama\n- experts: 8\n",
    "training.yaml": "output: new\nmodel: {upcycle: {source: llama}}\ndata: {train: [data]}\n",
    "t.yaml": "model: {source: llama, dtype: float32}\ndata: {train: [data], valid: [valid], sequence: 32}\nsteps: 2\nbatch: 2\n"
    "schedule: {warmup: 1}\nlog_every: 1\n",
    "no-arms.yaml": "output: new\nsource: llama\ndata: data\nbase: {steps: 2}\n",
    "empty.txt": "",
    "table.csv": "text,label\nhello,1\n",
    "broken.jsonl": '{"text": "one"}\n{"text": "two"\n{"text": "three"}\n',
    "talks.jsonl": '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n' * 4,
    "gguf/config.json": "{}",
    "adapter/adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "llama"}',
    "bert/config.json": '{"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32}',
    "empty/.keep": "",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with what a user may have there: models, whole and broken, texts, runs, results."""
    return make(tmp_path_factory.mktemp("mistakes"))


def make(place: Path) -> Path:
    for name, content in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(content)
    (place / "latin1.txt").write_bytes("Für Elise, größer als früher\n".encode("latin-1") * 9)
    (place / "paper.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n" + bytes(range(256)) * 4)
    shutil.copy(place / "paper.pdf", place / "paper.txt")
    (place / "book.txt").write_text("\n".join(texts(60)))
    for name, seed in (("book", 0), ("valid", 1), ("other", 2)):
        jsonl(place / f"{name}.jsonl", texts(60, seed))
    jsonl(place / "content.jsonl", texts(60), key="content")
    tiny.make("llama", place / "plain", vocab_size=400)
    tiny.make("llama", place / "small-vocabulary", vocab_size=64)
    for name, more in (("llama", {}), ("wide", {"hidden_size": 96, "num_attention_heads": 6})):
        tiny.make("llama", place / name, vocab_size=400, **more)
    for name in ("llama", "wide", "small-vocabulary"):
        make_tokenizer(place / name, bos=False)
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
        (place / name / "tokenizer_config.json").write_text(json.dumps(words))
    shutil.copytree(place / "llama", place / "chat")
    shutil.copy(place / "llama" / "model.safetensors", place / "bert")
    (place / "chat" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    break_models(place)
    here = Path.cwd()
    os.chdir(place)
    try:
        for words in (
            "convert source=llama output=moe experts=4",
            "prepare data tokenizer=llama sources=[book.jsonl]",
            "prepare valid tokenizer=llama sources=[valid.jsonl]",
            "prepare other-text tokenizer=llama sources=[other.jsonl]",
            "train t.yaml output=run",
            "train t.yaml output=other-run",
            "train t.yaml output=other-data data.train=[other-text]",
            "eval tiny llama limit=2 output=results",
        ):
            assert main(shlex.split(words)) == 0, words
    finally:
        os.chdir(here)
    return place


def break_models(place: Path) -> None:
    whole = place / "llama"
    for name in ("no-config", "no-weights", "missing-shard", "truncated", "pickle", "gptq", "broken-config"):
        shutil.copytree(whole, place / name)
    (place / "no-config" / "config.json").unlink()
    for name in ("no-weights", "pickle", "missing-shard"):
        (place / name / "model.safetensors").unlink()
    (place / "pickle" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    tensors = load_file(whole / "model.safetensors")
    half = dict(list(tensors.items())[::2])
    save_file(half, place / "missing-shard" / "model-00001-of-00002.safetensors")
    where = {name: f"model-0000{1 if name in half else 2}-of-00002.safetensors" for name in tensors}
    (place / "missing-shard" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    weights = place / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    config: dict[str, Any] = json.loads((whole / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (place / "gptq" / "config.json").write_text(json.dumps(config))
    (place / "broken-config" / "config.json").write_text('{"model_type": "llama",')
    (place / "gguf" / "model-q4.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    save_file({"base_model.model.lora_A.weight": tensors["lm_head.weight"]}, place / "adapter" / "adapter_model.safetensors")


def state(place: Path) -> dict[str, Any]:
    found = {str(p): p.stat() for p in place.rglob("*")}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items() if not Path(name).is_dir()}
