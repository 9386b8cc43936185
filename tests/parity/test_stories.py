"""A real trained model: what is called exact writes the same text, and what is measured on real text helps.

The model is a Llama of 260,000 parameters that tells children's stories (grouped-query attention, tied embeddings).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.judge.experts import routing
from tests.parity import tiny
from upcycle.__main__ import main
from upcycle.verifying.verify import Report, verify

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
STORIES = SHARED / "stories260k"
CORPUS = SHARED / "corpus"
pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason="the shared data folder is not here")

EXACT: dict[str, list[str]] = {
    "copy": ["method.name=copy", "experts=8", "top_k=2"],
    "copy, own sigmoid": ["method.name=copy", "experts=4", "top_k=1", "router.score=sigmoid"],
    "copy, topk-then-softmax": ["method.name=copy", "experts=4", "top_k=3", "router.order=topk-then-softmax", "target=granitemoe"],
    "virtual groups": ["method.name=virtual_group", "experts=4", "granularity=2", "top_k=2"],
    "virtual groups, two copies chosen": ["method.name=virtual_group", "experts=4", "granularity=4", "top_k=8"],
    "virtual groups, sigmoid, scale in the model": ["method.name=virtual_group", "experts=4", "granularity=2", "top_k=4", "router.score=sigmoid"],
    "virtual groups, sigmoid, scale in the weights": ["method.name=virtual_group", "experts=4", "granularity=2", "top_k=4", "router.score=sigmoid", "scale_in=weights"],
    "shared expert carved out": ["method.name=virtual_group", "experts=4", "granularity=3", "top_k=3", "shared=1"],
    "shared expert, sigmoid": ["method.name=virtual_group", "experts=4", "granularity=3", "top_k=3", "shared=1", "router.score=sigmoid"],
    "every second layer": ["method.name=virtual_group", "experts=4", "granularity=2", "top_k=2", "layers=every:2"],
    "first layer dense": ["method.name=copy", "experts=4", "layers=first-dense:1", "router.score=sigmoid"],
    "our own model": ["method.name=virtual_group", "experts=4", "granularity=4", "top_k=4", "shared=0.25", "target=upcycled", "layers=[0,3]"],
    "published scale of 1": ["method.name=copy", "experts=4", "scale=published"],
}  # fmt: skip


def convert(folder: Path, *words: str) -> Path:
    assert main(["convert", f"source={STORIES}", f"output={folder}", *words]) == 0
    return folder


@torch.no_grad()
def greedy(model: Any, tokens: int = 80) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    prompts = ("Once upon a time", "The little dog", "Lily and Tom")
    asked = [[1, *tokenizer.encode(prompt, add_special_tokens=False).ids] for prompt in prompts]
    ids = torch.tensor([each[: min(map(len, asked))] for each in asked])  # one batch, without padding
    texts = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return "\n".join(tokenizer.decode(text) for text in texts.tolist())


@cache
def dense_text() -> str:
    text = greedy(tiny.loaded(STORIES, torch.float32))
    assert "time" in text
    assert len(text) > 400
    return text


@pytest.mark.parametrize("words", EXACT.values(), ids=EXACT.keys())
def test_an_exact_upcycling_writes_the_same_text(tmp_path: Path, words: list[str]) -> None:
    folder = convert(tmp_path / "moe", *words)
    assert json.loads((folder / "upcycle.json").read_text())["promise"]["exact"]
    assert greedy(tiny.loaded(folder, torch.float32)) == dense_text()
    report = verify(STORIES, folder, count=512)
    assert report.held
    assert report.relative < 2e-6
    assert report.top1_agreement == 1.0
    assert report.kl < 1e-9


@pytest.mark.parametrize(
    "words",
    [
        ["method.name=virtual_group", "experts=4", "granularity=2", "top_k=2", "scale=none"],
        ["method.name=virtual_group", "experts=4", "granularity=2", "top_k=3", "router.choice=parts"],
        ["method.name=virtual_group", "experts=4", "granularity=2", "top_k=2", "scale=published"],
        ["method.name=drop", "experts=4", "top_k=2"],
        ["method.name=split", "experts=4", "top_k=2"],
    ],
    ids=lambda words: " ".join(words),
)
def test_what_is_not_exact_says_so_and_writes_another_text(tmp_path: Path, words: list[str]) -> None:
    folder = convert(tmp_path / "moe", *words)
    promise = json.loads((folder / "upcycle.json").read_text())["promise"]
    assert not promise["exact"]
    assert promise["reasons"]
    assert greedy(tiny.loaded(folder, torch.float32)) != dense_text()


def test_verify_fails_when_a_weight_of_an_exact_model_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    folder = convert(tmp_path / "moe", *EXACT["virtual groups"])
    assert main(["verify", str(STORIES), str(folder), "tokens=256"]) == 0
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.block_sparse_moe.experts.3.w2.weight"] *= 1.01
    save_file(tensors, path, {"format": "pt"})
    assert main(["verify", str(STORIES), str(folder), "tokens=256"]) == 1
    assert "BROKEN" in capsys.readouterr().out
    assert main(["inspect", str(folder), "check=true"]) == 1
    assert "written" in capsys.readouterr().err


def texts(*domains: str) -> str:
    return "[" + ",".join(str(CORPUS / f"{d}.val.jsonl.zst") for d in domains) + "]"


def kl(folder: Path, *words: str) -> float:
    report: Report = verify(STORIES, convert(folder, *words), [str(CORPUS / "fiction.val.jsonl.zst")], count=512)
    return report.kl


def test_a_measured_scale_beats_the_assumed_one(tmp_path: Path) -> None:
    """Softmax over all experts without renormalisation: the published scale assumes a uniform router."""
    words = ["experts=8", "top_k=2", "router.normalize=false", "router.init.std=0.05"]
    assumed = kl(tmp_path / "published", *words, "scale=published")
    plain = kl(tmp_path / "number", *words, "scale=4")  # E / T, on up and down alone
    measured = kl(tmp_path / "calibrated", *words, "scale=calibrated", f"calibration.texts={texts('fiction')}")
    assert measured < 0.3 * plain
    assert measured < 0.3 * assumed
    masses = json.loads((tmp_path / "calibrated" / "upcycle.json").read_text())["router_mass"]
    assert len(masses) == 5
    assert all(0.25 < mass < 0.9 for mass in masses.values())


def test_router_rows_from_domains_send_the_domains_to_their_experts(tmp_path: Path) -> None:
    """Rows are means of hidden states where the router reads: each domain's own expert is its favourite."""
    domains = ("fiction", "code", "law")
    folder = convert(
        tmp_path / "moe", "experts=3", "top_k=1", "router.init.name=hidden", f"router.init.texts={texts(*domains)}",
        "router.init.std=0.05",
    )  # fmt: skip
    model = tiny.loaded(folder, torch.float32)
    from upcycle.text.tokens import token_batches

    right = 0
    for i, domain in enumerate(domains):
        ids = token_batches(STORIES, [CORPUS / f"{domain}.val.jsonl.zst"], 1024, 256, 512)
        logits = model(ids, output_router_logits=True).router_logits
        share = [torch.bincount(layer.argmax(-1), minlength=3).double() for layer in logits]
        right += sum(int(s.argmax()) == i for s in share)
    assert right >= 11, f"in {right} of 15 (layer, domain) pairs the domain's own expert is chosen most"


def test_clusters_of_text_begin_exact_and_evenly(tmp_path: Path) -> None:
    """Slices that choose, with rows made of a text: the dense model's function, and another text is divided better than
    by rows drawn at random."""
    words = ["target=upcycled", "experts=8", "granularity=2", "top_k=2", "method=virtual_group"]
    given = f"calibration.texts={texts('fiction', 'code', 'law')}"
    found = convert(tmp_path / "found", *words, given)
    other = str(CORPUS / "encyclopedia.val.jsonl.zst")
    report = verify(STORIES, found, [other], count=512)
    assert report.held and not report.faults and report.kl < 1e-9
    drawn = convert(tmp_path / "drawn", *words, given, "router.init.name=normal")
    fullest = []
    for folder in (found, drawn):
        (loads,) = routing.measure(routing.RoutingConfig(str(folder), (other,), tokens=2048, sequence=256))[
            "load"
        ].values()
        fullest.append(max(max(layer) / (sum(layer) / len(layer)) for layer in loads))
    assert fullest[0] < 0.6 * fullest[1], fullest


def test_clustered_splits_keep_more_of_the_model_than_random_ones(tmp_path: Path) -> None:
    words = ["method.name=split", "experts=4", "top_k=2", "shared=0.25", "router.score=sigmoid"]
    found = kl(tmp_path / "found", *words, "method.by=activation", f"calibration.texts={texts('fiction')}")
    random = kl(tmp_path / "random", *words, "method.by=random")
    assert found < random
