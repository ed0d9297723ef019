"""Write slices in the Chrome trace format, such that Perfetto reads every one of them.

Format: "Trace Event Format" (Google). Perfetto drops slices of one thread that overlap without one
holding the other, negative times, and flows that start or end outside a slice.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from .timeline import RankTrace, Slice

ORDER = ["modules", "collectives", "async collectives"]
FLAT = {"collectives", "async collectives"}  # here slices that overlap get a lane each


def us(ns: int) -> float:
    """Microseconds that give back exactly `ns` whether a reader rounds or cuts ``us * 1000``."""
    value = ns / 1000
    while int(value * 1000) < ns:
        value = math.nextafter(value, math.inf)
    return value


def place(spans: Iterable[tuple[int, int]], nest: bool = True) -> list[int]:
    """A lane for each (start, end), so that on a lane spans are disjoint or one holds the other.

    With nest=False they are disjoint. Spans may come in any order; lanes count from 0.
    """
    spans = list(spans)
    lanes: list[list[int]] = []  # of each lane the ends of the spans still open
    chosen = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: (spans[i][0], -spans[i][1])):
        start, end = spans[i]
        lane = next((n for n, ends in enumerate(lanes) if _fits(ends, start, end, nest)), None)
        if lane is None:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(end)
        chosen[i] = lane
    return chosen


def _fits(ends: list[int], start: int, end: int, nest: bool) -> bool:
    while ends and ends[-1] <= start:
        ends.pop()
    return not ends or (nest and end <= ends[-1])


def place_tracks(slices: list[Slice]) -> tuple[list[int], dict[int, str]]:
    """A tid for each slice and the name of each tid, tracks in a fixed order."""
    tracks = defaultdict(list)
    for i, s in enumerate(slices):
        tracks[s.track].append(i)
    tids, names = [0] * len(slices), {}
    known = {name: place for place, name in enumerate(ORDER)}
    for track in sorted(tracks, key=lambda t: (known.get(t, len(ORDER)), t)):
        members = tracks[track]
        lanes = place([slices[i][2:4] for i in members], nest=track not in FLAT)
        first = len(names) + 1
        for lane in range(max(lanes) + 1):
            names[first + lane] = track if lane == 0 else f"{track} {lane + 1}"
        for i, lane in zip(members, lanes, strict=True):
            tids[i] = first + lane
    return tids, names


def chrome(ranks: list[RankTrace], flows: list[tuple]) -> dict:
    """The Chrome trace of all ranks: pid is the rank, times start at 0.

    flows are pairs ((rank's place in ranks, call), (rank's place, call)) of a send and its recv.
    """
    drawn = [rank.slices() for rank in ranks]
    starts = [s.start + r.clock for r, slices in zip(ranks, drawn, strict=True) for s in slices]
    starts += [at + r.clock for r in ranks for at, _ in r.memory]
    starts += [e["ts"] + r.clock for r in ranks for e in r.foreign if "ts" in e]
    zero = min(starts, default=0)
    events: list[dict] = []
    meta: list[dict] = []
    placed = []
    for rank, slices in zip(ranks, drawn, strict=True):
        shift = rank.clock - zero
        tids, names = place_tracks(slices)
        placed.append((slices, tids, shift))
        meta += names_of(rank.rank, rank.title, names)
        for s, tid in zip(slices, tids, strict=True):
            events.append(
                {"ph": "X", "pid": rank.rank, "tid": tid, "name": s.name, "cat": s.category}
                | {"ts": s.start + shift, "dur": s.end - s.start, "args": s.args}
            )
        for at, value in rank.memory:
            events.append(
                {"ph": "C", "pid": rank.rank, "name": rank.memory_name, "ts": at + shift}
                | {"args": {"MB": round(value / 1e6, 3)}}
            )
        for e in rank.foreign:
            moved = {**e, "pid": rank.rank, "tid": len(names) + e["tid"]}
            if "ts" in moved:
                moved["ts"] += shift
            (meta if e["ph"] == "M" else events).append(moved)
    for number, (sent, received) in enumerate(flows, 1):
        ends = []
        for (at, call), late in ((sent, False), (received, True)):
            slices, tids, shift = placed[at]
            i = len(slices) - len(ranks[at].calls) + call
            when = (slices[i].end - 1 if late else slices[i].start + 1) + shift
            ends.append({"pid": ranks[at].rank, "tid": tids[i], "ts": when})
        if ends[0]["ts"] < ends[1]["ts"]:
            flow = {"cat": "p2p", "name": "send → recv", "id": number}
            events.append({"ph": "s"} | flow | ends[0])
            events.append({"ph": "f", "bp": "e"} | flow | ends[1])
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
    for e in events:
        e["ts"] = us(e["ts"])
        if "dur" in e:
            e["dur"] = us(e["dur"])
    result = {"traceEvents": meta + events, "displayTimeUnit": "ms"}
    kinds = sorted({r.kind for r in ranks if r.kind})
    if any(s.category == "paced" for slices in drawn for s in slices):
        kinds.append("paced")
    if kinds:
        result["otherData"] = {"time": ", ".join(kinds)}
    return result


def names_of(pid: int, title: str, tracks: dict[int, str]) -> list[dict]:
    """The metadata events that name and order a process and its threads."""
    meta = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    ]
    for tid, name in tracks.items():
        at = {"pid": pid, "tid": tid}
        meta.append({"ph": "M", "name": "thread_name", **at, "args": {"name": name}})
        meta.append({"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": tid}})
    return meta
