"""Two traces compared: ``t.diff(expected)`` names the first call in which they differ.

First means that no other difference happened before it, on any rank: what only follows from
another rank's earlier mistake is counted, not named.
"""

import dataclasses
from collections import Counter
from typing import Any

from .align import Column, align, differences
from .before import pasts
from .diff_picture import html
from .steps import P2P, Step, comparable, steps
from .words import count, ranks_text, sentence


@dataclasses.dataclass
class Difference:
    """One call that differs: on which ranks, in which of the first one's steps, and how."""

    ranks: list[int]
    step: int
    expected: Step | None
    got: Step | None
    text: str

    def __str__(self) -> str:
        return self.text


class Diff:
    """What two traces differ in. True if nothing; as text it names the first difference."""

    def __init__(self, columns: dict[int, list[Column]], differences: list[Difference], what: str):
        self.columns, self.differences, self._what = columns, differences, what

    @property
    def equal(self) -> bool:
        """Whether the traces are equal in what was compared."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            return f"the traces are equal: {self._what}"
        first, others = self.differences[0], len(self.differences) - 1
        text = first.text + ("; everything before is equal" if first.step > 1 else "")
        if len(first.ranks) > 1 and self.columns:
            text += f"; the same on {ranks_text(first.ranks[1:])}"
        if others:
            text += f"; {others:,} more difference{'s follow' if others > 1 else ' follows'}"
        return text

    __repr__ = __str__

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        firsts = self.differences[0].ranks if self.differences else []
        return {"text/plain": str(self), "text/html": html(str(self), self.columns, firsts)}


def diff(
    got: Any, expected: Any, *, modules: bool = False, order: str = "rank", names: tuple = ()
) -> Diff:
    """Compare two traces, each a Trace, a run's Result or the path of one that was saved.

    Compared are each rank's communication calls: op, bytes, dtype, group, peer and their order;
    with modules=True the modules' calls among them, too. order="rank" is the order in which a rank
    made all of its calls, order="group" only that in each group and with each peer: where a
    contract leaves open whether a send or a receive is posted first, for example.
    """
    if order not in ("rank", "group"):
        raise ValueError(f'order is "rank" or "group", not {order!r}')
    here, there = names or ("the trace", "the expected trace")
    want = steps(expected, modules, there)
    have = steps(got, modules, here)
    if set(want) != set(have):
        wanted, found = (ranks_text(sorted(w)) for w in (want, have))
        text = f"expected {count(len(want), 'rank')} ({wanted}), got {len(have)} ({found})"
        text += ": the calls of other numbers of ranks can't be compared"
        only = sorted(set(want) ^ set(have))
        return Diff({}, [Difference(only, 1, None, None, text)], "")
    want, have = comparable(want, have)
    columns = {}
    for rank in want:
        columns[rank] = align(want[rank], have[rank], by_lane=order == "group")
    differing = {rank: d for rank, cs in columns.items() if (d := differences(cs))}
    total = sum(map(len, want.values()))
    kind = ("call of a module or a group" if modules else "communication call").partition(" of ")
    calls = f"{total:,} {kind[0]}{'' if total == 1 else 's'}{kind[1]}{kind[2]}"
    what = f"{count(len(want), 'rank')}, {calls if total else 'no calls'}"
    return Diff(columns, _told(differing, columns, want, have), what)


def _told(differing: dict[int, list[int]], columns: dict, want: dict, have: dict) -> list:
    """All differences, that which no other one precedes first; one that ranks share is one."""
    if not differing:
        return []
    before = pasts(want), pasts(have)
    firsts = {rank: columns[rank][at[0]] for rank, at in differing.items()}

    def precedes(a: int, b: int) -> bool:
        x, y = firsts[a], firsts[b]
        in_want = before[0][b][y.i].get(a, 0) > x.i
        return a != b and (in_want or before[1][b][y.j].get(a, 0) > x.j)

    roots = [b for b in firsts if not any(precedes(a, b) for a in firsts)]
    first = min(roots or firsts, key=lambda r: (firsts[r].step, r))
    numbers = [{rank: _numbers(mine) for rank, mine in side.items()} for side in (want, have)]

    def shared(rank: int, c: Column) -> tuple | None:
        """What makes it the same difference as another rank's: the call of the same collective."""
        calls = [(s, n[rank][k]) for s, k, n in zip(c[2:4], c[:2], numbers, strict=True) if s]
        alone = any(s.op in P2P for s, _ in calls)
        return None if alone else (c.expected, c.got, calls[0][1], c.moved is None)

    out: list[Difference] = []
    known: dict[tuple, Difference] = {}
    for rank in sorted(differing, key=lambda r: (r != first, firsts[r].step, r)):
        for at in differing[rank]:
            c = columns[rank][at]
            key = shared(rank, c)
            if key is not None and key in known:
                known[key].ranks.append(rank)
                continue
            text = f"rank {rank}, " + sentence(rank, at, columns[rank])
            made = Difference([rank], c.step, c.expected, c.got, text)
            out.append(made)
            if key is not None:
                known[key] = made
    return out


def _numbers(mine: list[Step]) -> list[int]:
    """Of each call, how many this rank has made in its group before."""
    counts: Counter = Counter()
    out = []
    for step in mine:
        out.append(counts[step.lane])
        counts[step.lane] += 1
    return out
