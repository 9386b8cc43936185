"""What all tests share: which files come first, and that their runs draw no pictures of themselves."""

from __future__ import annotations

import gc
import signal
import sys

import hypothesis
import pytest

# A shell that runs the suite in its background has it ignore Ctrl-C, which what it starts would inherit: some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines: on a busy machine an example of a property takes as long as it takes.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

# `make test` gives each of two processes whole files, so that what a file makes is made once. Those that take longest
# come first: else one process would end with a long file when the other has none left.
LONGEST = (
    "test_journeys", "test_shard", "test_run", "test_ready_study", "test_dispatch", "test_help", "test_notebooks", "test_pipeline",
    "test_lm_eval", "test_contributing", "test_remote_code", "test_kill_rank", "test_publish", "test_stories", "test_own_packages",
    "test_targets_parity", "test_ranges", "test_plan", "test_docs", "test_two_agents", "test_state", "test_upcycled",
    "test_decoder", "test_study", "test_recompute", "test_recommend", "test_island_run", "test_export", "test_stock",
    "test_average", "test_standalone", "test_kill", "test_lm", "test_copies", "test_siblings", "test_grow", "test_fuzz",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    """A picture takes longer than such a run; one test asks for it, of the function that was there before. What is
    imported stays, so the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    if train := sys.modules.get("training.run.session"):
        train.draw = lambda folder: None  # type: ignore[attr-defined]
