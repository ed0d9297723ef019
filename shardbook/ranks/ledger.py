"""The ranks' calls, read from the logs that `worker` writes and held against each other.

The k-th collective of a group must be the same on all its ranks, the j-th send from one rank to
another meets the j-th receive. So it can be told which calls can never complete, and which do
complete but make no sense, without waiting for a deadline.
"""

import dataclasses
import os
import re
from collections import defaultdict

from .output import ranks_text

_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input|^<cell")


def place(file: str, line: int | str) -> str:
    """ "cell line 14" for what a notebook defines, else "file.py:14"."""
    if _CELL.search(file):
        return f"cell line {line}"
    return f"{os.path.basename(file)}:{line}"


def at(where: str) -> str:
    """ " (cell line 14)" from a call's "file:line"; "" if that is not known."""
    file, _, line = where.rpartition(":")
    return f" ({place(file, line)})" if file else ""


@dataclasses.dataclass
class Entry:
    """One call in a rank's log. `count` numbers the calls of this op, `index` what it must meet."""

    rank: int
    op: str
    count: int
    group: str
    members: tuple[int, ...]
    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    where: str
    index: int = 0

    @property
    def p2p(self) -> bool:
        return self.op in ("send", "recv")

    def name(self, world_size: int) -> str:
        if self.op == "send":
            return f"send #{self.count} to rank {self.peer}"
        if self.op == "recv":
            return f"recv #{self.count} from " + (
                f"rank {self.peer}" if self.peer >= 0 else "any rank"
            )
        group = "" if len(self.members) == world_size else f" of group {list(self.members)}"
        return f"{self.op} #{self.count}{group}"

    def size(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Rank:
    """The state of one rank, as far as its log has been read."""

    def __init__(self, rank: int, folder: str):
        self.rank, self.folder = rank, folder
        self.started = self.finished = self.returned = self.threads = False
        self.died: str | None = None
        self.calls: dict[int, Entry] = {}  # issued and not known to be done
        self.waiting: dict[int, Entry] = {}
        self.last_wait: Entry | None = None
        self._at, self._tail = 0, b""

    def read(self, ledger: "Ledger") -> bool:
        """Take in what is new in the log; True if there was anything."""
        try:
            with open(f"{self.folder}/calls-{self.rank}", "rb") as f:
                f.seek(self._at)
                new = f.read()
        except FileNotFoundError:
            return False
        self._at += len(new)
        *lines, self._tail = (self._tail + new).split(b"\n")
        for line in lines:
            kind, *fields = line.decode("utf-8", "replace").split("\t")
            if kind == "S":
                self.started = True
            elif kind == "F":
                self.finished, self.returned = True, fields[0] == "value"
            elif kind == "T":
                self.threads = True
            elif kind == "W":
                number = int(fields[0])
                if number in self.calls:
                    self.waiting[number] = self.last_wait = self.calls[number]
            elif kind == "D":
                entry = self.calls.pop(int(fields[0]), None)
                self.waiting.pop(int(fields[0]), None)
                if entry is not None:
                    ledger.done(entry)
            elif kind == "C":
                number, op, count, group, members, peer, tag, shape, dtype, nbytes, where = fields
                entry = Entry(
                    self.rank, op, int(count), group, _ints(members), int(peer), int(tag),
                    _ints(shape), dtype, int(nbytes), where,
                )  # fmt: skip
                self.calls[int(number)] = entry
                ledger.add(entry)
        return bool(new)

    @property
    def gone(self) -> bool:
        return self.finished or self.died is not None


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x)


class Ledger:
    """All ranks' calls held against each other."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.issued: dict[tuple, int] = defaultdict(int)  # collectives of (group, rank)
        self.members: dict[str, tuple[int, ...]] = {}
        self.open: dict[tuple, dict[int, Entry]] = defaultdict(dict)  # (group, index) -> by rank
        self.channel: dict[tuple, dict[str, int]] = defaultdict(lambda: {"send": 0, "recv": 0})
        self.unmet: dict[tuple, Entry] = {}  # sends and receives whose other end is not there yet
        self.to: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])  # sent to, received by
        self.any_source: set[tuple] = set()
        self.bad: list[Entry] = []

    def add(self, entry: Entry) -> None:
        if entry.p2p:
            self._add_p2p(entry)
            return
        key = (entry.group, entry.rank)
        self.members[entry.group] = entry.members
        entry.index = self.issued[key]
        self.issued[key] += 1
        met = self.open[entry.group, entry.index]
        met[entry.rank] = entry
        if not self.bad and any(difference(other, entry) for other in met.values()):
            self.bad = [entry]
        if len(met) == len(entry.members) and not self.bad:
            del self.open[entry.group, entry.index]

    def _add_p2p(self, entry: Entry) -> None:
        sends = entry.op == "send"
        target = (entry.group, entry.peer if sends else entry.rank)
        if sends:
            self.to[target][0] += 1
        elif entry.peer < 0:
            self.any_source.add(target)
            return
        key = _channel(entry)
        entry.index = self.channel[key][entry.op]
        self.channel[key][entry.op] += 1
        other = self.unmet.pop((key, entry.index), None)
        if other is None:
            self.unmet[key, entry.index] = entry
        elif not self.bad and target not in self.any_source and difference(other, entry):
            self.bad = sorted((other, entry), key=lambda e: e.op == "recv")

    def done(self, entry: Entry) -> None:
        if entry.op == "recv":
            self.to[entry.group, entry.rank][1] += 1

    def missing(self, entry: Entry) -> list[int]:
        """The ranks that have not made the call this one waits for; [] if it can complete."""
        if entry.op == "recv" and entry.peer < 0:
            sent, received = self.to[entry.group, entry.rank]
            return [] if sent > received else [r for r in entry.members if r != entry.rank]
        if entry.p2p:
            there = self.channel[_channel(entry)]["recv" if entry.op == "send" else "send"]
            if there > entry.index or (
                entry.op == "send" and (entry.group, entry.peer) in self.any_source
            ):
                return []
            return [entry.peer]
        return [r for r in entry.members if self.issued[entry.group, r] <= entry.index]

    def abandoned(self, ranks: list[Rank]) -> bool:
        """Whether a collective has been entered that a rank which has returned never entered."""
        returned = {r.rank for r in ranks if r.returned}
        return bool(returned) and any(
            returned & set(self.missing(e)) for met in self.open.values() for e in met.values()
        )

    def mismatch(self) -> str | None:
        """The first calls that meet and don't fit, in words."""
        if not self.bad:
            return None
        if len(self.bad) == 2:
            s, r = self.bad
            return (
                f"rank {s.rank} sends {s.size()} to rank {r.rank}{at(s.where)}, which receives "
                f"{r.size()}{at(r.where)}: both ends must have the same dtype and size"
            )
        first = self.bad[0]
        met = self.open[first.group, first.index]
        kind = next(k for e in met.values() if (k := difference(met[min(met)], e)))
        name = met[min(met)].name(self.world_size)
        said: dict[str, list[int]] = defaultdict(list)
        for r, e in sorted(met.items()):
            text = {
                "op": e.name(self.world_size),
                "dtype": e.dtype,
                "root": f"rank {e.peer}",
                "shape": f"{list(e.shape)}",
                "size": f"{e.nbytes} bytes in all",
            }[kind]
            said[text + at(e.where)].append(r)
        parts = ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in said.items())
        if kind == "op":
            return (
                f"the ranks disagree on collective {first.index + 1} of their group: {parts}. "
                "All ranks of a group must make the same calls in the same order"
            )
        what = {"dtype": "dtypes", "root": "roots", "shape": "shapes", "size": "sizes"}[kind]
        return f"{name} was called with different {what}: {parts}"

    def skipped(self) -> str | None:
        """After all ranks have returned: a collective that some of them never entered."""
        for (_, index), met in sorted(self.open.items(), key=lambda item: item[0][1]):
            entry = met[min(met)]
            missing = [r for r in entry.members if r not in met]
            name = entry.name(self.world_size)
            if missing and index == entry.index:
                return f"{ranks_text(missing)} never entered {name}{at(entry.where)}"
        return None

    def unreceived(self) -> str | None:
        """After all ranks have returned: a send that met no receive. Gloo lets small ones go."""
        for entry in self.unmet.values():
            if entry.op == "send" and (entry.group, entry.peer) not in self.any_source:
                name = entry.name(self.world_size)
                return (
                    f"rank {entry.rank}'s {name}{at(entry.where)} was never received: "
                    f"rank {entry.peer} returned without a recv for it"
                )
        return None


def _channel(e: Entry) -> tuple:
    ends = (e.rank, e.peer) if e.op == "send" else (e.peer, e.rank)
    return (e.group, *ends, e.tag)


def difference(a: Entry, b: Entry) -> str | None:
    """In what two calls that meet don't fit: op, root, dtype, shape, size; None if they do."""
    if a.p2p:
        return None if (a.dtype, a.nbytes) == (b.dtype, b.nbytes) else "size"
    if a.op != b.op:
        return "op"
    if a.op == "barrier":
        return None
    if a.op in ("broadcast", "reduce", "gather", "scatter") and a.peer != b.peer:
        return "root"
    if a.dtype != b.dtype:
        return "dtype"
    if a.op in ("all_reduce", "reduce") and a.shape != b.shape:
        return "shape"
    if a.op == "broadcast" and a.nbytes != b.nbytes:
        return "shape"
    if a.op in ("all_gather", "reduce_scatter") and a.nbytes != b.nbytes:
        return "size"
    return None
