"""The ranks' calls, read from their logs and held against each other.

The k-th collective of a group must be the same on all its ranks, the j-th send from one rank to
another meets the j-th receive. So it can be told which calls can never complete, and which do
complete but make no sense, without waiting for a deadline.
"""

from collections import defaultdict

from .log import Entry, Rank


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
        self.bad: list[Entry] = []  # the first calls that meet and don't fit

    def add(self, entry: Entry) -> None:
        self.members[entry.group] = entry.members
        if entry.p2p:
            self._add_p2p(entry)
            return
        key = (entry.group, entry.rank)
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
        elif entry.peer is None:
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
        if entry.op == "recv" and entry.peer is None:
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

    def skipped(self) -> tuple[Entry, list[int]] | None:
        """After all ranks have returned: a collective, and the ranks that never entered it."""
        for (_, index), met in sorted(self.open.items(), key=lambda item: item[0][1]):
            entry = met[min(met)]
            missing = [r for r in entry.members if r not in met]
            if missing and index == entry.index:
                return entry, missing
        return None

    def unreceived(self) -> Entry | None:
        """After all ranks have returned: a send that met no receive. Gloo lets small ones go."""
        for entry in self.unmet.values():
            if entry.op == "send" and (entry.group, entry.peer) not in self.any_source:
                return entry
        return None

    def astray(self, entry: Entry) -> Entry | None:
        """The other end of a send or receive, if only its tag or its group keeps them apart."""
        for other in self.unmet.values():
            ends = (other.rank, other.peer) == (entry.peer, entry.rank)
            if ends and other.op != entry.op:
                return other
        return None

    def name(self, entry: Entry) -> str:
        """ "send #2 to rank 1 with tag 5", "all_reduce #1 of group [0, 2]"."""
        name, whole = f"{entry.op} #{entry.count}", len(entry.members) == self.world_size
        if entry.p2p:
            name += " to " if entry.op == "send" else " from "
            name += "any rank" if entry.peer is None else f"rank {entry.peer}"
            name += f" with tag {entry.tag}" if entry.tag else ""
            return f"{name} in {self.group(entry)}" if self._twins(entry) else name
        if whole and not entry.label and not self._twins(entry):
            return name
        return f"{name} of {self.group(entry)}"

    def group(self, entry: Entry) -> str:
        """ "group [0, 2]"; "the 2nd group made" where its ranks alone don't tell which."""
        if entry.label:
            return f"group {entry.label} {list(entry.members)}"
        if not self._twins(entry):
            whole = len(entry.members) == self.world_size
            return "the world" if whole else f"group {list(entry.members)}"
        # torch numbers the groups of a process, the world first; all ranks make all of them.
        if not entry.group.isdecimal():
            return f'group "{entry.group}"'
        return "the world" if entry.group == "0" else f"the {_ordinal(int(entry.group))} group made"

    def _twins(self, entry: Entry) -> bool:
        return list(self.members.values()).count(entry.members) > 1


def _ordinal(number: int) -> str:
    last = 0 if number % 100 in (11, 12, 13) else number % 10
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"


def _channel(e: Entry) -> tuple:
    ends = (e.rank, e.peer) if e.op == "send" else (e.peer, e.rank)
    return (e.group, *ends, e.tag)


def difference(a: Entry, b: Entry) -> str | None:
    """In what two calls that meet don't fit: op, root, dtype, reduce, shape, size; else None."""
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
    if a.reduce != b.reduce:
        return "reduce"
    if a.op in ("all_reduce", "reduce") and a.shape != b.shape:
        return "shape"
    if a.op == "broadcast" and a.nbytes != b.nbytes:
        return "shape"
    if a.op in ("all_gather", "reduce_scatter") and a.nbytes != b.nbytes:
        return "size"
    return None
