"""Ranks in a real kernel: cells' functions and lines, the magic, interrupt, restart, death."""

import os
import queue
import re
import signal
import time

import pytest
from jupyter_client.manager import start_new_kernel

from tests.processes import alive, descendants, wait_until

pytestmark = pytest.mark.usefixtures("on_cpu")  # what is tested is how ranks start, fail and end

SECONDS = 90


class Kernel:
    def __init__(self):
        self.manager, self.client = start_new_kernel(startup_timeout=SECONDS)
        assert self.run("import shardbook as sb, torch, torch.distributed as dist, time") == ""

    def start(self, code):
        return self.client.execute(code)

    def finish(self, ident):
        """What the cell printed, displayed and raised, as text."""
        shown = []
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != ident:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif message["msg_type"] in ("display_data", "execute_result"):
                shown.append(content["data"].get("text/plain", ""))
            elif message["msg_type"] == "error":
                shown.append("\n".join(content["traceback"]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(shown)
        raise TimeoutError(f"the cell did not end within {SECONDS} s: {shown}")

    def run(self, code):
        return self.finish(self.start(code))

    def ranks(self):
        """Process ids of the ranks: what hangs below the fork server."""
        pid = self.manager.provisioner.process.pid
        children = self.children()
        return {p for c in children for p in descendants(c)} if pid else set()

    def children(self):
        pid = self.manager.provisioner.process.pid
        below = descendants(pid)
        return below - {p for c in below for p in descendants(c)}


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def test_a_local_of_a_ranks_cell_is_no_name_of_the_notebook(kernel):
    kernel.run("import threading\nlock = threading.Lock()")  # which can't be sent
    text = kernel.run("%%ranks 2\ndef step(lock):\n    return lock + 1\nprint(step(1))")
    assert text.strip() == "[ranks 0-1] 2", text


def test_what_a_cell_defines_runs_on_ranks(kernel):
    text = kernel.run(
        "scale = 2\n"
        "class Doubler:\n"
        "    def __call__(self, x): return x * scale\n"
        "def step(f):\n"
        "    x = f(torch.ones(3))\n"
        "    dist.all_reduce(x)\n"
        "    print('sum', x.tolist()); print('I am', dist.get_rank())\n"
        "    return x[0].item()\n"
        "torch.randn(512, 512) @ torch.randn(512, 512)\n"  # OpenMP has run in the parent
        "sb.run(step, Doubler(), world_size=2).values"
    )
    assert text == "[ranks 0-1] sum [4.0, 4.0, 4.0]\n[rank 0] I am 0\n[rank 1] I am 1\n[4.0, 4.0]"


def test_a_message_names_the_line_of_the_cell(kernel):
    text = kernel.run(
        "def skip():\n"
        "    if dist.get_rank() != 1:\n"
        "        dist.all_reduce(torch.ones(3))\n"
        "\n"
        "sb.run(skip, world_size=2)"
    )
    assert text == (
        "RankError: rank 1 never entered all_reduce #1 (cell line 3); rank 0 is waiting\n"
        "  rank 1: returned"
    )
    text = kernel.run("def bad():\n    raise ValueError('boom')\nsb.run(bad, world_size=2)")
    assert text == (
        "RankError: ranks 0-1 raised ValueError: boom (cell line 2)\n"
        "    cell line 2 in bad: raise ValueError('boom')"
    )


def test_an_unwritten_exercise_on_ranks_is_no_error(kernel):
    text = kernel.run(
        "def ring():\n    raise NotImplementedError('exercise 1: ring is not written yet')\n"
        "sb.run(ring)"
    )
    assert text.strip() == "exercise 1: ring is not written yet"


def test_magic(kernel):
    text = kernel.run(
        "%%ranks 3\n"
        "x = torch.full((2,), float(rank), device=device)\n"
        "dist.all_reduce(x)\n"
        "print(scale, world_size)\n"
        "x.tolist()"
    )
    assert text == "[ranks 0-2] 2 3\n[ranks 0-2] [3.0, 3.0]\n"
    text = kernel.run("%%ranks 2 --timeout 30\nif rank == 1:\n    1 / 0\ndist.barrier()")
    assert "RankError: rank 1 raised ZeroDivisionError: division by zero (cell line 3)" in text
    assert "rank 0: waiting in barrier #1 (cell line 4)" in text
    assert "expected %%ranks [number of ranks]" in kernel.run("%%ranks four\npass")
    assert "world_size is 0" in kernel.run("%%ranks 0\npass")
    assert "SyntaxError" in kernel.run("%%ranks 2\nx = = 3")


def test_magic_sends_what_the_cell_reads_and_nothing_else(kernel):
    kernel.run("import threading\nlk = item = rank = threading.Lock()")
    assert "[ranks 0-1] 3" in kernel.run("%%ranks 2\nlk = 3\nprint(lk)")
    assert "[ranks 0-1] 1.0" in kernel.run("%%ranks 2\nprint(torch.ones(1).item())")
    assert "[rank 1] 1" in kernel.run("%%ranks 2\nprint(rank)")
    assert "which can't be sent to the ranks" in kernel.run("%%ranks 2\nprint(lk)")
    for line in ("%time x = 1", "!echo a", "print?"):
        assert "don't run on ranks: take them out" in kernel.run(f"%%ranks 2\n{line}")
    assert "expected %%ranks" in kernel.run("%%ranks 2 3\npass")


def test_magic_with_trace(kernel):
    text = kernel.run("%%ranks 2 --trace\ndist.all_reduce(torch.ones(3))")
    assert "Error" not in text
    assert re.search("trace", text, re.IGNORECASE)


def test_rank_0_is_seen_while_a_long_run_lasts(kernel):
    ident = kernel.start(
        "def slow():\n"
        "    for i in range(10):\n"
        "        print('step', i) if dist.get_rank() == 0 else None\n"
        "        time.sleep(1)\n"
        "import os; os.environ['SHARDBOOK_LIVE'] = '1'\n"
        "sb.run(slow, world_size=2)"
    )
    first = None
    while first is None:
        message = kernel.client.get_iopub_msg(timeout=SECONDS)
        if message["msg_type"] == "stream":
            first = message["content"]["text"]
    assert first.startswith("[rank 0] step 0\n") and "step 9" not in first
    rest = kernel.finish(ident)
    assert (first + rest).count("step 9") == 1
    assert "Result of 2 ranks" in rest


def test_interrupt_ends_the_ranks_and_the_next_cell_runs(kernel):
    ident = kernel.start(
        "def sleeps():\n    print('once')\n    time.sleep(1e6)\n"
        "sb.run(sleeps, world_size=2, echo=False)"
    )
    assert wait_until(lambda: len(kernel.ranks()) >= 2, 30)
    ranks = kernel.ranks()
    time.sleep(0.5)
    kernel.manager.interrupt_kernel()
    text = kernel.finish(ident)
    assert re.fullmatch(
        r"interrupted after \d+ s\n  ranks 0-1: at cell line 3 in sleeps: time.sleep\(1e6\)\n"
        "KeyboardInterrupt: the ranks are ended",
        text,
    ), text
    assert not any(map(alive, ranks))
    assert kernel.run("sb.run(step, Doubler(), world_size=2).values").endswith("[4.0, 4.0]")


def test_a_restart_during_a_run_leaves_no_rank(kernel):
    kernel.start("sb.run(time.sleep, 1e6, world_size=2)")
    assert wait_until(lambda: len(kernel.ranks()) >= 2, 30)
    old = kernel.ranks() | kernel.children()
    kernel.manager.restart_kernel(now=True)
    assert wait_until(lambda: not any(map(alive, old)), 10)
    kernel.client.wait_for_ready(timeout=SECONDS)
    assert kernel.run("import shardbook as sb; sb.run(int, 3, world_size=2).values") == "[3, 3]"


def test_a_kernel_that_dies_takes_its_ranks_with_it(kernel):
    kernel.start("import time; sb.run(time.sleep, 1e6, world_size=2)")
    assert wait_until(lambda: len(kernel.ranks()) >= 2, 30)
    old = kernel.ranks() | kernel.children()
    os.kill(kernel.manager.provisioner.process.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(alive, old)), 10)
