"""100 typical mistakes: each is answered with one sentence that leads to the fix, and nothing on the disk changes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file

from tests.parity import tiny
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from upcycle.__main__ import main

# fmt: off
# what the user did; the words that were typed; what of the sentence leads to the fix
MISTAKES = [
    ('a ready config whose model is not here', 'estimate qwen3-8b-slices gpus=8', 'model.upcycle.source: '),
    ('a typo in the folder', 'plan source=./lama', 'or download the model there (hf download org/name'),
    ('a file in place of its folder', 'plan source=llama/model.safetensors', 'give llama'),
    ('an empty folder', 'plan source=empty', 'config.json, *.safetensors and a tokenizer'),
    ('config.json was not copied', 'plan source=no-config', 'config.json, *.safetensors and a tokenizer'),
    ('only config.json was copied', 'plan source=no-weights', "copy or download the model's weights into it"),
    ('a shard is missing', 'plan source=missing-shard', 'copy or download it again'),
    ('the download was cut off', 'plan source=truncated', 'copy or download it again'),
    ('a checkpoint of .bin files', 'plan source=pickle', 'load the model where you trust it and write it with save_pre'),
    ('a folder of GGUF', 'plan source=gguf', 'load the model where you trust it and write it with save_pre'),
    ('a GGUF file', 'plan source=gguf/model-q4.gguf', 'load it with transformers where you trust it, and write it with save_pretrained'),
    ('an MoE in place of a dense model, with copies', 'plan source=moe method=drop', 'leave method at the default'),
    ('an encoder', 'plan source=bert', 'arcee, cohere2, ernie4_5, gemma, gemma2, gemma3_text, gpt_ne'),
    ('adapters of peft', 'plan source=adapter', 'give the training run or its merged model (export=FOLDER of'),
    ('a quantised checkpoint', 'plan source=gptq', 'upcycling needs the weights themselves, so give an unquantis'),
    ('config.json is broken', 'plan source=broken-config', 'line 1 column 24 (char 23)'),
    ('the key of another tool', 'plan source=llama num_experts=8', "write experts, the copies"),
    ('a typo in a key', 'plan source=llama expert=8', "did you mean 'experts'?"),
    ('a word for a number', 'plan source=llama experts=eight', 'it must be a whole number'),
    ('no experts at all', 'plan source=llama experts=0', 'it must be at least 1'),
    ('more chosen than there are', 'plan source=llama experts=4 top_k=16', 'top_k must be at most 4'),
    ('slices that do not divide the FFN', 'plan source=llama method=virtual_group experts=4 granularity=5 top_k=5', 'try granularity=3, 4, 6'),
    ('top_k is no multiple of the slices', 'plan source=llama target=upcycled method=virtual_group granularity=4 top_k=2', 'try top_k=4, or write router.choice=parts if you want that'),
    ('a typo in the method', 'plan source=llama method=copies', "did you mean 'copy'?"),
    ('a typo in the target', 'plan source=llama target=mixtrall', "did you mean 'mixtral'?"),
    ('a typo in the layers', 'plan source=llama layers=evry:2', 'write all, every:2, first-dense:1 or a list like [1,3,5]'),
    ('a flag', 'plan source=llama --experts 8', 'write experts=8'),
    ('spaces around =', 'plan source = llama', 'write source=llama, without spaces around ='),
    ('a typo in a ready config', 'plan llama3-8b-e8t3', 'ready configs are llama3-8b-e64t8, llama3-8b-e8t2, marco-nan'),
    ('no network', 'plan source=meta-llama/Llama-3.1-8B', 'Cannot find an appropriate cached snapshot folder for the sp'),
    ('a size without a unit', 'plan source=llama max_shard=5', 'write for instance 5GB or 512MiB'),
    ('a tab in the YAML', 'plan tab.yaml', 'softmax ^'),
    ('= in the YAML', 'plan equals.yaml', '8'),
    ('a config of training', 'plan training.yaml', 'write this in upcycle train or upcycle estimate, whose confi'),
    ('a typo in the command', 'plann source=llama', 'the commands are plan, convert, verify, inspect, quantize, push, prepar'),
    ("the name of another tool's command", 'finetune source=llama', 'the commands are plan, convert, verify, inspect, quantize, push, prepar'),
    ("the router's keys in one word", 'plan source=llama router=sigmoid', 'it must be keys and values, for instance router.score=VALUE'),
    ('a key of a method without it', 'plan source=llama method.name=drop ratio=0.5', 'write method.ratio (of a method that has it)'),
    ('no output', 'convert source=llama', 'write output=FOLDER'),
    ('the output is the source', 'convert source=llama output=llama', 'write another folder, for instance output=llama-moe'),
    ('the output is full of other things', 'convert source=llama output=notes', 'remove it or choose another output'),
    ("the output is another plan's", 'convert source=llama output=moe experts=8', 'remove it or choose another output'),
    ('nproc is a word', 'convert source=llama output=new nproc=all', 'write for instance nproc=8'),
    ('more than the disk holds', 'convert source=llama output=new experts=200000 top_k=1', 'a layer can have at most 16384 experts'),
    ('a path of Windows', "convert 'source=C:\\models\\llama' output=new", 'or download the model there (hf download org/name'),
    ('a measured split without text', 'convert source=llama output=new granularity=2 method.name=split method.by=activation', 'name .txt, .jsonl or .jsonl.zst files'),
    ('no donors', 'convert source=llama output=new method=branch_train_mix', 'list the models under `donors` or set experts=1'),
    ('donors of another shape', 'convert output=new method=branch_train_mix donors=[llama,wide] experts=2', 'all donors must have the same architecture'),
    ('a text that is not there', 'convert source=llama output=new scale=calibrated calibration.texts=[bok.txt]', 'name .txt, .jsonl or .jsonl.zst files'),
    ('one folder to verify', 'verify llama', "got ['llama']"),
    ('the two in the wrong order', 'verify moe llama', 'upcycle verify llama moe'),
    ('a folder that is not there', 'verify llama mo', 'or download the model there (hf download org/name'),
    ('a dtype by another name', 'verify llama moe dtype=fp32', 'it must be one of float64, float32, bfloat16, float16'),
    ('no GPU', 'verify llama moe device=cuda', 'write device=cpu, or leave it out'),
    ('nothing to inspect', 'inspect', 'got []'),
    ('a training run to inspect', 'inspect run', 'make its model with upcycle export run OUTPUT, and give OUTPUT'),
    ('no name on the hub', 'push moe', "got ['moe']"),
    ('a name without an owner', 'push moe my-moe', 'write it as org/name'),
    ('a training run to push', 'push run org/name dry_run=true', 'make its model with upcycle export run OUTPUT, and give OUTPUT'),
    ('no output folder', 'prepare tokenizer=llama sources=[book.txt]', 'OUTPUT is the folder to make'),
    ('no tokenizer', 'prepare new sources=[book.txt]', 'write tokenizer=FOLDER, or tokenizer=org/name'),
    ('a folder without a tokenizer', 'prepare new tokenizer=plain sources=[book.txt]', "add the model's"),
    ('an empty text', 'prepare new tokenizer=llama sources=[empty.txt]', 'there is no text in empty.txt'),
    ('a text that is not UTF-8', 'prepare new tokenizer=llama sources=[latin1.txt]', 'save it as UTF-8'),
    ('a PDF', 'prepare new tokenizer=llama sources=[paper.pdf]', 'convert it to one of .txt, .jsonl, .jsonl.zst, .parquet'),
    ('a PDF named .txt', 'prepare new tokenizer=llama sources=[paper.txt]', 'save it as UTF-8'),
    ('the text is in another field', 'prepare new tokenizer=llama sources=[content.jsonl]', "if it is under 'content', rename that key, or prepare conten"),
    ('a broken line', 'prepare new tokenizer=llama sources=[broken.jsonl]', "'...'}"),
    ('a file that is not there', 'prepare new tokenizer=llama sources=[bok.txt]', "source 'bok.txt' is not a file, a folder or a pattern that matches"),
    ('a folder without texts', 'prepare new tokenizer=llama sources=[notes]', "source 'notes' is not a file, a folder or a pattern that matche"),
    ('a table of commas', 'prepare new tokenizer=llama sources=[table.csv]', 'convert it to one of .txt, .jsonl, .jsonl.zst, .parquet'),
    ('chats without a template', 'prepare new tokenizer=llama sources=[talks.jsonl] kind=chat', 'give that of a chat model, or add a chat_template.jinja whos'),
    ('chats as texts', 'prepare new tokenizer=llama sources=[talks.jsonl]', 'write kind=chat to prepare it'),
    ('texts as chats', 'prepare new tokenizer=chat sources=[book.jsonl] kind=chat', "name the conversation's column, FILE#COLUMN, or leave kind=c"),
    ('an output that has other texts', 'prepare data tokenizer=llama sources=[valid.jsonl]', 'remove it or choose another output'),
    ('two files without brackets', 'prepare new tokenizer=llama sources=book.txt,valid.jsonl', 'sources=[book.txt,valid.jsonl]'),
    ('a list with a space, without quotes', 'prepare new tokenizer=llama sources=[book.txt, valid.jsonl]', "'sources=[...]'"),
    ("the hub's data without a network", 'prepare new tokenizer=llama sources=[hf:org/name]', 'offline mode is enabled. To disable it, please unset the `HF'),
    ('nothing said', 'train', 'write model.source=FOLDER'),
    ('a learning rate as elsewhere', 'train t.yaml output=new learning_rate=1e-4', 'write schedule.peak'),
    ('a batch size as elsewhere', 'train t.yaml output=new batch_size=8', "did you mean 'batch'?"),
    ('a batch size as Trainer has it', 'train t.yaml output=new per_device_train_batch_size=8', 'write micro_batch'),
    ('accumulation as Trainer has it', 'train t.yaml output=new gradient_accumulation_steps=8', 'write batch, the sequences of a step on all GPUs, and micro_'),
    ('epochs', 'train t.yaml output=new epochs=3', 'an epoch has as many steps as the data has tokens / (batch *'),
    ('bf16 as Trainer has it', 'train t.yaml output=new bf16=true', 'write model.dtype=bfloat16, the default on a GPU'),
    ('output_dir as Trainer has it', 'train t.yaml output_dir=new', "write output"),
    ('tokens in place of steps', 'train t.yaml output=new tokens=10b', 'a step reads batch * data.sequence tokens'),
    ('steps as a word', 'train t.yaml output=new steps=ten', 'it must be a whole number, for instance steps=1000'),
    ('a flag with a dash', 'train t.yaml --output new', 'write output=new'),
    ('no data', 'train model.source=llama output=new', 'write data.sequence=128, or raise max_position_embeddings in'),
    ('a text in place of shards', 'train t.yaml output=new data.train=[book.txt]', 'upcycle prepare book.txt-tokens tokenizer=MODEL sources=[book.txt]'),
    ('data of another tokenizer', 'train t.yaml output=new model.source=small-vocabulary', "prepare it with the model's own tokenizer"),
    ('a sequence beyond the context', 'train t.yaml output=new data.sequence=4096', 'write data.sequence=128, or raise max_position_embeddings in'),
    ('the output is the model', 'train t.yaml output=llama', 'write output=FOLDER for a folder that is new, empty, or of the run t'),
    ('other data for a run that is there', 'train t.yaml output=run data.train=[other-text]', 'some come twice and some never)'),
    ('another model for a run that is there', 'train t.yaml output=run model.source=wide', 'set them back, choose another output, or write resume.allow='),
    ('a mesh of more than there are', 'train t.yaml output=new model.source=moe mesh.ep=4', 'try mesh.ep=1, or start 4 processes: nproc=4'),
    ('a GPU that is not there', 'train t.yaml output=new device=cuda', 'write device=cpu, or leave it out'),
    ('a GPU that is not there, and what fits it', 'train t.yaml output=new device=cuda micro_batch=auto', 'write device=cpu, or leave it out'),
    ('a format to quantise to', 'quantize llama output=new format=fp8', 'write method=fp8|nvfp4|awq|gguf'),
    ('half precision', 'train t.yaml output=new model.dtype=float16', 'it must be one of bfloat16, float32, float64'),
    ('a typo in the backend', 'train t.yaml output=new model.source=moe model.expert_backend=groupd', "did you mean 'grouped'?"),
    ('a micro-batch that does not divide', 'train t.yaml output=new batch=5 micro_batch=2', 'try micro_batch=1'),
    ('the export is there', 'train t.yaml output=new export=llama', 'write another folder, for instance export=llama-trained'),
    ('a model and an upcycled one', 'train t.yaml output=new model.upcycle.source=llama', 'leave one out'),
    ('a warm-up longer than the run', 'train t.yaml output=new schedule.warmup=100', 'set a smaller warmup'),
    ("no adapters' names", 'train t.yaml output=new lora.rank=8 lora.match=[q_proj]', 'names are made of layers, attention, q, k, v, o, ffn, gate,'),
    ('wandb, which is not installed', 'train t.yaml output=new log.to=wandb', 'pip install "upcycle[logs]", or leave wandb out'),
    ('the Python of YAML', 'train t.yaml output=new checkpoint.asynchronous=yes_please', 'it must be true or false'),
    ('export without a folder', 'export run', "got ['run']"),
    ('export of a model', 'export llama new', 'give the folder that contains checkpoints/'),
    ('export to a folder that is there', 'export run llama', 'remove it or choose another folder to export to'),
    ('recommend without GPUs', 'recommend llama tokens=10B', 'write a number and a card, for instance gpus=8xh100'),
    ('recommend for a card by number alone', 'recommend llama gpus=8 tokens=10B', 'write a number and a card, for instance gpus=8xh100'),
    ('recommend for a card that is not known', 'recommend llama gpus=8xa100 tokens=10B', "did you mean 'h100'?"),
    ('recommend with words for numbers', "recommend llama gpus=8xh100 'tokens=10 billion'", 'write for instance tokens='),
    ('recommend for an MoE', 'recommend moe gpus=8xh100 tokens=10B', 'recommend needs a dense model as source'),
    ('estimate without GPUs', 'estimate t.yaml', 'say for how many GPUs to plan, for instance gpus=8'),
    ('estimate with a budget in words', "estimate t.yaml gpus=8 hardware=h100 'budget=100 billion'", 'write for instance budget='),
    ('bench of nothing', 'bench', 'write its path, or its keys and values with model_type'),
    ("bench of a model's folder", 'bench llama', 'source=llama of plan and convert, model.source=llama of trai'),
    ('a typo in the suite', 'eval tny llama', "did you mean 'tiny'?"),
    ('suite and model the wrong way round', 'eval llama tiny', "the suite comes first, then the model's folder"),
    ('no model', 'eval tiny', 'write for instance upcycle eval tiny ./model'),
    ('a model that is not there', 'eval tiny ./lama', 'or download the model there (hf download org/name'),
    ('a suite of the hub without a network', 'eval mmlu llama', 'write data=FOLDER to read files, or for suite perplexity tex'),
    ('float16', 'eval tiny llama dtype=float16', 'it must be one of float32, bfloat16, float64'),
    ('a model without a tokenizer', 'eval tiny plain', 'write tokenizer=FOLDER, or a hub id, with the one that the m'),
    ('perplexity without texts', 'eval perplexity llama', 'write data=FOLDER to read files, or for suite perplexity tex'),
    ('a text that is not there', 'eval perplexity llama texts=[nowhere.txt]', 'there is no file nowhere.txt'),
    ('results of another suite are there', 'eval perplexity llama texts=[book.txt] output=results', 'write output=FOLDER with a new one, or remove results'),
    ('a folder that is no run to compare', 'compare run llama', 'give folders of `upcycle eval`, of lm-eval, or of training r'),
    ('a run against results', 'compare run results', 'give folders of `upcycle eval`, of lm-eval, or of training r'),
    ('routing of a dense model', 'routing llama book.txt', 'give an MoE model'),
    ('routing without texts', 'routing moe', 'name files, for instance routing ./moe book.txt code.jsonl'),
    ('a report as a PDF page', 'report results output=report.docx', 'output=report.docx must end in .html, or in .png, .pdf, .svg'),
    ('a report of a text', 'report book.txt', "give folders with metrics.jsonl or upcycle.json, lm-eval's r"),
    ('a typo in the study', 'study tny', "did you mean 'tiny'?"),
    ('a config of training as a study', 'study t.yaml', 'a config of one run is for upcycle train'),
]
# fmt: on
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
    (place / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
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
    save_file(
        {"base_model.model.lora_A.weight": tensors["lm_head.weight"]}, place / "adapter" / "adapter_model.safetensors"
    )


def state(place: Path) -> dict[str, Any]:
    found = {str(p): p.stat() for p in place.rglob("*")}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items() if not Path(name).is_dir()}


@pytest.mark.parametrize(("what", "words", "lead"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_gets_one_sentence_that_leads_to_the_fix(
    what: str,
    words: str,
    lead: str,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A text that cannot be read leaves NEW.partial, which the corrected command takes over; all else is as before."""
    monkeypatch.chdir(world)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    before = state(world)
    assert main(shlex.split(words)) == 2
    *notes, said = capsys.readouterr().err.splitlines()
    assert said.startswith("upcycle: ") and all(note.startswith("computes in ") for note in notes), (notes, said)
    assert lead in said
    shutil.rmtree(world / "new.partial", ignore_errors=True)
    assert state(world) == before
