"""How a model uses its experts on given text, and how far they have come from the dense FFN they were copied from.

usage: upcycle routing CHECKPOINT TEXT ... [key=value ...]

  upcycle routing ./moe book.txt
  upcycle routing ./moe-trained book.txt other-book.txt start=./moe output=routing.json

Every text is a domain. What is measured of a layer:

    load            an expert's share of the choices / the mean share, by domain: 1 is balance
    entropy         of the load over all domains, divided by log N: 1 is balance
    specialisation  what an expert's number tells about the domain: mutual information / log of the number of domains
    together        how often two experts are chosen for one token / how often they would be if choices were independent
    whole groups    tokens whose experts are complete virtual groups: the dense FFN of one copy or several, whole
    whole           tokens whose experts are whole dense FFNs, of slices of whatever copies
    missing         slices of these FFNs that a token has too seldom; doubled: too often (see training/optim/balance.py)
    chosen          how many tokens took an expert
    saliency        the mean over them of weight * |what the expert gave| (REAP, 2510.13999)
    pruned          with keep=N: error, gain and cosine of the FFN in which the N most salient experts alone are left
    spread          |expert - mean of its copies| / |mean|, mean over experts: 0 as long as copies are copies
    moved           |expert - what it was at `start`| / |what it was|, mean over experts; the router's rows likewise

`upcycle` makes fewer or more experts by the file: method.name=prune or utility, method.by=routing.json.

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
        read(RoutingConfig, "", keys)  # a key that is unknown is refused first
        raise ValueError("routing needs a checkpoint and texts: routing CHECKPOINT TEXT [TEXT ...] [key=value ...]")
    config = read(RoutingConfig, "", [f"checkpoint={named[0]}", f"texts={json.dumps(named[1:])}", *keys])
    found = routing(config)
    print(f"{table(found)}\n\n{config.output}")
    return 0
