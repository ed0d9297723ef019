"""Lay a Chrome trace out: what the inline view and its picture both draw.

A view opens with all lanes where they fit, else with one row a rank. It opens at the step, where
the trace says which stretch that is: from the first kernel with a set length, or from the first
mark with the word "step" in its name.
"""

import re
from dataclasses import dataclass, field

from . import kinds
from .lanes import GAP, HEADER, PACED, Slice, Track, lanes, natural, number
from .reduce import reduce, thin

ROOM = 640  # pixels that the lanes of a view that opens may take: what a notebook shows at once


@dataclass(slots=True)
class Layout:
    """All a view draws. flows: pairs of (track, slice, ns); kinds: (name, colour)."""

    tracks: list[Track]
    processes: dict[object, str]
    flows: list[tuple[tuple[Track, Slice, int], tuple[Track, Slice, int]]]
    kinds: list[tuple[str, str]]
    duration: int
    label: str = ""  # "paced", "simulated" or "virtual" when the lengths were set and not measured
    total: int = 0  # slices of the whole trace
    below: int = 0  # > 0: slices shorter than this (ns) are joined
    shut: set = field(default_factory=set)  # pids that open as one row
    window: tuple[int, int] = (0, 1)  # the stretch of time that is shown first

    def lanes_of(self, pid: object) -> list[Track]:
        """The lanes of a process that are drawn as the view opens."""
        return [t for t in self.tracks if t.pid == pid and t.height]


def layout(chrome: dict, most: int | None = None) -> Layout:
    """Lay out `{"traceEvents": [...]}`; past `most` slices the short ones are joined."""
    events = [e for e in chrome["traceEvents"] if isinstance(e, dict)]
    names, order = _names(events)
    timed = [e for e in events if e.get("ph") != "M" and number(e.get("ts")) is not None]
    timed.sort(key=lambda e: e["ts"])
    zero = timed[0]["ts"] if timed else 0
    tracks, flows = lanes(timed, lambda us: round((us - zero) * 1000), names)

    # in the order of the ranks; counters below the slices of their process
    def place(t: Track) -> tuple:
        key = natural(t.tid)
        rank = order.get(t.pid, natural(t.pid))
        return (rank, natural(t.pid), bool(t.points), order.get((t.pid, t.tid), key), key)

    paced = sorted((t for t in tracks.values() if t.paced), key=place)
    listed = sorted(tracks.values(), key=lambda t: (*place(t)[:3], not t.paced, *place(t)[3:]))
    ends = [s.ts + s.dur for t in listed for s in t.slices]
    ends += [p[-1][0] for t in listed for p in t.points.values()]
    processes = {t.pid: names.get(t.pid, f"process {t.pid}") for t in listed}
    made = Layout(listed, processes, flows, [], max(ends, default=0), _label(events))
    made.total = sum(len(t.slices) for t in listed)
    if most is not None and made.total > most:
        made.below, made.flows = reduce(listed, flows, made.duration, most)
    for track in listed:
        track.points = {name: thin(points) for name, points in track.points.items()}
    made.kinds = kinds.number(listed)
    made.window = _window(made)
    if len(processes) > 1 and (paced or content_height(made) > ROOM):
        made.shut = set(processes)
        if (
            not paced
        ):  # the first one open shows what the rows stand for, if it leaves the rest room
            first = next(iter(processes))
            made.shut.discard(first)
            if content_height(made) > ROOM:
                made.shut.add(first)
    return made


def _names(events: list[dict]) -> tuple[dict, dict]:
    """Names and sort keys of processes (by pid) and threads (by pid, tid), from the M events."""
    names, order = {}, {}
    for e in events:
        if e.get("ph") != "M":
            continue
        key = e.get("pid") if "process" in e.get("name", "") else (e.get("pid"), e.get("tid"))
        args = e.get("args") or {}
        if e.get("name") in ("process_name", "thread_name"):
            names[key] = str(args.get("name", ""))
        elif e.get("name") in ("process_sort_index", "thread_sort_index"):
            order[key] = natural(args.get("sort_index", 0))
        elif e.get("name") == "process_labels" and args.get("labels"):
            names[key, "labels"] = str(args["labels"])
    for key in [k for k in names if isinstance(k, tuple) and k[1:] == ("labels",)]:
        names[key[0]] = f"{names.get(key[0], key[0])} {names.pop(key)}"
    return names, order


def _window(made: Layout) -> tuple[int, int]:
    """From the step on, if what comes before it takes a tenth of the time; else all."""
    whole = (-round(made.duration * 0.01), round(made.duration * 1.02) + 1)
    slices = [s for t in made.tracks for s in t.slices]
    begins = [s.ts for s in slices if s.cat == "paced"]
    begins = begins or [
        s.ts for s in slices if s.cat == "mark" and re.search(r"\bstep\b", s.name, re.I)
    ]
    start = min(begins, default=0)
    if start < made.duration / 10:
        return whole
    return start - round((made.duration - start) * 0.01), whole[1]


def content_height(made: Layout) -> int:
    """Pixels that the lanes need as the view opens: a header a process, its lanes below."""
    lanes = sum(GAP + t.height for t in made.tracks if t.height and t.pid not in made.shut)
    return lanes + HEADER * len(made.processes)


def describe(made: Layout, title: str = "") -> str:
    """One line: what the picture shows, for those who cannot see it."""
    names = list(made.processes.values())
    if not names:
        return f"{title or 'trace'}: no events"
    kind = "ranks" if all(n.startswith("rank ") for n in names) else "processes"
    who = names[0] if len(names) == 1 else f"{len(names)} {kind} ({names[0]} … {names[-1]})"
    label = f", {made.label} time" if made.label else ""
    count = "1 slice" if made.total == 1 else f"{made.total:,} slices"
    return f"{title or 'trace'}: {count} over {length(made.duration)}{label}; {who}"


def length(ns: float) -> str:
    """A time in ns to read: 950 ns, 12.3 µs, 4.56 ms, 7.89 s."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def _label(events: list[dict]) -> str:
    """How the lengths were set, if the trace says that they were not measured: "paced" or so."""
    ranks = {str((e.get("args") or {}).get("name")) for e in events if e.get("ph") == "M"}
    for label in reversed(PACED):
        if any(e.get("cat") == label for e in events) or any(f"{label})" in n for n in ranks):
            return label
    return ""
