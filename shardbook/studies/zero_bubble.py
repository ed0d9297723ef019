"""Schedules that split the backward pass: PyTorch's orders, for our clock and our runner.

An operation is ``(kind, microbatch, block)``: kind "F" forward, "B" full backward, "I" the gradient
of the input only, "W" that of the weights. Blocks are numbered through the whole model, so any
placement on ranks can be played and run: looped, or in a V where rank 0 has the first and the last.
"""

from .._seams import schedule_operations
from ..parallel.schedules import Op

SPLIT = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}  # input and weight gradients cost a forward each


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
