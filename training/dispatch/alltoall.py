"""Dispatch by all-to-all, to ranks with other experts (ep) and to ranks with other slices of the experts (etp).

    out:   sort by expert -> all-to-all over ep -> gather over etp -> sort by local expert
    home:  unsort -> sum over etp -> all-to-all over ep -> sum of a token's rows

Each step home is the transpose of a step out, with the same plan. It runs on gloo and on NCCL. The host waits once a
dispatch for the number of rows that go to each rank. With `room`, each rank sends exactly `room` rows to every expert,
filled or not, and the host does not wait.

R rows that leave, N rows that arrive, E local experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.dispatch import Capabilities, Dispatched, common
from training.kernels.permute import gather, places, spread

Group = dist.ProcessGroup
CAPABILITIES = Capabilities(each_choice=True, wait=0.112)


def available() -> str:
    return ""


def dispatcher(experts: int, ep_group: Group | None, etp_group: Group | None = None) -> AllToAll:
    return AllToAll(experts, ep_group, etp_group)


@dataclass(frozen=True)
class AllToAll(common.Routed):
    can = CAPABILITIES
    experts: int  # on all ranks together; rank i of ep has the i-th part
    ep_group: Group | None
    etp_group: Group | None = None

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched:
        def first(x_TD: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Plan]:
            plan = self.plan(weight_TK, expert_TK, room)
            weight_R = common.put(weight_TK.flatten(), plan.back_R, plan.rows)
            return plan.out(x_TD), plan.there(weight_R), plan.count_E, plan

        return common.dispatch(first, x_TD, weight_TK)

    def plan(self, weight_TK: Tensor, expert_TK: Tensor, room: int | None) -> Plan:
        ep, etp = size(self.ep_group), size(self.etp_group)
        local = self.experts // ep
        # dropped choices are sorted behind the last expert, and rows there are not sent
        chosen_TK = expert_TK.where(weight_TK != 0, self.experts)
        back_R, count_E = places(chosen_TK, self.experts + 1)
        send_PE = count_E[:-1].view(ep, local)
        arrive_PE = exchange(send_PE, [1] * ep, [1] * ep, self.ep_group)
        arrive_QPE = exchange(arrive_PE.expand(etp, ep, local), [1] * etp, [1] * etp, self.etp_group)
        expert_N = torch.arange(local, device=expert_TK.device).repeat(etp * ep)
        if room is None:
            # the only place where the host waits for the device
            sizes = torch.cat([send_PE.sum(1), arrive_PE.sum(1), arrive_QPE.sum((1, 2))]).tolist()
            send, arrive, gathered = sizes[:ep], sizes[ep : 2 * ep], sizes[2 * ep :]
            expert_N = expert_N.repeat_interleave(arrive_QPE.flatten(), output_size=sum(gathered))
        else:  # every expert has `room` places among the rows, filled or not
            send, arrive, gathered = [local * room] * ep, [local * room] * ep, [ep * local * room] * etp
            wider_E = torch.arange(self.experts + 1, device=count_E.device) * room - (count_E.cumsum(0) - count_E)
            back_R = back_R + wider_E[chosen_TK.flatten()]
            taken_NC = torch.arange(room, device=count_E.device) < arrive_QPE.view(-1, 1)
            expert_N = expert_N[:, None].where(taken_NC, local).flatten()
        place_N, arrived_E = places(expert_N[:, None], local + 1)
        k, count_E = expert_TK.shape[1], arrived_E[:-1].contiguous()
        return Plan(k, back_R, send, arrive, gathered, place_N, count_E, self.ep_group, self.etp_group)


@dataclass(frozen=True)
class Plan:
    """The place of each row on the way out and on the way home, in forward and in backward."""

    k: int
    back_R: Tensor  # choice -> row among those that leave; a dropped choice's row is beyond the last
    send: list[int]  # rows to each rank of ep
    arrive: list[int]  # rows from each rank of ep
    gathered: list[int]  # rows from each rank of etp
    place_N: Tensor  # row as it arrived -> row sorted by local expert
    count_E: Tensor
    ep_group: Group | None
    etp_group: Group | None

    @property
    def rows(self) -> int:
        return sum(self.send)

    def out(self, x_TD: Tensor) -> Tensor:
        return self.there(spread(x_TD, self.back_R, self.k, self.rows))

    def home(self, y_RD: Tensor, weight_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y_TD = gather(self.back(y_RD), self.back_R, self.k)
        if weight_R is None:
            return y_TD, None
        return y_TD, common.take(self.back(weight_R), self.back_R).view(-1, self.k)

    def there(self, rows_R: Tensor) -> Tensor:
        """Send rows (or their weights) sorted by expert; return the rows of this rank's experts, sorted by expert."""
        rows_N = exchange(rows_R, self.send, self.arrive, self.ep_group)
        if self.etp_group is not None:
            # gloo has no all-gather of uneven sizes, so every rank sends its rows to each rank
            peers = len(self.gathered)
            rows_N = rows_N.repeat(peers, *[1] * (rows_N.dim() - 1))
            rows_N = exchange(rows_N, [sum(self.arrive)] * peers, self.gathered, self.etp_group)
        if rows_N.dim() == 1:
            return torch.empty_like(rows_N).scatter_(0, self.place_N, rows_N)
        return spread(rows_N, self.place_N, 1)

    def back(self, rows_N: Tensor) -> Tensor:
        """Sum rows over etp, and send the sums back to the ranks that the rows came from."""
        rows_N = rows_N[self.place_N] if rows_N.dim() == 1 else gather(rows_N, self.place_N, 1)
        if self.etp_group is not None:
            # gloo has no reduce-scatter of uneven sizes, so every rank gets its rows from all ranks and adds them
            mine, peers = sum(self.arrive), len(self.gathered)
            rows_N = exchange(rows_N, self.gathered, [mine] * peers, self.etp_group)
            rows_N = rows_N.view(peers, mine, *rows_N.shape[1:]).sum(0)
        return exchange(rows_N, self.arrive, self.send, self.ep_group)


# ---- collectives that do nothing in a group of one


def size(group: Group | None) -> int:
    return 1 if group is None else group.size()


def exchange(rows: Tensor, send: Sequence[int], arrive: Sequence[int], group: Group | None) -> Tensor:
    if group is None:
        return rows
    out = rows.new_empty(sum(arrive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(arrive), list(send), group=group)
    return out
