"""What the process that ranks are forked from has read before: a rank of its own would import it in seconds, and train in
less. ranks.py names this module to it.

A picture of a run takes longer than such a run, so they draw none. What lies here is never looked through by a rank's
garbage collector, which would copy all of it for each of them.
"""
# ruff: noqa: F401

from __future__ import annotations

import gc

import hypothesis
import pytest
import torch.distributed.fsdp
import torch.distributed.tensor

import evaluation.ask.harness
import tests.parallel.models
import tests.parity.tiny
from training.run import session

session.draw = lambda folder: None
gc.collect()
gc.freeze()
