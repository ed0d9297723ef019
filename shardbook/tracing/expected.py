"""A trace that is written down instead of recorded: what a recorded one is compared with."""

from collections import Counter
from collections.abc import Iterable, Mapping

from ..calls import OPS, ROOTED
from .events import names_of
from .merge import Trace
from .steps import P2P


def expected_calls(
    calls: Mapping[int, Iterable[tuple]], title: str = "expected", label: str = ""
) -> Trace:
    """The trace of calls that are written down, to compare a recorded one with.

    calls gives each rank's in order: ``(op, bytes)`` for a collective of all ranks, ``(op, bytes,
    peer)`` for send, recv and a collective with a root, ``(op, bytes, peer or None, group)`` for a
    group, a list of ranks. Bytes are those of the full tensor, as `Call` counts them.
    """
    everyone, events = sorted(calls), []
    for rank in everyone:
        events += names_of(rank, f"rank {rank} (simulated)", {1: title})
        numbers: Counter = Counter()
        for i, call in enumerate(calls[rank]):
            op, nbytes, peer, group = (*call, *[None] * (4 - len(call)))
            group = everyone if group is None else sorted(group)
            if op not in OPS.values() or (op in ROOTED) != (peer is not None):
                raise ValueError(
                    f"rank {rank}, step {i + 1}: {call} is no call; expected (op, bytes), and for "
                    f"{', '.join(sorted(ROOTED))} (op, bytes, peer), op of "
                    f"{', '.join(sorted(set(OPS.values())))}"
                )
            if rank not in group or (peer is not None and peer not in group):
                raise ValueError(f"rank {rank}, step {i + 1}: {call} is outside of its {group}")
            args = {"bytes": nbytes, "group": group, "number": numbers[op, tuple(group)]}
            args |= {"label": label} if label else {}
            numbers[op, tuple(group)] += 1
            name = op
            if op in P2P:
                name = f"{op} {'to' if op == 'send' else 'from'} {peer}"
            if peer is not None:
                args["peer" if op in P2P else "root"] = peer
            events.append(
                {"ph": "X", "pid": rank, "tid": 1, "name": name, "ts": 10 * i, "dur": 8}
                | {"cat": "p2p" if op in P2P else "collective", "args": args}
            )
    result = Trace(title=title)
    order = sorted(events, key=lambda e: (e["ph"] != "M", e.get("ts", 0)))
    result.foreign = {"traceEvents": order, "displayTimeUnit": "ms"}
    return result
