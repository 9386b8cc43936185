"""Bad configs and sources: each is refused in one sentence that says what is wrong and what to write instead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import upcycle
from tests.parity import tiny
from tests.unit.upcycle.plans import load
from training.config.reading import settings
from training.config.schema import ModelConfig, TrainConfig
from training.run.parts import source
from upcycle.__main__ import main
from upcycle.config.reading import byte_size, read
from upcycle.config.schema import UpcycleConfig
from upcycle.converting.convert import convert
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.plan import UpcyclePlan, build
from upcycle.verifying.verify import verify


def plan(*words: str) -> UpcyclePlan:
    config = read(UpcycleConfig, "", words)
    names = [config.source or config.donors[0], *config.donors]
    checkpoints = [Checkpoint.open(name) for name in names]
    try:
        return build(config, checkpoints)
    finally:
        for checkpoint in checkpoints:
            checkpoint.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["expert=8"], "unknown key 'expert'; did you mean 'experts'"),
        (["router.scor=softmax"], "unknown key 'router.scor'; did you mean 'score'"),
        (["method.name=virtual_group", "method.ratio=0.5"], "unknown key 'method.ratio'"),
        (["method.name=virtual_grup"], "did you mean 'virtual_group'"),
        (["method.name=drop", "method.ratio=half"], "method.ratio"),
        (["method.name=drop", "method.ratio=1.5"], "from 0 to 1"),
        (["method.name=drop", "method.mode=papre"], "write paper or released"),
        (["method.name=noise", "method.std=0"], "above 0"),
        (["method.name=split", "method.by=size"], "write contiguous, random or activation"),
        (["top_k=two"], "top_k"),
        (["top_k=9"], "top_k must be at most 8"),
        (["top_k=0"], "at least 1"),
        (["experts=0"], "at least 1"),
        (["granularity=2"], "use method.name=virtual_group"),
        (["method.name=virtual_group", "granularity=7", "top_k=7"], "try granularity=4, 6, 8"),
        (
            ["method.name=virtual_group", "granularity=8", "top_k=2"],
            "top_k=2 is not a multiple of granularity=8, so no choice is whole FFNs and the model starts far from the "
            "dense one; try top_k=8, or write router.choice=parts if you want that",
        ),
        (["method.name=drop", "granularity=4", "top_k=6"], "try top_k=4"),
        (["shared=-1"], "shared is -1"),
        (["shared=1.5"], "shared is 1.5"),
        (["shared=0.999"], "shared="),
        (["method.name=virtual_group", "granularity=4", "top_k=4", "shared=1"], "try shared=2"),
        (["target=mixtral", "shared=1"], "target mixtral cannot hold a shared expert"),
        (["target=mixtrl"], "did you mean 'mixtral'"),
        (["target=qwen3_moe"], "targets that can: mixtral"),
        (["target=mixtral", "layers=[0]"], "MoE in only 1 of 2 layers"),
        (["layers=some"], "write all, every:2"),
        (["layers=[0,5]"], "layers 0 to 1"),
        (["layers=[0,0]"], "a layer twice"),
        (["layers=every:3"], "selects none of the"),
        (["layers=first-dense:2"], "selects none of the"),
        (["router.score=relu"], "write softmax, sigmoid or auto"),
        (["router.order=topk"], "softmax-then-topk or topk-then-softmax"),
        (["router.choice=best"], "write auto, any, each-slice or parts"),
        (
            ["router.choice=each-slice", "method.name=virtual_group", "granularity=4", "top_k=6"],
            "top_k=6 is not a multiple of granularity=4, so no choice is whole FFNs and the model starts far from the dense one; try top_k=4",
        ),
        (["router.choice=each-slice", "method.name=split", "granularity=2"], "method split makes no copies"),
        (
            ["router.choice=each-slice", "method.name=virtual_group", "granularity=4", "top_k=4", "target=mixtral"],
            "target mixtral cannot hold a choice in each slice; targets that can: upcycled. Or: no stock target",
        ),
        (["router.normalize=false"], "scale=calibrated"),
        (["router.init.name=zero"], "router.init.name is 'zero'"),
        (["router.init.std=0"], "equal logits send every token to the same experts"),
        (["router.init.name=hidden"], "one text per copy"),
        (["router.init.name=neurons"], "needs method.name=split"),
        (["method.name=split", "router.init.name=neurons"], "method.by=activation"),
        (["scale=exactly"], "scale is 'exactly'"),
        (["scale=-2"], "above 0"),
        (["scale=true"], "scale is True"),
        (["scale=calibrated"], "calibration.texts is empty"),
        (["scale_in=down"], "scale_in is 'down'"),
        (["scale_in=output"], "needs a target with an output scale"),
        (["dtype=int8"], "dtype is 'int8'"),
        (["dtype=bf16"], "did you mean 'bfloat16'?"),
        (["dtype=fp16"], "did you mean 'float16'?"),
        (["max_shard=5"], "'5' is not a size"),
        (["donors=nowhere"], "nowhere"),
        (["method.name=branch_train_mix"], "one donor per copy"),
        (["method=3"], "method"),
        (["shared=.inf"], "shared is inf"),
        (["experts=100000000"], "at most 16384 experts"),
        (["experts=99999999999999999999999999"], "experts is 99999999999999999999999999; it must be at most"),
        (["router.init.std=.inf"], "1e-6 to 1e3"),
        (["router.init.std=1e-50"], "1e-6 to 1e3"),
        (["router.init.std=1000", "router.score=sigmoid"], "whose sigmoids are 0 or 1; write at most 2.5"),
        (["method.name=noise", "method.std=.inf"], "above 0"),
        (["scale=1.0e+300"], "1e-9 to 1e9"),
        (["layers=every:²"], "every:2"),
        (["donors={a: b}"], "it must be a list, as in"),
        (["method=[]"], "method is []; it must be keys and values"),
        (["[=1"], "cannot be read"),
    ],
)  # fmt: skip
def test_a_wrong_key_type_or_size_is_one_sentence(llama: Path, words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        _ = plan(f"source={llama}", *words).shards
    message = str(caught.value)
    assert says in message, message
    assert "\n" not in message


def test_shared_counts_experts_or_is_a_share_of_the_neurons(llama: Path) -> None:
    def sizes(*words: str) -> tuple[int, int]:
        moe = plan(f"source={llama}", "method.name=virtual_group", "top_k=2", *words).moe
        return moe.shared, moe.widths[0]

    assert sizes("shared=1") == (48, 48)
    assert sizes("shared=1", "granularity=2") == (32, 32)
    assert sizes("shared=2", "granularity=2") == (48, 24)
    assert sizes("shared=0.25", "granularity=2") == (24, 36)
    assert sizes("shared=0.3", "granularity=2") == (32, 32)  # 28.8 neurons, so that the rest is rows of whole 16 bytes


def test_sizes_of_files_are_read_and_nonsense_refused() -> None:
    assert byte_size("5GB") == 5_000_000_000
    assert byte_size(" 1.5 GiB") == 3 * 2**29
    for wrong in ("", "GB", "0GB", "-1GB", "5 parsecs"):
        with pytest.raises(ValueError, match="not a size"):
            byte_size(wrong)


def broken(llama: Path, folder: Path, change: str) -> Path:
    folder.mkdir()
    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["model.layers.1.mlp.gate_up.weight"] = torch.zeros(3)
    elif change == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif change == "int8":
        tensors = {k: v.to(torch.int8) for k, v in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((llama / "config.json").read_text())
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing", "has no tensor 'model.layers.1.mlp.up_proj.weight'"),
        ("extra", "tensor 'model.layers.1.mlp.gate_up.weight' that no llama model has"),
        ("shape", "has shape [95, 64], but config.json promises [96, 64]"),
        ("int8", "stores its weights as int8"),
    ],
)
def test_a_checkpoint_that_is_not_its_config_is_refused_before_any_write(
    llama: Path, tmp_path: Path, change: str, says: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        plan(f"source={broken(llama, tmp_path / 'dense', change)}")
    assert says in str(caught.value)


def test_a_tied_head_is_dropped_by_name(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, folder / "model.safetensors")
    dropped = dict(plan(f"source={folder}").dropped)
    assert dropped == {
        "lm_head.weight": "tied to the embedding",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "a buffer, not a weight",
    }


def test_auto_says_why(llama: Path) -> None:
    made = plan(f"source={llama}")
    assert made.target == "mixtral"
    assert "stock transformers" in made.why
    ours = plan(f"source={llama}", "method.name=split", "experts=7", "top_k=2")
    assert ours.target == "upcycled"
    assert "no stock architecture holds it" in ours.why
    assert "experts of different widths" in ours.why
    half = plan(
        f"source={llama}", "dtype=bfloat16", "method.name=virtual_group", "granularity=2", "router.score=sigmoid"
    )
    assert "float32" in half.why


GROUPS = ["method.name=virtual_group", "granularity=4", "top_k=4"]


def test_copies_of_slices_choose_in_each_slice_where_that_can_be_said(llama: Path) -> None:
    assert plan(f"source={llama}", *GROUPS, "target=upcycled").moe.choice == "each-slice"
    assert plan(f"source={llama}", *GROUPS, "target=upcycled", "router.choice=any").moe.choice == "any"
    assert plan(f"source={llama}", *GROUPS).moe.choice == "any"  # stays stock
    split = ("method.name=split", "experts=4", "granularity=2", "top_k=4", "target=upcycled")
    assert plan(f"source={llama}", *split).moe.choice == "any"  # no copies
    with pytest.raises(ValueError, match="top_k=3 is not a multiple of granularity=4"):
        plan(f"source={llama}", *GROUPS[:2], "top_k=3", "target=upcycled")


SLICES = ["method.name=virtual_group", "target=upcycled"]


@pytest.mark.parametrize(
    ("words", "sizes", "choice", "said"),
    [
        (SLICES, (16, 4, 4), "each-slice", "by default experts=16 granularity=4 top_k=4, the recommended slices"),
        (["method=virtual_group", "router.choice=each-slice"], (16, 4, 4), "each-slice", "the recommended slices"),
        ([*SLICES, "granularity=2"], (8, 2, 2), "each-slice", "by default experts=8 top_k=2"),
        ([*SLICES, "granularity=8"], (32, 8, 8), "each-slice", "by default experts=32 top_k=8"),
        ([*SLICES, "experts=8"], (8, 4, 4), "each-slice", "by default granularity=4 top_k=4"),
        ([*SLICES, "top_k=8"], (16, 4, 8), "each-slice", "by default experts=16 granularity=4"),
        ([*SLICES, "top_k=2"], (8, 2, 2), "each-slice", "by default experts=8 granularity=2"),
        ([*SLICES, "experts=16", "granularity=4", "top_k=4"], (16, 4, 4), "each-slice", ""),
        ([*SLICES, "granularity=1"], (8, 1, 2), "any", "by default experts=8 top_k=2"),
        ([*SLICES, "router.choice=any"], (8, 1, 2), "any", "whole copies, because only target=upcycled keeps slices together in training"),
        (["method.name=virtual_group"], (8, 1, 2), "any", "by default experts=8 top_k=2 of whole copies, because"),
        (["method.name=virtual_group", "target=mixtral"], (8, 1, 2), "any", "only target=upcycled"),
        (GROUPS, (8, 4, 4), "any", "by default experts=8"),
        ([], (8, 1, 2), "any", "by default experts=8 top_k=2"),
        (["target=upcycled"], (8, 1, 2), "any", "by default experts=8 top_k=2"),
        (["experts=4"], (4, 1, 2), "any", "by default top_k=2"),
        (["method.name=noise", "granularity=4"], (8, 4, 4), "any", "by default experts=8 top_k=4"),
        (["method.name=split", "granularity=3"], (8, 3, 2), "any", "by default experts=8 top_k=2"),
    ],
)  # fmt: skip
def test_sizes_that_are_not_set_are_what_is_recommended_and_are_said(
    llama: Path, words: list[str], sizes: tuple[int, int, int], choice: str, said: str
) -> None:
    made = plan(f"source={llama}", *words)
    assert (made.moe.copies, made.moe.granularity, made.moe.top_k, made.moe.choice) == (*sizes, choice)
    assert made.promise.exact == made.method.exact and (made.method.name != "virtual_group" or made.promise.exact)
    lines = [note for note in made.notes if note.startswith("by default")]
    assert lines == [] if not said else len(lines) == 1 and said in lines[0]
    written = [f"experts={sizes[0]}", f"granularity={sizes[1]}", f"top_k={sizes[2]}"]
    assert plan(f"source={llama}", *words, *written).hash == made.hash, "the same plan with its sizes written out"
    assert upcycle.plan(source=str(llama), **dotted(words)).hash == made.hash, "the same default in Python"
    config = TrainConfig(model=ModelConfig(upcycle={"source": str(llama), **dotted(words)}))
    with source(config) as origin:
        assert origin.plan is not None and origin.plan.hash == made.hash, "the same default in training"
    assert settings(config)["model.upcycle.experts"] == sizes[0], "a run records what it decided"


def dotted(words: list[str]) -> dict[str, Any]:
    """Return words as keys and values."""
    found: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        outer, _, inner = key.partition(".")
        given: Any = int(value) if value.isdecimal() else value
        found[outer] = {inner: given} if inner else given
    return found


def test_a_free_choice_that_is_asked_for_is_noted_and_no_warning(llama: Path) -> None:
    made = plan(f"source={llama}", *GROUPS, "router.choice=any")
    assert not made.warnings and "0.26 nats worse than" in "".join(made.notes)


@pytest.mark.parametrize(
    ("words", "warned", "noted"),
    [
        (GROUPS, "0.26 nats worse than the dense control after 26 M tokens", ""),
        ([*GROUPS, "method.name=noise"], "use target=upcycled, whose router chooses in each slice (no stock target can hold that", ""),
        ([*GROUPS, "router.choice=each-slice"], "", "no stock target (mixtral, qwen3_moe, ...) can hold"),
        ([*GROUPS, "router.choice=each-slice", "router.normalize=false", "scale=published"], "not divided by their sum", "no stock target"),
        ([*GROUPS, "router.choice=each-slice", "router.normalize=false", "router.order=topk-then-softmax"], "", "no stock target"),
        ([*GROUPS, "experts=1"], "", ""),  # every expert is chosen
        (["method.name=split", "granularity=4", "top_k=4"], "", ""),  # no copies
        (["method.name=copy"], "", ""),
        (["method.name=drop"], "method drop pays off only after about 100 B tokens", ""),
    ],
)  # fmt: skip
def test_a_plan_warns_where_evidence_says_no(
    llama: Path, capsys: pytest.CaptureFixture[str], words: list[str], warned: str, noted: str
) -> None:
    made = plan(f"source={llama}", *words)
    assert len(made.warnings) == bool(warned) and warned in "".join(made.warnings)
    assert any(note.startswith(noted) for note in made.notes) if noted else "each-slice" not in "".join(made.notes)
    assert main(["plan", f"source={llama}", *words]) == 0
    page = capsys.readouterr().out
    assert (page.count("\nwarning "), warned in page) == (bool(warned), True)
    assert main(["plan", f"source={llama}", *words, "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == list(made.warnings)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gemma3", "nothing"])
def test_no_other_architecture_is_proposed_for_one_that_is_not_known(llama: Path, tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(ValueError, match=kind) as caught:
        plan(f"source={folder}")
    assert "did you mean" not in str(caught.value)
    assert ("dense families known" in str(caught.value)) == (kind in ("gemma3", "nothing"))


def test_gemma_in_half_precision_is_not_called_exact(tmp_path: Path) -> None:
    folder = tiny.make("gemma", tmp_path / "gemma", dtype=torch.bfloat16)
    assert "holds this model except that it rounds norm weights + 1 to bfloat16" in plan(f"source={folder}").why
    assert "holds this model exactly" in plan(f"source={folder}", "dtype=float32").why


def test_a_plan_reads_no_tensor(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "read", never)
    monkeypatch.setattr(Checkpoint, "fingerprint", never)
    made = plan(f"source={llama}", "method.name=drop")
    assert made.bytes > 0
    assert len(made.hash) == 64


def test_the_plans_hash_is_of_what_is_made_not_of_where(llama: Path) -> None:
    base = plan(f"source={llama}", "output=a").hash
    assert plan(f"source={llama}", "output=b", "sequence=128").hash == base
    for word in ("seed=1", "top_k=3", "scale=2", "router.init.std=0.02", "max_shard=1MB", "experts=4"):
        assert plan(f"source={llama}", "output=a", word).hash != base, word
    groups = (f"source={llama}", "target=upcycled", "method.name=virtual_group", "granularity=2")
    assert plan(*groups, "router.choice=any").hash != plan(*groups).hash


def test_more_layers_than_tensors_are_refused_at_once(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "tall")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match="num_hidden_layers=1000000000; it must be a whole number from 1 to 10000"):
        plan(f"source={folder}")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9999}))
    with pytest.raises(ValueError, match="promises 9999 layers"):
        plan(f"source={folder}")


def test_a_sigmoid_router_may_be_as_spread_as_float32_holds(llama: Path) -> None:
    """At the largest std that is not refused, the plan's own estimate still finds every weight above 0."""
    assert plan(f"source={llama}", "router.init.std=2.5", "router.score=sigmoid").promise.exact


def test_a_tensor_of_another_kind_among_floats_is_refused(llama: Path, tmp_path: Path) -> None:
    """Otherwise its bytes would be written under a header that says another dtype."""
    folder = shutil.copytree(llama, tmp_path / "mixed")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="stores its weights as int8"):
        plan(f"source={folder}")


@pytest.mark.parametrize(
    ("variant", "words", "target", "score"),
    [
        ("phi3_partial", (), "glm4_moe", "sigmoid"),  # as Phi-4-mini
        ("qwen3", ("shared=0.5",), "glm4_moe", "sigmoid"),
        ("qwen3", (), "qwen3_moe", "softmax"),
        ("llama", ("target=solar_open",), "solar_open", "sigmoid"),
        ("phi3_partial", ("target=upcycled",), "upcycled", "softmax"),
        ("qwen3", ("shared=0.5", "router.normalize=false", "scale=none"), "upcycled", "softmax"),  # exact with neither
        ("gpt_neox", (), "upcycled", "softmax"),
    ],
)
def test_score_auto_is_sigmoid_where_that_alone_is_stock_and_exact(
    variant: str, words: tuple[str, ...], target: str, score: str, tmp_path: Path
) -> None:
    source = f"source={tiny.make_variant(variant, tmp_path / 'dense')}"
    plan, _ = load(source, "experts=4", "router.score=auto", *words)
    assert (plan.target, plan.moe.score) == (target, score), plan.why
    assert f"router.score=auto is {score}" in plan.why
    plain, _ = load(source, "experts=4", f"router.score={score}", *words)
    assert (plan.outputs, plan.hf_config, plan.promise) == (plain.outputs, plain.hf_config, plain.promise)
    softmax, _ = load(source, "experts=4", *words) if "target=solar_open" not in words else (None, None)
    if softmax is not None and score == "sigmoid":  # which the default stays
        assert softmax.target == "upcycled" and softmax.moe.score == "softmax" and "auto" not in softmax.why


def test_score_auto_is_made_again_by_verify(tmp_path: Path) -> None:
    source = tiny.make("qwen3", tmp_path / "dense")
    plan, checkpoints = load(
        f"source={source}", f"output={tmp_path / 'moe'}", "experts=2", "shared=0.5", "router.score=auto"
    )
    report = verify(source, convert(plan, checkpoints, quiet=True), count=48, sequence=24)
    assert report.held, str(report)
