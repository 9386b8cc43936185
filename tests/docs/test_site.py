"""Build the documentation site as `make docs` does; a broken link, anchor or forgotten page fails the build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the successor
    return subprocess.run([*command, "-f", str(folder / "mkdocs.yml")], env=environment, capture_output=True, text=True)


def copied(folder: Path) -> Path:
    shutil.copytree(PAGES, folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    return folder


def test_the_site_is_built_and_has_every_page(tmp_path: Path) -> None:
    done = build(copied(tmp_path))
    assert done.returncode == 0, done.stderr
    for page in PAGES.rglob("*.md"):
        name = page.relative_to(PAGES).with_suffix("")
        built = tmp_path / "site" / ("." if name.name == "index" else name) / "index.html"
        assert built.is_file(), f"{page} is not on the site"


def test_a_broken_link_and_a_broken_anchor_fail_the_build(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    page = folder / "docs" / "index.md"
    text = page.read_text()
    for link in ("nowhere.md", "getting-started.md#nowhere"):
        page.write_text(f"{text}\n[here]({link})\n")
        done = build(folder)
        assert done.returncode != 0 and "nowhere" in done.stderr, link


def test_the_pages_have_at_most_20_000_words() -> None:
    words = {page.name: len(re.findall(r"\S*\w\S*", page.read_text())) for page in PAGES.rglob("*.md")}
    assert sum(words.values()) <= 20_000, words


def test_the_readme_has_at_most_10_kilobytes() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_000
