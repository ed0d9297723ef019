"""The clocks of several hosts: what to add to a rank's times to have them in rank 0's.

Ranks of one host share its monotonic clock. Between hosts the ranks exchange messages, as NTP does
(RFC 5905): the quickest round trip bounds the error by half its length.
"""

import platform
import time

import torch
import torch.distributed as dist

from ..devices import device

ROUNDS = 16


def offset(group: dist.ProcessGroup | None = None) -> int:
    """Nanoseconds to add to this rank's time.monotonic_ns() for that of the group's first rank.

    Every rank of the group calls it. 0 on the first rank's host.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    hosts: list = [None] * len(ranks)
    dist.all_gather_object(hosts, _host(), group=group)
    first, me = ranks[0], ranks.index(dist.get_rank())
    found = {hosts[0]: 0}
    for rank, host in zip(ranks, hosts, strict=True):
        if host in found:
            continue
        found[host] = 0
        if ranks[me] == first:
            for _ in range(ROUNDS):
                _receive(rank, group)
                _send(time.monotonic_ns(), rank, group)
        elif ranks[me] == rank:
            found[host] = min(_round_trip(first, group) for _ in range(ROUNDS))[1]
        told = [found[host]]
        dist.broadcast_object_list(told, src=rank, group=group)
        found[host] = told[0]
    return found[hosts[me]]


def _round_trip(first: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(nanoseconds it took, offset of the first rank's clock against ours)."""
    start = time.monotonic_ns()
    _send(start, first, group)
    theirs = _receive(first, group)
    end = time.monotonic_ns()
    return end - start, theirs - (start + end) // 2


def _send(value: int, to: int, group: dist.ProcessGroup | None) -> None:
    dist.send(torch.tensor([value], dtype=torch.int64).to(device()), to, group=group)


def _receive(source: int, group: dist.ProcessGroup | None) -> int:
    value = torch.zeros(1, dtype=torch.int64).to(device())
    dist.recv(value, source, group=group)
    return int(value.item())


def _host() -> str:
    """What tells hosts, and containers with a clock of their own, apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{platform.node()} {file.read().strip()}"
    except OSError:
        return platform.node()
