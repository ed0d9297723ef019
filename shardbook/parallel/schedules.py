"""Pipeline schedules as data: for each stage the list of what it computes, in order.

An operation is ``(kind, microbatch, chunk)`` with kind "F" or "B". Chunk c of stage s is layer
block c * num_stages + s of the model. The simulator plays a schedule against a clock.
"""

Op = tuple[str, int, int]
Schedule = list[list[Op]]


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965). Every micro-batch is live at once."""
    _positive(num_stages=num_stages, num_microbatches=num_microbatches)
    order = range(num_microbatches)
    return [[("F", i, 0) for i in order] + [("B", i, 0) for i in order] for _ in range(num_stages)]


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Backwards start as early as they can: at most p - s micro-batches live.

    Stage s runs p - s - 1 forwards to fill the pipe, then one forward and one backward in turn,
    then the backwards that are left. The same bubble as GPipe. With one optimizer step after all
    micro-batches, as here, it is PipeDream-Flush (arXiv 2006.09503) or DAPPLE (arXiv 2007.01045).
    """
    _positive(num_stages=num_stages, num_microbatches=num_microbatches)
    schedule = []
    for stage in range(num_stages):
        warm = min(num_stages - stage - 1, num_microbatches)
        forwards = [("F", i, 0) for i in range(num_microbatches)]
        backwards = [("B", i, 0) for i in range(num_microbatches)]
        schedule.append(_alternate(forwards, backwards, warm))
    return schedule


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Each stage holds v chunks of the model, so the pipe fills v times faster (arXiv 2104.04473).

    Micro-batches go through the chunks in groups of p. The bubble shrinks to (p-1)/(vm+p-1); every
    boundary between chunks is one more message.
    """
    _positive(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    p, m, v = num_stages, num_microbatches, num_chunks
    if m % p:
        raise ValueError(
            f"{m} micro-batches do not divide by {p} stages: an interleaved schedule sends them "
            f"through the chunks in groups of {p}"
        )
    schedule = []
    for stage in range(p):
        forwards, backwards = [], []
        for k in range(m * v):
            group, inside = divmod(k, p * v)
            chunk, i = divmod(inside, p)
            forwards.append(("F", group * p + i, chunk))
            backwards.append(("B", group * p + i, v - 1 - chunk))
        warm = min(2 * (p - stage - 1) + (v - 1) * p, m * v)
        schedule.append(_alternate(forwards, backwards, warm))
    return schedule


def _alternate(forwards: list[Op], backwards: list[Op], warm: int) -> list[Op]:
    """`warm` forwards, then a forward and a backward in turn, then the backwards left."""
    order = forwards[:warm]
    for i, forward in enumerate(forwards[warm:]):
        order += [forward, backwards[i]]
    return order + backwards[len(forwards) - warm :]


def bubble_fraction(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> float:
    """The idle share of all ranks' time: (p-1) / (v m + p - 1), with sending for free."""
    _positive(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    p, m, v = num_stages, num_microbatches, num_chunks
    return (p - 1) / (v * m + p - 1)


def simulate(
    schedule: Schedule, forward: float = 1.0, backward: float = 2.0, send: float = 0.0
) -> dict:
    """Play a schedule: every operation starts once its stage is free and its input has arrived.

    forward and backward are the times of one chunk's operation, send the latency of a message
    between different ranks. Returns makespan, bubble (idle share of all ranks' time), peak_live
    (forwards whose backward has not ended, per rank) and timeline, a list of
    (rank, kind, microbatch, chunk, start, end) by start. All times are simulated.

    Raises ValueError for a schedule that deadlocks or does not do all the work exactly once.
    """
    _complete(schedule)
    played = play(by_block(schedule), {"F": forward, "B": backward}, send)
    p = len(schedule)  # chunk c of stage s is block c p + s
    played["timeline"] = [(s, kind, i, b // p, *t) for s, kind, i, b, *t in played["timeline"]]
    return played


def play(order: list[list[Op]], cost: dict[str, float], send: float = 0.0) -> dict:
    """The clock of `simulate` for operations (kind, microbatch, block), with blocks on any rank.

    Besides "F" and "B", a full backward, there are its two parts: "I", the gradient of the input,
    and "W", that of the weights. Returns what `simulate` does, with blocks in the timeline; a
    micro-batch's block lives until its B or W. Raises ValueError for an order that deadlocks.
    """
    rank_of = {block: r for r, ops in enumerate(order) for _, _, block in ops}
    end: dict[Op, float] = {}
    at, clock, timeline = [0] * len(order), [0.0] * len(order), []
    while any(at[r] < len(ops) for r, ops in enumerate(order)):
        moved = False
        for r, ops in enumerate(order):
            while (
                at[r] < len(ops) and (ready := _ready(ops[at[r]], rank_of, end, send)) is not None
            ):
                op = ops[at[r]]
                start = max(clock[r], ready)
                clock[r] = end[op] = start + cost[op[0]]
                timeline.append((r, *op, start, clock[r]))
                at[r] += 1
                moved = True
        if not moved:
            stuck = [f"rank {r} at {o[at[r]]}" for r, o in enumerate(order) if at[r] < len(o)]
            raise ValueError("the schedule deadlocks: " + ", ".join(stuck))
    busy, makespan = sum(cost[op[0]] for ops in order for op in ops), max(clock)
    return {
        "makespan": makespan,
        "bubble": 1 - busy / (len(order) * makespan) if makespan else 0.0,
        "peak_live": [_peak(ops) for ops in order],
        "timeline": sorted(timeline, key=lambda op: (op[4], op[0])),
    }


def _ready(op: Op, rank_of: dict[int, int], end: dict[Op, float], send: float) -> float | None:
    """When the input of an operation is there, None while it is not computed yet."""
    kind, i, block = op
    times = []
    if kind != "F":  # a backward needs its own forward, W its own I
        times.append(end.get(("I" if kind == "W" else "F", i, block)))
    before = {"F": block - 1, "W": -1}.get(kind, block + 1)
    if before in rank_of:
        done = end.get(("F" if kind == "F" else "B", i, before))
        if done is None and kind != "F":
            done = end.get(("I", i, before))  # the gradient that we wait for is there after I
        latency = send if rank_of[before] != rank_of[block] else 0.0
        times.append(None if done is None else done + latency)
    return None if None in times else max(times, default=0.0)


def by_block(schedule: Schedule) -> list[list[Op]]:
    """A schedule of chunks (chunk c of stage s is block c p + s) with blocks instead."""
    p = len(schedule)
    return [[(kind, i, c * p + s) for kind, i, c in ops] for s, ops in enumerate(schedule)]


def _peak(stage: list[Op]) -> int:
    live = peak = 0
    for kind, _, _ in stage:
        live += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
        peak = max(peak, live)
    return peak


def _complete(schedule: Schedule) -> int:
    """The number of chunks; ValueError unless every stage does all the work exactly once."""
    if not schedule or not any(schedule):
        raise ValueError("the schedule is empty: expected a list of operations for every stage")
    m = 1 + max(i for stage in schedule for _, i, _ in stage)
    v = 1 + max(chunk for stage in schedule for _, _, chunk in stage)
    wanted = {(kind, i, chunk) for kind in "FB" for i in range(m) for chunk in range(v)}
    for s, stage in enumerate(schedule):
        missing, extra = wanted - set(stage), set(stage) - wanted
        if missing or extra or len(stage) != len(wanted):
            twice = sorted({op for op in stage if stage.count(op) > 1})
            raise ValueError(
                f"stage {s} does not do all the work exactly once: "
                f"missing {sorted(missing)[:3]}, unknown {sorted(extra)[:3]}, repeated {twice[:3]}"
            )
    return v


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, expected at least 1")
