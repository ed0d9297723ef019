"""What happened before what, across ranks (Lamport, 1978): a rank's own order and its messages."""

from collections import Counter, defaultdict

from .steps import Step

Past = dict[int, list[dict[int, int]]]


def pasts(steps: dict[int, list[Step]]) -> Past:
    """``pasts(steps)[r][i][a]``: how many of rank a's calls came before call i of rank r.

    A collective's members leave it after all have entered; a recv comes after its send, a send and
    a collective only after what this rank did before. One entry more than calls: the end. Where a
    trace lacks the other side, nothing is waited for.
    """
    members: dict[tuple, dict[int, int]] = defaultdict(dict)  # (lane, number) -> rank: call
    ends: dict[tuple, tuple[int, int]] = {}  # (channel, number) -> the rank and call that sends
    keys: dict[int, list[tuple]] = {}
    for rank, mine in steps.items():
        counts: Counter = Counter()
        keys[rank] = []
        for i, step in enumerate(mine):
            channel = _channel(rank, step)
            key = (channel, counts[step.op == "recv", channel])
            counts[step.op == "recv", channel] += 1
            keys[rank].append(key)
            if step.op == "send":
                ends[key] = (rank, i)
            elif step.op != "recv":
                members[key][rank] = i
    past: Past = {rank: [] for rank in steps}
    now = {rank: {} for rank in steps}  # the calls that this rank knows of
    left: dict[tuple[int, int], dict[int, int]] = {}  # what was known after a call
    at = dict.fromkeys(steps, 0)

    def ready(rank: int) -> list[tuple[int, int]] | None:
        """The calls of other ranks that this one's next call joins; None: not reached yet."""
        step, key = steps[rank][at[rank]], keys[rank][at[rank]]
        if step.op == "send":
            return []
        if step.op == "recv":
            sender = ends.get(key)
            return [sender] if sender in left else [] if sender is None else None
        there = members[key]
        return [*there.items()] if all(at[other] >= i for other, i in there.items()) else None

    def advance(rank: int, joined: list[tuple[int, int]]) -> None:
        i = at[rank]
        step, known = steps[rank][i], dict(now[rank])
        if step.op == "recv":
            for end in joined:
                known = _later(known, left[end])
        past[rank].append(known)
        if step.op not in ("send", "recv"):
            for other, call in joined:
                entered = past[other][call] if at[other] > call else now[other]
                known = _later(known, entered | {other: call + 1})
        now[rank] = left[rank, i] = known | {rank: i + 1}
        at[rank] += 1

    while open_ := [rank for rank in steps if at[rank] < len(steps[rank])]:
        free = [(rank, joined) for rank in open_ if (joined := ready(rank)) is not None]
        # if all wait for each other, as in a trace of a hang or of receives posted early, one goes
        for rank, joined in free or [(open_[0], [])]:
            advance(rank, joined)
    for rank in steps:
        past[rank].append(now[rank])
    return past


def _channel(rank: int, step: Step) -> tuple:
    ends = ()
    if step.op == "send":
        ends = (rank, step.peer, step.tag)
    if step.op == "recv":
        ends = (step.peer, rank, step.tag)
    return (step.group, step.label, step.twin, ends) if step.group else (rank, step.op)


def _later(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    return {rank: max(a.get(rank, 0), b.get(rank, 0)) for rank in a | b}
