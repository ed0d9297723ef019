"""Calls that meet and don't fit, and calls that nothing met, in words."""

from collections import defaultdict

from ..words import at, ranks_text
from .ledger import Ledger, difference
from .log import Entry

WHAT = {
    "dtype": "dtypes",
    "root": "roots",
    "reduce": "reductions",
    "shape": "shapes",
    "size": "sizes",
}


def mismatch(ledger: Ledger) -> str:
    """The first calls that meet and don't fit."""
    if len(ledger.bad) == 2:
        s, r = ledger.bad
        return (
            f"rank {s.rank} sends {_size(s)} to rank {r.rank}{at(s.where)}, which receives "
            f"{_size(r)}{at(r.where)}: both ends must have the same dtype and size"
        )
    first = ledger.bad[0]
    met = ledger.open[first.group, first.index]
    kind = next(k for e in met.values() if (k := difference(met[min(met)], e)))
    said: dict[str, list[int]] = defaultdict(list)
    for r, e in sorted(met.items()):
        text = {
            "op": ledger.name(e),
            "dtype": e.dtype,
            "root": f"rank {e.peer}",
            "reduce": e.reduce,
            "shape": f"{list(e.shape)}",
            "size": f"{e.nbytes} bytes in all",
        }[kind]
        behind = f" while handling {e.handling}" if e.handling else ""
        said[text + at(e.where) + behind].append(r)
    parts = ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in said.items())
    if kind == "op":
        return (
            f"the ranks disagree on collective {first.index + 1} of their group: {parts}. "
            "All ranks of a group must make the same calls in the same order"
        )
    return f"{ledger.name(met[min(met)])} was called with different {WHAT[kind]}: {parts}"


def _size(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def left_over(ledger: Ledger) -> str:
    """After all ranks have returned: a call that other ranks never made; "" if there is none."""
    if skipped := ledger.skipped():
        entry, missing = skipped
        return f"{ranks_text(missing)} never entered {ledger.name(entry)}{at(entry.where)}"
    if send := ledger.unreceived():
        return astray([send], ledger) or (
            f"rank {send.rank}'s {ledger.name(send)}{at(send.where)} was never received: "
            f"rank {send.peer} returned without a recv for it"
        )
    return ""


def astray(waits: list[Entry], ledger: Ledger) -> str:
    """A send and a receive of the same two ranks that never meet; "" if there is none."""
    for entry in waits:
        if not entry.p2p or (other := ledger.astray(entry)) is None:
            continue
        s, r = (entry, other) if entry.op == "send" else (other, entry)
        if s.group == r.group:
            ours, theirs = (f"with tag {e.tag}" for e in (s, r))
            why = "both ends must have the same tag"
        else:
            ours, theirs = (f"in {ledger.group(e)}" for e in (s, r))
            why = "both ends must name the same group"
        return (
            f"rank {s.rank} sends to rank {r.rank} {ours}{at(s.where)}, but rank {r.rank} "
            f"receives from rank {s.rank} {theirs}{at(r.where)}: {why}"
        )
    return ""
