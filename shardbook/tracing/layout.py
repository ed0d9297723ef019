"""Lay a Chrome trace out in rows: what the inline view and its picture both draw.

Times are integer nanoseconds from the first event. Nothing of a foreign trace is taken for granted:
slices may overlap, B may lack its E, ids may be strings.
"""

import bisect
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

# Okabe and Ito's colours, told apart with every common colour blindness, then paler ones of the
# same hues for the kinds that take less time.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"]
COLOURS += ["#B9CDD9", "#E3D3B4", "#B5D3C8", "#DFCBD6", "#C9DFEB", "#E0C3B0", "#E6E2BC"]
MERGED = "#999999"  # slices too short to draw one by one, and kinds past the palette
POINTS = 2000  # points kept of one counter
# pixels: heights, and the width of the column of track names
ROW, THIN, HEADER, COUNTER, GAP, AXIS, NAMES = 18, 9, 22, 38, 4, 24, 124


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

    @property
    def row(self) -> int:
        """Pixels of a row: less where many slices lie side by side only because they overlap."""
        return ROW if self.nests or self.rows <= 2 else THIN


@dataclass(slots=True)
class Layout:
    """All a view draws. flows: pairs of (track, slice, ns); kinds: (name, colour)."""

    tracks: list[Track]
    processes: dict[object, str]
    flows: list[tuple[tuple[Track, Slice, int], tuple[Track, Slice, int]]]
    kinds: list[tuple[str, str]]
    duration: int
    label: str = ""  # "paced" or "simulated" when the lengths were set and not measured
    total: int = 0  # slices of the whole trace
    below: int = 0  # > 0: slices shorter than this (ns) are drawn together


def layout(chrome: dict, most: int = 5000) -> Layout:
    """Lay out `{"traceEvents": [...]}`; past `most` slices the short ones are drawn together."""
    events = [e for e in chrome["traceEvents"] if isinstance(e, dict)]
    names, order = _names(events)
    timed = [e for e in events if e.get("ph") != "M" and _number(e.get("ts")) is not None]
    timed.sort(key=lambda e: e["ts"])
    zero = timed[0]["ts"] if timed else 0
    tracks = _collect(timed, lambda us: round((us - zero) * 1000), names)
    for track in tracks.values():
        _rows(track)
    flows = _flows(timed, tracks, lambda us: round((us - zero) * 1000))
    flows = _stack(tracks, flows)

    # in the order of the ranks; counters (tid "~…") below the slices of their process
    def place(t: Track) -> tuple:
        key = _natural(t.tid)
        return (
            order.get(t.pid, _natural(t.pid)),
            _natural(t.pid),
            bool(t.points),
            order.get((t.pid, t.tid), key),
            key,
        )

    listed = sorted(tracks.values(), key=place)
    ends = [s.ts + s.dur for t in listed for s in t.slices]
    ends += [p[-1][0] for t in listed for p in t.points.values()]
    processes = {t.pid: names.get(t.pid, f"process {t.pid}") for t in listed}
    count = sum(len(t.slices) for t in listed)
    made = Layout(listed, processes, flows, [], max(ends, default=0), _label(chrome), count)
    if count > most:
        _reduce(made, most)
    for track in listed:
        track.points = {name: _thin(points) for name, points in track.points.items()}
    made.kinds = _kinds(listed)
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
            order[key] = _natural(args.get("sort_index", 0))
        elif e.get("name") == "process_labels" and args.get("labels"):
            names[key, "labels"] = str(args["labels"])
    for key in [k for k in names if isinstance(k, tuple) and k[1:] == ("labels",)]:
        names[key[0]] = f"{names.get(key[0], key[0])} {names.pop(key)}"
    return names, order


def _collect(timed: list[dict], ns, names: dict) -> dict[object, Track]:
    """The tracks with their slices and points, not laid out yet."""
    tracks: dict[object, Track] = {}
    begun: dict[object, list] = defaultdict(list)
    last = ns(max((e["ts"] + (_number(e.get("dur")) or 0) for e in timed), default=0))

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
            add(track(pid, tid), e, start, ns(e["ts"] + (_number(e.get("dur")) or 0)))
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
                if _number(value) is not None:
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
    track.slices.sort(key=lambda s: (s.ts, -s.dur))
    open_: list[Slice | None] = []  # by row
    for s in track.slices:
        s.own = s.dur
        # a slice ends where the next one starts; an instant is inside what starts with it
        open_ = [o if o and o.ts + o.dur > s.ts else None for o in open_]
        while open_ and open_[-1] is None:
            open_.pop()
        if open_ and track.nests and open_[-1].ts + open_[-1].dur >= s.ts + s.dur:
            s.row = len(open_)
            open_[-1].own -= s.dur
        else:
            s.row = next((r for r, o in enumerate(open_) if o is None), len(open_))
        if s.row == len(open_):
            open_.append(s)
        else:
            open_[s.row] = s
        track.rows = max(track.rows, s.row + 1)


def _stack(tracks: dict[object, Track], flows: list) -> list:
    """Lanes "collectives", "collectives 2", … of flat slices become the rows of one track."""
    first = {(t.pid, t.name): t for t in tracks.values() if not t.points}
    moved: dict[int, Track] = {}
    for key, track in list(tracks.items()):
        base, _, number = track.name.rpartition(" ")
        into = first.get((track.pid, base))
        flat = into and track.rows == into.rows == 1
        if number.isdecimal() and flat:
            moved[id(track)] = into
            del tracks[key]
            into.slices += track.slices
    for track in {id(t): t for t in moved.values()}.values():
        track.nests = False
        _rows(track)
    return [tuple((moved.get(id(t), t), s, at) for t, s, at in flow) for flow in flows]


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


def _reduce(made: Layout, most: int) -> None:
    """Draw slices too short to be seen together, until at most `most` bars are left."""
    columns = [
        np.array([(s.row, s.ts, s.dur) for s in track.slices], np.int64).reshape(-1, 3)
        for track in made.tracks
    ]
    short = max(1, made.duration >> 14)
    while short <= made.duration and sum(_bars(c, short) for c in columns) > most:
        short *= 2
    became: dict[int, Slice] = {}
    kept = [_merge(track, short, became) for track in made.tracks]
    for track, slices in zip(made.tracks, kept, strict=True):
        track.slices = slices
    made.below = short
    made.flows = [
        tuple((t, became.get(id(s), s), min(when, s.ts + s.dur)) for t, s, when in flow)
        for flow in made.flows
    ]
    if len(made.flows) > most:
        made.flows = made.flows[:: -(-len(made.flows) // most)]


def _bars(columns: np.ndarray, short: int) -> int:
    """How many bars _merge leaves of a track whose slices are rows of (row, start, length)."""
    row, start, dur = columns.T
    # runs of short slices of one row, in one stretch of time, unless a long one comes between
    run = np.where(dur < short, start // short, -1 - np.arange(len(dur)))
    order = np.lexsort((start, row))
    row, run = row[order], run[order]
    return len(run) and 1 + int(((row[1:] != row[:-1]) | (run[1:] != run[:-1])).sum())


def _merge(track: Track, short: int, became: dict[int, Slice]) -> list[Slice]:
    """The slices of a track with runs of those shorter than `short` joined into one bar each."""
    out: list[Slice] = []
    by_row = defaultdict(list)
    for s in track.slices:
        by_row[s.row].append(s)
    for row, slices in by_row.items():
        for key, run in itertools.groupby(
            slices, key=lambda s: s.ts // short if s.dur < short else -1
        ):
            run = list(run)
            if key == -1 or len(run) == 1:
                out += run
                continue
            total = sum(s.dur for s in run)
            longest = max(run, key=lambda s: s.dur)
            args = {"slices": len(run), "together ns": total, "longest": longest.name}
            end = max(s.ts + s.dur for s in run)
            start = run[0].ts
            one = Slice(start, end - start, f"{len(run)} short slices", "", args, row, total)
            became.update((id(s), one) for s in run)
            out.append(one)
    return sorted(out, key=lambda s: (s.ts, -s.dur))


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most POINTS points: the lowest and the highest of each stretch, so that peaks stay."""
    if len(points) <= POINTS:
        return points
    step = -(-len(points) * 2 // POINTS)
    out = []
    for i in range(0, len(points), step):
        part = points[i : i + step]
        ends = (min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1]))
        out += sorted(set(ends))
    return out


def content_height(made: Layout) -> int:
    """Pixels that the lanes need: a header a process, its tracks below."""
    lanes = sum(GAP + (COUNTER if t.points else t.rows * t.row) for t in made.tracks)
    return lanes + HEADER * len(made.processes)


def describe(made: Layout, title: str = "") -> str:
    """One line: what the picture shows, for those who cannot see it."""
    names = list(made.processes.values())
    if not names:
        return f"{title or 'trace'}: no events"
    who = names[0] if len(names) == 1 else f"{len(names)} lanes ({names[0]} … {names[-1]})"
    label = f", {made.label} time" if made.label else ""
    count = "1 slice" if made.total == 1 else f"{made.total:,} slices"
    return f"{title or 'trace'}: {count} over {length(made.duration)}{label}; {who}"


def length(ns: float) -> str:
    """A time in ns to read: 950 ns, 12.3 µs, 4.56 ms, 7.89 s."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def kind(s: Slice) -> str:
    """What a slice is coloured by: its module's type, its collective, its category, its name."""
    if s.cat in ("collective", "p2p"):
        return s.name.split(" ")[0]  # "send to 3" is a send
    return str(s.args.get("type") or s.cat or s.name)


def _kinds(tracks: list[Track]) -> list[tuple[str, str]]:
    """Number the kinds by the time spent in each alone, and give each its colour.

    What mostly holds other slices (a block, the model) is pale, what works itself is bright.
    """
    own, whole = defaultdict(int), defaultdict(int)
    for track in tracks:
        for s in track.slices:
            own[kind(s)] += s.own
            whole[kind(s)] += s.dur
    ranked = sorted(own, key=lambda k: (-own[k], k))
    number = {k: i for i, k in enumerate(ranked)}
    for track in tracks:
        for s in track.slices:
            s.kind = number[kind(s)]
    bright, pale = iter(COLOURS[:7]), iter(COLOURS[7:])
    out = []
    for k in ranked:
        colour = next(bright, None) if own[k] * 3 >= whole[k] else next(pale, None)
        out.append((k, colour or next(pale, None) or MERGED))
    return out


def _label(chrome: dict) -> str:
    """ "paced" or "simulated" if the trace says that its lengths were set, not measured."""
    events = [e for e in chrome["traceEvents"] if isinstance(e, dict)]
    ranks = {str((e.get("args") or {}).get("name")) for e in events if e.get("ph") == "M"}
    for label in ("simulated", "paced"):
        if any(e.get("cat") == label for e in events) or any(f"{label})" in n for n in ranks):
            return label
    return ""


def _number(value: object) -> float | None:
    """The value if it is a finite number, else None."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value if ok else None


def _natural(key: object) -> tuple:
    """Sorts numbers before text, and 2 before 10."""
    return (0, key, "") if _number(key) is not None else (1, 0, str(key))
