"""A virtual clock: the schedule that a pipeline would have if its kernels took the times we say.

Ranks, messages and gradients are real; only time is counted instead of measured. Each rank has a
clock. A message carries the time at which its sender had it; a kernel starts at the later of the
rank's own time and the arrival of the newest message. So the timeline does not depend on the
machine. Without a clock, `kernel`, `stamp` and `read` do nothing.
"""

import contextlib
import struct
from collections.abc import Iterator

_running: "Clock | None" = None


class Clock:
    """The time of this rank, and the kernels it ran: (rank, kind, microbatch, part, start, end)."""

    def __init__(self, rank: int, cost: dict[str, float], message: float = 0.0):
        self.rank, self.cost, self.message = rank, cost, message
        self.now = self.arrived = 0.0
        self.kernels: list[tuple] = []


@contextlib.contextmanager
def virtual_clock(rank: int, cost: dict[str, float], message: float = 0.0) -> Iterator[Clock]:
    """Count the time of what runs in this block: a cost by kind ("F", "B", …), one per message."""
    global _running
    _running = Clock(rank, cost, message)
    try:
        yield _running
    finally:
        _running = None


def running() -> bool:
    """Whether messages carry a time."""
    return _running is not None


def kernel(kind: str, microbatch: int, part: int = 0) -> None:
    """A kernel starts now, or when its input has arrived, and takes the time of its kind."""
    if _running is not None:
        c = _running
        start = max(c.now, c.arrived)
        c.now = start + c.cost[kind]
        c.kernels.append((c.rank, kind, microbatch, part, start, c.now))


def stamp() -> int:
    """The rank's time as 64 bits that travel as a whole number; 0 without a clock."""
    return struct.unpack("<q", struct.pack("<d", _running.now))[0] if _running else 0


def read(word: int) -> None:
    """A message with this stamp has come: what is computed next starts no earlier."""
    if _running is not None:
        sent = struct.unpack("<d", struct.pack("<q", word))[0]
        _running.arrived = max(_running.arrived, sent + _running.message)
