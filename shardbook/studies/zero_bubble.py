"""Schedules that split the backward pass, played by a clock: PyTorch's orders beside ours.

An operation is ``(kind, microbatch, block)``: kind "F" forward, "B" full backward, "I" the gradient
of the input only, "W" that of the weights. Blocks are numbered through the whole model, so any
placement on ranks can be played: looped, or in V shape where rank 0 has the first and last block.
"""

from .._seams import schedule_operations
from ..parallel.schedules import Op, Schedule

SPLIT = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}  # input and weight gradients cost a forward each


def by_block(schedule: Schedule) -> list[list[Op]]:
    """A schedule of chunks (chunk c of stage s is block c p + s) with blocks instead."""
    p = len(schedule)
    return [[(kind, i, c * p + s) for kind, i, c in ops] for s, ops in enumerate(schedule)]


def torch_order(name: str, num_stages: int, num_microbatches: int) -> list[list[Op]]:
    """What each rank computes under PyTorch's schedule, e.g. "1F1B", "ZBVZeroBubble".

    Names as in torch.distributed.pipelining.schedules.get_schedule_class. Pairs that DualPipeV
    overlaps come one after the other. Padding is left out: a gap in a list is no time.
    """
    order = []
    for actions in schedule_operations(name, num_stages, num_microbatches):
        ops: list[Op] = []
        for action in actions:
            for a in (action.sub_actions or (action,)) if action is not None else ():
                if a.computation_type.value in SPLIT:
                    ops.append((a.computation_type.value, a.microbatch_index, a.stage_index))
        # 1F1B's listing counts the last rank's forwards from 1 in torch 2.13 (what runs is right).
        first = min(i for kind, i, _ in ops if kind == "F")
        order.append([(k, i - first if k == "F" else i, block) for k, i, block in ops])
    return order


def play(order: list[list[Op]], cost: dict[str, float] = SPLIT, send: float = 0.0) -> dict:
    """`simulate` for any placement of blocks and for a backward in two parts.

    F waits for F of the block before; B or I for its own F and the B or I of the block after; W for
    its I. Returns what `simulate` does: makespan, bubble, peak_live per rank (a micro-batch's block
    lives until its B or W), and timeline (rank, kind, microbatch, block, start, end). All times are
    simulated. Raises ValueError for an order that deadlocks.
    """
    rank_of = {block: r for r, ops in enumerate(order) for _, _, block in ops}
    last = max(rank_of)
    end: dict[tuple[str, int, int], float] = {}
    at, clock, timeline = [0] * len(order), [0.0] * len(order), []

    def ready(kind: str, i: int, block: int) -> float | None:
        times = []
        if kind != "F":
            times.append(end.get(("I" if kind == "W" else "F", i, block)))
        before = {"F": block - 1, "I": block + 1, "B": block + 1}.get(kind, -1)
        if 0 <= before <= last:
            done = end.get(("F" if kind == "F" else "I", i, before))
            if done is None and kind != "F":
                done = end.get(("B", i, before))
            far = rank_of[before] != rank_of[block]
            times.append(None if done is None else done + (send if far else 0.0))
        return None if None in times else max(times, default=0.0)

    while any(at[r] < len(ops) for r, ops in enumerate(order)):
        moved = False
        for r, ops in enumerate(order):
            while at[r] < len(ops) and (when := ready(*ops[at[r]])) is not None:
                op = ops[at[r]]
                start = max(clock[r], when)
                clock[r] = end[op] = start + cost[op[0]]
                timeline.append((r, *op, start, clock[r]))
                at[r] += 1
                moved = True
        if not moved:
            stuck = [f"rank {r} at {o[at[r]]}" for r, o in enumerate(order) if at[r] < len(o)]
            raise ValueError("the order deadlocks: " + ", ".join(stuck))
    busy, makespan = sum(cost[op[0]] for ops in order for op in ops), max(clock)
    return {
        "makespan": makespan,
        "bubble": 1 - busy / (len(order) * makespan),
        "peak_live": [_peak(ops) for ops in order],
        "timeline": sorted(timeline, key=lambda op: (op[4], op[0])),
    }


def _peak(ops: list[Op]) -> int:
    live = peak = 0
    for kind, _, _ in ops:
        live += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
        peak = max(peak, live)
    return peak
