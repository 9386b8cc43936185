"""Check README's results: the table and the picture are written from one file, and each figure stands in a log."""

from __future__ import annotations

import pytest

from tests.docs import headline
from tests.docs.headline import PICTURE, README, ROOT, page, picture, rows, written

LOGS = " ".join(path.read_text() for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")))


def test_the_readmes_table_and_picture_are_written_from_the_file() -> None:
    again = "run python -m tests.docs.headline"
    assert README.read_text() == page(), again
    assert PICTURE.read_text() == picture(), again


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['arm']} {row['against']}")
def test_each_figure_stands_in_a_log(row: dict[str, object]) -> None:
    for key in ("trained", "law"):
        mean, *ends = row[key]  # type: ignore[misc]
        assert f"{written([mean, *ends], 4)}" in LOGS.replace("*", ""), (row["arm"], key)


def test_a_changed_figure_changes_table_and_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [{**rows()[0], "trained": [-0.05, -0.06, -0.04]}, *rows()[1:]]
    monkeypatch.setattr(headline, "rows", lambda: changed)
    assert README.read_text() != page() and PICTURE.read_text() != picture()
