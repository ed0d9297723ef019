"""Two ranks that train a small pipeline until they are stopped: ``python -m tests.warm_pipeline``.

On a virtual machine, code that has not run for a tenth of a second takes milliseconds to get going
again. Ranks that sleep through long kernels meet that at every message, and what one measures then
is the machine. With this beside them, at the lowest priority, what they run is never cold.
"""

import os
import time

import shardbook as sb

from .test_pipeline_parallel import OURS, paced_step


def train() -> None:
    while True:
        paced_step(OURS["1F1B"](2, 4), 0)
        time.sleep(0.01)


if __name__ == "__main__":
    if hasattr(os, "SCHED_IDLE"):  # only where a core is free; ranks and their threads inherit it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    sb.run(train, world_size=2, timeout=600)
