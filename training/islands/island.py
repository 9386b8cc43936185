"""Exchange with the server after every H steps: send what the island learned, and continue from the answer.

The optimiser's state holds two more tensors for each parameter, divided and saved like the moments: `has` is the
parameter as the server believes this island has it, and `unsent` holds what it learned and did not send. The
weights are a scale times these tensors. Weight decay is one number that the server and all islands keep, because as
part of the deltas it would move every weight of every expert. A step of the optimiser therefore decays nothing; an
exchange does.

    start = scale * (has - unsent)    ... H steps ...    delta = (start - end) / scale

Each rank chooses among its own numbers and names their places in the whole model, so only the sent numbers are
gathered.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.data.mixture import DataConfig
from training.islands import center
from training.islands.center import Again
from training.islands.link import frames, wire
from training.islands.link.client import Link
from training.islands.link.frames import Halted
from training.islands.link.server import BLOCK
from training.islands.places import NUMBERS, Layout, Place, inside, share_of, whole
from training.islands.plan import agreed
from training.islands.rules.dgs import Push
from training.islands.sparse import Sparse
from training.model.moe import MoE
from training.optim.slots import Slot, copy_where_apart
from training.parallel.collectives import all_reduce, box, broadcast, broadcast_bytes, gather, local
from training.run.build import Run
from upcycle import plugin

LEAST = 0.1  # part of the mean share that an expert without tokens may send
FED = 0.5  # part of the mean tokens; an expert with fewer grows older
OTHER = 7919  # distance between the data seeds of two islands


@dataclass
class Part:
    """Hold this rank's part of a parameter."""

    slot: Slot
    place: Place
    box: list[tuple[int, int]]
    owns: bool  # this rank sends it; other ranks may hold a copy
    rate: float  # weight decay at a learning rate of 1

    @property
    def has(self) -> Tensor:
        return local(self.slot.state["has"]).view(-1)

    @property
    def unsent(self) -> Tensor:
        return local(self.slot.state["unsent"]).view(-1)

    @property
    def rows(self) -> int:
        return local(self.slot.master).shape[0] if self.place.experts else 1


class Island:
    def __init__(self, run: Run) -> None:
        assert run.optimizer is not None
        self.run, self.config = run, run.config.islands
        self.rule = plugin.load("training.islands.rules", self.config.rule)
        self.keeps = self.rule.KEEPS and self.config.keep
        self.seq, self.islands, self.number = 0, 1, 0
        self.joined = False  # it has taken a model from the server
        self.decay = self.learned = 0.0  # sums of learning rates: up to the last exchange, and since then
        self.steps = 0  # steps since the last exchange
        self.pending: Tensor | None = None  # a push without an answer, which a checkpoint holds
        self.problem = ""  # why it has no answer; the run saves and ends
        rates = run.optimizer.without_decay()
        slots = run.optimizer.slots
        for slot in slots:
            slot.state["has"] = torch.zeros_like(slot.master)
            slot.state["unsent"] = torch.zeros_like(slot.master)
        boxes = [(slot.name, list(slot.master.shape), box(slot.master)) for slot in slots]
        every: list[list[Any]] = gather(boxes)
        self.layout = Layout({name: shape for of_rank in every for name, shape, _ in of_rank})
        owner: dict[str, int] = {}
        for rank, of_rank in enumerate(every):
            for name, _, found in of_rank:
                owner.setdefault(f"{name} {[tuple(pair) for pair in found]}", rank)
        self.parts = [
            Part(slot, self.layout.places[name], found, owner[f"{name} {found}"] == run.mesh.rank, rates[name])
            for slot, (name, _, found) in zip(slots, boxes, strict=True)
            if local(slot.master).numel()
        ]
        blocks = {int(number): layer.ffn for number, layer in run.model.layers.items() if isinstance(layer.ffn, MoE)}
        self.here = blocks  # this rank's
        moe = run.model.moe
        self.layers = [] if moe is None else list(moe.layers)
        self.experts = 0 if moe is None else moe.experts
        self.moves_bias = run.config.balance.bias_rate > 0
        self.ages = torch.zeros(len(self.layers), self.experts, dtype=torch.int64)
        self.link: Link | None = None
        self.name = self.config.name or Path(run.config.output).resolve().name

    # ---- the part of a checkpoint that no parameter holds

    def state_dict(self) -> dict[str, Any]:
        names = ("seq", "islands", "number", "decay", "learned", "steps", "joined", "name")
        pending = {} if self.pending is None else {"pending": self.pending}
        return {**{name: getattr(self, name) for name in names}, "ages": self.ages, **pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seq, self.islands, self.number = state["seq"], state["islands"], state["number"]
        self.decay, self.learned, self.steps = state["decay"], state["learned"], state["steps"]
        self.joined, self.pending = state["joined"], state.get("pending")
        self.ages.copy_(state["ages"])
        if state["name"] != self.name:  # the server does not know the new name
            self.seq, self.joined, self.pending = 0, False, None

    # ---- joining

    def join(self) -> None:
        """Join the server, or join it again. All ranks call this together."""
        told: dict[str, Any] = {}
        problem = ""
        if self.run.leads:
            who = {"name": self.name, "layout": self.layout.digest, "rule": self.config.rule, "has": self.joined}
            who["agreed"] = agreed(self.run.whole)
            try:
                self.link = Link(self.config, frames.secret_of(self.config.secret), who, self.seq)
                told = self.link.introduce(self.longest)
            except (ValueError, OSError) as error:
                problem = str(error)
        told, problem = broadcast([told, problem])
        if problem:
            raise ValueError(problem)
        if told["goes_on"]:
            self.settle()
            return
        if self.joined and self.run.leads:
            warnings.warn(
                f"the server does not remember the state of island {self.name} after exchange {self.seq}; the island "
                "takes the whole model and loses what it learned since then",
                stacklevel=2,
            )
        self.take(told)

    @torch.no_grad()
    def take(self, told: dict[str, Any]) -> None:
        """Take the whole model from the server."""
        self.number, self.islands, self.seq, self.decay = (told[key] for key in ("number", "islands", "seq", "decay"))
        self.learned, self.steps, self.pending = 0.0, 0, None
        self.run.balance.load.since_NE.zero_()
        for part in self.parts:
            part.unsent.zero_()
        # most islands join at the start and have the server's weights already
        alike = self.run.mesh.world == 1 and self.decay == 0 and self.digest() == told["model"]
        if alike:
            for part in self.parts:
                part.has.copy_(local(part.slot.master).view(-1))
        else:
            self.stream()
        self.joined = True
        self.write()
        self.set_bias(told.get("bias"))

    def digest(self) -> str:
        sha = hashlib.sha256()
        for part in sorted(self.parts, key=lambda part: part.place.first):
            sha.update(local(part.slot.master).detach().float().cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()

    def stream(self) -> None:
        for at in range(0, self.layout.size, BLOCK // 4):
            data = self.ask(frames.TAKE, (4 * at).to_bytes(8, "little"))
            value = torch.frombuffer(bytearray(data), dtype=torch.float32)
            if len(value) != min(BLOCK // 4, self.layout.size - at):
                raise ValueError(
                    f"the server sent {len(value)} numbers of the model, and {min(BLOCK // 4, self.layout.size - at)} "
                    "were asked for; use the same version of the program on both sides"
                )
            index = torch.arange(at, at + len(value))
            for part, where, which in self.own(index):
                part.has[where] = value[which].to(part.has)

    # ---- the loop

    def order(self, data: DataConfig) -> DataConfig:
        """Return the data config with this island's own order of the samples."""
        return replace(data, seed=data.seed + OTHER * self.number)

    def settle(self) -> None:
        """Finish the exchange in which an earlier process of this run was stopped."""
        if self.pending is None:
            return
        data = self.pending.numpy().tobytes() if self.run.leads else b""
        self.finish(data)
        if self.problem:
            raise ValueError(self.problem)
        if self.link is not None and self.run.state.step >= self.run.config.steps:
            self.link.leave()

    def after(self, step: int, lr: float, asked: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Exchange if an exchange is due, and return figures for the log. All ranks call this after every step.

        `asked`: says whether to stop. The push then stays pending, as after the end of patience."""
        self.learned += lr
        self.steps += 1
        last = step == self.run.config.steps
        if self.steps < self.config.every and not last:
            return {}
        self.run.phases.tell("exchange")
        with self.run.phases("exchange"):
            found = self.exchange(last, asked)
        if last and self.link is not None and self.pending is None:
            self.link.leave()
        self.run.phases.tell("")
        return found

    @torch.no_grad()
    def exchange(self, all: bool = False, asked: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Send one push and apply its answer. `all`: both sides send everything."""
        began = time.perf_counter()
        loads = self.loads()
        gain = self.config.gain or self.rule.gain(self.islands)
        shares = self.shares(loads)
        writer, count = wire.Writer(self.layout.size), 0
        for last, parts in self.blocks(all):
            numbers = self.merged(self.pushed(parts, shares, gain, all))
            count += len(numbers.index)
            if self.run.leads:
                writer.add(numbers, last)
            del numbers  # the numbers of a whole model would fill most of the host's memory
        tokens = self.steps * self.run.config.batch * self.run.config.data.sequence
        head: dict[str, Any] = {"steps": self.steps, "tokens": tokens, "decay": self.learned * gain, "all": all}
        head["masters"] = True  # older islands pulled copies together before their last push
        if self.moves_bias:
            head["loads"] = loads.tolist()
        data = center.join(head, *writer.parts()) if self.run.leads else b""
        del writer  # it is as large as the push
        return self.finish(data, began, count, asked)

    @torch.no_grad()
    def finish(
        self,
        data: bytes | bytearray,
        began: float | None = None,
        count: int = 0,
        asked: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Send a push, apply its answer, and return figures; without an answer keep the push in `pending`."""
        size, began = self.layout.size, began or time.perf_counter()
        self.problem = ""
        try:
            answer = self.ask(frames.PUSH, data, self.seq + 1, asked)
        except Again as error:
            return self.restart(str(error))
        except (Halted, ValueError) as error:
            self.problem = str(error)  # nothing after a signal, which the loop sees itself
            shared = broadcast_bytes(bytes(data), 0) if dist.is_initialized() else data
            self.pending = torch.frombuffer(bytearray(shared), dtype=torch.uint8)
            return {}
        del data
        self.pending = None
        told, rest = center.split(answer)
        self.seq += 1
        if self.link is not None:
            self.link.seq = self.seq
        self.islands, self.decay = told["islands"], told["decay"]
        self.learned, self.steps = 0.0, 0
        self.run.balance.load.since_NE.zero_()
        received = 0
        for got in wire.pieces(rest, size):
            received += len(got.index)
            for part, where, which in self.own(got.index):
                part.has[where] += got.value[which].to(part.has)
        self.write()
        self.set_bias(told.get("bias"))
        figures = {
            "islands": self.islands,
            "stale": told["stale"],
            "steps": told["steps"],
            "sent": count / size,
            "received": received / size,
            "seconds": time.perf_counter() - began,
            "age": float(self.ages.max()) if self.ages.numel() else 0.0,
            **self.norms(),
        }
        if self.link is not None:
            figures |= {"bytes_up": self.link.bytes_up, "bytes_down": self.link.bytes_down}
        return {f"islands/{name}": float(value) for name, value in figures.items()}

    def restart(self, reason: str) -> dict[str, float]:
        """Take the whole model after the server refused to continue from this island's state."""
        told: dict[str, Any] = {}
        if self.link is not None:
            warnings.warn(
                f"{reason}; island {self.name} takes the whole model and loses what it learned since its last exchange",
                stacklevel=2,
            )
            told = self.link.introduce(self.longest, empty=True)
        self.take(broadcast(told))
        return {}

    # ---- parts of an exchange

    def blocks(self, all: bool) -> Iterator[tuple[int, list[Part]]]:
        """Yield blocks of this rank's parts, in order of place, that send about NUMBERS numbers; and where each ends.

        The ends are the same on all ranks."""
        parts = {part.place.name: part for part in self.parts}
        share = self.rule.SHARE or self.config.share
        block: list[Part] = []
        told = 0.0
        for place in self.layout.places.values():
            more = place.size * (1.0 if all or place.dense else share)
            if told and told + more > NUMBERS:
                yield place.first, block
                block, told = [], 0.0
            told += more
            block += [parts[place.name]] if place.name in parts else []
        yield self.layout.size, block

    def pushed(self, parts: Sequence[Part], shares: Tensor, gain: float, all: bool) -> list[Sparse]:
        """Return what this rank sends of these parts."""
        sent: list[Sparse] = []
        for part in parts:
            scale = self.scale(part)
            start = part.has - part.unsent if self.keeps else part.has
            delta = start - local(part.slot.master).view(-1) / scale
            momentum = self.config.momentum if self.config.rule == "dgs" and not all else 0.0
            push = Push(part.unsent.view(part.rows, -1), momentum, gain=gain)
            found = push.push(delta.view(part.rows, -1), self.counts(part, shares, all))
            if part.owns:
                index = whole(found.index, part.box, part.place.shape) + part.place.first
                sent.append(Sparse(index.cpu(), found.value.float().cpu()))
        return sent

    @property
    def longest(self) -> int:
        """Return the bytes of the longest answer."""
        head = center.HEAD + 32 * len(self.layers) * self.experts
        return max(head + wire.most(self.layout.size), 2 * BLOCK)

    def scale(self, part: Part) -> float:
        return math.exp(-self.decay * part.rate)

    def write(self) -> None:
        """Write the weights that the next step starts from."""
        for part in self.parts:
            start = part.has - part.unsent if self.keeps else part.has
            master = local(part.slot.master)
            master.copy_((self.scale(part) * start).view_as(master))
        copy_where_apart([local(p.slot.parameter) for p in self.parts], [local(p.slot.master) for p in self.parts])

    def own(self, index: Tensor) -> list[tuple[Part, Tensor, Tensor]]:
        """Find ascending places of the whole model in this rank: (part, places in the part, positions in `index`)."""
        found: list[tuple[Part, Tensor, Tensor]] = []
        if not len(index):
            return found
        lowest, highest = int(index[0]), int(index[-1])
        for part in self.parts:
            if part.place.last <= lowest or part.place.first > highest:
                continue
            edges = torch.tensor([part.place.first, part.place.last])
            first, last = torch.searchsorted(index, edges).tolist()
            if first == last:
                continue
            there, where = inside(index[first:last] - part.place.first, part.box, part.place.shape)
            found.append((part, where.to(part.has.device), first + there.nonzero().flatten()))
        return found

    def loads(self) -> Tensor:
        """Return the tokens of all ranks since the last exchange, by (layer, expert), in host memory."""
        run = self.run
        table = torch.zeros(len(self.layers), self.experts, dtype=torch.int64, device=run.device)
        if self.here:
            mine = all_reduce(run.balance.load.since_NE, run.mesh.tokens_group())
            table[[self.layers.index(number) for number in self.here]] = mine
        return all_reduce(table, run.mesh.group("pp")).cpu()

    def shares(self, loads: Tensor) -> Tensor:
        """Return the share of each expert's numbers to send, by (layer, expert).

        It grows with the expert's tokens, and is 1 for an expert that has waited `islands.age` exchanges."""
        mean = loads.double().mean(1, keepdim=True).clamp(min=1)
        of_mean = loads / mean
        relative = of_mean.clamp(min=LEAST)
        shares = self.config.share * relative / relative.mean(1, keepdim=True)
        self.ages = torch.where(of_mean >= FED, 0, self.ages + 1)
        if self.config.age:
            old = self.ages > self.config.age
            shares, self.ages = shares.masked_fill(old, 1.0), self.ages.masked_fill(old, 0)
        return shares

    def counts(self, part: Part, shares: Tensor, all: bool) -> Sequence[int]:
        """Return how many numbers of each segment of a part are sent."""
        width = part.has.numel() // part.rows
        share = self.rule.SHARE or self.config.share
        if all or part.place.dense or share == 1:
            return [width] * part.rows
        words = part.place.name.split(".")
        if not part.place.experts or words[0] != "layers":
            return [share_of(width, share)] * part.rows
        row, first = self.layers.index(int(words[1])), part.box[0][0]
        return [share_of(width, min(float(shares[row, first + i]), 1.0)) for i in range(part.rows)]

    def merged(self, sent: list[Sparse]) -> Sparse:
        """Gather on rank 0 what all ranks send of a block, in order of place."""
        index = torch.cat([each.index for each in sent]) if sent else torch.zeros(0, dtype=torch.int64)
        value = torch.cat([each.value for each in sent]) if sent else torch.zeros(0)
        sent.clear()
        if self.run.control is not None:
            counts = gather(len(index))
            most = max(counts)
            tables = []
            for own in (index, value):
                padded = torch.cat([own, own.new_zeros(most - len(own))])
                there = [torch.empty_like(padded) for _ in counts] if self.run.leads else None
                dist.gather(padded, there, 0, group=self.run.control)
                tables.append(torch.cat([t[:n] for t, n in zip(there, counts, strict=True)]) if there else own)
            index, value = tables
        if not bool(value.isfinite().all()):
            raise ValueError(
                "this island's weights are not finite; start it in a new output with a lower schedule.peak"
            )
        if self.run.control is None:  # one rank's parts are in order already
            return Sparse(index, value)
        order = index.argsort()
        return Sparse(index[order], value[order])

    def ask(
        self, kind: int, data: bytes | bytearray = b"", seq: int = 0, asked: Callable[[], bool] = lambda: False
    ) -> bytes:
        """Ask the server from rank 0; return the answer on all ranks, or raise rank 0's error on all."""
        answer, again, problem, halted = b"", "", "", False
        if self.link is not None:
            self.link.asked = asked
            try:
                answer = self.link.ask(kind, data, seq)
            except Again as error:
                again = str(error)
            except ValueError as error:
                problem = str(error)
            except Halted:
                halted = True
            self.link.asked = lambda: False
        again, problem, halted = broadcast([again, problem, halted])
        if halted:
            raise Halted
        if again:
            raise Again(again)
        if problem:
            raise ValueError(problem)
        return broadcast_bytes(answer, 0) if dist.is_initialized() else answer

    def set_bias(self, bias: list[list[float]] | None) -> None:
        for number, block in self.here.items():
            if bias is not None and block.router.bias is not None:
                block.router.bias.copy_(torch.tensor(bias[self.layers.index(number)]))

    def norms(self) -> dict[str, float]:
        """Return the norm of the unsent numbers as a share of the weights' norm."""
        squares = [
            [float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 for x in (part.unsent, part.has)]
            for part in self.parts
            if part.owns
        ]
        both = torch.tensor(gather([sum(pair) for pair in zip(*squares, strict=True)] if squares else [0.0, 0.0])).sum(
            0
        )
        return {"unsent": math.sqrt(float(both[0]) / max(float(both[1]), 1e-30))}

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
