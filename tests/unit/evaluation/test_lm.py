"""What is packed is what was asked, and the engine's answers are those of a plain forward of each request alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evaluation.__main__ import main
from evaluation.ask import load, tasks
from evaluation.ask.attention import laid_out
from evaluation.ask.engine import Engine
from evaluation.ask.packing import FILL, Input, Row, grouped, plan, share
from evaluation.judge import logged
from evaluation.judge.results import Evaluation, Group, Item, Model, Task
from tests.parallel import models
from tests.unit.evaluation.written import save
from training.checkpoint.layout import initialise
from training.model.decoder import Decoder
from training.model.moe import MoE, Routing
from upcycle.arch.spec import DenseSpec

CPU = torch.device("cpu")

# ---- packing


def seen_by(row: Row, token: int) -> list[int]:
    return [j for j in range(token + 1) if token < row.ends[j]]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 64, 4096]), st.booleans())
def test_a_row_is_a_tree_in_which_every_input_is_a_path(seed: int, budget: int, trees: bool) -> None:
    draw = random.Random(seed)
    beginning = [draw.randrange(3) for _ in range(draw.choice([0, 20, 300, 600]))]
    found: dict[tuple[int, ...], int] = {}
    for _ in range(draw.randrange(1, 30)):
        question = beginning[: draw.choice([0, len(beginning)])] + [
            draw.randrange(3) for _ in range(draw.randrange(1, 12))
        ]
        for _ in range(draw.randrange(1, 4)):
            tokens = tuple(question + [draw.randrange(3) for _ in range(draw.randrange(3))])
            found[tokens] = min(found.get(tokens, len(tokens)), len(question) - 1)
    inputs = [Input(np.array(tokens), scored) for tokens, scored in found.items()]
    planned = plan(inputs, budget, trees=trees)
    placed: list[int] = []
    for batch in planned.batches:
        assert batch.tokens <= budget or len(batch.rows) == 1
        prefix = planned.prefixes[batch.group].tolist()
        for row in batch.rows:
            assert trees or len(row.places) == 1
            for number, places in row.places.items():
                placed.append(number)
                path = seen_by(row, places[-1])
                wanted = inputs[number]
                assert prefix + [row.tokens[j] for j in path] == wanted.tokens.tolist()
                assert [row.positions[j] for j in path] == list(range(len(prefix), len(wanted.tokens)))
                assert places == path[wanted.scored - len(prefix) :]
                assert all(seen_by(row, token) == path[: at + 1] for at, token in enumerate(path))
    assert sorted(placed) == list(range(len(inputs)))
    assert planned.tokens <= sum(len(each.tokens) for each in inputs)


def test_a_prefix_that_is_shared_is_read_once() -> None:
    shared = np.arange(500)
    inputs = [Input(np.concatenate([shared, [600 + i, 0, 1]]), 502) for i in range(40)]
    planned = plan(inputs, 4096)
    assert planned.tokens == 500 + 40 * 3
    # one that only two share would save less than a forward costs
    assert plan([Input(each.tokens[300:], each.scored - 300) for each in inputs[:2]], 4096).tokens == 203 + 3


def test_windows_of_a_text_share_only_their_first_token_and_stay_plain_rows() -> None:
    """As one tree they would be a row of all texts, compared with itself token by token, behind a mask."""
    draw = np.random.default_rng(0)
    windows = [Input(np.concatenate([[0], draw.integers(1, 2000, 63)]), 0) for _ in range(600)]
    planned = plan(windows, 1024)
    assert planned.tokens == 600 * 64
    for batch in planned.batches:
        assert {len(row) for row in batch.rows} == {64}
        assert laid_out(batch.rows, len(planned.prefixes[batch.group]), 64, 0, CPU).mask(None) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 700), max_size=7))
def test_each_interval_of_the_tree_is_whole_or_in_parts_whatever_saves_more(between: list[int]) -> None:
    def best(first: int, last: int) -> int:
        """Of units first to last; the parts of an interval are what is left when it is cut where the least is shared."""
        if last - first == 1:
            return 0
        least = min(between[first : last - 1])
        cuts = [first, *(i + 1 for i in range(first, last - 1) if between[i] == least), last]
        return max(least * (last - first - 1) - FILL, sum(best(a, b) for a, b in itertools.pairwise(cuts)))

    saved = sum(length * (last - first - 1) - FILL for first, last, length in grouped(between) if length)
    assert saved == best(0, len(between) + 1)


def test_the_ranks_shares_are_all_of_the_work() -> None:
    inputs = [Input(np.arange(i, i + 5 + i % 7), 2) for i in range(50)]
    planned = plan(inputs, 16)
    for ranks in (1, 2, 3, 60):
        shares = [share(planned.batches, planned.prefixes, rank, ranks) for rank in range(ranks)]
        assert [batch for part in shares for batch in part] == list(planned.batches)


# ---- answers


def alone(model: Decoder, context: Any, continuation: Any) -> tuple[float, bool]:
    """One request, one forward, every logit."""
    whole = torch.tensor([[*context, *continuation]])
    logits = model(whole[:, :-1])[0, len(context) - 1 :].double().log_softmax(-1)
    targets = torch.tensor(continuation)
    return float(logits.gather(1, targets[:, None]).sum()), bool((logits.argmax(-1) == targets).all())


def requests(vocab: int, seed: int = 0) -> list[tuple[Any, Any]]:
    """A few questions behind long and short beginnings, with endings of several lengths, and some alone."""
    draw = np.random.default_rng(seed)

    def some(size: int) -> Any:
        return draw.integers(0, vocab, size)

    out = []
    for beginning in (some(46), some(3), some(0)):  # the first is worth a forward of its own
        for size in (1, 2, 4, 4, 9, 11, 12, 13):
            question = np.concatenate([beginning, some(size)])
            out += [(question, some(ending)) for ending in (1, 1, 3, 5)]
    return [*out, (some(1), some(25)), (some(20), out[5][1]), out[0]]


def scores(engine: Engine, pairs: list[tuple[Any, Any]]) -> list[tuple[float, bool]]:
    found: dict[int, tuple[float, bool]] = {}
    with engine.open():
        engine.score(pairs, found.update)
    return [found[n] for n in range(len(pairs))]


@pytest.mark.parametrize("name", models.SPECS)
@pytest.mark.parametrize("budget", [1, 70, 4096])
@torch.no_grad()
def test_scores_are_those_of_each_request_alone(name: str, budget: int) -> None:
    model, pairs = models.make(name), requests(models.VOCAB)
    engine = Engine(model, budget, progress=False)
    for (logprob, greedy), (context, continuation) in zip(scores(engine, pairs), pairs, strict=True):
        wanted, is_greedy = alone(model, context, continuation)
        assert logprob == pytest.approx(wanted, abs=1e-10)
        assert greedy == is_greedy
    assert engine.work["tokens"] < 0.75 * sum(len(a) + len(b) - 1 for a, b in pairs)


@torch.no_grad()
def test_a_rotation_for_long_sequences_is_not_used_for_short_ones() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
        "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0],
    }  # fmt: skip
    spec = DenseSpec("phi3", 2, 32, 24, 4, 2, 8, 61, context=64, rope=rope)
    model = initialise(Decoder(spec, compute=torch.float64).double(), seed=1)
    pairs = requests(61)
    lengths = [len(a) + len(b) - 1 for a, b in pairs]
    assert min(lengths) < 24 < max(lengths)
    for got, (context, continuation) in zip(scores(Engine(model, 4096, progress=False), pairs), pairs, strict=True):
        assert got[0] == pytest.approx(alone(model, context, continuation)[0], abs=1e-10)


@pytest.mark.parametrize("name", ["moe", "odd", "sandwich"])
@pytest.mark.parametrize("budget", [1, 4096])
@torch.no_grad()
def test_what_is_written_is_what_is_likeliest(name: str, budget: int) -> None:
    model = models.make(name)
    prompts = list({tuple(context): context for context, _ in requests(models.VOCAB)}.values())
    found: dict[int, list[int]] = {}
    engine = Engine(model, budget, progress=False)
    with engine.open():
        engine.write(prompts, 10, lambda text: sum(text) % 5 == 0, lambda got: found.update(got))
    assert len({len(text) for text in found.values()}) > 1  # they end at other times
    for number, prompt in enumerate(prompts):
        text: list[int] = []
        while len(text) < 10 and not (text and sum(text) % 5 == 0):
            text.append(int(model(torch.tensor([[*prompt, *text]]))[0, -1].argmax()))
        assert found[number] == text


@torch.no_grad()
def test_only_tokens_are_routed_and_the_model_is_left_as_it_was() -> None:
    model = models.make("moe")
    blocks = [layer.ffn for layer in model.layers.values() if isinstance(layer.ffn, MoE)]
    counted: list[int] = []

    def refuse(routing: Routing) -> Routing:
        raise AssertionError("balance has no say in an evaluation")

    def count(module: Any, inputs: tuple[Tensor, ...]) -> None:
        counted.append(len(inputs[0].flatten(0, -2)))

    for block in blocks:
        block.balance = refuse
        block.router.register_forward_pre_hook(count)
    before = [(layer.attention.attend, layer.ffn) for layer in model.layers.values()]
    engine = Engine(model, 4096, progress=False)
    scores(engine, requests(models.VOCAB))
    assert sum(counted) == len(blocks) * engine.work["tokens"]
    assert before == [(layer.attention.attend, layer.ffn) for layer in model.layers.values()]
    assert all(block.balance is refuse for block in blocks)


# ---- the weights


def test_a_fingerprint_is_of_the_numbers() -> None:
    model = models.make("moe", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    before = load.fingerprint(model)
    assert load.fingerprint(models.make("moe", torch.float32)) != before
    assert load.fingerprint(model.bfloat16()) == before  # the same numbers, narrower
    with torch.no_grad():
        model.layers["2"].ffn.experts.down[3, 1, 1] += 0.125
    assert load.fingerprint(model) != before


# ---- results


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    task = Task("t", "T", {"acc": 0.5}, {"acc": 0.1}, {"acc": True}, 1, 2, 5, "1.0", "multiple_choice", ("g",))
    run = Evaluation(
        Model("m", "./m", "f" * 64, "llama", 10, 8, "float32", 3, "i"), "tiny", "upcycle eval", {"limit": 1},
        {"torch": "2"}, "2026-01-01T00:00:00+00:00", 1.5, {"tokens": 2.0}, {"t": task},
        {"g": Group("g", "G", {"acc": 0.5}, {}, ("t",), 1)}, ("a note",),
    )  # fmt: skip
    scores = {"acc": 1.0, "bits_per_byte": (-0.1 - 0.2, 7.0)}
    item = Item("t", 0, "h", "p", "1", scores, (-0.3, -1e-300), (True, False), "", ("a", "ü"), {"file": "f"})
    found = logged.load(save(tmp_path, run, [item]))
    assert found == replace(run, items=(item,), place=found.place, seconds=found.seconds)
    assert found.seconds == pytest.approx(1.5, abs=1) and Path(found.place).parent == tmp_path
    with pytest.raises(ValueError, match="finished"):
        logged.load(tmp_path / "none")


# ---- files and errors


def test_files_of_another_form_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gsm8k/test.jsonl is missing; give data=FOLDER"):
        tasks.load("gsm8k", str(tmp_path))
    (tmp_path / "gsm8k").mkdir()
    for content, says in (
        (
            '{"question": "1 + 1?", "answer": "#### 2"}\n{"query": "x"}\n',
            r":2 has no question, answer \(it has 'query'\)",
        ),
        ("{]\n", r"test.jsonl:1 is not JSON"),
        ("", "no documents for openai/gsm8k"),
    ):
        (tmp_path / "gsm8k/test.jsonl").write_text(content)
        with pytest.raises(ValueError, match=says):
            tasks.load("gsm8k", str(tmp_path))


@pytest.mark.parametrize("name", sorted(path.stem for path in tasks.SUITES.glob("*.yaml")))
def test_a_suites_tasks_are_there(name: str) -> None:
    """By name, in the folders of lm-eval that it says; with documents, where it brings them itself."""
    suite, _ = tasks.read_suite(name)
    folders = [tasks.LM_EVAL / folder for folder in suite.folders]
    named = {task for task in suite.tasks if isinstance(task, str)}
    known = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False).task_index if folders else {}
    assert named <= set(known) and suite.notes.keys() <= named
    own = {task["task"] for task in suite.tasks if not isinstance(task, str)}
    loaded = tasks.load(name).loaded["tasks"] if own and not named else {}
    assert set(loaded) == own and all(len(task.eval_docs) > 0 for task in loaded.values())
    assert named or own


def test_suites_are_named_and_take_what_they_can(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'perplexity'"):
        tasks.load("perplexty")
    with pytest.raises(ValueError, match="takes no texts"):
        tasks.load("tiny", texts=["a.txt"])
    (tmp_path / "own.yaml").write_text("tasks: [gsm8k_cott]\nfolders: [gsm8k]\n")
    with pytest.raises(ValueError, match="did you mean 'gsm8k_cot'"):
        tasks.load(str(tmp_path / "own.yaml"))
    (tmp_path / "own.yaml").write_text("task: [gsm8k]\n")
    with pytest.raises(ValueError, match=r"unknown key 'own.yaml: task'; did you mean 'tasks'"):
        tasks.load(str(tmp_path / "own.yaml"))
    (tmp_path / "a.txt").write_text("Some text.")
    (tmp_path / "b.jsonl").write_text('{"text": "x y"}\n{"text": "z"}\n')
    found = tasks.load("perplexity", texts=[str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")])
    assert {name: len(task.eval_docs) for name, task in found.loaded["tasks"].items()} == {"ppl_a": 1, "ppl_b": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny"], "checkpoint is not set"),
        (["tiny", "./none"], "none"),
        (["tiny", "a", "b"], "one name too many"),
        (["tiny", "a", "limits=3"], "did you mean 'limit'"),
        (["tiny", "a", "forward_tokens=0"], "forward_tokens is 0; it must be at least 1"),
        (["tiny", "a", "tokens=9"], "unknown key 'tokens'; write forward_tokens"),
        (["tiny", "a", "batch_size=8"], "unknown key 'batch_size'; write forward_tokens"),
        (["tiny", "a", "sequence=64"], "unknown key 'sequence'; write max_length"),
        (["tiny", "a", "experts=grouped"], "unknown key 'experts'; write expert_backend"),
        (["tiny", "a", "dtype=half"], "it must be one of float32"),
        (["tiny", "a", "mesh.pp=2"], "has no pipeline"),
        (["mmlu-5shot"], "checkpoint is not set"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["run", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("upcycle: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_model_that_reads_less_says_so() -> None:
    from evaluation.ask.lm import moved_spaces

    assert moved_spaces("a \n", " b") == ("a", " \n b")
    assert moved_spaces("", " b") == ("", " b")
    spec = replace(models.DENSE, context=8)
    engine = Engine(Decoder(spec), 64, progress=False)

    class Words:
        eos_token_id, bos_token_id, is_fast = 0, None, False

    from evaluation.ask.lm import DecoderLM

    lm = DecoderLM(engine, Words())
    with pytest.raises(ValueError, match="likelihood of 9 tokens, and the model reads at most 8"):
        lm.scores([([1], list(range(9)))])
    with pytest.raises(ValueError, match="writes up to 8 tokens and the model's context is 8"):
        lm.texts(["a"], 8, ())
