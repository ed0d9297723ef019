"""What a foreign trace holds beside slices: arrows, instants, counters, async spans, and the rest.

Older writers use phases that viewers have dropped; they become the ones that took their place.
"""

import bisect
from collections import Counter, defaultdict, deque

NOW = {"C": "C", "i": "i", "b": "b", "n": "n", "e": "e"}
NOW |= {"I": "i", "R": "i"} | {"S": "b", "F": "e", "T": "n", "p": "n"}
"""Phases drawn as they are or as what replaced them: instants, async spans and their steps."""

FLOWS = "stf"  # at equal times an arrow starts before it ends

REST = {
    "E": "end without a begin",
    "O": "object",
    "N": "object",
    "D": "object",
    "P": "sample",
    "V": "memory dump",
    "v": "memory dump",
    "c": "clock mark",
}


def events(others: list[dict], slices: list[dict]) -> tuple[list[dict], str]:
    """(the events to draw beside the slices, what had to be left out in words).

    Times are in ns and pids and tids final already.
    """
    kept, ends, left_out = [], [], Counter()
    for e in others:
        phase = e["ph"]
        if phase in NOW:
            if phase == "C" and not isinstance(e.get("args") or {}, dict):
                left_out["counter without values"] += 1
                continue
            kept.append({**e, "ph": NOW[phase]})
        elif phase in ("s", "t", "f"):
            ends.append(e)
        elif not isinstance(phase, str):
            raise TypeError(f"ph is {phase!r}")
        else:
            left_out[REST.get(phase, f"event of phase {phase!r}")] += 1
    arrows, lost = _arrows(ends, slices)
    if lost:
        left_out["end of an arrow that joins no two slices"] = lost
    said = ", ".join(f"{n:,} × {what}" for what, n in sorted(left_out.items()))
    return kept + arrows, said


def _arrows(ends: list[dict], slices: list[dict]) -> tuple[list[dict], int]:
    """(an s and an f for every hop from slice to slice, how many of the ends are in no hop).

    An arrow is known by category, name and id together, since writers number each kind from 1. An
    id that was used up may come again; of several arrows under way the first to start ends first.
    """
    find = _finder(slices)
    under_way: dict[tuple, deque] = defaultdict(deque)
    hops, used = [], set()
    ends = sorted(ends, key=lambda e: (e["ts"], FLOWS.find(e["ph"])))
    for i, e in enumerate(ends):
        waiting = under_way[str(e.get("cat")), str(e.get("name")), str(e.get("id"))]
        here = find(e)
        if e["ph"] != "s" and waiting:
            start, where = waiting.popleft()
            if where is not None and here is not None and where["ts"] <= here["ts"]:
                hops.append((where, here))
                used |= {start, i}
        if e["ph"] != "f":
            waiting.append((i, here))
    out = []
    for number, pair in enumerate(hops, 1):
        for phase, e in zip("sf", pair, strict=True):
            end = {"name": "flow", **e, "ph": phase, "id": number}
            end.pop("bp", None)
            out.append(end | ({"bp": "e"} if phase == "f" else {}))
    return out, len(ends) - len(used)


def _finder(slices: list[dict]):
    """A function that puts an arrow's end strictly inside the slice it belongs to, or gives None.

    Where it lies on the slice's edge it is moved by a nanosecond.
    """
    threads = defaultdict(list)
    for e in slices:
        threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    starts = {}
    for key, spans in threads.items():
        spans.sort()
        starts[key] = [start for start, _ in spans]

    def find(e: dict) -> dict | None:
        key, at = (e["pid"], e["tid"]), e["ts"]
        spans = threads.get(key, [])
        last = bisect.bisect_right(starts.get(key, []), at)
        if e["ph"] == "f" and e.get("bp") != "e" and last < len(spans):
            at = spans[last][0]  # without bp an arrow ends at the next slice
            last += 1
        for start, end in reversed(spans[max(0, last - 64) : last]):
            if start <= at <= end and end - start >= 2:
                return {**e, "ts": min(max(at, start + 1), end - 1)}
        return None

    return find
