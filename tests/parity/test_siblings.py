"""Dense models whose MoE sibling transformers has: converted, loaded by the stock class, they give the dense logits.

Every weight but the FFNs is carried over by name and the config copied, so what can go wrong is a key that the two
classes read differently: each pair is made with no value at its default, and every stated key of it is dropped once.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from tests.parity import tiny
from tests.unit.upcycle.mutations import keys_read, unreadable, written
from training.checkpoint import layout
from training.model.stock.model import Stock
from upcycle.__main__ import main
from upcycle.arch import siblings
from upcycle.arch.spec import MoESpec
from upcycle.config.reading import read
from upcycle.config.schema import UpcycleConfig
from upcycle.converting.convert import convert
from upcycle.converting.make import Maker
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.plan import UpcyclePlan, build
from upcycle.verifying.inspect import describe
from upcycle.verifying.verify import verify

logging.disable_progress_bar()
TOLERANCE, BROKEN = 1e-6, 1e-3  # of the largest logit, in float64 but for routers; what a twin must exceed
ROPE = {"rope_theta": 300.0, "rope_type": "default"}
OWN: dict[str, dict[str, Any]] = {
    "ernie4_5": {"head_dim": 24, "rope_parameters": ROPE, "rms_norm_eps": 0.1},
    "hunyuan_v1_dense": {"head_dim": 24, "rope_parameters": ROPE, "attention_bias": True, "rms_norm_eps": 0.1},
    "cohere2": {
        "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.7,
        "rope_parameters": ROPE, "layer_norm_eps": 0.1, "attention_bias": True,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"], "block_multiple_of": 16, "intermediate_size": 144, "conv_L_cache": 4,
        "rope_parameters": ROPE, "norm_eps": 0.1,
    },
    "granitemoehybrid": {
        "num_local_experts": 0, "shared_intermediate_size": 96, "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.3, "position_embedding_type": "rope",
        "rope_parameters": ROPE,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 32, "rms_norm_eps": 0.1,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
    },
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
OWN["qwen3_5"] = {
    "text_config": tiny.SIZES | OWN["qwen3_5_text"], "vision_config": VISION, "architectures": ["Qwen3_5ForConditionalGeneration"],
}  # fmt: skip
PLAIN = "router.init.std=0.1"
SCORE = {"lfm2": "sigmoid"}
WORDS: dict[str, tuple[str, ...]] = {
    "copies": ("experts=4",),
    "groups": ("method.name=virtual_group", "granularity=2", "top_k=4", "experts=4"),
    "shared": ("method.name=virtual_group", "granularity=2", "top_k=4", "experts=4", "shared=1"),
    "mixed": ("experts=4", "layers=first-dense:1"),
}


def shapes(dense: str) -> list[str]:
    can = siblings.DENSE[dense].can
    return [
        "copies",
        "groups",
        *(["shared"] if can.shared != "none" else []),
        *(["mixed"] if can.mixed != "none" else []),
    ]


CASES = [(pair.dense, shape) for pair in siblings.PAIRS for shape in shapes(pair.dense)]


@torch.no_grad()
def made(dense: str, folder: Path) -> Path:
    if dense not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {dense}")
    sizes = {} if dense == "qwen3_5" else tiny.SIZES
    config = AutoConfig.for_model(dense, **(sizes | OWN[dense]))
    if dense == "qwen3_5":
        from transformers import AutoModelForImageTextToText

        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        p.copy_((1 + 0.25 * noise) if "norm" in name else 0.2 * noise if p.dim() == 1 else 0.15 * noise)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda dense: made(dense, tmp_path_factory.mktemp("sibling") / dense))


def planned(folder: Path, *words: str) -> tuple[UpcyclePlan, list[Checkpoint]]:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    score = f"router.score={SCORE.get(kind, 'softmax')}"
    config = read(UpcycleConfig, "", [f"source={folder}", score, PLAIN, *words])
    checkpoints = [Checkpoint.open(folder)]
    return build(config, checkpoints), checkpoints


def converted(folder: Path, output: Path, shape: str) -> Path:
    plan, checkpoints = planned(folder, f"output={output}", *WORDS[shape])
    return convert(plan, checkpoints, quiet=True)


@torch.no_grad()
def logits(folder: Path, *, strict: bool = True) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not strict or not any(info.values()), info
    # Qwen3.5 asks for float32 in every norm, whose rounding differs by processor: it gets float64 there too
    narrow = model.config.model_type.startswith("qwen3_5")
    with patch.object(torch.Tensor, "float", torch.Tensor.double if narrow else torch.Tensor.float):
        out: torch.Tensor = model.eval()(tiny.tokens()).logits
    return out.double()


def difference(folder: Path, dense: Path, *, strict: bool = True) -> float:
    wanted = cached_logits(dense)
    return float((logits(folder, strict=strict) - wanted).abs().max() / wanted.abs().max())


cached_logits = cache(logits)


@pytest.mark.parametrize(("dense", "shape"), CASES)
def test_the_sibling_gives_the_dense_logits(
    dense: str, shape: str, dense_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source = dense_folder(dense)
    folder = converted(source, tmp_path / "moe", shape)
    error = difference(folder, source)
    assert error < TOLERANCE, error
    # the twin: one matrix of one expert comes from the wrong neurons
    tensors = load_file(folder / "model.safetensors")
    ends = ("experts.1.down_proj.weight", "experts.1.w2.weight", "block_sparse_moe.output_linear.weight")
    down = next(name for name in tensors if name.endswith(ends))
    tensors[down] = tensors[down].flip(-1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert difference(folder, source) > BROKEN


@pytest.mark.parametrize("dense", siblings.DENSE)
def test_all_but_the_ffns_keeps_its_name_and_bytes_and_verify_holds_it(
    dense: str, dense_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source = dense_folder(dense)
    folder = converted(source, tmp_path / "moe", "groups")
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    ffns = {s.name for role, s in siblings.Dense(siblings.DENSE[dense]).sources(planned(source)[0].dense).items()
            if not role.startswith("carried.")}  # fmt: skip
    kept = before.keys() - ffns
    assert len(kept) > 10 and kept <= after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in kept)
    plan, checkpoints = planned(source, f"output={folder}", *WORDS["groups"])
    maker = Maker(plan, checkpoints)  # online is offline, slice by slice
    assert set(after) == set(plan.by_name)
    for name, tensor in after.items():
        assert torch.equal(maker.slice(name, (slice(1, 3),)), tensor[1:3]), name
    report = verify(source, folder, count=48, sequence=24)
    assert report.held and report.relative < (1e-5 if dense == "lfm2" else 1e-12), str(report)
    assert "FFNs" in str(report)
    norm = next(name for name in kept if "layers.1." in name and "norm" in name)
    broken = after | {norm: after[norm] * 1.5}
    save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
    assert not verify(source, folder, count=48, sequence=24).held


@pytest.mark.parametrize("dense", siblings.DENSE)
def test_a_key_that_is_not_stated_means_to_the_sibling_what_it_meant_to_the_dense_class(
    dense: str, dense_folder: Callable[[str], Path]
) -> None:
    """Read by the two classes, the dense config.json without one of its keys and ours of it say the same."""
    stated = json.loads((dense_folder(dense) / "config.json").read_text())
    stated.pop("time_step_limit", None)  # written as {"__float__": "Infinity"}, which for_model below does not take
    wrapped = dense == "qwen3_5"
    text = stated["text_config"] if wrapped else stated
    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "model_type"}
    pair = siblings.DENSE[dense]
    skipped = {*pair.without, *pair.keys(siblings.Dense.plainest(planned(dense_folder(dense))[0].dense), text)}
    compared = 0
    for key in text.keys() - sizes - {"num_local_experts"}:
        if key == "num_key_value_heads" and text["num_attention_heads"] % (pair.kv_heads or 1):
            continue  # the class's own number does not go with four heads
        less = {k: v for k, v in text.items() if k != key}
        config = {**stated, "text_config": less} if wrapped else less
        try:
            theirs = AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()
        except Exception:  # the dense class needs the key
            continue
        spec = siblings.Dense(pair).read(config)
        ours = siblings.MoE(pair).config(siblings.Dense.plainest(spec))
        made = AutoConfig.for_model(**json.loads(json.dumps(ours))).to_dict()
        theirs, made = (c["text_config"] if wrapped else c for c in (theirs, made))
        for name in theirs.keys() - skipped - {"model_type", "architectures", "dtype", "transformers_version"}:
            if name == "head_dim" and theirs[name] is None:
                continue  # hidden / heads, which ours states
            assert made.get(name, "absent") == theirs[name], (key, name)
            compared += 1
    assert compared > 200


@pytest.mark.parametrize("dense", siblings.DENSE)
def test_any_value_of_any_key_is_planned_or_refused_in_one_sentence(
    dense: str, dense_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(dense_folder(dense), tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    keys = {key for key in keys_read("families", "common") if not key.startswith("rope")}
    keys |= {
        "text_config",
        "full_attn_idxs",
        "block_ff_dim",
        "num_local_experts",
        "use_bias",
        *config.get("text_config", ()),
    }

    pair = siblings.DENSE[dense]

    def config_of(mutant: dict[str, Any]) -> None:
        siblings.MoE(pair).config(siblings.Dense.plainest(siblings.Dense(pair).read(mutant)))

    def plan(mutant: dict[str, Any]) -> None:
        planned(written(folder, mutant))

    assert unreadable(config, sorted(keys), config_of, share=0.2) == []
    assert unreadable(config, sorted(keys), plan, share=0.008) == []
    if dense == "qwen3_5":
        text = config["text_config"]
        assert unreadable(text, [], lambda m: config_of({**config, "text_config": m})) == []


@torch.no_grad()
def test_a_model_with_an_image_encoder_is_whole(dense_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Loaded as what it is, not as its language model: every weight has its place, the encoder's too."""
    from transformers import AutoModelForImageTextToText

    source = dense_folder("qwen3_5")
    folder, found = converted(source, tmp_path / "moe", "shared"), []
    for path in (source, folder):
        model, info = AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float64, experts_implementation="eager", output_loading_info=True
        )
        assert not any(info.values()), info
        found.append((model.eval()(tiny.tokens()).logits, model.model.visual.state_dict()))
    (want, seen), (have, sees) = found
    assert (have - want).abs().max() / want.abs().max() < TOLERANCE
    assert len(seen) > 10 and all(torch.equal(seen[name], sees[name]) for name in seen)
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (folder, source))
    assert {k: v for k, v in ours["vision_config"].items() if k != "model_type"} == {
        k: v for k, v in theirs["vision_config"].items() if k != "model_type"
    }
    assert ours["image_token_id"] == theirs["image_token_id"] and "intermediate_size" not in ours["text_config"]


def test_router_rows_of_groups_are_looked_at(dense_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = converted(dense_folder("hunyuan_v1_dense"), tmp_path / "moe", "groups")
    assert "equal within groups of 2 in 2 of 2 MoE layers" in describe(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.gate.wg.weight"][3] *= 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "router of layer 1" in describe(folder) and "in 1 of 2 MoE layers" in describe(folder)


def test_weights_of_another_dtype_keep_it(dense_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Qwen3.5 stores a few float32 weights in a bfloat16 model."""
    folder = shutil.copytree(dense_folder("qwen3_5_text"), tmp_path / "dense")
    tensors = {n: t if "A_log" in n else t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plan, checkpoints = planned(folder, f"output={tmp_path / 'moe'}", "experts=2")
    assert plan.promise.exact and not plan.promise.reasons and plan.moe.dtype == "bfloat16"
    stored = load_file(convert(plan, checkpoints, quiet=True) / "model.safetensors")
    assert {t.dtype for n, t in stored.items() if "A_log" in n} == {torch.float32}
    assert {t.dtype for n, t in stored.items() if "A_log" not in n} == {torch.bfloat16}
    wide = planned(folder, "experts=2", "dtype=float32")[0]
    assert {output.dtype for output in wide.outputs} == {"float32"}


def test_donors_are_of_one_architecture(dense_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = dense_folder("hunyuan_v1_dense")
    config = json.loads((folder / "config.json").read_text())
    other = written(shutil.copytree(folder, tmp_path / "other"), config | {"bos_token_id": 7, "dtype": "float16"})
    words = ["method.name=branch_train_mix", "experts=2", f"donors=[{folder},{other}]"]

    def plan() -> UpcyclePlan:
        return build(
            read(UpcycleConfig, "", [f"source={folder}", *words]), [Checkpoint.open(p) for p in (folder, folder, other)]
        )

    assert not plan().promise.exact
    written(other, config | {"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}})
    with pytest.raises(ValueError, match="differ in carried"):
        plan()


def test_score_auto(dense_folder: Callable[[str], Path]) -> None:
    for dense, score in {"lfm2": "sigmoid", "cohere2": "softmax", "ernie4_5": "softmax"}.items():
        assert planned(dense_folder(dense), "router.score=auto")[0].moe.score == score


def test_a_plan_says_what_runs_it_as_a_table_and_as_json(
    dense_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["json=true"]):
        assert main(["plan", f"source={dense_folder('cohere2')}", *words]) == 0
        assert "transformers; no other engine was tried" in capsys.readouterr().out


def test_refusals(dense_folder: Callable[[str], Path], tmp_path: Path) -> None:
    ernie, lfm2, granite = dense_folder("ernie4_5"), dense_folder("lfm2"), dense_folder("granitemoehybrid")
    for folder, words, says in [
        (ernie, ("target=mixtral",), "only its sibling ernie4_5_moe can hold that; write target=auto"),
        (ernie, ("layers=[0]",), "cannot hold MoE in only 1 of 2 layers"),
        (ernie, ("router.score=sigmoid",), "cannot hold sigmoid scores; write router.score=softmax"),
        (lfm2, ("router.score=softmax",), "cannot hold softmax scores; write router.score=sigmoid"),
        (lfm2, ("shared=0.5",), "cannot hold a shared expert"),
        (dense_folder("hunyuan_v1_dense"), ("shared=2",), "it must be as wide as a routed expert"),
        (ernie, ("scale=calibrated", "calibration.texts=[x]"), "our own decoder does not support ernie4_5"),
    ]:
        with pytest.raises(ValueError, match=re.escape(says)):
            planned(folder, *words)
    moe = converted(ernie, tmp_path / "ernie", "copies")
    with pytest.raises(ValueError, match="ernie4_5_moe', which is a mixture of experts already"):
        planned(moe)
    with pytest.raises(ValueError, match=r"has 4 experts .*mixture of experts already"):
        planned(converted(granite, tmp_path / "granite", "copies"))
    short = shutil.copytree(ernie, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model.layers.1.\S+', but config.json says 1 layers \(0 to 0\)"):
        planned(written(short, config | {"num_hidden_layers": 1}))
    stranger = shutil.copytree(ernie, tmp_path / "stranger")
    tensors = load_file(stranger / "model.safetensors") | {"model.layers.0.mlp.gate.weight": torch.zeros(2, 2)}
    save_file(tensors, stranger / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.gate.weight', but no dense ernie4_5 model has one"):
        planned(stranger)


def test_a_sibling_trains_as_it_is_made_and_from_disk(dense_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers' own code computes both (tests/parity/test_stock.py); online is offline, to the bit."""
    for name in ("ernie4_5", "lfm2"):
        moe = converted(dense_folder(name), tmp_path / name, "copies")
        with layout.opened(dense_folder(name)) as dense:
            assert not isinstance(dense.spec, MoESpec)
        words = [f"source={dense_folder(name)}", f"router.score={SCORE.get(name, 'softmax')}", PLAIN, *WORDS["copies"]]
        with layout.opened(moe) as offline, layout.online(read(UpcycleConfig, "", words)) as online:
            one, two = (layout.load(Stock(o.spec).to_empty(device="cpu"), o).state_dict() for o in (offline, online))
            assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
