"""From the events of a Chrome trace to lanes: slices in rows, counters, arrows.

Times are integer nanoseconds from the first event. Nothing of a foreign trace is taken for granted:
slices may overlap, B may lack its E, ids may be strings.
"""

import bisect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

# pixels: heights, and the width of the column of lane names
ROW, THIN, HEADER, COUNTER, GAP, AXIS, NAMES = 18, 9, 22, 44, 4, 24, 124
OURS = ("modules", "collectives", "async collectives")  # lanes that events.py numbers
PACED = ("paced", "simulated", "virtual")  # categories of slices whose length was set
WHOLE_PROCESS = ("resident memory (MB)", "peak memory (MB)")  # of the whole process: hardly moves


@dataclass(slots=True, eq=False)
class Slice:
    """One bar: start and length in ns, and the row of its track that it is drawn in."""

    ts: int
    dur: int
    name: str
    cat: str
    args: dict
    row: int = 0
    own: int = 0  # dur without the slices nested in it
    kind: int = 0
    mark: bool = False  # a message under way: drawn as a mark at its start

    @property
    def end(self) -> int:
        """Where what is drawn of it ends."""
        return self.ts if self.mark else self.ts + self.dur


@dataclass(slots=True, eq=False)
class Track:
    """One lane of a process: slices in rows, or the points (ns, value) of a counter."""

    pid: object
    tid: object
    name: str
    slices: list[Slice] = field(default_factory=list)
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    rows: int = 1
    nests: bool = True  # async slices need not nest
    paced: bool = False  # kernels whose length was set
    fold: bool = False  # opens as one row

    @property
    def row(self) -> int:
        """Pixels of a row: less where many slices lie side by side only because they overlap."""
        return ROW if self.nests or self.rows <= 2 else THIN

    @property
    def memory(self) -> bool:
        """The memory of the whole process: shown when asked for, since it says little of a step."""
        return bool(self.points) and self.name in WHOLE_PROCESS

    @property
    def height(self) -> int:
        """Pixels of the lane as the view opens."""
        if self.memory:
            return 0
        return COUNTER if self.points else ROW if self.fold else self.rows * self.row


def lanes(
    timed: list[dict], ns: Callable[[float], int], names: dict
) -> tuple[dict[object, Track], list]:
    """The lanes by (pid, tid), and the arrows between their slices, of events sorted by time."""
    tracks = _collect(timed, ns, names)
    for track in tracks.values():
        track.slices.sort(key=lambda s: (s.ts, -s.dur))
    flows = _flows(timed, tracks, ns)
    _pace(tracks)
    flows = _stack(tracks, flows)
    for track in tracks.values():
        _marks(track)
        _rows(track)
        track.fold = not track.nests and track.rows > 2
    return tracks, flows


def _collect(timed: list[dict], ns, names: dict) -> dict[object, Track]:
    """The tracks with their slices and points, not laid out yet."""
    tracks: dict[object, Track] = {}
    begun: dict[object, list] = defaultdict(list)
    last = ns(max((e["ts"] + (number(e.get("dur")) or 0) for e in timed), default=0))

    def track(pid, tid, name=None, nests=True) -> Track:
        if (pid, tid) not in tracks:
            name = name if name is not None else names.get((pid, tid), f"thread {tid}")
            tracks[pid, tid] = Track(pid, tid, name, nests=nests)
        return tracks[pid, tid]

    def add(at: Track, e: dict, start: int, end: int, more: dict | None = None) -> None:
        args = e.get("args")
        args = dict(args) if isinstance(args, dict) else {} if args is None else {"args": args}
        if more:
            args |= more
        name, cat = str(e.get("name", "")), str(e.get("cat", ""))
        at.slices.append(Slice(start, max(0, end - start), name, cat, args))

    for e in timed:
        ph, pid, tid = e.get("ph"), e.get("pid", 0), e.get("tid", 0)
        start = ns(e["ts"])
        if ph == "X":
            # end - start in ns: rounding start and length apart would make neighbours overlap
            add(track(pid, tid), e, start, ns(e["ts"] + (number(e.get("dur")) or 0)))
        elif ph in ("i", "I", "R"):
            add(track(pid, tid), e, start, start)
        elif ph == "B":
            begun[pid, tid].append((e, start))
        elif ph == "E" and begun[pid, tid]:
            first, at = begun[pid, tid].pop()
            add(track(pid, tid), first, at, start, e.get("args"))
        elif ph == "C":
            key = f"{e.get('name', '')}{e.get('id', '')}"
            at = track(pid, f"~{key}", key)
            for series, value in (e.get("args") or {}).items():
                if number(value) is not None:
                    at.points.setdefault(str(series), []).append((start, value))
        elif ph in ("b", "e", "n"):
            key = (pid, "async", e.get("cat"), str(e.get("id", e.get("id2"))))
            lane = f"{e.get('cat') or 'async'}"
            if ph == "n":
                add(track(pid, f"async {lane}", lane, nests=False), e, start, start)
            elif ph == "b":
                begun[key].append((e, start))
            elif begun[key]:
                first, at = begun[key].pop()
                add(track(pid, f"async {lane}", lane, False), first, at, start, e.get("args"))
    for key, stack in begun.items():
        for e, start in stack:  # never ended: an exception, or the trace stopped first
            tid = e.get("tid", 0) if len(key) == 2 else f"async {e.get('cat') or 'async'}"
            add(track(key[0], tid), e, start, last, {"end": "not in the trace"})
    return tracks


def _rows(track: Track) -> None:
    """Give every slice a row: below the slice it is nested in, never over another."""
    open_: list[Slice | None] = []  # by row
    for s in track.slices:
        s.own = s.dur
        # a slice ends where the next one starts; an instant is inside what starts with it
        open_ = [o if o and o.end > s.ts else None for o in open_]
        while open_ and open_[-1] is None:
            open_.pop()
        if s.mark:
            s.row = next((r for r, o in enumerate(open_) if o is None), len(open_))
        elif open_ and track.nests and open_[-1].ts + open_[-1].dur >= s.ts + s.dur:
            s.row = len(open_)
            open_[-1].own -= s.dur
        else:
            s.row = next((r for r, o in enumerate(open_) if o is None), len(open_))
        if s.row == len(open_):
            open_.append(s)
        else:
            open_[s.row] = s
        track.rows = max(track.rows, s.row + 1)


def _marks(track: Track) -> None:
    """A send that is under way until something waits for it says when it began, no more."""
    if track.name == "async collectives":
        for s in track.slices:
            s.mark = s.cat == "p2p" and s.name.startswith("send")


def _pace(tracks: dict[object, Track]) -> None:
    """Kernels whose length was set get a lane of their own: they overlap their host's slices."""
    for key, track in list(tracks.items()):
        paced = [s for s in track.slices if s.cat == "paced"]
        if not paced:
            track.paced = bool(track.slices) and all(s.cat in PACED for s in track.slices)
            continue
        into = tracks.setdefault((track.pid, ""), Track(track.pid, "", "paced kernels", paced=True))
        into.slices = sorted([*into.slices, *paced], key=lambda s: (s.ts, -s.dur))
        track.slices = [s for s in track.slices if s.cat != "paced"]
        if not track.slices:
            del tracks[key]


def _stack(tracks: dict[object, Track], flows: list) -> list:
    """Lanes "collectives", "collectives 2", … become the rows of one: they only overlap.

    So do lanes of any name if all of their slices are flat.
    """
    first = {(t.pid, t.name): t for t in tracks.values() if not t.points}
    moved: dict[int, Track] = {}
    for key, track in list(tracks.items()):
        base, _, number = track.name.rpartition(" ")
        into = first.get((track.pid, base))
        if into and number.isdecimal() and (base in OURS or (_flat(track) and _flat(into))):
            moved[id(track)] = into
            del tracks[key]
            into.nests = into.nests and base == "modules"
            into.slices += track.slices
    for track in {id(t): t for t in moved.values()}.values():
        track.slices.sort(key=lambda s: (s.ts, -s.dur))
    return [tuple((moved.get(id(t), t), s, at) for t, s, at in flow) for flow in flows]


def _flat(track: Track) -> bool:
    return all(a.ts + a.dur <= b.ts for a, b in zip(track.slices, track.slices[1:], strict=False))


def _flows(timed: list[dict], tracks: dict, ns) -> list:
    """Arrows between the deepest slices around the two ends of each flow (s, t, f events)."""
    starts = {key: [s.ts for s in t.slices] for key, t in tracks.items()}

    def at(e: dict):
        key, when = (e.get("pid", 0), e.get("tid", 0)), ns(e["ts"])
        if key not in tracks:
            return None
        slices = tracks[key].slices
        right = bisect.bisect_right(starts[key], when)
        around = (s for s in reversed(slices[max(0, right - 200) : right]))
        best = next((s for s in around if s.ts + s.dur >= when), None)
        if e["ph"] == "f" and e.get("bp") != "e" and right < len(slices):
            best = slices[right]  # without bp "e" an arrow ends at the next slice
        return best and (tracks[key], best, when)

    found, open_ = [], {}
    # at equal times an arrow starts before it ends
    for e in sorted(timed, key=lambda e: (e["ts"], "stf".find(str(e.get("ph"))))):
        if e.get("ph") not in ("s", "t", "f"):
            continue
        key = (e.get("cat"), e.get("name"), str(e.get("id")))
        end = at(e)
        if e["ph"] != "s" and open_.get(key) and end:
            found.append((open_[key], end))
        open_[key] = end if e["ph"] != "f" else None
    return found


def number(value: object) -> float | None:
    """The value if it is a finite number, else None."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value if ok else None


def natural(key: object) -> tuple:
    """Sorts numbers before text, and 2 before 10."""
    return (0, key, "") if number(key) is not None else (1, 0, str(key))
