"""Define a run of a suite for the judge: the model, its scores, and its answers item by item.

logged.load makes an Evaluation from lm-eval's files. Two runs are compared item by item: join them by Item.key, and
refuse if prompt_hash differs, because the two models had different prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Raw = Any  # an item's score from lm-eval's task: a number, a tuple of numbers or of texts, ...


@dataclass(frozen=True)
class Item:
    task: str
    doc: int  # its number in the task
    doc_hash: str  # lm-eval's hash of the document
    prompt_hash: str  # lm-eval's hash of the prompt
    target: str
    # by metric, in the form that its aggregation takes (metrics.py): 0 or 1 (acc, exact_match); (log-likelihood in
    # nats,
    # units) for a text (bits_per_byte); (right class, chosen class) for f1 and mcc; (reference, text) for bleu
    scores: Mapping[str, Raw]
    logprobs: tuple[float, ...] = ()  # in nats: one for each choice, one for a text, none for a generation
    greedy: tuple[bool, ...] = ()  # whether greedy decoding would write each choice
    text: str = ""  # the generated text
    choices: tuple[str, ...] = ()  # the text of each log-probability; empty for texts
    # digests of the document's keys that group items (file, passage, ...; see logged.FROM), by key
    clusters: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """Return the item's name in every run of a suite; the number tells equal documents of a task apart."""
        return self.task, self.doc_hash, self.doc


@dataclass(frozen=True)
class Task:
    name: str
    title: str  # for tables
    metrics: Mapping[str, float]
    stderr: Mapping[str, float]  # if lm-eval gives one
    higher_is_better: Mapping[str, bool]
    items: int
    total: int  # all items of the task; more than `items` if there is a limit
    fewshot: int
    version: str
    output: str  # multiple_choice | loglikelihood | loglikelihood_rolling | generate_until
    groups: tuple[str, ...] = ()  # the task's groups, the innermost first
    aggregation: Mapping[str, str] = field(default_factory=dict)  # for metrics other than the mean (metrics.py)


@dataclass(frozen=True)
class Group:
    name: str
    title: str
    metrics: Mapping[str, float]  # weighted by the tasks' sizes, except the metrics in `alike`
    stderr: Mapping[str, float]
    tasks: tuple[str, ...]  # all tasks, also those of inner groups
    items: int
    alike: tuple[str, ...] = ()  # metrics that weigh all tasks equally, whatever their sizes


@dataclass(frozen=True)
class Model:
    name: str  # for tables and legends
    source: str  # folder, hub id or training run
    fingerprint: str  # of the weights: equal for the same model in any folder
    kind: str  # model_type in config.json
    parameters: int
    active: int  # the number of parameters that a token uses
    dtype: str
    step: int | None = None  # the step of a training run's checkpoint
    identity: str = ""  # digest of weights, config, tokenizer, dtype and versions (load.identity)


@dataclass(frozen=True)
class Evaluation:
    model: Model
    suite: str
    command: str
    options: Mapping[str, Any]
    versions: Mapping[str, str]  # python, torch, lm_eval, transformers, upcycle
    started: str  # ISO 8601, UTC
    seconds: float
    work: Mapping[str, float]  # tokens that the model read, forwards, requests, requests answered from disk, seconds
    tasks: Mapping[str, Task]
    groups: Mapping[str, Group] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # notes for the reader: items that were cut, official lists not used, a limit
    items: tuple[Item, ...] = ()  # the items of all tasks, in their order
    place: str = ""  # the results file
