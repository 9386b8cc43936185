"""Keep the server's state: the members, the model and each island's copy. Events go in and answers come out.

This file knows no sockets and no clock. An event changes the state by the state alone, so replaying the events since a
snapshot restores the state and its answers bit for bit (journal.py). The server keeps its last answers. An island whose
answer was lost, or which resumes from its own checkpoint and learns the same again, gets the same answer again, and
nothing counts twice.

`check` judges an event before it is logged, so that a logged event can always be replayed. A push may move a parameter
only as far as learning rates can (Bounds). An island that pushes more is put in quarantine.
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
from training.islands.link.frames import JOIN, PUSH
from training.islands.places import Layout
from training.islands.sparse import Sparse
from training.optim.balance import update_bias_
from upcycle import plugin
from upcycle.io import strict

WORTH = 2**-16  # share of a weight; smaller differences wait, see rules/dgs.py
KEPT = 64  # most answers kept for each island
ANSWERS = 4  # bytes a number of the model that kept answers may take; the last answer of an island stays in any case
SLACK = 4.0  # learning rates that one step may move a parameter's weights on average; AdamW stays near 1
PEAK = 64.0  # learning rates that one step may move one weight; Muon may concentrate a step in few weights
HEAD = 1 << 16  # bytes of a message's header, without what the routers need
NAME = 64  # letters in an island's name


OWN = ("number", "seq", "seen", "here", "came", "waits", "all", "steps", "bad")  # a member's fields in a snapshot
# the center's fields in a snapshot; older ones lack the last
TOTALS = ("pushes", "steps", "tokens", "decay", "numbers", "came", "masters")


class Again(ValueError):
    """Tell an island that it cannot continue from its state and must take the whole model."""


class Poison(ValueError):
    """Say that a push would harm the model; its island goes into quarantine."""


@dataclass(frozen=True)
class Bounds:
    """Limit what the pushes of an island may change, by the server's own config."""

    rate: float = 1.0  # highest learning rate
    multipliers: Tensor | float = 1.0  # by place: factor of the learning rate
    decays: Tensor | float = 0.0  # by place: weight decay at a learning rate of 1
    bias_rate: float = 0.0  # change of the routers' selection biases in a step


@dataclass
class Answer:
    seq: int
    asked: str  # sha256 of the push
    data: bytearray
    at: int  # pushes of all islands before it


@dataclass
class Member:
    number: int
    seq: int = 0  # the last push that counted
    seen: int = 0  # pushes of all islands at this island's last answer
    here: bool = True
    came: bool = False  # it has pushed at least once
    waits: str = ""  # sha256 of a push without an answer yet, because a round of diloco is not over
    all: bool = False  # that push asked for every difference
    steps: int = 0  # steps of all its pushes
    bad: str = ""  # why it is in quarantine
    answers: deque[Answer] = field(default_factory=deque)


class Center:
    def __init__(
        self,
        layout: Layout,
        start: Tensor,
        config: IslandsConfig,
        bias: Tensor | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """`start`: the model (P,) in float32. `bias`: the routers' selection biases (layers, experts), where load moves
        them."""
        self.layout, self.config, self.bounds = layout, config, bounds or Bounds()
        places = layout.places.values()
        self.edges = torch.tensor([*(place.first for place in places), layout.size])
        self.sizes = self.edges.diff().double()
        sizes = [start[place.first : place.last].abs() for place in places]
        # by place: the sum of its numbers' sizes at the start, and the largest of them
        self.first = torch.tensor([float(each.sum(dtype=torch.float64)) for each in sizes], dtype=torch.float64)
        self.largest = torch.tensor([float(each.max()) if len(each) else 0.0 for each in sizes], dtype=torch.float64)
        del sizes
        self.spent: dict[int, Tensor] = {}  # by island, by place: sum of the sizes of everything it has pushed
        secondary = layout.top(config.answer) if config.answer else None
        self.rule = plugin.load("training.islands.rules", config.rule).Pull(start, secondary, WORTH)
        self.members: dict[str, Member] = {}
        self.numbers = self.came = 0  # islands that have ever joined, and that have ever pushed
        self.pushes = self.steps = self.tokens = 0
        self.decay = 0.0  # sum of learning rates, for weight decay
        self.masters = False  # the last push came from an island that leaves it to the export to pull copies together
        self.bias = bias
        self.loads: dict[int, Tensor] = {}  # by island: the loads of its last interval

    # ---- events

    def knows(self, name: str, seq: int) -> bool:
        """Say whether an island that took the model here and has had `seq` answers can continue from its state."""
        member = self.members.get(name)
        if member is None and (not seq or self.numbers > len(self.members)):  # new, or forgotten
            return False
        if member is None or seq > member.seq:
            raise ValueError(
                f"island {name} has had {seq} answers, and this server remembers "
                f"{0 if member is None else member.seq}; start the server with its old folder, or the island in a "
                "new output"
            )
        kept = {answer.seq for answer in member.answers} | ({member.seq} if member.waits else set())
        return all(number in kept for number in range(seq + 1, member.seq + 1)) and (member.here or seq < member.seq)

    def check(self, kind: int, name: str, data: bytes | bytearray) -> None:
        """Raise a ValueError for an event that may not be logged."""
        if kind == JOIN:
            self.check_good(name)
            known = self.members.get(name)
            here = sum(member.here for member in self.members.values())
            if (known is None or not known.here) and here >= self.config.most:
                raise ValueError(f"{here} islands are here, and islands.most allows no more; raise it on the server")
        elif kind == PUSH:
            self.read(name, data)

    def check_good(self, name: str) -> None:
        """Raise a ValueError if the island is in quarantine."""
        known = self.members.get(name)
        if known is not None and known.bad:
            raise ValueError(
                f"island {name} is in quarantine, because {known.bad}; mend it, and start it in a new output"
            )

    def join(self, name: str) -> Member:
        """Let an island take the whole model; its copy is then the server's model of this moment."""
        known = self.members.pop(name, None)
        if known is None:
            known = Member(self.numbers)
            self.numbers += 1
            self.spent[known.number] = torch.zeros_like(self.first)
        self.members[name] = known  # the last; the first one that is gone is forgotten first
        known.here, known.waits, known.seen = True, "", self.pushes
        known.answers.clear()
        self.rule.leave(known.number)  # no round may wait for the island's old copy
        self.settle()
        self.rule.join(known.number)
        return known

    def leave(self, name: str) -> None:
        member = self.members[name] = self.members.pop(name)
        member.here = False
        self.rule.leave(member.number)
        self.loads.pop(member.number, None)
        self.settle()
        gone = [name for name, member in self.members.items() if not member.here]
        for name in gone[: max(len(gone) - self.config.most, 0)]:
            del self.spent[self.members.pop(name).number]

    def quarantine(self, name: str, data: bytes | bytearray) -> None:
        """Take back what an island pushed, and refuse it from now on. `data` says why, and holds the changes."""
        head, rest = split(data)
        change = torch.frombuffer(bytearray(rest), dtype=torch.float32)
        self.rule.undo(change.view(-1, self.layout.size))
        self.members[name].bad = head["why"]
        self.leave(name)

    def answer(self, name: str, seq: int, data: bytes | bytearray) -> bytes | bytearray | None:
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

    def read(self, name: str, data: bytes | bytearray) -> None:
        """Raise a ValueError for a push that no island sends, and Poison for one that would change too much."""
        head, rest = self.head_of(data)
        member = self.members[name]
        spent, largest = self.spent[member.number].clone(), torch.zeros_like(self.first)
        for sent in wire.pieces(rest, self.layout.size):
            spent += self.sums(sent)
            counts = torch.searchsorted(sent.index, self.edges).diff()
            peaks = torch.segment_reduce(sent.value.abs(), "max", lengths=counts, initial=0.0)
            largest = torch.maximum(largest, peaks.double())
        bounds, steps = self.bounds, member.steps + head["steps"]
        scale = torch.exp(torch.as_tensor((self.decay + head["decay"]) * bounds.decays, dtype=torch.float64))
        reach = bounds.rate * max(self.config.gain, 1.0) * steps * bounds.multipliers * scale
        for got, allowed, what in (
            (spent, self.first + SLACK * reach * self.sizes, "all its pushes move {} by {:.3g}"),
            (largest, 2 * self.largest + PEAK * reach, "its push moves a weight of {} by {:.3g}"),
        ):
            over = (got > allowed).nonzero().flatten().tolist()
            if over:
                moved = what.format(list(self.layout.places)[over[0]], float(got[over[0]]))
                raise Poison(f"{moved}, and {steps} steps allow {float(allowed[over[0]]):.3g}")

    def sums(self, sent: Sparse) -> Tensor:
        """Return the sum of the sizes of the sent numbers, by place."""
        total = torch.cat([torch.zeros(1, dtype=torch.float64), sent.value.abs().cumsum(0, dtype=torch.float64)])
        return total[torch.searchsorted(sent.index, self.edges)].diff()

    def head_of(self, data: bytes | bytearray) -> tuple[dict[str, Any], memoryview]:
        """Return a push's header and the bytes of its numbers."""
        head, rest = split(data)
        for key, most in (("steps", self.config.every), ("tokens", 2**53)):
            if strict.held(head.get(key), strict.Count, f"a push's {key}") > most:
                raise ValueError(f"a push's {key} is {strict.short(head[key])}; the server allows at most {most}")
        decay, most = head.get("decay"), self.bounds.rate * max(self.config.gain, 1.0) * head["steps"] * (1 + 1e-6)
        if not strict.is_number(decay) or not 0 <= float(decay) <= most:  # type: ignore[arg-type]
            raise ValueError(f"a push's decay is {strict.short(decay)}; it must be a number from 0 to {most:.6g}")
        for key, value in (("all", head.get("all")), ("masters", head.get("masters", False))):
            if type(value) is not bool:
                raise ValueError(f"a push's {key} is {strict.short(value)}; it must be true or false")
        if self.bias is not None:
            loads = head.get("loads")
            ok = isinstance(loads, list) and len(loads) == len(self.bias) and all(
                isinstance(row, list) and len(row) == self.bias.shape[1] and all(map(strict.is_whole, row))
                and all(0 <= value < 2**53 for value in row) for row in loads
            )  # fmt: skip
            if not ok:
                raise ValueError(f"a push's loads do not fit {len(self.bias)} routers")
        return head, rest

    def push(self, name: str, seq: int, data: bytes | bytearray) -> None:
        """Count a push that `answer` did not know and `read` accepted; answer it as soon as the rule can."""
        member = self.members[name]
        assert member.here and seq == member.seq + 1 and not member.waits, "answer was not asked"
        head, rest = self.head_of(data)
        self.came += not member.came
        member.seq, member.came, member.all = seq, True, head["all"]
        member.waits = hashlib.sha256(data).hexdigest()
        member.steps += head["steps"]
        many = 0
        for sent in wire.pieces(rest, self.layout.size):
            self.rule.take(member.number, sent)
            self.spent[member.number] += self.sums(sent)
            many += len(sent.index)
        if not member.all or many:
            self.pushes += 1
        self.steps += head["steps"]
        self.tokens += head["tokens"]
        self.decay += float(head["decay"])
        self.masters = head.get("masters", False)
        if self.bias is not None and head["steps"]:
            self.loads[member.number] = torch.tensor(head["loads"], dtype=torch.int64)
            rate = self.bounds.bias_rate * head["steps"] / self.here
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
            member.answers.append(Answer(member.seq, member.waits, data, self.pushes))
            member.waits, member.seen = "", self.pushes
            if len(member.answers) > KEPT:
                member.answers.popleft()
            self.trim()

    def trim(self) -> None:
        """Drop the oldest answers while all of them together are too long, first those of islands that are gone."""
        members = self.members.values()
        while sum(len(a.data) for m in members for a in m.answers) > ANSWERS * self.layout.size:
            spare = [m for m in members if len(m.answers) > m.here]
            if not spare:
                return
            min(spare, key=lambda m: (m.here, m.answers[0].at, m.number)).answers.popleft()

    # ---- figures

    @property
    def here(self) -> int:
        return max(sum(member.here for member in self.members.values()), 1)

    @property
    def done(self) -> bool:
        """Say whether all `islands.count` islands have pushed and left."""
        return 0 < self.config.count <= self.came and not any(member.here for member in self.members.values())

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
                **{key: getattr(m, key) for key in OWN},
                "answers": [[a.seq, a.asked, a.at] for a in m.answers],
            }
            for answer in m.answers:
                tensors[f"answer.{m.number}.{answer.seq}"] = torch.frombuffer(answer.data, dtype=torch.uint8)
        tensors |= {f"loads.{number}": load for number, load in self.loads.items()}
        tensors |= {f"spent.{number}": spent for number, spent in self.spent.items()}
        if self.bias is not None:
            tensors["bias"] = self.bias
        facts = {key: getattr(self, key) for key in TOTALS}
        return tensors, facts | {"members": members, "layout": self.layout.digest, "rule": self.config.rule}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        if facts["layout"] != self.layout.digest:
            raise ValueError("the server's folder holds another model; start the server with the config that made it")
        if facts["rule"] != self.config.rule:
            raise ValueError(
                f"the server's folder was made with islands.rule={facts['rule']}, and now islands.rule="
                f"{self.config.rule}; set it back, or choose another output"
            )
        vars(self).update((key, facts[key]) for key in TOTALS if key in facts)
        self.rule.restore({name[5:]: tensor for name, tensor in tensors.items() if name.startswith("rule.")})
        self.loads = {int(name[6:]): tensor for name, tensor in tensors.items() if name.startswith("loads.")}
        self.spent = {int(name[6:]): tensor for name, tensor in tensors.items() if name.startswith("spent.")}
        if self.bias is not None:
            self.bias = tensors["bias"]
        self.members = {}
        for name, m in facts["members"].items():
            kept = [
                Answer(seq, asked, bytearray(tensors[f"answer.{m['number']}.{seq}"].numpy()), at)
                for seq, asked, at in m["answers"]
            ]
            self.members[name] = Member(**{key: m[key] for key in OWN}, answers=deque(kept))


# ---- a message is a header and numbers


def join(head: Mapping[str, Any], *numbers: bytes | memoryview) -> bytearray:
    text = json.dumps(head).encode()
    return bytearray().join([len(text).to_bytes(4, "little"), text, *numbers])


def split(data: bytes | bytearray) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(data)
    length = int.from_bytes(view[:4], "little")
    if len(view) < 4 + length:
        raise ValueError(f"a message of {len(view)} bytes says that its header has {length}")
    head = strict.parse(bytes(view[4 : 4 + length]), "a message's header")
    if not isinstance(head, dict):
        raise ValueError("a message's header must be a JSON object")
    return head, view[4 + length :]
