"""Process trees: found whole, ended whole, and nothing else with them."""

import os
import subprocess
import sys

from shardbook.ranks import processes
from tests.processes import alive, wait_until

TREE = """
import subprocess, sys
inner = "import time; time.sleep(100)"
child = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def tree() -> tuple[subprocess.Popen, int]:
    """A process of a group of its own, and the pid of its child, which has left that group."""
    top = subprocess.Popen(
        [sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True, process_group=0
    )
    return top, int(top.stdout.readline())


def test_trees_end_whole_and_their_neighbours_stay():
    trees, (neighbour, inner) = [tree() for _ in range(2)], tree()
    try:
        assert {inner, *(child for _, child in trees)} <= {
            p.pid for p in processes.below(os.getpid())
        }
        processes.end_trees([top.pid for top, _ in trees])
        pids = [pid for top, child in trees for pid in (top.pid, child)]
        assert wait_until(lambda: not any(map(alive, pids)), 5)
        assert alive(neighbour.pid) and alive(inner)
        processes.end_trees([])
        assert alive(neighbour.pid)
    finally:
        processes.end_trees([neighbour.pid])
        for top in (neighbour, *(top for top, _ in trees)):
            top.wait(10)
            top.stdout.close()
    assert wait_until(lambda: not alive(inner), 5)


def test_what_has_ended_has_nothing_below():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert processes.below(done.pid) == []
    processes.end_trees([done.pid])
