"""The calls of a trace in order, rank by rank: what a comparison of two traces reads.

A trace just recorded and one read from a file give the same steps, since both are read as the
Chrome trace that `t.save` writes.
"""

import dataclasses
import os
import re
from collections import defaultdict
from typing import Any

from . import foreign

P2P = ("send", "recv")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One communication call of a rank, or one call of a module."""

    op: str  # a module's: "forward of blocks.0.mlp"
    nbytes: int = 0
    dtype: str = ""
    reduce: str = ""  # "sum", "max" …
    group: tuple[int, ...] = ()  # global ranks
    label: str = ""  # the group's own name, if it has one
    twin: int = 0  # of several groups of the same ranks and label: which, in order of first use
    peer: int | None = None  # the other end of send and recv, the root of a rooted collective
    detail: str = ""  # a module's type, inputs and outputs
    tag: int = dataclasses.field(default=0, compare=False)
    where: str = dataclasses.field(default="", compare=False)

    @property
    def lane(self) -> tuple:
        """Calls of one lane are taken in order whatever the rank does in between."""
        ends = (self.op, self.peer) if self.op in P2P else ()
        return (self.group, self.label, self.twin, bool(self.detail), *ends)


def load(trace: Any, what: str = "this") -> tuple[dict, str]:
    """(Chrome trace, name) of a Trace, a run's Result or a path; an error says if it is none."""
    if isinstance(trace, (str, os.PathLike)):
        return foreign.load(trace)[0], str(trace)
    if hasattr(trace, "chrome"):
        return trace.chrome(), trace.title or what
    if not hasattr(trace, "trace"):
        kind = type(trace).__name__
        raise TypeError(f"a trace is compared with a Trace, a run's Result or a path, not a {kind}")
    if trace.trace is None:
        raise ValueError(f"{what} was not traced: run it with sb.run(…, trace=True)")
    return load(trace.trace, what)


def steps(trace: Any, modules: bool = False, what: str = "this") -> dict[int, list[Step]]:
    """Each rank's communication calls in the order in which it made them, modules' if asked for."""
    chrome, what = load(trace, what)
    events = chrome["traceEvents"]
    ranks: dict[Any, int] = {}
    for e in events:
        if e["ph"] == "M" and e["name"] == "process_name":
            named = re.match(r"rank (\d+)\b", str(e["args"].get("name", "")))
            if named:
                ranks[e["pid"]] = int(named[1])
    if not ranks:
        raise ValueError(
            f"{what} is no trace of ranks: no process in it is called 'rank 0'; "
            "expected one that t.save(path) wrote"
        )
    found: dict[int, list[Step]] = {rank: [] for rank in sorted(ranks.values())}
    names: dict[int, list[str]] = defaultdict(list)  # of the groups, step by step
    for e in events:
        if e["ph"] != "X" or e["pid"] not in ranks:
            continue
        rank = ranks[e["pid"]]
        step = _call(e, what) if e.get("cat") in ("collective", "p2p") else None
        if modules and e.get("cat") in ("forward", "backward") and "type" in e.get("args", {}):
            step = _module(e)
        if step is not None:
            found[rank].append(step)
            names[rank].append(str(e["args"].get("group name", "")))
    return _twins(found, names)


def _call(event: dict, what: str) -> Step:
    args = event.get("args") or {}
    group, nbytes, op = args.get("group"), args.get("bytes"), str(event["name"]).split(" ")[0]
    whole = isinstance(group, list) and all(isinstance(r, int) for r in group)
    if not whole or not isinstance(nbytes, int):
        raise ValueError(
            f"{what} has {event['name']!r} without its bytes and group (a list of ranks): expected "
            "a trace that t.save(path) wrote"
        )
    return Step(
        op=op,
        nbytes=nbytes,
        dtype=str(args.get("tensor", "")).partition("[")[0],
        group=tuple(group),
        reduce=str(args.get("reduce", "")),
        label=str(args.get("label", "")),
        peer=args.get("peer" if op in P2P else "root"),
        tag=args.get("tag", 0),
        where=str(args.get("where", "")),
    )


def _module(event: dict) -> Step:
    args, name = event["args"], str(event["name"]).removesuffix(" (backward)")
    shapes = f" {args['inputs']} → {args['outputs']}" if "inputs" in args else ""
    return Step(op=f"{event['cat']} of {name}", detail=f"{args['type']}{shapes}")


def _twins(found: dict[int, list[Step]], names: dict[int, list[str]]) -> dict[int, list[Step]]:
    """Number the groups of the same ranks and label; the names torch gives them are arbitrary."""
    known: dict[tuple, dict[str, int]] = defaultdict(dict)
    out: dict[int, list[Step]] = {}
    for rank, mine in found.items():
        out[rank] = []
        for step, name in zip(mine, names[rank], strict=True):
            twins = known[step.group, step.label]
            twin = twins.setdefault(name, len(twins))
            out[rank].append(dataclasses.replace(step, twin=twin) if twin else step)
    return out


def comparable(*both: dict[int, list[Step]]) -> list[dict[int, list[Step]]]:
    """The same without what one of the two does not record: dtypes, reductions, groups' labels."""
    every = [[s for mine in one.values() for s in mine] for one in both]
    typed = all(s.dtype for one in every for s in one if s.group and s.op != "barrier")
    reducing = all(any(s.reduce for s in one) for one in every)
    unnamed = {s.group for one in every for s in one if not s.label}

    def less(s: Step) -> Step:
        label = "" if s.group in unnamed else s.label
        dtype = s.dtype if typed and s.op != "barrier" else ""
        reduce = s.reduce if reducing else ""
        return dataclasses.replace(s, dtype=dtype, label=label, reduce=reduce)

    return [{rank: [less(s) for s in mine] for rank, mine in one.items()} for one in both]
