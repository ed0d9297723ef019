"""Two lists of calls side by side: what is equal, missing, one too many, or has moved."""

from collections import defaultdict
from difflib import SequenceMatcher
from typing import NamedTuple

from .steps import P2P, Step

MOST = 4_000_000  # pairs of calls that are aligned; past it the rest is compared place by place


class Column(NamedTuple):
    """A rank's step in both traces, None where one has none; i and j count its calls from 0."""

    i: int
    j: int
    expected: Step | None
    got: Step | None
    moved: int | None = None  # where the other trace has the same call, if it only came elsewhere
    swapped: bool = False

    @property
    def equal(self) -> bool:
        """Whether both traces have the same call here."""
        return self.expected == self.got

    @property
    def step(self) -> int:
        """The number people count: a rank's first call is step 1."""
        return 1 + (self.i if self.got is None else self.j)


def align(want: list[Step], have: list[Step], by_lane: bool) -> list[Column]:
    """The two lists side by side, equal calls in one column."""
    if not by_lane:
        return _columns(list(enumerate(want)), list(enumerate(have)), len(want), len(have))
    lanes: dict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))
    for side, calls in enumerate((want, have)):
        for i, step in enumerate(calls):
            lanes[step.lane][side].append((i, step))
    found = [c for a, b in lanes.values() for c in _columns(a, b, len(want), len(have))]
    return sorted(_elsewhere(found), key=lambda c: (c.i, c.j))


def _elsewhere(columns: list[Column]) -> list[Column]:
    """A message missing in one lane and one too many in another went to, or came from, another."""
    paired: dict[int, Column | None] = {}
    for op in P2P:
        missing = [c for c in columns if c.got is None and c.expected.op == op]
        extra = [c for c in columns if c.expected is None and c.got.op == op]
        sides = (sorted(side, key=lambda c: (c.i, c.j)) for side in (missing, extra))
        for a, b in zip(*sides, strict=False):
            paired[id(a)] = a._replace(j=b.j, got=b.got, moved=None)
            paired[id(b)] = None
    out = [paired.get(id(c), c) for c in columns]
    return [c for c in out if c is not None]


def _columns(want: list[tuple], have: list[tuple], end: int, stop: int) -> list[Column]:
    a, b = [s for _, s in want], [s for _, s in have]
    places = [i for i, _ in want] + [end], [j for j, _ in have] + [stop]

    def column(i: int, j: int, x: bool = True, y: bool = True) -> Column:
        return Column(places[0][i], places[1][j], a[i] if x else None, b[j] if y else None)

    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    after = 0
    while after < min(len(a), len(b)) - same and a[-1 - after] == b[-1 - after]:
        after += 1
    out = [column(i, i) for i in range(same)]
    x, y = a[same : len(a) - after], b[same : len(b) - after]
    swap = len(x) == len(y) > 1 and x == [y[-1], *y[1:-1], y[0]]
    codes = [("replace", 0, len(x), 0, len(y))]
    if not swap and len(x) * len(y) <= MOST:
        codes = SequenceMatcher(None, x, y, autojunk=False).get_opcodes()
    for _, i, i_end, j, j_end in codes:
        both = min(i_end - i, j_end - j)
        out += [column(same + i + k, same + j + k) for k in range(both)]
        out += [column(same + k, same + j + both, y=False) for k in range(i + both, i_end)]
        out += [column(same + i + both, same + k, x=False) for k in range(j + both, j_end)]
    if swap:
        last = out[-1]
        out[same] = out[same]._replace(moved=last.j, swapped=True)
        out[-1] = last._replace(moved=out[same].j, swapped=True)
    else:
        out = _moved(out)
    rest = range(1, after + 1)
    return out + [column(len(a) - k, len(b) - k) for k in reversed(rest)]


def _moved(columns: list[Column]) -> list[Column]:
    """A call missing here that is one too many there has moved."""
    extra: dict[Step, list[int]] = defaultdict(list)
    for at, c in enumerate(columns):
        if c.expected is None:
            extra[c.got].append(at)
    out = list(columns)
    for at, c in enumerate(columns):
        if c.got is None and extra[c.expected]:
            other = extra[c.expected].pop(0)
            out[at], out[other] = (
                c._replace(moved=columns[other].j),
                columns[other]._replace(moved=c.i),
            )
    return out


def differences(columns: list[Column]) -> list[int]:
    """Places of the columns that differ; of a call that moved the first one."""
    found, seen = [], set()
    for at, c in enumerate(columns):
        if c.equal:
            continue
        if c.moved is not None:
            pair = (c.i, c.moved) if c.got is None else (c.moved, c.j)
            pair = tuple(sorted((c.j, c.moved))) if c.swapped else pair
            if pair in seen:
                continue
            seen.add(pair)
        found.append(at)
    return found
