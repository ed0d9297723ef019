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
    p = len(schedule)
    v = _complete(schedule)
    cost = {"F": forward, "B": backward}
    end: dict[tuple[str, int, int], float] = {}  # (kind, microbatch, layer block) -> end time
    at = [0] * p  # next operation of each stage
    clock = [0.0] * p
    timeline = []
    while any(at[s] < len(schedule[s]) for s in range(p)):
        moved = False
        for s in range(p):
            while at[s] < len(schedule[s]):
                kind, i, chunk = schedule[s][at[s]]
                block = chunk * p + s
                ready = _ready(kind, i, block, p, v, end, send)
                if ready is None:
                    break
                start = max(clock[s], ready)
                clock[s] = end[kind, i, block] = start + cost[kind]
                timeline.append((s, kind, i, chunk, start, clock[s]))
                at[s] += 1
                moved = True
        if not moved:
            waiting = [
                f"stage {s} at {schedule[s][at[s]]}" for s in range(p) if at[s] < len(schedule[s])
            ]
            raise ValueError("the schedule deadlocks: " + ", ".join(waiting))
    makespan = max(clock)
    busy = sum(cost[kind] for stage in schedule for kind, _, _ in stage)
    return {
        "makespan": makespan,
        "bubble": 1 - busy / (p * makespan) if makespan else 0.0,
        "peak_live": [_peak(stage) for stage in schedule],
        "timeline": sorted(timeline, key=lambda op: (op[4], op[0])),
    }


def _ready(kind: str, i: int, block: int, p: int, v: int, end: dict, send: float) -> float | None:
    """When the input of an operation is there, None while it is not computed yet."""
    step = -1 if kind == "F" else 1
    before = block + step
    times = []
    if kind == "B":  # needs its own activations
        times.append(end.get(("F", i, block)))
    if 0 <= before < p * v:
        arrived = end.get((kind, i, before))
        latency = send if before % p != block % p else 0.0
        times.append(None if arrived is None else arrived + latency)
    return None if None in times else max(times, default=0.0)


def _peak(stage: list[Op]) -> int:
    live = peak = 0
    for kind, _, _ in stage:
        live += 1 if kind == "F" else -1
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
