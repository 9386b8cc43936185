"""Measure how a model uses its experts on text, and how far they have moved from the dense FFN that they copy.

usage: upcycle routing CHECKPOINT TEXT ... [key=value ...]

  upcycle routing ./moe book.txt
  upcycle routing ./moe-trained book.txt other-book.txt start=./moe output=routing.json

Every text is a domain. Each layer gets these numbers:

    load            an expert's share of the choices / the mean share, by domain: 1 is balance
    entropy         of the load over all domains, divided by log N: 1 is balance
    specialisation  how much an expert's number tells about the domain: mutual information / log of the number of
    domains
    together        how often a token chooses two experts together / how often if choices were independent
    whole groups    tokens whose experts are complete virtual groups: the whole dense FFN of one copy or several
    whole           tokens whose experts form whole dense FFNs, with slices of any copies
    missing         slices of these FFNs that a token lacks; doubled: that it has too often (training/optim/balance.py)
    chosen          tokens that chose an expert
    saliency        mean over these tokens of weight * |the expert's output| (REAP, 2510.13999)
    pruned          with keep=N: error, gain and cosine of an FFN with only the N most salient experts
    spread          |expert - mean of its copies| / |mean|, mean over experts: 0 while copies are equal
    goes to         with parts: the share of a text's choices that the base's own FFN and each part get
    moved           |expert - its value at `start`| / |that value|, mean over experts; also for the router's rows

`upcycle convert` uses the file to make fewer or more experts: method.name=prune or utility, method.by=routing.json.

C domains, L MoE layers, N experts = E copies x G parts, K chosen a token, T tokens.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from upcycle.cli import frame


@frame.command()
def main(words: Sequence[str]) -> int:
    from evaluation.judge.experts.routing import RoutingConfig, routing, table
    from upcycle.config.reading import read

    named, keys = frame.names_and_words(words)
    if not named:
        read(RoutingConfig, "", keys)  # refuse an unknown key first
        raise ValueError("routing needs a checkpoint and texts: routing CHECKPOINT TEXT [TEXT ...] [key=value ...]")
    config = read(RoutingConfig, "", [f"checkpoint={named[0]}", f"texts={json.dumps(named[1:])}", *keys])
    found = routing(config)
    print(frame.printable(f"{table(found)}\n\n{config.output}", keep="\n"))
    return 0
