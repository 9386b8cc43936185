"""Check the style check: it finds each form of its list, and passes plain prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import style

PLANTED = [
    "Experts, two of which are chosen.",
    "It stands beside the model.",
    "That of the shared expert is the whole FFN.",
    "What a plan cannot have is a router.",
    "Of the experts two are chosen.",
    "It takes some 20 minutes.",
    "Slices that are to be trained need a router.",
    "The folder is no run.",
    "Nothing but the router is trained.",
    "The folder and the shards therein.",
    "The run goes on where it was.",
    "The mean is saved in its stead.",
    "Copies that are alike are merged.",
    "Draw as many as there are.",
    "The page has it that copies win.",
]
PLAIN = [
    "Choose two experts for each token.",
    "There is no GPU, so this runs on the CPU.",
    "The folder is no longer a run.",
    "What does the router choose?",
    "The run went on to win.",
]


@pytest.mark.parametrize("line", PLANTED)
def test_a_planted_form_is_found_in_code_pages_and_configs(line: str) -> None:
    assert list(style.wrong(line))
    assert list(style.of_page(f"# Title\n\n{line}\n"))
    assert list(style.of_yaml(f"steps: 3  # {line}\n"))
    assert list(style.of_python(f'"""Do it.\n\n{line}\n"""\n'))
    assert list(style.of_python(f"steps = 3  # {line}\n"))


@pytest.mark.parametrize("line", PLAIN)
def test_plain_prose_passes(line: str) -> None:
    assert not list(style.wrong(line))


def test_a_docstring_begins_with_a_verb() -> None:
    code = 'def width() -> int:\n    """{} width."""\n    return 1\n'
    assert not list(style.of_python(code.format("Return the")))
    assert list(style.of_python(code.format("The")))


def test_code_in_a_page_is_not_prose_and_a_quoted_form_can_be_excused() -> None:
    assert not list(style.of_page("```\nof which\n```\nWrite `of which` never.\n"))
    assert not list(style.of_page('"of which" is a riddle <!-- style: off -->\n'))


def test_the_command_names_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("Fine.\n\nExperts, two of which are chosen.\n")
    assert style.faults(["a.md"]) == ["a.md:3: 'of which': start a new sentence"]
