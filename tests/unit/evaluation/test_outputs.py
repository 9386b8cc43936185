"""Nothing is destroyed: a command writes over its own files alone, and says so before it asks or measures anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evaluation.ask import run
from evaluation.ask.written import redacted
from evaluation.judge import logged
from evaluation.studies import sample
from tests.parity import asked
from tests.unit.training.test_data import cached
from upcycle.__main__ import main

MOE = ("target=mixtral", "experts=4", "top_k=2")
TINY = ("limit=2", "device=cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    asked.make(folder / "llama")
    asked.make(folder / "other", seed=1)
    (folder / "book.txt").write_text("the cat and the dog went home and slept " * 40)
    assert main(["convert", f"source={folder / 'llama'}", f"output={folder / 'moe'}", *MOE]) == 0
    assert main(["eval", "tiny", str(folder / "llama"), f"output={folder / 'results'}", *TINY]) == 0
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- an evaluation


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["perplexity", "llama", "texts=[book.txt]"], "results holds results of tiny of llama with suite='tiny'"),
        (
            ["tiny", "llama", "limit=3"],
            "results holds results of tiny of llama with limit=2.0, and this command has limit=3.0",
        ),
        (
            ["tiny", "other"],
            "results holds results of tiny of llama, computed with other weights, settings or versions",
        ),
        (["tiny", "llama", "dtype=bfloat16"], "computed with other weights, settings or versions"),
        (["tiny", "llama", "output=llama"], "llama holds config.json, which is not part of an evaluation"),
        (["tiny", "llama", "output=moe"], "moe holds README.md, which is not part of an evaluation"),
    ],
)
def test_another_evaluation_does_not_replace_what_a_folder_holds(
    words: list[str], said: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    if "computed with" not in said:  # all else is said in seconds, whatever the size of the model
        monkeypatch.setattr(run, "model_to_ask", lambda *_: pytest.fail("it loaded the model"))
    monkeypatch.setattr(run, "ask", lambda *_, **__: pytest.fail("it asked"))
    before = content(place)
    more = [word for word in (*TINY, "output=results") if not any(w.startswith(word.split("=")[0]) for w in words)]
    assert main(["eval", *words, *more]) == 2
    error = capsys.readouterr().err
    assert said in error and "write output=FOLDER" in error and error.count("\n") == 1
    assert content(place) == before


def test_the_same_evaluation_again_goes_on_and_takes_its_folder(place: Path, tmp_path: Path) -> None:
    """The same model at another place, in other batches: not one request is asked twice."""
    moved, results = shutil.copytree(place / "llama", tmp_path / "moved"), tmp_path / "results"
    shutil.copytree(place / "results", results)
    (results / "notes.txt").write_text("mine")
    assert main(["eval", "tiny", str(moved), f"output={results}", "forward_tokens=300", "name=again", *TINY]) == 0
    work = logged.load(results).work
    assert work["recalled"] == work["requests"] and (results / "notes.txt").read_text() == "mine"
    for path in results.glob("results_*.json"):  # as if it had been killed before the last file
        path.unlink()
    (results / "notes.txt").unlink()
    assert main(["eval", "tiny", str(moved), f"output={results}", *TINY]) == 0
    assert logged.load(results).work["recalled"] == work["requests"]


def test_what_lm_eval_wrote_is_not_replaced(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its results carry no word of ours."""
    [file] = (place / "results").glob("results_*.json")
    found = json.loads(file.read_text())
    del found["upcycle"]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / file.name).write_text(json.dumps(found))
    before = content(tmp_path)
    assert main(["eval", "tiny", str(place / "llama"), f"output={tmp_path / 'theirs'}", *TINY]) == 2
    assert "theirs holds results of another program's evaluation" in capsys.readouterr().err
    assert content(tmp_path) == before


def test_no_file_of_results_has_a_secret(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, login = "hf_Abcdefgh12345678", "me:hunter22"
    given = {
        "token": secret,
        "base_url": f"https://{login}@example.org/v1",
        "headers": {"Authorization": f"Bearer {secret}"},
    }
    config = run.RunConfig(
        suite="tiny", checkpoint=str(place / "llama"), model="hf", model_args=given, output=str(tmp_path / "o"), limit=1
    )
    ours = run.model_to_ask(run.RunConfig(suite="tiny", checkpoint=str(place / "llama"), device="cpu"))
    monkeypatch.setattr(run, "model_to_ask", lambda _: ours)
    run.evaluate(config, f"upcycle eval tiny llama model=hf model_args.token={secret}")
    texts = {path: path.read_text() for path in (tmp_path / "o").rglob("*") if path.is_file()}
    assert any(path.name.startswith("results_") and "***" in text for path, text in texts.items())
    report = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "o"), f"output={report}"]) == 0
    texts |= {path: path.read_text() for path in tmp_path.glob("report.*")}
    assert not [path for path, text in texts.items() if secret in text or "hunter22" in text]
    run.evaluate(config)  # the same evaluation takes its folder again


def test_redacted_hides_secrets_and_nothing_else() -> None:
    value = {"api_key": "sk-12345678", "use_auth_token": "short", "tokenizer": "org/tokenizer", "max_gen_toks": 3}
    value |= {"inner": [{"Password": "p" * 9}], "command": f"x sk-12345678 {'p' * 9} short", "token": ""}
    assert redacted(value) == value | {
        "api_key": "***", "use_auth_token": "***", "inner": [{"Password": "***"}], "command": "x *** *** short",
    }  # fmt: skip


def test_the_tokenizer_of_a_hub_id_asks_the_same(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(place / "llama", bare, ignore=shutil.ignore_patterns("tokenizer*"))
    cached(place / "llama", "org/tokenizer", monkeypatch, tmp_path / "cache")
    words = ["tokenizer=org/tokenizer", f"output={tmp_path / 'results'}", *TINY]
    assert main(["eval", "tiny", str(bare), *words]) == 0
    scores = [logged.load(folder).tasks["tiny_text"].metrics for folder in (tmp_path / "results", place / "results")]
    assert scores[0] == scores[1]


def test_other_options_have_another_folder_of_their_own(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for limit in (2, 3, 2):
        assert main(["eval", "tiny", str(place / "llama"), f"limit={limit}", "device=cpu"]) == 0
    assert sorted(logged.load(folder).options["limit"] for folder in Path("runs/eval").iterdir()) == [2, 3]


# ---- files


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "routing": lambda place: ["routing", str(place / "moe"), str(place / "book.txt"), "tokens=128", "sequence=32"],
    "compare": lambda place: ["compare", str(place / "results"), str(place / "results")],
    "report": lambda place: ["report", str(place / "results")],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_of_the_users_is_left_and_an_own_one_is_replaced(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, words = tmp_path / ("README.html" if name == "report" else "README.md"), COMMANDS[name](place)
    file.write_text("# Mine\n")
    assert main([*words, f"output={file}"]) == 2
    assert f"{file} exists and upcycle {name} did not write it; choose another output" in capsys.readouterr().err
    assert content(tmp_path) == {file.name: b"# Mine\n"}
    for _ in range(2):
        assert main([*words, f"output={tmp_path / 'own.html'}"]) == 0
    file.write_text("")  # as mktemp makes one
    assert main([*words, f"output={file}"]) == 0 and file.stat().st_size
    assert main([*words, "output=/dev/null"]) == 2 and not Path("/dev/null").is_file()


@pytest.mark.parametrize("suffix", [".md", ".json"])
def test_a_report_leaves_a_page_in_other_words_that_is_not_its_own(suffix: str, place: Path, tmp_path: Path) -> None:
    (tmp_path / f"notes{suffix}").write_text("{}")
    assert main([*COMMANDS["report"](place), f"output={tmp_path / 'notes.html'}"]) == 2
    assert content(tmp_path) == {f"notes{suffix}": b"{}"}


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_of_the_users_is_left(suffix: str, tmp_path: Path) -> None:
    from tests.unit.evaluation.test_report import log

    run, picture = log(tmp_path / "run", 1.0, {0: 5.0, 1: 4.0}), tmp_path / f"cat{suffix}"
    picture.write_bytes(b"a photograph")
    assert main(["report", str(run), f"output={picture}"]) == 2
    assert picture.read_bytes() == b"a photograph"
    picture.unlink()
    for _ in range(2):
        assert main(["report", str(run), f"output={picture}"]) == 0


@pytest.mark.parametrize("name", ["study.html", "study.json"])
def test_a_study_leaves_a_page_that_is_not_its_own(name: str, tmp_path: Path) -> None:
    file = tmp_path / "study" / name
    file.parent.mkdir()
    file.write_text("mine")
    assert main(["study", "tiny", f"output={file.parent}"]) == 2
    assert content(tmp_path) == {f"study/{name}": b"mine"}


def test_a_sample_is_not_made_in_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a sample"):
        sample.Stages(tmp_path, sample.SampleConfig(output=str(tmp_path)))
    assert content(tmp_path) == {"start/thesis.txt": b"mine"}
    assert sample.Stages(tmp_path / "new", sample.SampleConfig()).done == {}
    assert sample.Stages(tmp_path / "new", sample.SampleConfig()).done == {}  # one that was killed goes on
