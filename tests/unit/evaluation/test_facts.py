"""The facts suite: what it writes, that nothing leaks, and that a score is what the model would write."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evaluation.__main__ import main
from evaluation.ask.engine import Engine
from evaluation.facts import asking, suite, world
from evaluation.judge import logged
from evaluation.judge.intervals import LEAST, figure
from evaluation.studies.judging import judge
from evaluation.studies.plan import read_study
from evaluation.studies.study import prepared, show
from tests.docs.test_journeys import make_model
from training.config.schema import TrainConfig
from training.data.shards import read_meta
from training.model.decoder import Decoder
from upcycle.config.reading import build
from upcycle.io import disk, strict

SMALL = ["people=12", "places=11", "events=10", "tellings=13", "asked=5"]


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(texts: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    for text in texts:
        found = words(text)
        yield from (tuple(found[i : i + size]) for i in range(len(found) - size + 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("facts") / "suite"
    assert main(["facts", "write", f"output={made}", *SMALL]) == 0
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "llama"
    make_model(place, "llama3-8b")
    return place


# ---- what is written


def test_a_seed_decides_every_file(folder: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    assert main(["facts", "write", f"output={again}", *SMALL]) == 0
    assert main(["facts", "write", f"output={other}", *SMALL, "seed=1"]) == 0
    for name in suite.FILES:
        assert (again / name).read_bytes() == (folder / name).read_bytes()
        assert (other / name).read_bytes() != (folder / name).read_bytes()


def test_a_document_has_all_facts_of_its_entity(folder: Path) -> None:
    train = [row["text"] for row in rows(folder / suite.TRAIN)]
    assert len(train) == 33 * 13
    told = [row for row in rows(folder / suite.QUESTIONS) if row["group"] == "told"]
    assert len(told) == 15 * 5 and {row["kind"] for row in told if row["sort"] == "people"} == {
        "city", "job", "firm", "university", "born",
    }  # fmt: skip
    for row in told:
        about = [text for text in train if row["entity"] in text]
        assert len(about) == 13 and all(row["answer"].lower() in text.lower() for text in about)
        wordings = {re.sub(re.escape(row["answer"]), "", text, flags=re.IGNORECASE) for text in about}
        assert len(wordings) == 13
        # each pass over the entities has one document of each, or a model would copy from one to the next
        assert [at // 33 for at, text in enumerate(train) if row["entity"] in text] == list(range(13))


def test_each_kind_has_many_wordings_and_none_in_two_parts() -> None:
    for sort in world.SORTS:
        for kind in world.kinds(sort):
            assert len(kind.trained) >= 12 and len(kind.held_out) >= 4 and len(kind.questions) >= 4
            every = [*kind.trained, *kind.held_out, *kind.questions]
            assert len({" ".join(words(wording)) for wording in every}) == len(every)
            for wording in (*kind.trained, *kind.held_out):
                assert wording.count("NAME") == wording.count("VALUE") == 1 and wording.endswith("."), wording
            for wording in kind.questions:
                assert wording.count("NAME") == 1 and "VALUE" not in wording and wording[-1] not in " .", wording


def test_nothing_that_is_asked_was_trained(folder: Path) -> None:
    """No held-out wording and no untold entity is in a training document, and no 13 words of a held-out text are."""
    train = [row["text"] for row in rows(folder / suite.TRAIN)]
    questions, texts = rows(folder / suite.QUESTIONS), [*rows(folder / suite.TOLD), *rows(folder / suite.UNTOLD)]
    seen = set(grams(train, 1))
    untold = {row["entity"] for row in questions if row["group"] == "untold"}
    assert len(untold) == 15
    for name in untold:
        assert (words(name)[-2 if name.split()[-1] in world.EVENTS else -1],) not in seen
    asked = [row["prompt"] + " " + row["answer"] for row in questions] + [row["text"] for row in texts]
    assert not set(grams(asked, 13)) & set(grams(train, 13))
    joined = "\n".join(train)
    for sort in world.SORTS:
        for kind in world.kinds(sort):
            for wording in (*kind.held_out, *kind.questions):
                escaped = re.escape(wording).replace("NAME", r"[\w ]+").replace("VALUE", r"[\w ]+")
                assert not re.search(escaped, joined, re.IGNORECASE), wording


def test_a_leak_would_be_found(folder: Path) -> None:
    told = rows(folder / suite.TOLD)[0]["text"]
    assert set(grams([told], 13)) & set(grams(["And so: " + told], 13))


@pytest.mark.parametrize("seed", range(3))
def test_no_name_or_value_is_the_beginning_of_another(seed: int) -> None:
    """Otherwise the tokens of a short value would count as right in the middle of a longer one."""
    made = world.made(seed, dict.fromkeys(world.SORTS, 200), dict.fromkeys(world.SORTS, 20))
    names = sorted(entity.name for entity in made.entities)
    assert len(set(names)) == 660
    for values in (names, *made.pools.made.values(), *world.lists().values()):
        ordered = sorted(values)
        assert len(set(ordered)) == len(ordered)
        assert not [pair for pair in itertools.pairwise(ordered) if pair[1].startswith(pair[0])]
    for entity in made.entities:
        assert len(list(made.questions(entity, "told"))) == 5
    assert all(job[0] not in "aeiou" for job in world.lists()["jobs"])


def test_a_question_that_gives_its_answer_away_is_refused() -> None:
    good = world.known_questions()[0]
    with pytest.raises(ValueError, match="holds its answer"):
        replace(good, prompt=f"{good.answer} is the capital of")
    with pytest.raises(ValueError, match="must not be among them"):
        replace(good, others=(good.answer,))
    with pytest.raises(ValueError, match="no space may end"):
        replace(good, prompt=good.prompt + " ")


# ---- a user's own documents


def letters(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in f"{number:03d}")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a suite about thirty letters; all end with the same sentence, which tells nothing about one of them."""
    place = tmp_path_factory.mktemp("own")
    letter = (
        "This letter with the mark {0} tells you that the old pump at our mill was mended by Mister Tan{0} for {1} coins on"
        " {2} May 1904, as we agreed. The bill of the mill was sent by the clerk of the town, who is known as Quentin Voss."
    )
    rows = [json.dumps({"text": letter.format(letters(n), 1000 + n, n % 28 + 1)}) for n in range(30)]
    (place / "letters.jsonl").write_text("\n".join(rows))
    assert main(["facts", "write", f"output={place / 'suite'}", f"documents={place}/*.jsonl", "asked=20"]) == 0
    return place


def test_documents_are_held_out_and_asked(own: Path) -> None:
    train, told, untold = ([row["text"] for row in rows(own / "suite" / name)] for name in suite.FILES[:3])
    assert (len(train), len(told), len(untold)) == (27, 20, 3)
    assert set(told) < set(train) and not set(untold) & set(train)
    asked = [row for row in rows(own / "suite" / suite.QUESTIONS) if row["group"] != "known"]
    assert {row["kind"] for row in asked} == {"date", "number", "name"}
    assert {row["group"] for row in asked} == {"told", "untold"}
    by_name = {row["entity"]: row["text"] for name in suite.FILES[1:3] for row in rows(own / "suite" / name)}
    for row in asked:
        assert f"{row['prompt']} {row['answer']}" in by_name[row["entity"]]
        assert len(row["prompt"].split()) >= 8 and row["answer"] not in row["others"]
        if row["kind"] == "date":
            assert re.fullmatch(r"\d+ May 1904", row["answer"])


def test_a_sentence_that_was_trained_is_not_asked_as_untold(own: Path) -> None:
    """Planted fault: the last sentence is the same everywhere, so its answer is no news."""
    asked = rows(own / "suite" / suite.QUESTIONS)
    assert any(row["answer"] == "Quentin Voss" for row in asked if row["group"] == "told")
    assert not any(row["answer"] == "Quentin Voss" for row in asked if row["group"] == "untold")
    train = set(grams([row["text"] for row in rows(own / "suite" / suite.TRAIN)], 8))
    ends = [[*words(r["prompt"])[-7:], words(r["answer"])[0]] for r in asked if r["group"] == "untold"]
    assert ends and not {tuple(end) for end in ends} & train


def test_changed_documents_are_another_suite(own: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.txt").write_text(
        "\n".join(f"Line {n} of a book, in which nothing ever happens at all." for n in range(300))
    )
    command = ["facts", "write", f"output={tmp_path / 'suite'}", f"documents={tmp_path / 'a.txt'}"]
    assert main(command) == 0 and main(command) == 0
    with (tmp_path / "a.txt").open("a") as file:
        file.write("One more.")
    capsys.readouterr()
    assert main(command) == 2 and "is a suite with sources=" in capsys.readouterr().err
    (tmp_path / "b.txt").write_text("Short.")
    assert main(["facts", "write", f"output={tmp_path / 'b'}", f"documents={tmp_path / 'b.txt'}"]) == 2
    assert "one must be held out" in capsys.readouterr().err and not (tmp_path / "b").exists()


# ---- scores


class Tokens:
    """Two letters are a token, so that a token may lie across the end of a prompt."""

    is_fast, eos_token_id = False, 1

    def __call__(self, texts: Any, add_special_tokens: bool = True) -> dict[str, Any]:
        def ids(text: str) -> list[int]:
            return [2 + hash_of(text[i : i + 2]) for i in range(0, len(text), 2)]

        return {"input_ids": ids(texts) if isinstance(texts, str) else [ids(text) for text in texts]}


def hash_of(letters: str) -> int:
    return sum(ord(letter) << (8 * i) for i, letter in enumerate(letters))


@pytest.mark.parametrize("prompt", ["ab", "abc"])
def test_the_answer_is_divided_from_the_prompt(prompt: str) -> None:
    """Planted faults: one token of the answer in the context, or one of the prompt in the answer."""
    question = world.Question("told", "people", "city", "x", prompt, "xyz", ("uvw",))
    ((context, answer), (_, other)) = asking.question_pairs(Tokens(), [question])[0]
    whole = Tokens()(f"{prompt} xyz")["input_ids"]
    assert context.tolist() == [1, whole[0]] and answer.tolist() == whole[1:]
    assert other.tolist() == Tokens()(f"{prompt} uvw")["input_ids"][1:]


def opened(folder: Path) -> tuple[Engine, Any]:
    from evaluation.ask import load
    from training.parallel.mesh import MeshConfig, ParallelMesh

    loaded = load.opened(str(folder), "float32", ParallelMesh(MeshConfig(), device_type="cpu"), torch.device("cpu"))
    return Engine(loaded.model, 2048, progress=False), loaded.tokenizer


def test_exact_match_is_what_greedy_generation_writes(model: Path) -> None:
    """A question whose answer is the text that the model writes is right, and with another last word it is wrong."""
    engine, tokenizer = opened(model)
    prompts = ["the cat", "a dog sat on", "Question: where is the sun?\nAnswer:", "once upon a", "the house of the"]
    start = asking.start_token(tokenizer)
    contexts = [np.array([start, *tokenizer(p, add_special_tokens=False)["input_ids"]]) for p in prompts]
    written: dict[int, Sequence[int]] = {}
    with engine.open():
        engine.write(contexts, 4, lambda tokens: False, written.update)
    for n, context in enumerate(contexts):
        right = np.array(written[n])
        wrong = right.copy()
        wrong[-1] = (wrong[-1] + 1) % engine.model.dense.vocab
        assert [best for _, best in asking.scored(engine, [(context, right), (context, wrong)], 64)] == [True, False]
        # the same tokens one place further left: an answer span that is off by one is not what the model writes
        early = (context[:-1], np.concatenate([context[-1:], right[:-1]]))
        plain = greedy(engine.model, context[:-1], 1)
        assert asking.scored(engine, [early], 64)[0][1] == (plain[0] == context[-1])


def greedy(model: Decoder, context: np.ndarray[Any, Any], count: int) -> list[int]:
    ids = context.tolist()
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor(ids)[None])[0, -1].argmax()))
    return ids[len(context) :]


def test_a_model_is_scored_and_compared(folder: Path, model: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "scores"
    command = ["facts", "score", str(model), f"suite={folder}", f"output={out}", "device=cpu"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith((out / "facts.md").read_text()) and "| told | 75 | 15 |" in printed
    run = logged.load(out)
    assert set(run.tasks) == {
        *(f"{group}_{what}" for group in ("told", "untold") for what in ("exact", "choice", "text")), "known_exact",
        "known_choice",
    }  # fmt: skip
    assert run.tasks["told_exact"].metrics["exact_match"] == np.mean(
        [item.scores["exact_match"] for item in run.items if item.task == "told_exact"]
    )
    for item in run.items:
        if item.task.endswith("choice"):
            assert item.scores["acc"] == float(item.logprobs[0] > max(item.logprobs[1:]))
            assert len(item.choices) == 8 or item.task == "known_choice"
    assert 2 < run.tasks["told_text"].metrics["nats_a_token"] < 12
    assert main(command) == 0  # in place of the earlier scores
    capsys.readouterr()
    assert main(["compare", str(out), str(out)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| told, exact match |"))
    assert "| 75 | 15 |" in row  # questions, and entities as their clusters


def test_mistakes_are_one_sentence(folder: Path, model: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    broken = tmp_path / "broken"
    assert main(["facts", "write", f"output={broken}", *SMALL]) == 0
    capsys.readouterr()
    (broken / suite.TOLD).write_text("")
    for given, says in (
        ([], "write upcycle facts write"),
        (["ask"], "facts got 'ask'"),
        (["write"], "output is not set"),
        (["write", f"output={tmp_path}/new", "people=0", "places=0", "events=0"], "are all 0"),
        (["write", f"output={tmp_path}/new", "persons=3"], "unknown key 'persons'"),
        (["write", f"output={tmp_path}/full"], "is not empty"),
        (["write", f"output={folder}", *SMALL, "seed=4"], "seed=0, and seed=4 is asked for"),
        (["score"], "model is not set"),
        (["score", str(model)], "suite is not set"),
        (["score", str(model), f"suite={tmp_path}"], "has no suite.json"),
        (["score", str(model), f"suite={broken}"], "told.jsonl is missing or was changed"),
        (["score", str(model), f"suite={folder}", f"output={tmp_path}/full"], "did not write it"),
    ):
        assert main(["facts", *given]) == 2, given
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1, said
    assert not (tmp_path / "new").exists() and (tmp_path / "full" / "mine").exists()


# ---- what a kill leaves


def test_a_killed_write_goes_on_and_takes_nothing_of_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = suite.write_rows, tmp_path / "out"

    def killed(path: Path, given: Any) -> int:
        if path.name == suite.UNTOLD:
            raise KeyboardInterrupt
        return real(path, given)

    monkeypatch.setattr(suite, "write_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        suite.write(suite.WriteConfig(output=str(out), people=12, places=11, events=10, tellings=13, asked=5, seed=3))
    assert not out.exists()
    (tmp_path / "out.partial" / "mine").write_text("")
    monkeypatch.undo()
    assert main(["facts", "write", f"output={out}", *SMALL]) == 0  # other settings than the killed one
    assert {path.name for path in out.iterdir()} == {*suite.FILES, suite.ABOUT, "mine"}
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in (*suite.FILES, suite.ABOUT))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_earlier_scores_stay_until_the_new_ones_are_whole(
    folder: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "scores", disk.write_atomic
    command = ["facts", "score", str(model), f"suite={folder}", f"output={out}", "device=cpu"]
    assert main(command) == 0
    before = logged.load(out)

    def full(path: Path, data: bytes) -> None:
        if path.name.startswith("results_"):
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(disk, "write_atomic", full)
    assert main([*command, "name=other"]) == 2
    monkeypatch.undo()
    assert logged.load(out) == before
    assert main([*command, "name=other"]) == 0
    assert logged.load(out).model.name == "other"
    assert len(list(out.glob("results_*"))) == 1 and len(list(out.glob("samples_*"))) == len(before.tasks)


# ---- intervals


def test_intervals_count_entities_and_not_questions() -> None:
    right = np.array([1.0] * 50 + [0.0] * 50)
    alone = figure(right, np.ones(100), [str(n) for n in range(100)])
    together = figure(right, np.ones(100), [str(n // 5) for n in range(100)])
    assert alone.value == together.value == 0.5 and together.clusters == 20
    assert alone.low is not None and together.low is not None and alone.error and together.error
    assert together.low < alone.low - 0.05 and together.error > 2 * alone.error
    few = figure(right, np.ones(100), [str(n % (LEAST - 1)) for n in range(100)])
    assert few.error is None and few.low is None
    nats = figure(np.array([30.0, 10.0] * 10), np.array([10.0, 5.0] * 10), [str(n) for n in range(20)])
    assert nats.value == pytest.approx(400 / 150) and nats.low is not None and nats.low < nats.value


# ---- a study


def test_a_study_of_facts_trains_and_asks_before_and_after(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"source={model}", f"output={tmp_path / 'study'}", "seeds=[0]", "facts.people=12", "facts.asked=3"]
    small = [
        "base.batch=4",
        "base.micro_batch=4",
        "base.data.sequence=32",
        "base.model.dtype=float32",
        "base.device=cpu",
    ]
    plan = read_study(
        "facts", [*given, *small, "facts.tellings=3", "facts.readings=0.5", "arms.slices.model.upcycle.experts=2"]
    )
    _, jobs = prepared(plan)
    tokens = read_meta(tmp_path / "study" / "facts-tokens" / "train")["tokens"]
    configs = [build(TrainConfig, strict.read_yaml(plan.run_folder(arm, 0).with_suffix(".yaml"))) for arm in plan.arms]
    assert [config.steps for config in configs] == [round(tokens / 2 / 128)] * 2 and tokens > 1000
    for job in jobs:  # in this process, which is faster than a process for each command
        while command := job.left():
            assert main(command[1:]) == 0, command
    capsys.readouterr()
    show(plan, "upcycle study facts", {})
    printed = capsys.readouterr().out
    assert "| | before | dense | slices |" in printed and "| told, exact match (facts) |" in printed
    judged = judge(plan)
    kept = {task.task: task for task in judged.kept}
    assert len(kept) == 8 and not kept["told, nats a token"].higher_is_better
    assert all(kept["told, nats a token"].change[arm].mean < -0.1 for arm in ("dense", "slices"))
    assert any(c.what == "told, exact match (facts)" and c.arm == "slices" for c in judged.contrasts)
    # the same commands do nothing twice
    assert all(job.left() is None for job in prepared(plan)[1])


def test_a_study_without_facts_refuses_documents(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this study has no facts"):
        read_study("smollm2", ["source=x", f"data={tmp_path}", "documents=x"])
    with pytest.raises(ValueError, match=r"unknown key 'facts.persons'"):
        read_study("facts", ["source=x", "facts.persons=3"])


def test_the_right_answer_is_the_one_that_counts() -> None:
    """Planted fault: a score that looks at a wrong alternative."""
    question = world.known_questions()[0]
    assert asking.Answered(question, ((-1.0, True), (-2.0, False))).exact
    assert not asking.Answered(question, ((-1.0, False), (-2.0, True))).exact
    assert asking.Answered(question, ((-1.0, False), (-2.0, True))).chosen
    assert not asking.Answered(question, ((-2.0, False), (-2.0, False))).chosen
