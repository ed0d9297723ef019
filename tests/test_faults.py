"""Each thing that goes wrong on ranks: one readable message, nothing left behind, and it goes on.

The faults in the table run in this process; those of a notebook's kernel are at the end.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import shardbook as sb
from tests.processes import alive, descendants, slowness, wait_until

pytestmark = pytest.mark.usefixtures("on_cpu")  # what is tested is how ranks start, fail and end

LINE = r"\(test_faults\.py:\d+\)"


def rank_raises():
    if dist.get_rank() == 2:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(3))


def all_raise():
    raise KeyError("gone")


def raises_what_cannot_be_pickled():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")
            self.lock = threading.Lock()

    raise Odd(1, 2)


def calls_sys_exit():
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()


def calls_os_exit():
    if dist.get_rank() == 1:
        os._exit(0)
    dist.barrier()


def aborts():
    if dist.get_rank() == 3:
        os.abort()
    dist.all_reduce(torch.ones(3))


def is_killed():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def sleeps_for_ever():
    if dist.get_rank() == 3:
        time.sleep(1e6)
    dist.all_reduce(torch.ones(3))


def spins_for_ever():
    if dist.get_rank() == 1:
        while True:
            pass
    dist.all_reduce(torch.ones(3))


def ignores_sigterm_and_sleeps():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1e6)


def skips_a_collective():
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() != 3:
        dist.all_reduce(torch.ones(3))


def skips_a_collective_that_does_not_block():
    if dist.get_rank() != 2:
        dist.broadcast(torch.ones(3), src=0, async_op=True)


def calls_different_collectives():
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(3), src=0)
    else:
        dist.all_reduce(torch.ones(3))


def calls_in_another_order():
    x, y = torch.ones(3), torch.ones(4)
    if dist.get_rank() == 0:
        dist.all_gather_into_tensor(torch.empty(16), y)
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(16), y)


def passes_different_shapes():
    dist.all_reduce(torch.ones(5 if dist.get_rank() == 2 else 4))


def passes_transposed_shapes():  # gloo adds them without a word
    dist.all_reduce(torch.ones(2, 3) if dist.get_rank() == 2 else torch.ones(3, 2))


def passes_different_dtypes():  # gloo adds their bits without a word
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() == 2 else torch.float32))


def names_different_roots():
    dist.broadcast(torch.ones(4), src=1 if dist.get_rank() == 1 else 0)


def sends_against_a_send():
    other = 1 - dist.get_rank()
    dist.send(torch.ones(3), dst=other)
    dist.recv(torch.ones(3), src=other)


def receives_without_a_send():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(3), src=1)


def receives_in_a_ring():
    size = dist.get_world_size()
    dist.recv(torch.ones(3), src=(dist.get_rank() - 1) % size)
    dist.send(torch.ones(3), dst=(dist.get_rank() + 1) % size)


def sends_without_a_receive():
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), dst=1)


def isends_what_nobody_receives():  # gloo drops it without a word
    if dist.get_rank() == 0:
        dist.isend(torch.ones(3), dst=1)


def sends_less_than_is_received():  # gloo takes it without a word
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), dst=1)
    else:
        dist.recv(torch.ones(4), src=0)


def sends_more_than_is_received():  # gloo aborts the process
    if dist.get_rank() == 0:
        dist.send(torch.ones(9), dst=1)
    else:
        dist.recv(torch.ones(4), src=0)


def returns_a_generator():
    return (i for i in range(3)) if dist.get_rank() == 1 else 0


def returns_a_lock_in_a_list():
    return [1, threading.Lock()]


def runs_inside_a_run():
    sb.run(print, world_size=2)


def skips_a_backward_of_ddp():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    for step in range(3):
        loss = model(torch.ones(4, 3)).sum()
        if step < 2 or dist.get_rank() != 1:
            loss.backward()


def skips_a_monitored_barrier():
    if dist.get_rank() == 0:
        dist.monitored_barrier()


def makes_no_group():
    if dist.get_rank() == 0:
        dist.new_group([0, 1])
    else:
        time.sleep(1e6)


def is_not_written():
    raise NotImplementedError("exercise 2: ring_all_reduce is not written yet")


def leaves_a_thread_behind():  # no fault: the run ends all the same
    threading.Thread(target=time.sleep, args=(1e6,)).start()
    raise ValueError("after the thread")


FAULTS = [  # function, ranks, seconds allowed for the run, what the message says, hung
    (rank_raises, 4, 60, rf"^rank 2 raised ValueError: boom {LINE}\n.*in rank_raises: raise.*\n"
     rf"  ranks 0-1, 3: waiting in all_reduce #1 {LINE}$", False),
    (all_raise, 4, 60, rf"^ranks 0-3 raised KeyError: 'gone' {LINE}", False),
    (raises_what_cannot_be_pickled, 2, 60, rf"^ranks 0-1 raised Odd: 1 and 2 {LINE}", False),
    (calls_sys_exit, 2, 60, rf"^rank 1 called sys.exit\(3\) {LINE}", False),
    (calls_os_exit, 2, 60, rf"^rank 1 ended with exit code 0\n"
     rf"  rank 0: waiting in barrier #1 {LINE}$", False),
    (aborts, 4, 60, r"^rank 3 was killed by SIGABRT", False),
    (is_killed, 4, 60, rf"^rank 0 was killed by SIGKILL\n"
     rf"  ranks 1-3: waiting in all_reduce #1 {LINE}$", False),
    (sleeps_for_ever, 4, 4, rf"^rank 3 never entered all_reduce #1 {LINE}; ranks 0-2 are waiting "
     r"\(ended after 4 s\)\n  rank 3: at test_faults.py:\d+ in sleeps_for_ever: time.sleep",
     True),
    (spins_for_ever, 2, 4, r"^rank 1 never entered .*\n  rank 1: at test_faults.py:\d+ in spins",
     True),
    (ignores_sigterm_and_sleeps, 2, 6, r"^no end after 6 s\n  ranks 0-1: at .*time.sleep", True),
    (skips_a_collective, 4, 60, rf"^rank 3 never entered all_reduce #2 {LINE}; ranks 0-2 are "
     r"waiting\n  rank 3: returned", True),
    (skips_a_collective_that_does_not_block, 4, 60, rf"^rank 2 never entered broadcast #1 {LINE}",
     False),
    (skips_a_backward_of_ddp, 2, 60, rf"^rank 1 never entered all_reduce #\d {LINE}; rank 0 is "
     r"waiting", True),
    (skips_a_monitored_barrier, 2, 60, rf"^rank 1 never entered barrier #1 {LINE}", True),
    (makes_no_group, 2, 4, r"^no end after 4 s\n  rank 0: at .* in makes_no_group: dist.new_group\("
     r".*\n  rank 1: at .* time.sleep", True),
    (calls_different_collectives, 4, 60, rf"disagree on collective 1 .*: all_reduce #1 {LINE} on "
     rf"ranks 0, 2-3, broadcast #1 {LINE} on rank 1", False),
    (calls_in_another_order, 4, 60, rf"disagree on collective 1 .*: all_gather #1 {LINE} on rank 0,"
     rf" all_reduce #1 {LINE} on ranks 1-3\. .*same order", False),
    (passes_different_shapes, 4, 60, rf"all_reduce #1 was called with different shapes: \[4\] "
     rf"{LINE} on ranks 0-1, 3, \[5\] {LINE} on rank 2", False),
    (passes_transposed_shapes, 4, 60, r"different shapes: \[3, 2\] .* \[2, 3\] .* rank 2", False),
    (passes_different_dtypes, 4, 60, rf"all_reduce #1 was called with different dtypes: float32 "
     rf"{LINE} on ranks 0-1, 3, int32 {LINE} on rank 2", False),
    (names_different_roots, 2, 60, r"broadcast #1 .* different roots: rank 0 .* rank 1", False),
    (sends_against_a_send, 2, 60, rf"^rank 0 waits in send #1 to rank 1 {LINE}, but rank 1 does not"
     rf" receive it: it is in a send itself .*\n"
     rf"  rank 1: waiting in send #1 to rank 0 {LINE}", True),
    (receives_without_a_send, 2, 60, rf"^rank 0 waits in recv #1 from rank 1 {LINE}, but rank 1 "
     r"never sends it\n  rank 1: returned", True),
    (receives_in_a_ring, 3, 60, r"^rank 0 waits in recv #1 from rank 2", True),
    (sends_without_a_receive, 2, 60, r"^rank 0 waits in send #1 .* rank 1 does not receive it",
     True),
    (isends_what_nobody_receives, 2, 60, rf"^rank 0's send #1 to rank 1 {LINE} was never received: "
     r"rank 1 returned without a recv for it$", False),
    (sends_less_than_is_received, 2, 60, rf"^rank 0 sends float32 \[3\] to rank 1 {LINE}, which "
     rf"receives float32 \[4\] {LINE}", False),
    (sends_more_than_is_received, 2, 60, r"^rank 0 sends float32 \[9\] .* receives float32 \[4\]",
     False),
    (returns_a_generator, 2, 60, r"^rank 1 returned an object of type generator, which can't be",
     False),
    (returns_a_lock_in_a_list, 2, 60, r"^ranks 0-1 returned a list of int, lock", False),
    (runs_inside_a_run, 2, 60, r"sb.run was called inside a rank", False),
    (is_not_written, 4, 60, r"^ranks 0-3 .*exercise 2: ring_all_reduce is not written yet", False),
    (leaves_a_thread_behind, 2, 60, r"after the thread", False),
]  # fmt: skip


def total(k):
    x = torch.full((3,), float(dist.get_rank() * k))
    dist.all_reduce(x)
    return x[0].item()


def ranks_alive(before):
    return descendants(os.getpid()) - before


@pytest.fixture(scope="module")
def before():
    sb.run(total, 1, world_size=1)  # the fork server and its tracker stay
    return descendants(os.getpid())


@pytest.mark.parametrize(
    ("fn", "world_size", "timeout", "says", "hung"), FAULTS, ids=[f[0].__name__ for f in FAULTS]
)
def test_fault(fn, world_size, timeout, says, hung, before):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    start = time.monotonic()
    with pytest.raises(sb.RankError, match=says) as caught:
        sb.run(fn, world_size=world_size, timeout=timeout)
    seconds = time.monotonic() - start
    assert caught.value.hung == hung
    assert isinstance(caught.value, sb.NotWritten) == (fn is is_not_written)
    assert seconds < min(timeout, 8) + 10 * slowness(), "the message comes inside the deadline"
    assert not ranks_alive(before)
    assert sb.run(total, 2, world_size=3).values == [6.0] * 3, "the next run works"
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_causes_are_the_exceptions_of_the_ranks():
    with pytest.raises(sb.RankError) as caught:
        sb.run(rank_raises)
    assert list(caught.value.causes) == [2]
    assert isinstance(caught.value.causes[2], ValueError)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def test_an_exception_without_a_text_still_names_itself():
    def raises():
        raise Unprintable()

    with pytest.raises(sb.RankError, match=r"raised Unprintable: .its text can't be shown"):
        sb.run(raises, world_size=1)


def test_a_long_message_is_cut_and_kept_whole_in_causes():
    def raises():
        raise ValueError("x" * 1_000_000)

    with pytest.raises(sb.RankError, match="1,000,000 characters") as caught:
        sb.run(raises, world_size=1)
    assert len(str(caught.value)) < 6000
    assert len(str(caught.value.causes[0])) == 1_000_000


def test_a_rank_may_close_or_replace_its_stdout():
    def closes(replace: bool):
        print("before")
        sys.stdout.close()
        if replace:
            sys.stdout = None
        return 5

    for replace in (False, True):
        result = sb.run(closes, replace, world_size=1)
        assert (result.values, result.output) == ([5], ["before\n"])


def test_what_a_rank_starts_ends_with_it(before):
    def starts(how: str):
        child = subprocess.Popen(["sleep", "300"])
        print(child.pid, flush=True)
        if how == "exit":
            os._exit(0)
        return child.pid

    pids = sb.run(starts, "return", world_size=2).values
    assert wait_until(lambda: not any(map(alive, pids)), 5), "children of ranks outlive the run"
    with pytest.raises(sb.RankError, match="exit code 0") as caught:
        sb.run(starts, "exit", world_size=1)
    assert wait_until(lambda: not alive(int(caught.value.output[0])), 5)
    assert not ranks_alive(before)


def test_ten_megabytes_of_prints(capfd, before):
    def floods():
        for i in range(100_000):
            print(f"{i:06d}" + "x" * 95)

    result = sb.run(floods, world_size=2)
    shown = capfd.readouterr().out
    assert len(shown) < 50_000
    assert "lines more" in shown and "[ranks 0-1] 000000x" in shown
    assert len(result.output[1].splitlines()) == 100_000
    assert not ranks_alive(before)


def test_endless_prints_are_ended(before, monkeypatch):
    from shardbook.ranks import output

    monkeypatch.setattr(output, "MOST_BYTES", 2**20)

    def floods():
        while dist.get_rank() == 1:
            print("x" * 1000)

    with pytest.raises(sb.RankError, match="rank 1 printed more than 1 MB"):
        sb.run(floods, world_size=2)
    assert not ranks_alive(before)


def test_fifty_ranks(before):
    assert sb.run(total, 1, world_size=50, timeout=120).values == [float(sum(range(50)))] * 50
    assert not ranks_alive(before)


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0, "4", None, 10**6])
def test_world_size_must_be_a_positive_whole_number(world_size):
    with pytest.raises(ValueError, match="world_size is"):
        sb.run(total, 1, world_size=world_size)


@pytest.mark.parametrize("timeout", [0, -1, True, "5", None, float("nan"), float("inf"), 1e12])
def test_timeout_must_be_a_number_of_seconds(timeout):
    with pytest.raises(ValueError, match=r"timeout is .* a number of seconds above 0"):
        sb.run(total, 1, world_size=1, timeout=timeout)


def test_what_cannot_be_sent_is_named():
    with pytest.raises(ValueError, match="total or one of its arguments can't be sent"):
        sb.run(total, threading.Lock())
    with pytest.raises(ValueError, match="must be a function"):
        sb.run(total(1) if dist.is_initialized() else 3.0)


def test_interrupt(before):
    """What Ctrl-C and the kernel's interrupt do: a KeyboardInterrupt in the process that runs."""
    # Under nohup, or in the background of a script, Python starts with the signal ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            sb.run(time.sleep, 1e6)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not ranks_alive(before)
    assert sb.run(total, 2, world_size=3).values == [6.0] * 3


# What a run must not change, and what it must not leave


def forks():
    pid = os.fork()
    if pid == 0:
        return "child"
    os.waitpid(pid, 0)
    return "parent"


def test_a_child_that_a_rank_forks_does_not_answer_for_it():
    assert sb.run(forks, world_size=2).values == ["parent", "parent"]


def starts_a_session():
    command = ["sleep", "77"]
    return subprocess.Popen(command, start_new_session=True).pid


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="who is whose child: /proc")
def test_a_process_in_a_session_of_its_own_ends_with_the_run():
    pids = sb.run(starts_a_session, world_size=2).values
    assert wait_until(lambda: not any(map(alive, pids)), 5)


def test_runs_in_threads_leave_the_main_module_alone():
    main, values = sys.modules["__main__"], []
    threads = [
        threading.Thread(target=lambda: values.append(sb.run(os.getpid, world_size=2).values))
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert sys.modules["__main__"] is main
    assert len({pid for pids in values for pid in pids}) == 8


def test_what_stdout_cannot_show_costs_no_values():
    code = "import shardbook as sb; print(sb.run(lambda: (print('é'), 42)[1], world_size=2).values)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[ranks 0-1] ?\n[42, 42]\n", done.stderr


RUNS = "import os, shardbook as sb; print(sb.run(int, 3, world_size=2).values)"


def test_a_long_tmpdir_is_no_reason_not_to_start(tmp_path):
    folder = tmp_path / ("d" * 100)  # with a socket's name, longer than the system takes
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUNS],
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[3, 3]\n", done.stderr
    assert not list(folder.glob("shardbook-*"))


INTERRUPTED = """
import os, random, shutil, signal, sys, tempfile, threading, time
import shardbook as sb
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run under nohup
sb.run(os.getpid, world_size=2)
random.seed(0)
for _ in range(40):
    threading.Timer(random.uniform(0.002, 0.06), os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        sb.run(os.getpid, world_size=2)
        time.sleep(0.1)
    except KeyboardInterrupt:
        pass
print(sb.run(lambda: 1, world_size=2).values, flush=True)
time.sleep(0.5)
from tests.processes import descendants
left = descendants(os.getpid())
names = [open(f"/proc/{p}/cmdline").read() for p in left if os.path.exists(f"/proc/{p}/cmdline")]
print(len(left), os.listdir(tempfile.gettempdir()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="who is whose child: /proc")
def test_interrupts_at_any_moment_leave_neither_ranks_nor_folders(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    first, second = done.stdout.splitlines()[-2:]  # above them, where interrupted ranks were
    assert first == "[1, 1]", done.stdout + done.stderr
    count, _, folders = second.partition(" ")
    assert int(count) <= 2, second  # the fork server and multiprocessing's resource tracker
    assert "shardbook-" not in folders


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_RANK.* is not: start with torchrun, or unset"),
        (
            {n: "x" for n in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
            | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
            "must be whole numbers",
        ),
    ],
)
def test_half_a_launcher_is_told_so(monkeypatch, names, says):
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=says):
        sb.run(os.getpid, world_size=1)
