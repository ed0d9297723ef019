"""One timeline of all ranks: what `with sb.trace(…) as t` and `sb.run(…).trace` give."""

import gzip
import json
import os
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from . import events
from .tables import Table, comm_table, module_table
from .timeline import RankTrace, Slice


class Trace:
    """The events of one or more ranks. Displays inline in a notebook."""

    def __init__(self, ranks: list[RankTrace] | None = None, title: str = ""):
        self.ranks = ranks
        self.title = title
        self.foreign: dict | None = None
        self._chrome: tuple[Any, dict] | None = None

    @classmethod
    def simulated(
        cls,
        timeline: Iterable[tuple],
        title: str = "",
        unit_ms: float = 1.0,
        label: str = "simulated",
    ) -> "Trace":
        """A computed timeline, drawn like a measured one and labelled as such.

        timeline holds (rank, name, start, end), start and end in units of `unit_ms` milliseconds
        from any origin, e.g. of a pipeline schedule. The label is "simulated", or "virtual" where
        real ranks counted the time.
        """
        if label not in ("simulated", "virtual"):
            raise ValueError(f'the label is {label!r}: expected "simulated" or "virtual"')
        ranks: dict[int, RankTrace] = {}
        for rank, name, start, end in timeline:
            if not 0 <= start <= end:
                raise ValueError(
                    f"{name!r} on rank {rank} goes from {start} to {end}: need 0 <= start <= end"
                )
            one = ranks.setdefault(rank, RankTrace(rank, kind=label))
            span = [round(t * unit_ms * 1e6) for t in (start, end)]
            args = {"time": label, "start": start, "end": end}
            one.drawn.append(Slice(label, str(name), *span, label, args))
        return cls([ranks[r] for r in sorted(ranks)], title=title or label)

    def chrome(self) -> dict:
        """The Chrome trace: a dict that json can write and chrome://tracing and Perfetto read."""
        if self.foreign is not None:
            return self.foreign
        if self._chrome is None or self._chrome[0] is not self.ranks:
            ranks = self._finished()
            self._chrome = (self.ranks, events.chrome(ranks, flows(ranks)))
        return self._chrome[1]

    def save(self, path: str | os.PathLike) -> None:
        """Write the Chrome trace to `path`; gzipped where the name ends in .gz."""
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"t.save() takes a path, not {path!r}")
        data = json.dumps(self.chrome(), separators=(",", ":"), allow_nan=False).encode()
        opener = gzip.open if str(path).endswith(".gz") else open
        with opener(path, "wb") as file:
            file.write(data)

    def table(self) -> Table:
        """Module by module: type, calls, shapes, parameters, time of the first call, FLOPs.

        One row a module of the model (of each rank); of shapes and time those of the first call.
        """
        return module_table(self._finished())

    def comm(self) -> Table:
        """Per rank, collective and group: calls, bytes (of the full tensor, as `Call`), time."""
        return comm_table(self._finished())

    def diff(self, expected: Any, *, modules: bool = False, order: str = "rank") -> Any:
        """What differs from the expected trace (a Trace, a Result or a saved file's path), first
        the call that no other difference precedes; see `shardbook.tracing.diff.diff`.
        """
        from .diff import diff

        return diff(self, expected, modules=modules, order=order)

    def _finished(self) -> list[RankTrace]:
        if self.foreign is not None:
            raise ValueError("this trace was read from a file: it has slices only, no tables")
        if self.ranks is None:
            raise ValueError("the trace is still being recorded: read it after the with block")
        return self.ranks

    def __repr__(self) -> str:
        if self.ranks is None and self.foreign is None:
            return "<Trace, still recording>"
        listed = self.chrome()["traceEvents"]
        slices = sum(e["ph"] == "X" for e in listed)
        pids = len({e["pid"] for e in listed if e["ph"] == "X"})
        kind = self.chrome().get("otherData", {}).get("time")
        what = "rank" if self.foreign is None else "process"
        what += {"rank": "s", "process": "es"}[what] if pids != 1 else ""
        return f"<Trace: {slices} slices of {pids} {what}" + (f", {kind} time>" if kind else ">")

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        bundle = {"text/plain": repr(self)}
        if self.ranks is not None or self.foreign is not None:
            from .view import html

            bundle["text/html"] = html(self.chrome(), title=self.title)
        return bundle


def merge(traces: Iterable[RankTrace | Trace], title: str = "") -> Trace:
    """The traces of several ranks as one, by rank. Ranks of one host share its clock."""
    ranks = []
    for trace in traces:
        ranks += [trace] if isinstance(trace, RankTrace) else trace._finished()
    return Trace(sorted(ranks, key=lambda r: r.rank), title)


def flows(ranks: list[RankTrace]) -> list[tuple]:
    """Each send with the recv that took it: first sent, first received, per pair, group and tag."""
    waiting: dict[tuple, deque] = defaultdict(deque)
    found = []
    for at, rank in enumerate(ranks):
        for i, call in enumerate(rank.calls):
            if call.op == "send":
                waiting[_channel(call, rank.rank, call.peer)].append((at, i))
    for at, rank in enumerate(ranks):
        for i, call in enumerate(rank.calls):
            if call.op == "recv" and call.peer is not None:
                sent = waiting[_channel(call, call.peer, rank.rank)]
                if sent:
                    found.append((sent.popleft(), (at, i)))
    return found


def _channel(call: Any, source: int, destination: int) -> tuple:
    return (source, destination, call.group, call.tag)
