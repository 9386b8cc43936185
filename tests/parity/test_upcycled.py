"""Our own modelling file: as a plain dense model it is every donor; as an MoE it is the formulas.

Dense: each tiny donor, its tensors under our names, gives transformers' logits, gradients, cached decoding and greedy
text. MoE: the block against a reference written here from formulas, in float64, token by token. Each comparison has a
twin with one thing wrong, which must fail by a wide margin.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.parity import tiny
from upcycle.arch import registry
from upcycle.arch.remote.modeling_upcycled import UpcycledConfig, UpcycledForCausalLM, UpcycledMoE
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.arch.targets import upcycled

logging.disable_progress_bar()
TOLERANCE = 1e-6  # of the largest value, in float32
BROKEN = 1e-3  # what a twin must exceed
# their frequencies depend on how long the sequence is by now, so a cache holds keys turned by other ones
CHANGING = ("dynamic", "longrope")
WINDOWED = tuple(name for name in tiny.VARIANTS if "window" in name or name == "qwen2_layer_types")
FOLDERS = ["llama", "gemma_untied_bias", "granite_bias", "olmo2", "nemotron_bias", "gpt_neox", "smollm3", "gemma2"]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: tiny.make_variant(name, tmp_path_factory.mktemp(name)))


def spec_of(folder: Path) -> DenseSpec:
    config = json.loads((folder / "config.json").read_text())
    spec: DenseSpec = registry.family(config["model_type"]).read(config)
    return replace(spec, dtype="float32")


def dense_tensors(folder: Path, spec: DenseSpec) -> Tensors:
    """role -> tensor"""
    stored, found = load_file(folder / "model.safetensors"), {}
    for role, source in registry.family(spec.family).sources(spec).items():
        whole = stored[source.name]
        found[role] = torch.cat([whole[a:b] for a, b in source.rows]) if source.rows else whole
    return found


def write(folder: Path, moe: MoESpec, roles: Tensors, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = upcycled.TARGET.config(moe) | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for slot in upcycled.TARGET.slots(moe):
        whole = torch.cat([roles[role] for role in slot.roles]).view(slot.shape)
        tensors[slot.name] = whole.to(getattr(torch, slot.dtype or moe.dtype)).clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(upcycled.MODELING, folder)
    return folder


def identity(folder: Path, attention: str = "eager", **changes: Any) -> Any:
    """The donor in our class, without a file between."""
    spec = spec_of(folder)
    moe = MoESpec(spec, layers=(), widths=(), top_k=0, copies=1, dtype="float32")
    config = upcycled.TARGET.config(moe) | changes
    if "rope_parameters" in changes:
        config.pop("rope_scaling", None)  # the same under its old name, and read first
    model = UpcycledForCausalLM(UpcycledConfig(**config, attn_implementation=attention))
    roles = dense_tensors(folder, spec)
    missing, unexpected = model.load_state_dict(
        {s.name: roles[s.roles[0]] for s in upcycled.TARGET.slots(moe)}, strict=False
    )
    assert not unexpected and missing == (["lm_head.weight"] if spec.tied else [])
    model.tie_weights()
    return model.eval()


def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def error(got: Tensor, want: Tensor) -> float:
    return float(((got - want).abs().max() / want.abs().max()).detach())


def padded() -> tuple[Tensor, Tensor]:
    ids, mask = tiny.tokens(seed=1), torch.ones(2, tiny.LENGTH, dtype=torch.long)
    mask[0, :7] = 0
    return ids, mask


# ---- the dense model


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_logits_loss_and_gradients(name: str, dense: Callable[[str], Path]) -> None:
    a, b = theirs(dense(name)), identity(dense(name))
    ids, mask = padded()
    labels = ids.masked_fill(mask == 0, -100)
    for kept in (None, mask):
        want, got = (m(ids, attention_mask=kept, labels=labels) for m in (a, b))
        seen = torch.ones_like(mask) if kept is None else mask
        assert error(got.logits[seen.bool()], want.logits[seen.bool()]) < TOLERANCE
        assert error(got.loss, want.loss) < TOLERANCE
        want.loss.backward()
        got.loss.backward()
    for part in ("get_input_embeddings", "get_output_embeddings"):
        want_grad, got_grad = (getattr(m, part)().weight.grad for m in (a, b))
        assert error(got_grad, want_grad) < 5 * TOLERANCE  # two backward passes of float32 sums in another order
    with torch.no_grad():
        b.model.layers[-1].mlp.down_proj.weight[0, 0] += 1.0
        assert error(b(ids).logits, a(ids).logits) > BROKEN


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_cache_and_greedy_text(name: str, dense: Callable[[str], Path]) -> None:
    a, b = theirs(dense(name)), identity(dense(name))
    ids, mask = padded()

    def decoded(model: Any) -> Tensor:
        """A prompt of 8 tokens, then 2 tokens, then one at a time."""
        steps, past = [], None
        for start, stop in itertools.pairwise([0, 8, 10, *range(11, tiny.LENGTH + 1)]):
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=past, use_cache=True)
            steps.append(out.logits)
            past = out.past_key_values
        return torch.cat(steps, 1)[mask.bool()]

    assert error(decoded(b), decoded(a)) < TOLERANCE
    if b.config.rope_parameters["rope_type"] not in CHANGING:
        assert error(decoded(b), b(ids, attention_mask=mask).logits[mask.bool()]) < 5 * TOLERANCE  # other matrix shapes
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = a.generate(ids, **settings)
    assert want.shape[1] > tiny.LENGTH and torch.equal(b.generate(ids, **settings), want)
    b.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    assert error(decoded(b), decoded(a)) > BROKEN


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma", "granite", "gpt_neox", *WINDOWED])
def test_sdpa_is_eager(name: str, dense: Callable[[str], Path]) -> None:
    ids, mask = padded()
    want, got = (identity(dense(name), kind)(ids, attention_mask=mask).logits for kind in ("eager", "sdpa"))
    assert error(got[mask.bool()], want[mask.bool()]) < 5 * TOLERANCE  # sums in another order
    cut = identity(dense(name), "sdpa")(ids).logits
    assert error(cut[mask.bool()], want[mask.bool()]) > BROKEN  # the padding was seen


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama", {"norm_eps": 0.1}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 9e3}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("llama", {"attention_multiplier": 0.3}),
        ("llama_llama3_rope", {"rope_parameters": tiny.LLAMA3 | {"factor": 2.0}}),
        ("mistral_window", {"sliding_window": 7}),
        ("qwen2_layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gemma", {"norm": "rms"}),
        ("gemma", {"embedding_multiplier": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"logit_multiplier": 1.0}),
        ("olmo2", {"block": "pre"}),
        ("gpt_neox", {"block": "pre"}),
        ("smollm3", {"nope_layers": []}),
        ("olmo3", {"sliding_rope_parameters": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {"sliding_rope_parameters": None}),
        ("nemotron", {"norm": "layernorm"}),
        ("nemotron", {"hidden_act": "relu"}),
    ],
)
def test_every_field_counts(name: str, wrong: dict[str, Any], dense: Callable[[str], Path]) -> None:
    want = tiny.logits(theirs(dense(name)), tiny.tokens())
    assert error(tiny.logits(identity(dense(name)), tiny.tokens()), want) < TOLERANCE
    assert error(tiny.logits(identity(dense(name), **wrong), tiny.tokens()), want) > BROKEN


# ---- the MoE block, from formulas


def formula(block: Any, config: UpcycledConfig, x_TD: Tensor) -> Tensor:
    """Token by token, expert by expert: sum over the chosen of weight * expert, times the scale, plus the shared one."""
    act = {"silu": functional.silu, "gelu": functional.gelu, "relu2": lambda h: torch.where(h > 0, h * h, 0 * h)}

    def ffn(mlp: Any, x: Tensor) -> Tensor:
        def linear(m: Any, v: Tensor) -> Tensor:
            y = m.weight @ v
            return y if m.bias is None else y + m.bias

        up = linear(mlp.up_proj, x)
        h = act[config.hidden_act](linear(mlp.gate_proj, x)) * up if config.gated else act[config.hidden_act](up)
        return linear(mlp.down_proj, h)

    def expert(i: int, x: Tensor) -> Tensor:
        if not hasattr(block.experts, "gate_up_proj"):
            return ffn(block.experts.get_submodule(str(i)), x)
        gate, up = (block.experts.gate_up_proj[i] @ x).chunk(2)
        return block.experts.down_proj[i] @ (act[config.hidden_act](gate) * up)

    rows = []
    for x in x_TD:
        logits = block.gate.weight @ x
        if config.scoring_func == "sigmoid":
            scores = 1 / (1 + torch.exp(-logits))
            votes = scores + block.gate.e_score_correction_bias
        else:
            scores = votes = torch.exp(logits) / torch.exp(logits).sum()
        ranked = sorted(range(len(votes)), key=lambda i: (-float(votes[i].detach()), i))
        of_slice = [[i for i in ranked if i % config.expert_slices == s] for s in range(config.expert_slices)]
        chosen = [i for some in of_slice for i in some[: config.num_experts_per_tok // config.expert_slices]]
        weight = {i: scores[i] for i in chosen}
        if config.norm_topk_prob or (config.scoring_func == "softmax" and config.router_order == "topk-then-softmax"):
            weight = {i: w / sum(weight.values()) for i, w in weight.items()}
        y = sum(w * expert(i, x) for i, w in weight.items()) * config.routed_scaling_factor
        rows.append(y + ffn(block.shared_experts, x) if config.shared_expert_intermediate_size else y)
    return torch.stack(rows)


FORMS: dict[str, dict[str, Any]] = {
    f"{score}, {order}, {'' if normalize else 'not '}normalised": {
        "scoring_func": score,
        "router_order": order,
        "norm_topk_prob": normalize,
    }
    for score in ("softmax", "sigmoid")
    for order in ("softmax-then-topk", "topk-then-softmax")
    for normalize in (True, False)
} | {
    "uneven": {"expert_widths": [1, 9, 4, 4, 7]},
    "shared": {"shared_expert_intermediate_size": 11},
    "squared ReLU": {"hidden_act": "relu2", "gated": False},
    "biases": {"mlp_bias": True, "shared_expert_intermediate_size": 3},
    "everything": {
        "hidden_act": "gelu", "mlp_bias": True, "expert_widths": [2, 3, 5, 8, 13], "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 6, "scoring_func": "sigmoid", "norm_topk_prob": False,
    },
    "each slice": {"expert_widths": [8] * 8, "num_experts_per_tok": 4, "expert_slices": 4},
    "each slice by sigmoid": {
        "expert_widths": [8] * 6, "num_experts_per_tok": 4, "expert_slices": 2, "scoring_func": "sigmoid",
    },
    "one expert per token": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 5},
}  # fmt: skip


def block_of(form: dict[str, Any], seed: int = 0, experts: str = "eager") -> tuple[Any, UpcycledConfig]:
    settings = {"hidden_size": 16, "expert_widths": [8] * 5, "num_experts_per_tok": 2, "routed_scaling_factor": 1.7}
    config = UpcycledConfig(**settings | form)
    config._experts_implementation = experts
    block, generator = UpcycledMoE(config).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in sorted(block.state_dict().items()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.5)
    return block, config


STACKED = [form for form in FORMS if block_of(FORMS[form])[1].has_stacked_experts]


@pytest.mark.parametrize("form", STACKED)
def test_grouped_products_are_the_loop(form: str) -> None:
    """Values and gradients, in float32, which torch's grouped products want."""
    assert 1 < len(STACKED) < len(FORMS)
    x = torch.randn(21, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = []
    for experts in ("eager", "grouped_mm", "batched_mm"):
        block = block_of(FORMS[form], experts=experts)[0].float()
        y = block(x)
        probe = torch.linspace(-1, 1, x.numel()).view_as(x)
        found.append([y, *torch.autograd.grad((y * probe).sum(), [x, *block.experts.parameters()])])
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert error(got, want) < 1e-5
    block.experts.gate_up_proj.data[:, 0] *= 1.5
    assert error(block(x), found[0][0]) > BROKEN


@pytest.mark.parametrize("form", FORMS)
def test_moe_is_its_formula(form: str) -> None:
    block, config = block_of(FORMS[form])
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    got, want = block(x), formula(block, config, x.flatten(0, 1)).view_as(x)
    assert error(got, want) < 1e-12
    inputs = [x, *block.parameters()]
    probe = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    pairs = [torch.autograd.grad((y * probe).sum(), inputs, allow_unused=True, retain_graph=True) for y in (got, want)]
    for got_grad, want_grad in zip(*pairs, strict=True):
        if want_grad is None or not want_grad.abs().max() > 1e-12:  # one expert, normalised: its weight is constant
            assert got_grad is None or float(got_grad.abs().max()) < 1e-12
        else:
            assert error(got_grad, want_grad) < 1e-10
    busiest = torch.bincount(block.gate(x.flatten(0, 1))[2].flatten()).argmax()
    with torch.no_grad():
        experts = dict(block.experts.named_parameters())
        experts.get(
            f"{busiest}.down_proj.weight", block.experts.down_proj[busiest] if config.has_stacked_experts else None
        )[0] *= 1.5
        assert error(block(x), want) > BROKEN
        assert float((want - want.mean()).abs().max()) > 0.1


@pytest.mark.parametrize(
    "wrong",
    [{"norm_topk_prob": False}, {"num_experts_per_tok": 3}, {"routed_scaling_factor": 1.0}, {"hidden_act": "gelu"}],
    ids=str,
)
@torch.no_grad()
def test_moe_formula_sees_every_setting(wrong: dict[str, Any]) -> None:
    block, config = block_of({})
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert error(block(x), formula(block, UpcycledConfig(**config.to_dict() | wrong), x)) > BROKEN


@torch.no_grad()
def test_correction_bias_chooses_but_does_not_weigh() -> None:
    block, _ = block_of({"scoring_func": "sigmoid", "norm_topk_prob": False})
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    block.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0, 9.0]))
    _, weight, chosen = block.gate(x)
    assert torch.equal(chosen.sort(-1).values, torch.tensor([2, 4]).expand(20, 2))
    want = 1.7 * (x @ block.gate.weight.T).sigmoid().gather(1, chosen)
    assert torch.allclose(weight, want, atol=1e-12) and not torch.allclose(weight, want + 9)


@torch.no_grad()
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ties_keep_a_virtual_group_whole(score: str) -> None:
    form = {"expert_widths": [2] * 64, "num_experts_per_tok": 8, "scoring_func": score}
    block, _ = block_of(form)
    if score == "sigmoid":
        block.gate.e_score_correction_bias.zero_()
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[5] = rows[2]  # two groups of eight that always tie
    block.gate.weight.copy_(rows.repeat_interleave(8, 0))
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    groups = block.gate(x)[2] // 8
    assert bool((groups == groups[:, :1]).all())
    assert 2 in groups and 5 not in groups  # the lower index first
    mixed = torch.topk(x @ rows[torch.arange(64) % 8].T, 8).indices // 8  # the other layout: the same row, other parts
    assert not bool((mixed == mixed[:, :1]).all())


@torch.no_grad()
def test_router_is_float32_in_a_bf16_model() -> None:
    block, config = block_of({"expert_widths": [2] * 64, "num_experts_per_tok": 8})
    block = block.bfloat16()
    x = torch.randn(500, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, weight, chosen = block.gate(x)
    logits = x.float() @ block.gate.weight.float().T
    want = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :8]
    assert weight.dtype == torch.float32 and torch.equal(chosen, want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block.gate(x)[2], want)
    rounded = torch.sort(x @ block.gate.weight.T, dim=-1, descending=True, stable=True).indices[:, :8]
    assert not torch.equal(rounded, want)
    assert block(x).dtype == torch.bfloat16 and config.routed_scaling_factor == 1.7


# ---- the whole MoE model, from a folder


def upcycle_by_hand(
    spec: DenseSpec, roles: Tensors, *, copies: int, parts: int, shared: int
) -> tuple[MoESpec, Tensors]:
    """Virtual groups in the last layer, the first `shared` neurons carved out: exact with the output scale `parts`."""
    layer, width = spec.layers - 1, (spec.ffn - shared) // parts
    moe = MoESpec(
        spec, (layer,), (width,) * (copies * parts), parts, copies, parts, shared, output_scale=parts, dtype="float32"
    )  # fmt: skip
    out, prefix = dict(roles), f"layers.{layer}"
    rows = torch.randn(copies, spec.hidden, generator=torch.Generator().manual_seed(3))
    out[f"{prefix}.router.weight"] = 0.05 * rows.repeat_interleave(parts, 0)
    for name in spec.ffn_matrices:
        part, _, bias = name.partition("_")
        whole, role = out.pop(f"{prefix}.{part}.{bias or 'weight'}"), f"{part}.{bias or 'weight'}"
        dim = 1 if name == "down" else 0
        for i in range(copies * parts):
            start = shared + (i % parts) * width
            # a routed down bias is weighted to `parts` times itself in all, the shared one counts once more
            piece = 0 * whole if name == "down_bias" and shared else whole / parts if name == "down_bias" else None
            piece = whole.narrow(dim, start, width) if piece is None else piece
            out[f"{prefix}.experts.{i}.{role}"] = piece
        if shared:
            out[f"{prefix}.shared.{role}"] = whole if name == "down_bias" else whole.narrow(dim, 0, shared)
    return moe, out


@pytest.mark.parametrize("shared", [0, 24])
@pytest.mark.parametrize("name", FOLDERS)
def test_folder_is_the_dense_model(name: str, shared: int, dense: Callable[[str], Path], tmp_path: Path) -> None:
    spec = spec_of(dense(name))
    moe, roles = upcycle_by_hand(spec, dense_tensors(dense(name), spec), copies=3, parts=4, shared=shared)
    folder = write(tmp_path / "moe", moe, roles)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert {k: list(v) for k, v in loading.items() if len(v)} == {}
    assert [type(layer.mlp).__name__ for layer in model.model.layers] == ["UpcycledMLP", "UpcycledMoE"]
    ids, mask = padded()
    want = theirs(dense(name))(ids, attention_mask=mask).logits
    got = model.eval()(ids, attention_mask=mask, output_hidden_states=True, output_attentions=True)
    assert error(got.logits[mask.bool()], want[mask.bool()]) < 2 * TOLERANCE  # the parts' sums are rounded too
    assert len(got.hidden_states) == 3 and got.attentions[0].shape == (2, 4, tiny.LENGTH, tiny.LENGTH)
    # not the scale: where the block's output is normalised (OLMo 2) any scale will do
    wrong = write(tmp_path / "wrong", moe, roles, num_experts_per_tok=3)
    bad = AutoModelForCausalLM.from_pretrained(wrong, trust_remote_code=True, attn_implementation="eager").eval()
    assert error(bad(ids, attention_mask=mask).logits[mask.bool()], want[mask.bool()]) > BROKEN


def test_folder_survives_bf16_saving_and_checkpointing(dense: Callable[[str], Path], tmp_path: Path) -> None:
    spec = spec_of(dense("llama_tied"))
    moe, roles = upcycle_by_hand(spec, dense_tensors(dense("llama_tied"), spec), copies=2, parts=2, shared=0)
    moe = replace(moe, score="sigmoid")
    roles["layers.1.router.bias"] = torch.tensor([0.1, 0.0, 0.0, 0.30001])
    folder = write(tmp_path / "moe", moe, roles)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32 and torch.equal(bias, roles["layers.1.router.bias"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "saved")
    again, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", trust_remote_code=True, output_loading_info=True
    )
    assert {k: list(v) for k, v in loading.items() if len(v)} == {}
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)

    model = model.float()
    ids, grads = tiny.tokens(), []
    for checkpointing in (False, True):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append({k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and "model.layers.1.mlp.gate.weight" in grads[0]
    assert all(error(grads[1][k], g) < TOLERANCE for k, g in grads[0].items() if float(g.abs().max()) > 0)


def test_fresh_model_has_no_neutral_router() -> None:
    config = UpcycledConfig(moe_layers=[1], expert_widths=[8, 8], scoring_func="sigmoid", norm="layernorm1p",
                            rope_parameters={"rope_type": "default", "rope_theta": 1e4})  # fmt: skip
    with torch.device("meta"):
        model = UpcycledForCausalLM(config)
    model = model.to_empty(device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    gate = model.model.layers[1].mlp.gate
    assert 0.01 < float(gate.weight.detach().std()) < 0.03 and not gate.e_score_correction_bias.any()
    assert not model.model.norm.weight.any()
    assert torch.isfinite(model(torch.arange(8).unsqueeze(0)).logits).all()
