"""From a recorder's notes to slices: forward, backward, collectives, marks of one rank."""

import bisect
import dataclasses
from typing import Any, NamedTuple

from ..calls import Call

RECORD = "module thread start end first_node last_node inputs outputs error device0 device1"
"""Fields of a module call's record. first_node and last_node bound the autograd nodes it made."""


class Slice(NamedTuple):
    """Something that took time: on a track of a rank, from start to end in monotonic ns."""

    track: str
    name: str
    start: int
    end: int
    category: str
    args: dict


class Visit(NamedTuple):
    """One call of a module: index into RankTrace.modules, the enclosing visit or -1, depth."""

    module: int
    parent: int
    depth: int
    record: list


@dataclasses.dataclass
class RankTrace:
    """All one rank noted, as plain data: what travels from a rank to the notebook."""

    rank: int = 0
    label: dict[str, int] = dataclasses.field(default_factory=dict)
    modules: list[dict] = dataclasses.field(default_factory=list)
    records: list[list] = dataclasses.field(default_factory=list)
    fires: list[tuple] = dataclasses.field(default_factory=list)
    runs: list[tuple] = dataclasses.field(default_factory=list)  # backward: start, end, thread
    calls: list[Call] = dataclasses.field(default_factory=list)
    marks: list[tuple] = dataclasses.field(default_factory=list)
    memory: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    memory_name: str = ""
    main: int = 0
    start: int = 0
    end: int = 0
    flops: list[tuple] | None = None
    foreign: list[dict] = dataclasses.field(default_factory=list)  # Chrome events, ts in ns
    kind: str = ""  # "simulated" or "virtual" for a computed timeline
    drawn: list[Slice] = dataclasses.field(default_factory=list)  # slices given as such
    clock: int = 0  # nanoseconds to add, where the rank's host has another clock

    @property
    def title(self) -> str:
        """``rank 1 (tp=1, cp=0)``."""
        inside = [f"{k}={v}" for k, v in self.label.items()]
        inside += [self.kind] if self.kind else []
        return f"rank {self.rank}" + (f" ({', '.join(inside)})" if inside else "")

    def visits(self) -> list[Visit]:
        """Module calls in order of their starts, with their nesting (a thread nests alone)."""
        visits: list[Visit] = []
        open_in: dict[int, list[int]] = {}
        for record in self.records:
            stack = open_in.setdefault(record[1], [])
            while stack and _end(visits[stack[-1]].record, self.end) <= record[2]:
                stack.pop()
            visits.append(Visit(record[0], stack[-1] if stack else -1, len(stack), record))
            stack.append(len(visits) - 1)
        return visits

    def slices(self) -> list[Slice]:
        """Everything this rank did, in monotonic nanoseconds."""
        out = list(self.drawn)
        visits = self.visits()
        for visit in visits:
            _, thread, start, _, _, _, inputs, outputs, error, device0, device1 = visit.record
            args = {"type": self.modules[visit.module]["type"]}
            args |= {"inputs": text(inputs), "outputs": text(outputs)}
            args |= {n: parameter(p) for n, p in self.modules[visit.module]["parameters"].items()}
            if device0 is not None and device1 is not None:
                args["device ms"] = round(device1 - device0, 4)
            if error:
                args["error"] = error
            end = max(_end(visit.record, self.end), start + 1)
            name = self.name(visit.module)
            out.append(Slice(self.track(thread), name, start, end, "forward", args))
        out += self.backward(visits)
        for name, thread, start, end, category, args in self.marks:
            end = max(end, start + 1)
            out.append(Slice(self.track(thread), name, start, end, category, args))
        return out + self.call_slices()

    def name(self, module: int) -> str:
        """The module's dotted name; the root, whose name is empty, goes by its type."""
        return self.modules[module]["name"] or self.modules[module]["type"]

    def track(self, thread: int) -> str:
        """Modules of the main thread on one track, of each other thread on another."""
        if thread == self.main:
            return "modules"
        others = sorted({r[1] for r in self.records} | {f[3] for f in self.fires} - {self.main})
        place = others.index(thread) + 1 if thread in others else len(others) + 1
        return f"modules (thread {place + 1})"

    def backward(self, visits: list[Visit]) -> list[Slice]:
        """Backward of each module call: from the first of its autograd nodes to the next foreign.

        The engine runs nodes in descending order of creation, so a module's nodes lie together.
        Where they do not, the module shows as several slices rather than a wrong one.
        """
        by_thread: dict[int, tuple[list[int], list[int]]] = {}
        for i, visit in enumerate(visits):
            firsts, places = by_thread.setdefault(visit.record[1], ([], []))
            firsts.append(visit.record[4])
            places.append(i)

        def chain(key: tuple[int, int]) -> list[int]:
            firsts, places = by_thread.get(key[0], ([], []))
            at = bisect.bisect_right(firsts, key[1]) - 1
            i = places[at] if at >= 0 else -1
            while i >= 0 and visits[i].record[5] <= key[1]:
                i = visits[i].parent
            found = []
            while i >= 0:
                found.append(i)
                i = visits[i].parent
            return found[::-1]

        found: list[Slice] = []
        tasks: dict[int, list[tuple]] = {}
        for fire in self.fires:
            tasks.setdefault(fire[2], []).append(fire)
        for fires in tasks.values():
            begin = fires[0][0]
            runs = [r for r in self.runs if r[0] <= begin and (r[1] or self.end) >= begin]
            begin, end, _ = max([r for r in runs if r[2] == fires[0][1][0]] or runs)
            end = max(end or self.end, fires[-1][0] + 1)
            track = self.track(fires[0][3])
            open_: list[tuple[int, int, Any]] = []  # (visit, start, device ms)
            out: list[Slice] = []

            def close(keep: int, now: int, device: Any, track=track, open_=open_, out=out) -> None:
                while len(open_) > keep:
                    i, start, device0 = open_.pop()
                    module = visits[i].module
                    args = {"type": self.modules[module]["type"]}
                    if device is not None and device0 is not None:
                        args["device ms"] = round(device - device0, 4)
                    stop = max(now, start + 1)
                    name = f"{self.name(module)} (backward)"
                    out.append(Slice(track, name, start, stop, "backward", args))

            for now, key, _, _, device in fires:
                target = chain(key)
                same = 0
                while same < min(len(open_), len(target)) and open_[same][0] == target[same]:
                    same += 1
                close(same, now, device)
                open_ += [(i, now, device) for i in target[same:]]
            close(0, end, None)
            out.append(Slice(track, "backward", begin, end, "backward", {}))
            found += reversed(out)  # the enclosing first, where they begin and end together
        return found

    def call_slices(self) -> list[Slice]:
        """One slice a collective or point-to-point call, in their order."""
        out, counts, named = [], {}, {}
        for call in self.calls:
            named.setdefault(call.group, set()).add(call.group_name)
        for call in self.calls:
            kind = "p2p" if call.op in ("send", "recv") else "collective"
            name = call.op
            if call.peer is not None and kind == "p2p":
                name = f"{call.op} {'to' if call.op == 'send' else 'from'} {call.peer}"
            number = counts[call.op, call.group] = counts.get((call.op, call.group), -1) + 1
            args = {"bytes": call.nbytes, "tensor": tensor(call.shape, call.dtype)}
            args |= {"group": list(call.group), "number": number, "where": call.where}
            if call.peer is not None:
                args["peer" if kind == "p2p" else "root"] = call.peer
            told = {"label": call.label, "tag": call.tag, "reduce": call.reduce}
            told |= {"group name": call.group_name if len(named[call.group]) > 1 else ""}
            args |= {name: value for name, value in told.items() if value}
            if len(call.events) == 2:
                args["device ms"] = round(call.events[1] - call.events[0], 4)
            if call.complete is False:
                args["unfinished"] = "when the trace ended"
            end = self.end if call.end_ns is None else call.end_ns
            track = "async collectives" if call.is_async else "collectives"
            out.append(Slice(track, name, call.start_ns, max(end, call.start_ns + 3), kind, args))
        return out


def _end(record: list, default: int) -> int:
    return default if record[3] is None else record[3]


def tensor(shape: tuple, dtype: Any) -> str:
    """``float32[2, 128, 512]``."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def text(described: Any) -> str:
    """What `describe` gives, as people read it."""
    if described is None:
        return ""
    if isinstance(described, tuple):
        shape, dtype, *sharded = described
        if sharded:
            return f"{tensor(sharded[0], dtype)} of {list(shape)} {sharded[1]}"
        return tensor(shape, dtype)
    if isinstance(described, dict):
        return ", ".join(f"{k}={_nested(v)}" for k, v in described.items())
    return ", ".join(_nested(v) if isinstance(v, list) else text(v) for v in described)


def _nested(described: Any) -> str:
    return f"({text(described)})" if isinstance(described, (list, dict)) else text(described)


def parameter(p: dict) -> str:
    """A parameter: ``float32[768, 512]``, sharded ``float32[192, 512] of [768, 512] Shard(0)``."""
    if p["placements"]:
        return f"{tensor(p['local_shape'], p['dtype'])} of {list(p['shape'])} {p['placements']}"
    return tensor(p["shape"], p["dtype"])
