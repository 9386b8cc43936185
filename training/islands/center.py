"""Keep the server's state: the members, the model and each island's copy. Events go in and answers come out.

This file knows no sockets and no clock. An event changes the state by the state alone, so replaying the events since a
snapshot restores the state and its answers bit for bit (journal.py). The server keeps its last answers. An island whose
answer was lost, or which resumes from its own checkpoint and learns the same again, gets the same answer again, and
nothing counts twice.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from training.islands.config import IslandsConfig
from training.islands.link import wire
from training.islands.places import Layout
from training.optim.balance import update_bias_
from upcycle import plugin
from upcycle.io import strict

WORTH = 2**-16  # share of a weight; smaller differences wait, see rules/dgs.py
KEPT = 64  # answers kept for each island
HEAD = 1 << 16  # bytes of a message's header, without what the routers need
NAME = 64  # letters in an island's name


class Again(ValueError):
    """Tell an island that it cannot continue from its state and must take the whole model."""


@dataclass
class Answer:
    seq: int
    asked: str  # sha256 of what was pushed
    data: bytes


@dataclass
class Member:
    number: int
    seq: int = 0  # the last push that counted
    seen: int = 0  # pushes of all islands at this island's last answer
    here: bool = True
    came: bool = False  # it has pushed at least once
    waits: str = ""  # sha256 of a push without an answer yet, because a round of diloco is not over
    all: bool = False  # that push asked for every difference
    answers: deque[Answer] = field(default_factory=deque)


class Center:
    def __init__(self, layout: Layout, start: Tensor, config: IslandsConfig, bias: Tensor | None = None) -> None:
        """`start`: the model (P,) in float32. `bias`: the routers' selection biases (layers, experts), where load moves
        them."""
        self.layout, self.config = layout, config
        secondary = layout.top(config.answer) if config.answer else None
        self.rule = plugin.load("training.islands.rules", config.rule).Pull(start, secondary, WORTH)
        self.members: dict[str, Member] = {}
        self.pushes = self.steps = self.tokens = 0
        self.decay = 0.0  # sum of learning rates, for weight decay
        self.bias = bias
        self.loads: dict[int, Tensor] = {}  # by island: the loads of its last interval

    # ---- events

    def knows(self, name: str, seq: int) -> bool:
        """Say whether an island that took the model here and has had `seq` answers can continue from its state."""
        member = self.members.get(name)
        if member is None and not seq:
            return False
        if member is None or seq > member.seq:
            raise ValueError(
                f"island {name} has had {seq} answers, and this server remembers "
                f"{0 if member is None else member.seq}; start the server with its old folder, or the island in a "
                "new output"
            )
        kept = {answer.seq for answer in member.answers} | ({member.seq} if member.waits else set())
        return all(number in kept for number in range(seq + 1, member.seq + 1)) and (member.here or seq < member.seq)

    def join(self, name: str) -> Member:
        """Let an island take the whole model; its copy is then the server's model of this moment."""
        known = self.members.get(name)
        here = sum(member.here for member in self.members.values())
        if (known is None or not known.here) and here >= self.config.most:
            raise ValueError(f"{here} islands are here, and islands.most allows no more; raise it on the server")
        if known is None:
            known = self.members[name] = Member(len(self.members))
        known.here, known.waits, known.seen = True, "", self.pushes
        known.answers.clear()
        self.rule.leave(known.number)  # no round may wait for the island's old copy
        self.settle()
        self.rule.join(known.number)
        return known

    def leave(self, name: str) -> None:
        member = self.members[name]
        member.here = False
        self.rule.leave(member.number)
        self.loads.pop(member.number, None)
        self.settle()

    def answer(self, name: str, seq: int, data: bytes) -> bytes | None:
        """Return the answer to push number `seq`; None if the push is new, or has no answer yet."""
        member = self.members[name]
        if seq > member.seq + 1 or seq < 1:
            raise ValueError(
                f"push {seq} of island {name} came instead of push {member.seq + 1}; start the island in a new output"
            )
        asked = hashlib.sha256(data).hexdigest()
        if seq == member.seq and member.waits:
            if member.waits != asked:
                raise Again(f"push {seq} of island {name} differs from the first one")
            return None
        if seq == member.seq + 1:
            if not member.here:
                raise Again(f"island {name} has left")
            return None
        for answer in member.answers:
            if answer.seq == seq:
                if answer.asked != asked:
                    raise Again(f"push {seq} of island {name} differs from the first one")
                return answer.data
        raise Again(f"push {seq} of island {name} is older than the answers that the server keeps")

    def read(self, data: bytes) -> None:
        """Raise a ValueError for a push that no island sends."""
        for _ in wire.pieces(self.head_of(data)[1], self.layout.size):
            pass

    def head_of(self, data: bytes) -> tuple[dict[str, Any], memoryview]:
        """Return a push's header and the bytes of its numbers."""
        head, rest = split(data)
        for key in ("steps", "tokens"):
            strict.held(head.get(key), strict.Count, f"a push's {key}")
        decay = head.get("decay")
        if not strict.is_number(decay) or not 0 <= float(decay) < 1e6:  # type: ignore[arg-type]
            raise ValueError(f"a push's decay is {strict.short(decay)}; it must be a number of at least 0")
        if self.bias is not None:
            loads = head.get("loads")
            ok = isinstance(loads, list) and len(loads) == len(self.bias) and all(
                isinstance(row, list) and len(row) == self.bias.shape[1] and all(map(strict.is_whole, row))
                and all(0 <= value < 2**53 for value in row) for row in loads
            )  # fmt: skip
            if not ok:
                raise ValueError(f"a push's loads do not fit {len(self.bias)} routers")
        return head, rest

    def push(self, name: str, seq: int, data: bytes) -> None:
        """Count a push that `answer` did not know and `read` accepted; answer it as soon as the rule can."""
        member = self.members[name]
        assert member.here and seq == member.seq + 1 and not member.waits, "answer was not asked"
        head, rest = self.head_of(data)
        member.seq, member.came, member.all = seq, True, head.get("all") is True
        member.waits = hashlib.sha256(data).hexdigest()
        many = 0
        for sent in wire.pieces(rest, self.layout.size):
            self.rule.take(member.number, sent)
            many += len(sent.index)
        if not member.all or many:
            self.pushes += 1
        self.steps += head["steps"]
        self.tokens += head["tokens"]
        self.decay += float(head["decay"])
        if self.bias is not None and head["steps"]:
            self.loads[member.number] = torch.tensor(head["loads"], dtype=torch.int64)
            rate = float(head.get("bias_rate", 0.0)) * head["steps"] / self.here
            update_bias_(self.bias, torch.stack(list(self.loads.values())).sum(0), rate)
        self.rule.done(member.number)
        self.settle()

    def settle(self) -> None:
        """Answer every island that waits and that the rule can answer."""
        for member in self.members.values():
            if not member.waits or not member.here:
                continue
            told = self.rule.told(member.number, member.all)
            if told is None:
                continue
            writer = wire.Writer(self.layout.size)
            for sparse, upto in told:
                writer.add(sparse, upto)
            others = self.pushes - member.seen - 1
            head: dict[str, Any] = {
                "islands": self.here,
                "decay": self.decay,
                "steps": self.steps,
                "stale": max(others, 0),
            }
            if self.bias is not None:
                head["bias"] = self.bias.tolist()
            data = join(head, *writer.parts())
            del writer  # as long as the answer
            member.answers.append(Answer(member.seq, member.waits, data))
            member.waits, member.seen = "", self.pushes
            while len(member.answers) > 1 and (
                len(member.answers) > KEPT or sum(len(a.data) for a in member.answers) > 4 * self.layout.size
            ):
                member.answers.popleft()

    # ---- figures

    @property
    def here(self) -> int:
        return max(sum(member.here for member in self.members.values()), 1)

    @property
    def done(self) -> bool:
        """Say whether all `islands.count` islands have pushed and left."""
        came = sum(member.came for member in self.members.values())
        return 0 < self.config.count <= came and not any(member.here for member in self.members.values())

    def longest(self) -> int:
        """Return the bytes of the longest message."""
        return self.head + wire.most(self.layout.size)

    @property
    def head(self) -> int:
        return HEAD + (0 if self.bias is None else 32 * self.bias.numel())

    # ---- the content of a snapshot

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"rule.{name}": tensor for name, tensor in self.rule.state().items()}
        members = {}
        for name, m in self.members.items():
            members[name] = {
                "number": m.number, "seq": m.seq, "seen": m.seen, "here": m.here, "came": m.came, "waits": m.waits,
                "all": m.all, "answers": [[a.seq, a.asked] for a in m.answers],
            }  # fmt: skip
            for answer in m.answers:
                tensors[f"answer.{m.number}.{answer.seq}"] = torch.frombuffer(bytearray(answer.data), dtype=torch.uint8)
        tensors |= {f"loads.{number}": load for number, load in self.loads.items()}
        if self.bias is not None:
            tensors["bias"] = self.bias
        facts = {"pushes": self.pushes, "steps": self.steps, "tokens": self.tokens, "decay": self.decay}
        return tensors, facts | {"members": members, "layout": self.layout.digest, "rule": self.config.rule}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        if facts["layout"] != self.layout.digest:
            raise ValueError("the server's folder holds another model; start the server with the config that made it")
        if facts["rule"] != self.config.rule:
            raise ValueError(
                f"the server's folder was made with islands.rule={facts['rule']}, and now islands.rule="
                f"{self.config.rule}; set it back, or choose another output"
            )
        self.pushes, self.steps, self.tokens = facts["pushes"], facts["steps"], facts["tokens"]
        self.decay = facts["decay"]
        self.rule.restore({name[5:]: tensor for name, tensor in tensors.items() if name.startswith("rule.")})
        self.loads = {int(name[6:]): tensor for name, tensor in tensors.items() if name.startswith("loads.")}
        if self.bias is not None:
            self.bias = tensors["bias"]
        self.members = {}
        for name, m in facts["members"].items():
            kept = [
                Answer(seq, asked, tensors[f"answer.{m['number']}.{seq}"].numpy().tobytes())
                for seq, asked in m["answers"]
            ]
            rest = {key: m[key] for key in ("number", "seq", "seen", "here", "came", "waits", "all")}
            self.members[name] = Member(**rest, answers=deque(kept))


# ---- a message is a header and numbers


def join(head: Mapping[str, Any], *numbers: bytes) -> bytes:
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, *numbers])


def split(data: bytes) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(data)
    length = int.from_bytes(view[:4], "little")
    if len(view) < 4 + length:
        raise ValueError(f"a message of {len(view)} bytes says that its header has {length}")
    head = strict.parse(bytes(view[4 : 4 + length]), "a message's header")
    if not isinstance(head, dict):
        raise ValueError("a message's header must be a JSON object")
    return head, view[4 + length :]
