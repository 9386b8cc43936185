"""Our modelling file in the hands of transformers' users: found by auto_map, in a pipeline, with a cache and batches,
placed by accelerate, saved again, adapted by peft, and balanced by Trainer."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import logging

import upcycle
from tests.parity import test_decoder, test_layers_differ, tiny
from tests.unit.training.test_data import make_tokenizer, texts
from training.checkpoint import layout
from training.model.decoder import Decoder
from training.optim.balance import Balance, BalanceConfig

logging.disable_progress_bar()
OPTIONS: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float32}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
TOLERANCE = 1e-5  # of a logit: the same sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Virtual groups chosen in each slice and a shared expert, which no stock architecture holds."""
    place = tmp_path_factory.mktemp("remote")
    make_tokenizer(tiny.make("qwen2", place / "dense", vocab_size=400), bos=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
    (place / "dense" / "tokenizer_config.json").write_text(json.dumps(settings))
    keys = {"experts": 4, "granularity": 2, "top_k": 2, "method": "virtual_group", "shared": 1}
    router = {"choice": "each-slice", "init": {"std": 0.3}}
    return upcycle.convert(keys, source=place / "dense", router=router, output=place / "moe", quiet=True)


def loaded(folder: Path, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **OPTIONS | more).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(tiny.tokens()).logits
    return found


@torch.no_grad()
def test_a_pipeline_writes_what_the_model_does_one_token_at_a_time(folder: Path) -> None:
    tokenizer, prompts = AutoTokenizer.from_pretrained(folder, padding_side="left"), [t[:40] for t in texts(3, 3)]
    made = pipeline("text-generation", model=str(folder), tokenizer=tokenizer, batch_size=3, **OPTIONS)
    assert type(made.model).__name__ == "UpcycledForCausalLM" and made.model.config.expert_slices == 2
    written = [row[0]["generated_text"] for row in made(prompts, return_full_text=True, **GREEDY)]
    lengths = set()
    for prompt, text in zip(prompts, written, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        lengths.add(ids.shape[1])
        for _ in range(GREEDY["max_new_tokens"]):  # no cache, no batch, no padding
            ids = torch.cat([ids, made.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert text == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert len(lengths) > 1, "no prompt was padded"


def test_accelerate_places_it(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    want = logits(loaded(folder))
    auto = loaded(folder, device_map="auto")
    assert (logits(auto) - want).abs().max() < TOLERANCE
    half = loaded(folder, device_map={"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
                                      "model.rotary_emb": "cpu", "lm_head": "cpu"}, offload_folder=tmp_path)  # fmt: skip
    assert any(p.is_meta for p in half.parameters()), "nothing lies on the disk"
    assert (logits(half) - want).abs().max() < TOLERANCE
    assert torch.equal(half.generate(tiny.tokens(), **GREEDY), auto.generate(tiny.tokens(), **GREEDY))


def trained_tokenizer(kind: str, folder: Path) -> None:
    """Write a byte-level tokenizer, or one as SentencePiece's are converted."""
    texts_, special = [*texts(20), "Once upon a time"], ["<unk>", "<s>", "</s>"]
    if kind == "Qwen2Tokenizer":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        texts_ = [text.replace(" ", "▁") for text in texts_]
    made.train_from_iterator(texts_, trainers.BpeTrainer(vocab_size=250, special_tokens=special, show_progress=False))
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "PreTrainedTokenizerFast"), ("llama", "LlamaTokenizerFast"), ("qwen3", "Qwen2Tokenizer")],
)
def test_its_tokenizer_is_the_dense_ones_and_needs_no_code(family: str, kind: str, tmp_path: Path) -> None:
    """Without a word where code is refused, and where nobody answers; with it config and model have none either."""
    trained_tokenizer(kind, tiny.make(family, tmp_path / "dense"))
    folder = upcycle.convert({"experts": 2, "top_k": 1, "target": "upcycled"}, source=tmp_path / "dense",
                             output=tmp_path / "moe", quiet=True)  # fmt: skip
    text = " Once upon a  time,\n12 of them"
    want = AutoTokenizer.from_pretrained(tmp_path / "dense")(text).input_ids
    code = folder / "modeling_upcycled.py"
    shutil.copy(code, tmp_path / "right.py")
    code.write_text("raise SystemExit('the code ran')")
    lines = [
        "import shutil",
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer",
        *(
            f"print(AutoTokenizer.from_pretrained('.'{more})({text!r}).input_ids)"
            for more in (", trust_remote_code=False", "")
        ),
        f"shutil.copy({str(tmp_path / 'right.py')!r}, 'modeling_upcycled.py')",
        *(f"{each}.from_pretrained('.', trust_remote_code=True)" for each in ("AutoConfig", "AutoModelForCausalLM")),
    ]  # in one process, because transformers' imports take longer than all of it
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    # transformers asks nobody whether it may run code, and goes on without
    assert [line.rpartition("[y/N] ")[2] for line in done.stdout.splitlines() if line.endswith("]")] == [str(want)] * 2


@torch.no_grad()
def test_a_cache_says_where_a_text_goes_on(folder: Path) -> None:
    """Without position_ids, which generate() always gives."""
    model = loaded(folder)
    first = model(tiny.tokens()[:, :7], use_cache=True)
    rest = model(tiny.tokens()[:, 7:], past_key_values=first.past_key_values)
    assert (torch.cat([first.logits, rest.logits], 1) - logits(model)).abs().max() < TOLERANCE


@torch.no_grad()
def test_each_expert_has_the_weight_of_its_own_choice(folder: Path) -> None:
    moe = loaded(folder, experts_implementation="eager").model.layers[0].mlp.double()
    generator = torch.Generator().manual_seed(0)
    moe.gate.weight.normal_(generator=generator)  # no groups of equal rows, whose weights are equal in each choice
    experts = moe.experts
    experts.down_proj *= torch.arange(1.0, 1 + len(experts.down_proj))[:, None, None]
    x_TD = torch.randn(9, moe.gate.weight.shape[1], generator=generator, dtype=torch.float64)
    _, weight_TK, expert_TK = moe.gate(x_TD)
    assert (weight_TK.amax(1) > 1.1 * weight_TK.amin(1)).all()
    choices = zip(x_TD, weight_TK, expert_TK.tolist(), strict=True)

    def one(index: int, x: Tensor) -> Tensor:
        gate, up = (experts.gate_up_proj[index] @ x).chunk(2)
        found: Tensor = experts.down_proj[index] @ (torch.nn.functional.silu(gate) * up)
        return found

    want = [sum(w * one(e, x) for w, e in zip(weights, chosen, strict=True)) for x, weights, chosen in choices]
    assert (moe(x_TD) - moe.shared_experts(x_TD) - torch.stack(want)).abs().max() < 1e-10


def test_accelerate_keeps_a_layer_whole(folder: Path, tmp_path: Path) -> None:
    """Two devices in one layer cannot add up its residual stream."""
    pytest.importorskip("accelerate")
    parts = {name: sum(p.nbytes for p in part.parameters()) for name, part in loaded(folder).model.named_children()}
    room = parts["embed_tokens"] + parts["layers"] * 7 // 8  # of the two layers, one and three quarters
    placed = loaded(folder, device_map="auto", max_memory={"cpu": room}, offload_folder=tmp_path).hf_device_map
    assert set(placed.values()) == {"cpu", "disk"}
    assert not any(re.match(r"model\.layers\.\d+\.", name) for name in placed), placed


def test_it_is_saved_with_its_code(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "first")
    model = loaded(tmp_path / "first")
    model.save_pretrained(tmp_path / "again")
    shutil.rmtree(tmp_path / "first")
    assert (tmp_path / "again" / "modeling_upcycled.py").is_file()
    assert torch.equal(logits(loaded(tmp_path / "again")), logits(model))


def test_peft_adapts_it(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = logits(loaded(folder))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
                             target_parameters=["experts.gate_up_proj", "experts.down_proj", "shared_experts.up_proj.weight"])  # fmt: skip
    model = peft.get_peft_model(loaded(folder), config)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("mlp.experts." in name for name in trained) and any("shared_experts" in name for name in trained)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # LoRA's second factor starts at zero
        model(tiny.tokens(), labels=tiny.tokens()).loss.backward()
        optimiser.step()
    adapted = logits(model.eval())
    assert (adapted - base).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "adapter")
    assert torch.equal(logits(again), adapted)
    assert (logits(again.merge_and_unload()) - adapted).abs().max() < 10 * TOLERANCE  # merged weights are rounded


# each way to choose: best of all, best of each slice, with scores that a bias moves, in all layers or one
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "best of all": ("llama", {"choice": "any"}),
    "each slice": ("llama", {"choice": "each-slice"}),
    "each slice by sigmoid and bias": ("qwen3", {"choice": "each-slice", "score": "sigmoid"}),
}


def routed(name: str, place: Path, **more: Any) -> Path:
    """A folder whose routers balance nothing by themselves."""
    family, router = ROUTERS[name]
    dense = tiny.make(family, place / "dense")
    keys = {"experts": 3, "granularity": 2, "top_k": 4, "method": "virtual_group", "target": "upcycled", **more}
    router = {"init": {"name": "independent", "std": 1.0}, **router}
    return upcycle.convert(keys, source=dense, router=router, output=place / "moe", quiet=True)


@pytest.mark.parametrize("name", ROUTERS)
def test_it_balances_as_training_does(name: str, tmp_path: Path) -> None:
    """The balance loss and the gradient of every tensor, in float64, are those of training with balance.aux_weight."""
    folder, ids, weight = routed(name, tmp_path), tiny.tokens(), 0.7
    bias_N = torch.linspace(-0.2, 0.2, 6)
    more = {"dtype": torch.float64, "router_aux_loss_coef": weight, "attn_implementation": "eager"}
    theirs = loaded(folder, **more, experts_implementation="eager")  # grouped products have no float64
    with layout.opened(folder) as origin:
        ours = layout.load(Decoder(origin.spec, experts="reference", compute=torch.float64).double(), origin)
    for gate, block in zip((m for n, m in theirs.named_modules() if n.endswith(".gate")),
                           (layer.ffn.router for layer in ours.layers.values()), strict=True):  # fmt: skip
        if "bias" in name:
            gate.e_score_correction_bias.copy_(bias_N)
            block.bias.copy_(bias_N)
    balance = Balance(BalanceConfig(aux_weight=weight), ours)
    shifted = test_decoder.labels(ids)
    counted = int((shifted >= 0).sum())
    with test_layers_differ.Wide():
        (ours.loss(ids, shifted) / counted).backward()
        found = theirs(ids, labels=ids.where(shifted.roll(1, 1) >= 0, -100), output_router_logits=True)
        found.loss.backward()
    balance.end_step()
    aux = sum(layer.aux for layer in balance.load.fetch())
    assert len(found.router_logits) == 2 and {t.shape for t in found.router_logits} == {(ids.numel(), 6)}
    assert found.aux_loss.item() == pytest.approx(aux, rel=1e-10) and aux > 2.01, "it is in balance already"
    want = test_decoder.gradients_of(theirs, tmp_path / "gradients")
    for parameter in ours.parameters():
        parameter.data = parameter.grad
    views = layout.views(ours)
    for stored in origin.tensors:
        if not stored.roles[0][0].endswith("router.bias"):
            have = layout.joined(stored, views)
            torch.testing.assert_close(have, want[stored.name], rtol=1e-10, atol=1e-12, msg=stored.name)


@torch.no_grad()
def test_padding_has_no_part_in_the_balance_loss(tmp_path: Path) -> None:
    """As in transformers' own function, of which ours is the sum over layers and its top_k-th part."""
    model, ids = loaded(routed("best of all", tmp_path), output_router_logits=True), tiny.tokens()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    found = model(ids, attention_mask=mask, labels=ids)
    theirs = [load_balancing_loss_func((logits,), 6, 4, mask) / 4 for logits in found.router_logits]
    assert float(found.aux_loss) == pytest.approx(float(sum(theirs)), rel=1e-5)
    assert float(found.aux_loss) != pytest.approx(float(model(ids).aux_loss), rel=1e-3)
    plain = model(ids, attention_mask=mask, labels=ids, output_router_logits=False)
    assert plain.router_logits is None and plain.aux_loss is None
    assert float(found.loss - plain.loss) == pytest.approx(0.01 * float(found.aux_loss), abs=1e-6)
    half = model(ids[:, :12], attention_mask=mask[:, :12], use_cache=True)
    rest = model(ids[:, 12:], attention_mask=mask, past_key_values=half.past_key_values)
    assert rest.router_logits[0].shape == (24, 6) and torch.isfinite(rest.aux_loss)
    assert model.generate(ids, attention_mask=mask, **GREEDY).shape == (2, 36)


@pytest.mark.parametrize(("adapters", "rate"), [(False, 1e-2), (True, 0.1)])
def test_trainer_balances_it(adapters: bool, rate: float, tmp_path: Path) -> None:
    """Three steps of transformers' Trainer, with all weights or with peft's adapters of the routers."""
    pytest.importorskip("accelerate")
    peft = pytest.importorskip("peft")
    folder = routed("each slice", tmp_path)
    rows = [{"input_ids": row, "labels": row} for row in tiny.tokens(8, vocab=4)]
    settings: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": rate, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "seed": 0,
    }  # fmt: skip
    found = []
    for coefficient in (0.0, 10.0):
        model = loaded(folder, output_router_logits=True, router_aux_loss_coef=coefficient)
        if adapters:
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=64, target_parameters=["gate.weight"]))
        arguments = TrainingArguments(output_dir=str(tmp_path / "out"), **settings)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        with torch.no_grad():
            found.append(float(model(tiny.tokens(8, vocab=4)).aux_loss))
    assert found[1] < 0.95 * found[0], found
