"""The streamed pass against transformers, measurements against brute force, and text files to tokens."""

from __future__ import annotations

import base64
import json
import math
import re
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import normalizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.parity import tiny
from upcycle.arch import registry
from upcycle.arch.ffn import FFN
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.text import growth, observe
from upcycle.text import tokens as text
from upcycle.text.layer import Read

IDS = tiny.tokens(3, 20, seed=4)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: tiny.make_variant(name, tmp_path_factory.mktemp(name)))


def opened(folder: Path) -> tuple[DenseSpec, Read]:
    config = json.loads((folder / "config.json").read_text())
    family, stored = registry.family(config["model_type"]), load_file(folder / "model.safetensors")
    spec = family.read(config)
    sources = family.sources(spec)

    def read(role: str) -> Tensor:
        source = sources[role]
        whole = stored[source.name]
        return torch.cat([whole[a:b] for a, b in source.rows]) if source.rows else whole

    return spec, read


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the pass


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_walk_is_transformers(name: str, dense: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(dense(name), dtype=torch.float32).eval()
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    seen: list[Tensor] = []
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    norm = next(m for n, m in model.named_modules() if n.endswith(("model.norm", "final_layer_norm")))
    final: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, args: final.append(args[0]))
    want = model(IDS).logits

    spec, read = opened(dense(name))
    monkeypatch.setattr(observe, "CHUNK", 45)  # two sequences at a time: the third goes alone
    for view in observe.walk(spec, read, IDS, quiet=True):
        assert torch.allclose(view.router_input, seen[view.layer], atol=1e-5, rtol=1e-5)
        x = view.router_input[:5]
        assert torch.allclose(view.ffn(x, spec.activation), layers[view.layer].mlp(x), atol=1e-5, rtol=1e-5)
    assert view.layer == spec.layers - 1
    assert torch.allclose(view.output, final[0].flatten(0, 1), atol=1e-5, rtol=1e-5)

    norm._forward_pre_hooks.clear()
    hidden = norm(view.output.view(*IDS.shape, -1))
    head = functional.linear(hidden, read("embed.weight" if spec.tied else "head.weight")) * spec.logit_scale
    head = spec.logit_cap * torch.tanh(head / spec.logit_cap) if spec.logit_cap else head
    assert float((head - want).abs().max() / want.abs().max()) < 1e-5

    def broken(role: str) -> Tensor:
        return read(role) + (0.02 if role == "layers.0.v.weight" else 0.0)

    *_, view = observe.walk(spec, broken, IDS, quiet=True)
    assert not torch.allclose(view.output, final[0].flatten(0, 1), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(view.router_input, seen[view.layer], atol=1e-3, rtol=1e-3)


def test_walk_reads_a_layer_when_it_is_asked_for_and_keeps_none(dense: Callable[[str], Path]) -> None:
    spec, read = opened(dense("llama"))
    asked, given = list[str](), list[weakref.ref[Tensor]]()

    def fresh(role: str) -> Tensor:
        tensor = read(role).clone()
        asked.append(role)
        given.append(weakref.ref(tensor))
        return tensor

    views = observe.walk(spec, fresh, IDS, quiet=True)
    assert not asked
    first = next(views)
    own = [f"layers.0.{role}" for role in spec.attention_shapes() | spec.ffn_shapes()]
    assert sorted(asked) == sorted(["embed.weight", *own])
    assert not [tensor for tensor in given if tensor() is not None]
    assert first.ffn["down"].shape == (spec.hidden, spec.ffn) and asked[-1] == "layers.0.down.weight"
    assert torch.is_grad_enabled() and not first.router_input.requires_grad


def test_a_domains_mean_is_that_of_its_tokens() -> None:
    x, domain = normal(60, 16), torch.tensor([0] * 20 + [1] * 40)
    assert torch.allclose(observe.domain_means(x, domain), torch.stack([x[:20].mean(0), x[20:].mean(0)]))


# ---- router mass


def moe(top_k: int, experts: int, **more: Any) -> MoESpec:
    dense = DenseSpec("llama", layers=1, hidden=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocab=9, context=64)
    return MoESpec(dense, (0,), (4,) * experts, top_k, copies=experts, **more)


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_mass_of_a_zero_router(top_k: int) -> None:
    x, zero = normal(50, 16), torch.zeros(8, 16)
    assert observe.router_mass(x, zero, moe(top_k, 8, normalize=False)) == pytest.approx(top_k / 8, abs=1e-12)
    assert observe.router_mass(x, normal(8, 16), moe(top_k, 8)) == pytest.approx(1, abs=1e-12)
    if top_k < 8:  # unequal logits: the chosen weights add up to more
        assert observe.router_mass(x, normal(8, 16), moe(top_k, 8, normalize=False)) > 1.1 * top_k / 8


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_mass_is_brute_force(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows = normal(37, 16), normal(4, 16, seed=1).repeat_interleave(2, 0) * 0.3
    total = 0.0
    for token in x.tolist():
        logits = [sum(a * b for a, b in zip(token, row, strict=True)) for row in rows.tolist()]
        exps = [math.exp(v) for v in logits]
        scores = [e / sum(exps) for e in exps] if score == "softmax" else [e / (1 + e) for e in exps]
        total += sum(sorted(scores)[-3:])
    monkeypatch.setattr(observe, "CHUNK", 5)
    got = observe.router_mass(x, rows, moe(3, 8, normalize=False, score=score))
    assert got == pytest.approx(total / 37, rel=1e-12)
    assert observe.router_mass(x, rows, moe(2, 8, normalize=False, score=score)) != pytest.approx(got, rel=1e-2)


# ---- neurons


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_activity_is_brute_force(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = {"gate": normal(24, 16)} if activation == "silu" else {}
    ffn = FFN.of(**gated, up=normal(24, 16, seed=1), down=normal(16, 24), up_bias=normal(24, seed=2))
    x = normal(31, 16, seed=3)
    up = x @ ffn["up"].T + ffn["up_bias"]
    size = (functional.silu(x @ ffn["gate"].T) * up).abs() if gated else up.clamp_min(0) ** 2
    monkeypatch.setattr(observe, "CHUNK", 7)
    for top in (3, 20, 99):
        marks = observe.neuron_activity(ffn, x, activation, top)
        for row, marked in zip(size.tolist(), marks.tolist(), strict=True):
            best = sorted(range(24), key=lambda i: -row[i])[:top]
            assert [i for i in range(24) if marked[i]] == sorted(i for i in best if row[i] > 0)
    assert activation == "silu" or not bool(marks.all())  # switched-off neurons are not active


def planted(groups: int, size: int, tokens: int, noise: float) -> tuple[Tensor, Tensor]:
    """(marks, group of each neuron): a token marks half of the neurons of one group, and a few others."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(groups).repeat_interleave(size)[torch.randperm(groups * size, generator=generator)]
    topic = torch.randint(groups, (tokens,), generator=generator)
    chance = torch.where(topic[:, None] == group, 0.5, noise)
    return torch.rand(chance.shape, generator=generator) < chance, group


def purity(order: Tensor, group: Tensor, widths: list[int]) -> float:
    parts = torch.split(group[order], widths)
    return sum(int(part.bincount().max()) for part in parts) / len(group)


def test_planted_clusters_are_found() -> None:
    marks, group = planted(8, 16, 400, 0.03)
    order, representatives = observe.cluster_neurons(marks, 0, [16] * 8)
    assert purity(order, group, [16] * 8) == 1.0
    for members, representative in zip(torch.split(order, 16), representatives, strict=True):
        assert representative in members
    chance = torch.randperm(len(group), generator=torch.Generator().manual_seed(1))
    assert purity(chance, group, [16] * 8) < 0.5
    shuffled = torch.stack([row[torch.randperm(len(row))] for row in marks])  # together by chance alone
    assert purity(observe.cluster_neurons(shuffled, 0, [16] * 8)[0], group, [16] * 8) < 0.5


def test_shared_neurons_are_the_most_active() -> None:
    marks, _ = planted(4, 8, 200, 0.05)
    assert sorted(observe.cluster_neurons(marks, 3, [8, 8, 8, 5])[0][:3].tolist()) != [3, 17, 30]
    marks[:, [3, 17, 30]] = True
    assert sorted(observe.cluster_neurons(marks, 3, [8, 8, 8, 5])[0][:3].tolist()) == [3, 17, 30]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 2**16), st.floats(0, 0.6))
def test_clusters_are_a_permutation(widths: list[int], shared: int, seed: int, share: float) -> None:
    f = shared + sum(widths)
    marks = torch.rand(23, f, generator=torch.Generator().manual_seed(seed)) < share  # sometimes no marks at all
    order, representatives = observe.cluster_neurons(marks, shared, widths, seed)
    assert order.sort().values.tolist() == list(range(f))
    starts = [shared + sum(widths[:i]) for i in range(len(widths))]
    for start, width, representative in zip(starts, widths, representatives, strict=True):
        assert representative in order[start : start + width]
    again = observe.cluster_neurons(marks, shared, widths, seed)
    assert torch.equal(again[0], order) and torch.equal(again[1], representatives)


# ---- text


def zstd(path: Path, *frames: bytes) -> Path:
    path.write_bytes(b"".join(zstandard.compress(frame) for frame in frames))
    return path


def test_documents_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("ein Überfall\nund mehr")
    rows.write_text('{"text": "x\\ny", "id": 1}\n\n{"text": "z"}\n')
    packed = zstd(tmp_path / "c.jsonl.zst", '{"text": "é"}\n{"te'.encode(), b'xt": "w"}\n')
    assert list(text.documents([plain, str(rows), packed])) == ["ein Überfall\nund mehr", "x\ny", "z", "é", "w"]
    monkeypatch.setattr(text, "PIECE", 5)
    assert "".join(text.documents([plain])) == "ein Überfall\nund mehr" and len(list(text.documents([plain]))) == 5


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.pdf", b"", "must end in .txt"),
        ("a.txt", None, "does not exist"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "line 2 of .* is not JSON"),
        ("a.jsonl", b'{"body": "x"}', "line 1 of .* no string under the key 'text'"),
        ("a.jsonl", b"[1]", "line 1 of .* no string under the key 'text'"),
        ("a.jsonl.zst", b"not zstd at all", "cannot be read"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "\xff"}'), "not UTF-8"),
    ],
)
def test_a_bad_text_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        list(text.documents([tmp_path / name]))
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("checksum", [False, True])
def test_a_zst_that_was_cut_is_refused_wherever_it_was_cut(tmp_path: Path, frames: int, checksum: bool) -> None:
    packer = zstandard.ZstdCompressor(write_checksum=checksum)
    part = packer.compress(b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(20_000)))
    path, skipped = tmp_path / "a.jsonl.zst", (0x184D2A53).to_bytes(4, "little") + b"\3\0\0\0abc"
    path.write_bytes(skipped + part * frames + skipped)
    assert len(list(text.documents([path]))) == 20_000 * frames
    whole, between = path.read_bytes(), {len(skipped) + len(part) * number for number in range(frames + 1)}
    step = len(whole) // 300
    for size in [0, 1, 9, 15, *range(20, len(whole), step), *range(len(whole) - 20, len(whole))]:
        if size not in between:  # a file that was cut between two frames looks as if it were whole
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=r"a\.jsonl\.zst (ends in the middle|cannot be read)"):
                next(text.documents([path]))


def test_a_zst_that_was_cut_after_a_block_loses_no_documents_silently(tmp_path: Path) -> None:
    path, lines = tmp_path / "a.jsonl.zst", b"".join(b'{"text": "%d"}\n' % i for i in range(2000))
    packer = zstandard.ZstdCompressor().compressobj()
    begun = packer.compress(lines) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    path.write_bytes(begun)
    with pytest.raises(
        ValueError, match=r"ends in the middle of its packed data, at byte \d+; copy or download it again"
    ):
        list(text.documents([path]))
    path.write_bytes(begun + packer.flush())
    assert len(list(text.documents([path]))) == 2000


@pytest.fixture
def donor(tmp_path: Path) -> Path:
    """A tokenizer of three words, with a start token, and with a truncation that must be switched off."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_token_batches(donor: Path) -> None:
    (donor / "a.txt").write_text("a b " * 20)
    (donor / "b.jsonl").write_text('{"text": "b b"}\n' * 20)
    got = text.token_batches(donor, [donor / "a.txt", donor / "b.jsonl"], 20, 6, vocab=4)
    assert got.tolist() == [[0, 1, 2, 1, 2, 1], [2, 1, 2, 1, 2, 1], [0, 2, 2, 0, 2, 2]]
    assert text.token_batches(donor, [donor / "a.txt"], 4, 512, vocab=4).tolist() == [[0, 1, 2, 1]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vocab": 2}, "gives id 2 but the model has 2 embeddings"),
        ({"tokens": 400}, "has 41 tokens and 396 are needed"),
        ({"tokens": 0}, "both must be at least 1"),
        ({"paths": []}, "no text to calibrate on"),
        ({"folder": Path("nowhere")}, "nowhere has no tokenizer.json"),
    ],
)
def test_token_batches_refuse(donor: Path, change: dict[str, Any], sentence: str) -> None:
    (donor / "a.txt").write_text("a b " * 20)
    values = {"folder": donor, "paths": [donor / "a.txt"], "tokens": 18, "length": 6, "vocab": 4}
    assert text.token_batches(**values).shape == (3, 6)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        text.token_batches(**values | change)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model":\n {}}')
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read as a tokenizer") as caught:
        text.token_batches(tmp_path, [tmp_path / "a.txt"], 1, 1, 4)
    assert "\n" not in str(caught.value)


LONG = "\ufdfa"  # which NFKC and NFKD write as 18 letters


def charsmap(content: str, key: bytes = b"a") -> dict[str, Any]:
    """Return a Precompiled rule that writes `content` for `key`: a chain of units, each at the next byte's place."""
    units = np.zeros(512 * (len(key) + 1), dtype="<u4")
    place = 0
    for number, byte in enumerate(key, 1):
        units[place] |= (256 * number ^ (place if number > 1 else 0)) << 10
        place = 256 * number ^ byte
        units[place] = byte
    units[place] |= (256 * (len(key) + 1) ^ place) << 10 | 256
    data = len(units.tobytes()).to_bytes(4, "little") + units.tobytes() + content.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def test_a_table_is_read_as_the_tokenizers_package_reads_it() -> None:
    for key, content in (("a", "xyz"), ("é", "e"), ("ab", "c")):
        rule = charsmap(content, key.encode())
        normalizer = normalizers.Precompiled(base64.b64decode(rule["precompiled_charsmap"]))
        assert normalizer.normalize_str(f"{key}b") in (f"{content}b", f"{key}b")
        assert growth.precompiled(rule["precompiled_charsmap"]) == ({key: content}, [])
        assert growth.growth([rule]) == max(len(content) / len(key), 1)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LENGTHENS: dict[str, Any] = {
    "a long word": {**REPLACE, "content": "a" * 1_000_000},
    "sixty times twice": {"type": "Sequence", "normalizers": [REPLACE] * 60},
    "a regex": {**REPLACE, "pattern": {"Regex": "[a-c]|b"}, "content": "x" * 100},
    "between letters": {"type": "Sequence", "normalizers": [{**REPLACE, "pattern": {"Regex": "b*"}}] * 5},
    "before each word": {"type": "Prepend", "prepend": "a" * 100},
    "through another letter": {
        "type": "Sequence",
        "normalizers": [
            {**REPLACE, "content": "b" * 10}, {**REPLACE, "pattern": {"String": "b"}, "content": "c" * 10},
        ],
    },
    "bytes of bytes": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40},
    "through a normal form": {
        "type": "Sequence",
        "normalizers": [
            *[{**REPLACE, "pattern": {"String": letter}, "content": LONG} for letter in (" ", "\u0644")], {"type": "NFKD"},
        ] * 9,
    },
    "through small letters": {
        "type": "Sequence", "normalizers": [{**REPLACE, "content": "A" * 4}, {"type": "Lowercase"}] * 9,
    },
    "through a table": {"type": "Sequence", "normalizers": [charsmap("a" * 9)] * 9},
}  # fmt: skip


# decoders have Replace alone of these rules
DECODES = [
    way for way, rule in LENGTHENS.items() if set(re.findall(r"'type': '(\w+)'", str(rule))) <= {"Replace", "Sequence"}
]


@pytest.mark.parametrize(
    ("way", "part"), [*((way, "normalizer") for way in LENGTHENS), *((way, "decoder") for way in DECODES)]
)
def test_a_tokenizer_that_lengthens_texts_is_refused(donor: Path, way: str, part: str) -> None:
    rule = LENGTHENS[way]
    if part == "decoder":
        rule = {("decoders" if key == "normalizers" else key): value for key, value in rule.items()}
    (donor / "tokenizer.json").write_text(json.dumps(json.loads((donor / "tokenizer.json").read_text()) | {part: rule}))
    with pytest.raises(ValueError, match=r"tokenizer\.json has rules .* that can make a text .* times longer"):
        text.load_tokenizer(donor)


@pytest.mark.parametrize("kind", ["ByteLevel", "Metaspace"])
def test_a_pre_tokenizer_that_lengthens_texts_is_refused(donor: Path, kind: str) -> None:
    rules = {
        "ByteLevel": {"type": kind, "add_prefix_space": True, "trim_offsets": True, "use_regex": False},
        "Metaspace": {"type": kind, "replacement": "a", "prepend_scheme": "always", "split": True},
    }
    many = {"type": "Sequence", "pretokenizers": [rules[kind]] * 200}
    made = json.loads((donor / "tokenizer.json").read_text()) | {"pre_tokenizer": many}
    (donor / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"tokenizer\.json has rules .* that can make a text .* times longer"):
        text.load_tokenizer(donor)


def test_a_pattern_that_does_not_end_is_one_sentence(donor: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    made = json.loads((donor / "tokenizer.json").read_text()) | {"pre_tokenizer": split}
    (donor / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tokenizer: .*retry-limit"):
        text.encoder(donor)("a" * 40 + "!")


def test_a_template_of_many_tokens_is_refused(donor: Path) -> None:
    token = {"SpecialToken": {"id": "a", "type_id": 0}}
    whole = [{"Sequence": {"id": "A", "type_id": 0}}]
    template = {
        "type": "TemplateProcessing", "single": [*whole, *[token] * 300], "pair": [*whole, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"a": {"id": "a", "ids": [1] * 300, "tokens": ["a"] * 300}},
    }  # fmt: skip
    made = json.loads((donor / "tokenizer.json").read_text()) | {"post_processor": template}
    (donor / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"has a template that adds 90,000 tokens to each text; at most 64"):
        text.load_tokenizer(donor)


def test_tokenizers_as_models_have_them_are_read(donor: Path) -> None:
    """Rules of Llama 2, Gemma, CLIP, XLNet and T5, and forty that each write one letter as several."""
    made = json.loads((donor / "tokenizer.json").read_text())
    llama = [{"type": "Prepend", "prepend": "▁"}, {**REPLACE, "pattern": {"String": " "}, "content": "▁"}]
    quotes = [{**REPLACE, "pattern": {"String": two}, "content": '"'} for two in ("``", "''")]
    spaces = [{**REPLACE, "pattern": {"Regex": regex}, "content": " "} for regex in ("\\s+", " {2,}", "\\p{Z}+")]
    many = [{**REPLACE, "pattern": {"String": chr(9312 + i)}, "content": f"({i})"} for i in range(40)]
    xlnet = [*quotes, *({"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")), charsmap(" " * 18), *spaces]
    byte_level = [[{"type": kind} for kind in (form, "ByteLevel")] for form in ("NFC", "NFKC")]
    for rules in (llama, [*quotes, {"type": "NFKD"}, *spaces], [*many, *spaces * 10], xlnet, *byte_level):
        made["normalizer"] = {"type": "Sequence", "normalizers": rules}
        (donor / "tokenizer.json").write_text(json.dumps(made))
        assert text.load_tokenizer(donor).encode("a b", add_special_tokens=False).ids
