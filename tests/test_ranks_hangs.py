"""A hang is told along its chain of waits, with the learner's lines."""

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import shardbook as sb
from shardbook.basics.collectives import ring_all_reduce
from shardbook.ranks import folder, log
from shardbook.ranks.diagnose import folded, hang
from shardbook.ranks.ledger import Ledger
from tests.processes import wait_until

pytestmark = pytest.mark.usefixtures("on_cpu")

LINE = r"\(test_ranks_hangs\.py:\d+\)"


def said(fn, world_size=4, timeout=60) -> str:
    with pytest.raises(sb.RankError) as caught:
        sb.run(fn, world_size=world_size, timeout=timeout, echo=False)
    text = str(caught.value)
    assert "calls.py" not in text and "typing_extensions.py" not in text
    return text


def one_leaves_the_ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        if rank == 2 and step == 1:
            return
        work = dist.isend(torch.ones(4), (rank + 1) % size)
        dist.recv(torch.empty(4), (rank - 1) % size)
        work.wait()


def one_never_enters_the_librarys_ring():
    if dist.get_rank() != 2:
        ring_all_reduce(torch.ones(400_000))


@pytest.mark.parametrize("fn", [one_leaves_the_ring, one_never_enters_the_librarys_ring])
def test_a_ring_that_one_rank_leaves_is_told_from_that_rank(fn):
    text = said(fn)
    assert re.match(
        r"rank 2 returned without a recv from rank 1 and a send to rank 3; "
        r"ranks 1, 3 wait for it, rank 0 waits for rank [13]\n"
        rf"  rank 0: waiting in .* {LINE}\n  rank 1: waiting in .* {LINE}\n"
        rf"  rank 3: waiting in recv #\d from rank 2 {LINE}$",
        text,
    ), text
    assert "isend" not in text


def one_leaves_a_chain_of_groups():
    rank = dist.get_rank()
    groups = {pair: dist.new_group(pair) for pair in [(0, 1), (2, 3), (0, 2)]}
    for pair in [] if rank == 3 else [(2, 3), (0, 2), (0, 1)]:
        if rank in pair:
            dist.all_reduce(torch.ones(1), group=groups[pair])


def test_a_chain_through_groups_starts_at_its_end():
    assert re.match(
        rf"rank 3 never entered all_reduce #1 of group \[2, 3\] {LINE}; rank 2 is waiting, "
        r"rank 0 waits for rank 2, rank 1 waits for rank 0\n",
        said(one_leaves_a_chain_of_groups),
    )


def sends_to_a_sleeper():
    if dist.get_rank() == 2:
        time.sleep(1000)
    dist.send(torch.ones(1), 2)


def test_a_sleeper_is_told_with_what_it_has_not_done():
    assert re.match(
        r"rank 2 has not made recvs from ranks 0-1, 3; ranks 0-1, 3 wait for it "
        rf"\(ended after 4 s\)\n  ranks 0-1, 3: waiting in send #1 to rank 2 {LINE}\n"
        r"  rank 2: at test_ranks_hangs.py:\d+ in sends_to_a_sleeper: time.sleep",
        said(sends_to_a_sleeper, timeout=4),
    )


def sends_in_a_circle(send):
    rank = dist.get_rank()
    send(torch.ones(3), (rank + 1) % dist.get_world_size())
    dist.recv(torch.ones(3), (rank - 1) % dist.get_world_size())


def isend_and_wait(x, to):
    dist.isend(x, to).wait()


def test_isend_is_advised_for_blocking_sends_in_a_circle_alone():
    blocking = said(functools.partial(sends_in_a_circle, dist.send), 3)
    assert re.match(
        rf"rank 0 waits in send #1 to rank 1 {LINE}, but rank 1 does not receive it: it is in a "
        r"send itself, as all of ranks 0-2 in a circle \(use isend, or let one side",
        blocking,
    )
    waited = said(functools.partial(sends_in_a_circle, isend_and_wait), 3)
    assert "wait for an isend after the recv" in waited and "use isend" not in waited


def receives_against_a_barrier():
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)
    dist.barrier()


def test_a_circle_of_different_calls_names_both():
    assert re.match(
        rf"ranks 0, 2 wait in barrier #1 {LINE} for rank 1, which waits in recv #1 from rank 0 "
        rf"{LINE}: none can go on$",
        said(receives_against_a_barrier, 3),
    )


def uses_two_groups_in_another_order():
    groups = [dist.new_group([0, 1, 2, 3]) for _ in range(2)]
    for group in groups[::-1] if dist.get_rank() == 3 else groups:
        dist.all_reduce(torch.ones(1), group=group)


def test_two_groups_of_the_same_ranks_are_told_apart():
    assert re.match(
        rf"ranks 0-2 wait in all_reduce #1 of the 1st group made {LINE} for rank 3, which waits in "
        rf"all_reduce #1 of the 2nd group made {LINE} for rank 0: all ranks must use their groups "
        "in the same order$",
        said(uses_two_groups_in_another_order),
    )


def sends_with_another_tag(blocking: bool):
    send, receive = (dist.send, dist.recv) if blocking else (dist.isend, dist.irecv)
    if dist.get_rank() == 0:
        send(torch.ones(3), 1, tag=5)
    else:
        receive(torch.ones(3), 0, tag=7)


@pytest.mark.parametrize("blocking", [True, False])
def test_mismatched_tags_are_both_named(blocking):
    assert re.match(
        rf"rank 0 sends to rank 1 with tag 5 {LINE}, but rank 1 receives from rank 0 with tag 7 "
        rf"{LINE}: both ends must have the same tag",
        said(functools.partial(sends_with_another_tag, blocking), 2),
    )


def reduces_differently():
    op = dist.ReduceOp.MAX if dist.get_rank() == 2 else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(3), op=op)


def test_different_reductions_are_a_mismatch():
    assert re.match(
        rf"all_reduce #1 was called with different reductions: sum {LINE} on ranks 0-1, max {LINE} "
        "on rank 2$",
        said(reduces_differently, 3),
    )


def raises_behind_a_barrier(same: bool):
    try:
        if dist.get_rank() == 1:
            raise ValueError("boom")
        if same:
            time.sleep(1000)
        dist.all_reduce(torch.ones(2))
    finally:
        dist.barrier()


@pytest.mark.parametrize("same", [True, False])
def test_an_exception_that_a_finally_hides_is_told(same):
    text = said(functools.partial(raises_behind_a_barrier, same), 2, timeout=4)
    assert re.search(
        rf"rank 1.* barrier #1 {LINE},? while handling ValueError: boom {LINE}"
        rf"|barrier #1 {LINE} while handling ValueError: boom {LINE} on rank 1",
        text,
    ), text


def makes_a_group_alone():
    if dist.get_rank() == 0:
        dist.new_group([0, 1])
    time.sleep(1000)


def test_who_makes_a_group_alone_is_told_that_all_must():
    text = said(makes_a_group_alone, 2, timeout=4)
    assert re.search(r"rank 0: at .*dist.new_group.*, which every rank must call\n  rank 1", text)


# Errors


def fails_in_torch():
    dist.reduce_scatter_single(torch.empty(2), torch.ones(7))


def test_torchs_same_error_is_told_once_with_the_learners_line():
    text = said(fails_in_torch)
    assert re.fullmatch(
        rf"ranks 0-3 raised \w+: [^\n]*Check failed[^\n]*7\)[^\n]* {LINE}\n"
        r"    test_ranks_hangs.py:\d+ in fails_in_torch: dist.reduce_scatter_single.*",
        text,
    ), text


def raises_from():
    try:
        {}["lr"]
    except KeyError as e:
        raise RuntimeError("the config can't be used") from e


def test_raise_from_keeps_its_cause():
    assert re.fullmatch(
        rf"ranks 0-1 raised RuntimeError: the config can't be used {LINE}\n    .*\n"
        rf"    caused by KeyError: 'lr' {LINE}",
        said(raises_from, 2),
    )


def broadcasts_from_nowhere():
    dist.broadcast(torch.ones(2), src=7)


def test_a_root_outside_the_group_is_named():
    assert f"{ValueError.__name__}: rank 7 is not in the group of ranks 0-3" in said(
        broadcasts_from_nowhere
    )


def raises_deep_in_the_standard_library():
    import json

    json.loads("{")


def test_the_standard_librarys_lines_are_not_shown():
    text = said(raises_deep_in_the_standard_library, 1)
    assert re.fullmatch(
        rf"rank 0 raised JSONDecodeError: .* {LINE}\n    test_ranks_hangs.py:\d+ in raises_deep.*",
        text,
    ), text


def test_the_exception_that_comes_back_has_the_whole_traceback():
    with pytest.raises(sb.RankError) as caught:
        sb.run(raises_deep_in_the_standard_library, world_size=1)
    (note,) = caught.value.causes[0].__notes__
    assert "decoder.py" in note and "test_ranks_hangs.py" in note


def fails_with_its_rank():
    raise ValueError(f"no gradient on rank {dist.get_rank()}: 2 3")


def test_errors_that_differ_in_the_rank_alone_are_one():
    assert said(fails_with_its_rank).startswith(
        "ranks 0-3 raised ValueError: no gradient on ranks 0-3: 2 3 ("
    )
    assert folded({0: "a rank 1", 1: "a rank 0", 2: "b"}) == {
        "a rank 1": [0],
        "a rank 0": [1],
        "b": [2],
    }


# Interrupts


@pytest.fixture
def heard():
    """SIGINT raises, also where these tests were started in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def waits_for_a_sleeper(folder):
    (folder / str(dist.get_rank())).touch()
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(3))


def test_an_interrupt_tells_where_everyone_was(heard, capfd, tmp_path):
    def interrupt():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 60)
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        sb.run(waits_for_a_sleeper, tmp_path, world_size=3)
    assert re.search(
        rf"rank 1 never entered all_reduce #1 {LINE}; ranks 0, 2 are waiting "
        r"\(interrupted after \d+ s\)\n"
        r"  rank 1: at test_ranks_hangs.py:\d+ in waits_for_a_sleeper: time.sleep",
        capfd.readouterr().out,
    )


# The pieces


def test_a_log_gives_back_what_was_written(tmp_path):
    from shardbook.calls import Call

    path = folder.Folder(str(tmp_path)).calls(1)
    writer, ledger, rank = log.Log(path, 1), Ledger(2), log.Rank(1, path)
    call = Call("all_reduce", 8, (2,), torch.float32, (0, 1), None, 0, where="a\tb.py:3")
    call.group_name, call.reduce = "0", "max"
    writer.call("enter", call)
    writer.call("wait", call)
    assert rank.read(ledger) and rank.started and not rank.read(ledger)
    (entry,) = rank.waiting.values()
    assert (entry.op, entry.shape, entry.members, entry.dtype) == (
        "all_reduce",
        (2,),
        (0, 1),
        "float32",
    )
    assert (entry.where, entry.reduce, entry.blocking) == ("a\tb.py:3", "max", True)
    assert ledger.missing(entry) == [0]
    other = log.Rank(0, folder.Folder(str(tmp_path)).calls(0))
    assert hang([other, rank], ledger, {}, "").startswith("rank 0 never entered all_reduce #1 (a")
    writer.call("done", call)
    writer.finish("value")
    assert rank.read(ledger) and not rank.waiting and not rank.calls and rank.returned


def test_half_a_line_waits_for_its_rest(tmp_path):
    path = tmp_path / "calls-0"
    rank = log.Rank(0, str(path))
    assert not rank.read(Ledger(1))
    path.write_text('["start", {"pid": ')
    assert not rank.read(Ledger(1)) and not rank.started
    path.write_text('["start", {"pid": 1}]\n')
    assert rank.read(Ledger(1)) and rank.started


IN_BACKGROUND = """
import os, signal, threading, time
import shardbook as sb
print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
print(sb.run(lambda: time.sleep(2), world_size=1).values)
"""


def test_a_process_that_ignores_interrupts_goes_on():
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{IN_BACKGROUND}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.stdout == "True\n[None]\n", done.stderr
