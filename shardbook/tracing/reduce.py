"""Fewer bars and points, where a trace is too many bytes for a notebook."""

import itertools
from collections import defaultdict

import numpy as np

from .lanes import Slice, Track

POINTS = 2000  # points kept of one counter


def reduce(tracks: list[Track], flows: list, duration: int, most: int) -> tuple[int, list]:
    """Join slices too short to be seen, until at most `most` bars are left.

    Gives the length in ns under which slices are joined, and the arrows between what is left.
    """
    columns = [
        np.array([(s.row, s.ts, s.dur) for s in track.slices], np.int64).reshape(-1, 3)
        for track in tracks
    ]
    short = max(1, duration >> 14)
    while short <= duration and sum(_bars(c, short) for c in columns) > most:
        short *= 2
    became: dict[int, Slice] = {}
    for track in tracks:
        track.slices = _merge(track, short, became)
    flows = [
        tuple((t, became.get(id(s), s), min(when, s.ts + s.dur)) for t, s, when in flow)
        for flow in flows
    ]
    return short, flows[:: max(1, -(-len(flows) // most))]


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


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
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
