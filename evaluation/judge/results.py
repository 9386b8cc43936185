"""What a run of a suite is to those who judge it: the model, its scores, and its answers item by item.

logged.load makes an Evaluation of the files that lm-eval writes. Two runs are compared item by item: join on Item.key,
and refuse where prompt_hash differs, because the two models were asked different things.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Raw = Any  # a score of an item as lm-eval's task makes it: a number, a tuple of numbers or of texts, ...


@dataclass(frozen=True)
class Item:
    task: str
    doc: int  # its number in the task
    doc_hash: str  # lm-eval's, of the document's content
    prompt_hash: str  # lm-eval's, of the text that the model saw
    target: str
    # by metric, as the task's aggregation takes them (metrics.py): 0 or 1 (acc, exact_match); (log-likelihood in nats,
    # units) of a text (bits_per_byte); (right class, chosen class) for f1 and mcc; (reference, text) for bleu
    scores: Mapping[str, Raw]
    logprobs: tuple[float, ...] = ()  # of each choice in nats; one for a text; none for a generation
    greedy: tuple[bool, ...] = ()  # whether each choice is what greedy decoding would write
    text: str = ""  # what was generated
    choices: tuple[str, ...] = ()  # what each log-probability is of; empty for texts
    # digests by name of those of the document's keys that say where it is from (file, passage, ...; see logged.FROM)
    clusters: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """Name the item in every run of a suite. The number tells apart the few documents that a task has twice."""
        return self.task, self.doc_hash, self.doc


@dataclass(frozen=True)
class Task:
    name: str
    title: str  # for tables
    metrics: Mapping[str, float]
    stderr: Mapping[str, float]  # where lm-eval gives one
    higher_is_better: Mapping[str, bool]
    items: int
    total: int  # items that the task has; more than `items` under a limit
    fewshot: int
    version: str
    output: str  # multiple_choice | loglikelihood | loglikelihood_rolling | generate_until
    groups: tuple[str, ...] = ()  # that it counts in, innermost first
    aggregation: Mapping[str, str] = field(default_factory=dict)  # of metrics that are not the mean: see metrics.py


@dataclass(frozen=True)
class Group:
    name: str
    title: str
    metrics: Mapping[str, float]  # weighted by the tasks' sizes, but for those that `alike` names
    stderr: Mapping[str, float]
    tasks: tuple[str, ...]  # all of them, through inner groups too
    items: int
    alike: tuple[str, ...] = ()  # metrics in which all tasks weigh the same, whatever their sizes


@dataclass(frozen=True)
class Model:
    name: str  # for tables and legends
    source: str  # folder, hub id or training run
    fingerprint: str  # of the weights: the same model has the same one, wherever it lies
    kind: str  # model_type, of config.json
    parameters: int
    active: int  # parameters that a token uses
    dtype: str
    step: int | None = None  # of a training run's checkpoint
    identity: str = ""  # of the model as computed: weights, config, tokenizer, dtype, versions; see load.identity


@dataclass(frozen=True)
class Evaluation:
    model: Model
    suite: str
    command: str
    options: Mapping[str, Any]
    versions: Mapping[str, str]  # python, torch, lm_eval, transformers, upcycle
    started: str  # ISO 8601, UTC
    seconds: float
    work: Mapping[str, float]  # tokens through the model, forwards, requests, requests answered by the cache, seconds
    tasks: Mapping[str, Task]
    groups: Mapping[str, Group] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader must know: items cut, official lists not used, a limit
    items: tuple[Item, ...] = ()  # of all tasks, in their order
    place: str = ""  # the results file
