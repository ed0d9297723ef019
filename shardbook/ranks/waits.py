"""Who waits for whom, followed to the rank that all wait for in the end, in words."""

from collections import defaultdict
from collections.abc import Iterable

from ..words import at, ranks_text
from .ledger import Ledger
from .log import Entry, Rank

MOST = 4  # links of a chain that are told one by one


def stuck(ranks: list[Rank], ledger: Ledger) -> dict[int, Entry]:
    """The call each rank waits in that others have not made."""
    running = [r for r in ranks if not r.gone]
    found = {r.rank: [e for e in r.waiting.values() if ledger.missing(e)] for r in running}
    if not any(found.values()):  # DDP waits in C++, unseen: what it waits for is at least open
        for r in running:
            found[r.rank] = [e for e in r.calls.values() if not e.p2p and ledger.missing(e)]
    return {r: entries[0] for r, entries in found.items() if entries}


def headline(ranks: list[Rank], ledger: Ledger) -> tuple[str, set[int]]:
    """What the ranks wait for, and the ranks of which all is said; "" if none waits."""
    waits = stuck(ranks, ledger)
    if not waits:
        return "", set()
    links = {r: ledger.missing(e) for r, e in waits.items()}
    depth = _depths(links)
    if not depth:
        return _circle(waits, links, ledger)
    first = {r: waits[r] for r in sorted(depth) if depth[r] == 1}
    causes = sorted({m for r in first for m in links[r] if m not in waits})
    later = _later(links, depth)
    some = next(iter(first.values()))
    if not some.p2p and all((e.group, e.index) == (some.group, some.index) for e in first.values()):
        text = f"{ranks_text(causes)} never entered {ledger.name(some)}{at(some.where)}; "
        return text + f"{ranks_text(first)} {_are(first)} waiting{later}", set(first)
    if len(first) == 1:
        return _alone(some, ledger) + later, set(first)
    text = "; ".join(_absent(ranks, causes, first, links, ledger))
    if len(causes) == 1:
        waiting = f"{ranks_text(first)} wait for it"
    else:
        waiting = f"{ranks_text(first)} wait for them"
    return f"{text}; {waiting}{later}", {r for r in causes if ranks[r].returned}


def _are(ranks: Iterable[int]) -> str:
    return "is" if len(list(ranks)) == 1 else "are"


def _depths(links: dict[int, list[int]]) -> dict[int, int]:
    """How many waits lie between a rank and one that does not wait; circles have no end."""
    depth: dict[int, int] = {}
    step = 0
    while True:
        step += 1
        reached = {m for m in depth} | ({m for ms in links.values() for m in ms} - set(links))
        new = [r for r in links if r not in depth and reached & set(links[r])]
        if not new:
            return depth
        depth |= dict.fromkeys(new, step)


def _later(links: dict[int, list[int]], depth: dict[int, int]) -> str:
    """ ", rank 0 waits for rank 1" for those that wait for ranks that wait themselves."""
    told: dict[tuple, list[int]] = defaultdict(list)
    for r in sorted(depth, key=lambda r: (depth[r], r)):
        if depth[r] > 1:
            nearer = [m for m in links[r] if depth.get(m) == depth[r] - 1]
            told[tuple(nearer)].append(r)
    text = ""
    for n, (nearer, waiting) in enumerate(told.items()):
        if n == MOST:
            return text + ", and so on"
        verb = "waits" if len(waiting) == 1 else "wait"
        text += f", {ranks_text(waiting)} {verb} for {ranks_text(nearer)}"
    return text


def _alone(entry: Entry, ledger: Ledger) -> str:
    """One rank waits in a send or receive for one that does not wait."""
    head = f"rank {entry.rank} waits in {ledger.name(entry)}{at(entry.where)}, but "
    if entry.op == "send":
        return head + f"rank {entry.peer} does not receive it"
    return head + ("no rank sends" if entry.peer is None else f"rank {entry.peer} never sends it")


def _absent(
    ranks: list[Rank],
    causes: list[int],
    first: dict[int, Entry],
    links: dict[int, list[int]],
    ledger: Ledger,
) -> Iterable[str]:
    """ "rank 2 returned without a recv from rank 1", for what those who wait for it need."""
    needs: dict[int, list[Entry]] = {c: [] for c in causes}
    for r, entry in first.items():
        for c in set(causes) & set(links[r]):
            needs[c].append(entry)
    said: dict[tuple, list[int]] = defaultdict(list)
    for c in causes:
        said[ranks[c].returned, _other_ends(needs[c], ledger)].append(c)
    for (returned, calls), who in said.items():
        how = "returned without" if returned else f"{'has' if len(who) == 1 else 'have'} not made"
        yield f"{ranks_text(who)} {how} {calls}"


def _other_ends(entries: list[Entry], ledger: Ledger) -> str:
    """The calls that would let these go on: "a recv from rank 1 and sends to ranks 2-3"."""
    wanted: dict[tuple, list[int]] = defaultdict(list)
    for e in entries:
        tag = f" with tag {e.tag}" if e.tag else ""
        ends = {"send": ("recv", "from"), "recv": ("send", "to")}.get(e.op, (ledger.name(e), ""))
        wanted[(*ends, tag)].append(e.rank)
    calls = []
    for (op, way, tag), ranks in wanted.items():
        op = f"{op}s" if way and len(ranks) > 1 else f"a {op}" if way else op
        calls.append(f"{op} {way} {ranks_text(ranks)}{tag}" if way else op)
    if len(calls) > 3:
        calls = [*calls[:2], f"{len(calls) - 2} calls more"]
    return " and ".join(calls)


def _circle(
    waits: dict[int, Entry], links: dict[int, list[int]], ledger: Ledger
) -> tuple[str, set[int]]:
    """Ranks that all wait for each other: none of them can go on."""
    path = [min(waits)]
    while (step := min(links[path[-1]])) not in path:
        path.append(step)
    circle = path[path.index(step) :]
    start = circle.index(min(circle))
    circle = circle[start:] + circle[:start]
    entries = [waits[r] for r in circle]
    ops = {e.op for e in entries}
    head = entries[0]
    if ops == {"send"}:
        text = _alone(head, ledger) + ": it is in a send itself"
        text += f", as all of {ranks_text(circle)} in a circle" if len(circle) > 2 else ""
        if all(e.blocking for e in entries):
            return text + " (use isend, or let one side receive first)", {head.rank}
        return text + " (wait for an isend after the recv, not before)", {head.rank}
    if ops == {"recv"} and all(e.peer is not None for e in entries):
        text = f"rank {head.rank} waits in {ledger.name(head)}{at(head.where)}, but rank "
        text += f"{head.peer} waits in a recv itself"
        text += f", as all of {ranks_text(circle)} in a circle" if len(circle) > 2 else ""
        return text + " (one of them must send first)", {head.rank}
    beside = [
        r for r, e in waits.items()
        if not e.p2p and (e.group, e.index) == (head.group, head.index)
    ] or [head.rank]  # fmt: skip
    text = f"{ranks_text(beside)} {'waits' if len(beside) == 1 else 'wait'}"
    for n, (entry, target) in enumerate(zip(entries, circle[1:] + circle[:1], strict=True)):
        if n == MOST:
            text += ", and so on in a circle"
            break
        text += ", which waits" if n else ""
        text += f" in {ledger.name(entry)}{at(entry.where)}"
        text += "" if entry.p2p and entry.peer == target else f" for rank {target}"
    if any(e.p2p for e in entries):
        return text + ": none can go on", {*beside, *circle[:MOST]}
    return text + ": all ranks must use their groups in the same order", {*beside, *circle[:MOST]}
