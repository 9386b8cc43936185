"""Tiny dense models that no test writes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("dense") / "llama")


@pytest.fixture(scope="session")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("arcee", tmp_path_factory.mktemp("dense") / "arcee")
