"""Two traces compared: the call that was changed is the one named, and nothing else is."""

import base64
import html
import itertools
import json
import random
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import shardbook as sb
from shardbook.calls import ROOTED, Call
from shardbook.tracing import Trace, diff_cli, expected_calls
from shardbook.tracing.timeline import RankTrace

BASE = {r: [("all_gather", 4096), ("reduce_scatter", 4096), ("all_reduce", 64)] for r in range(4)}


def changed(rank, step, *calls):
    """BASE with other calls in the place of one step (counted from 1) of a rank."""
    made = {r: list(mine) for r, mine in BASE.items()}
    made[rank][step - 1 : step] = calls
    return expected_calls(made)


def said(trace, expected=BASE, **options):
    return str(trace.diff(expected_calls(expected), **options))


# Programs for hypothesis: ops of the whole world, ("p2p", bytes, source, destination) or
# (collective, bytes, root or None, group); what each rank calls follows from them.

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "broadcast")


@st.composite
def operations(draw, world):
    nbytes = draw(st.sampled_from([8, 64, 4096]))
    if draw(st.booleans()):
        source, destination = draw(st.permutations(range(world)))[:2]
        return ("p2p", nbytes, source, destination)
    group = tuple(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1))))
    op = draw(st.sampled_from(COLLECTIVES))
    root = draw(st.sampled_from(group)) if op in ROOTED else None
    return (op, 0 if op == "barrier" else nbytes, root, group)


def expand(op):
    """{rank: its call} of one operation."""
    kind, nbytes, a, b = op
    if kind == "p2p":
        return {a: ("send", nbytes, b), b: ("recv", nbytes, a)}
    return {rank: op for rank in b}


def trace_of(calls, seed=None):
    """A trace of these calls; with a seed as a run records them, at times of its own."""
    if seed is None:
        return expected_calls(calls)
    chance, ranks = random.Random(seed), []
    for rank, mine in calls.items():
        now, log = chance.randrange(10**9), []
        for call in mine:
            op, nbytes, peer, group = (*call, *[None] * (4 - len(call)))
            group = tuple(calls) if group is None else group
            now += chance.randrange(1, 10**6)
            shape = (nbytes // 4,)
            log.append(Call(op, nbytes, shape, torch.float32, group, peer, now, now + 1000))
            log[-1].where = f"cell:{chance.randrange(99)}"
        ranks.append(RankTrace(rank, calls=log, start=0, end=now + 2000))
    return Trace(ranks)


def mutants(op, world, how):
    """The operations in the place of `op`."""
    kind, nbytes, a, b = op
    if how == "drop":
        return []
    if how == "extra":
        return [op, ("all_reduce", 777, None, tuple(range(world)))]
    if how == "bytes":
        return [(kind, nbytes + 8, a, b)] if kind != "barrier" else None
    if how == "peer" and kind == "p2p":
        others = set(range(world)) - {a, b}
        return [(kind, nbytes, a, min(others))] if others else None
    if how == "op" and kind not in ("p2p", "broadcast"):
        return [("all_gather" if kind != "all_gather" else "all_reduce", max(8, nbytes), None, b)]
    if how == "group" and kind not in ("p2p", "broadcast") and world > 1:
        return [(kind, nbytes, a, tuple(r for r in range(world) if (r in b) != (r == world - 1)))]
    return None


@given(st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_the_mutated_call_is_the_one_named(tmp_path_factory, data):
    world = data.draw(st.integers(2, 4))
    program = data.draw(st.lists(operations(world), min_size=1, max_size=12))
    at = data.draw(st.integers(0, len(program) - 1))
    how = data.draw(st.sampled_from(["drop", "extra", "bytes", "peer", "op", "group", "swap"]))
    new = mutants(program[at], world, how)
    if how == "swap":
        assume(at + 1 < len(program))
        new = [program[at + 1], program[at]]
    assume(new is not None and all(op[3] != () for op in new))
    only = data.draw(st.sampled_from([None, *range(world)]))  # one rank, or all that take part
    sides = {}
    for side in ("expected", "got"):
        sides[side] = {rank: [] for rank in range(world)}
        for i, op in enumerate(program):
            for rank, mine in sides[side].items():
                replaced = side == "got" and only in (None, rank)
                ops = new if i == at and replaced else [op]
                ops = [] if how == "swap" and i == at + 1 and replaced else ops
                mine += [expand(o)[rank] for o in ops if rank in expand(o)]
    start = {r: sum(r in expand(o) for o in program[:at]) for r in range(world)}
    start = {r: n + (how == "extra" and r in expand(program[at])) for r, n in start.items()}
    want, have = (
        trace_of(calls, data.draw(st.none() | st.integers(0, 9))) for calls in sides.values()
    )
    found = have.diff(want)
    assert bool(found) == found.equal == (sides["expected"] == sides["got"]), str(found)
    if not found:
        first = found.differences[0]
        rank, place = first.ranks[0], first.step - 1
        a, b = sides["expected"][rank], sides["got"][rank]
        assert a[:place] == b[:place] and a[place : place + 1] != b[place : place + 1]
        run = (a if len(b) < len(a) else b)[start[rank] : place + 1]
        assert place == start[rank] or len(set(run)) == 1, "only a run of equal calls may hide it"
        for side, step in ((a, first.expected), (b, first.got)):
            if step is not None:
                assert (step.op, step.nbytes) == side[place][:2]
    folder = tmp_path_factory.getbasetemp()
    want.save(folder / "want.json")
    have.save(folder / "have.json")
    saved = sb.show(folder / "have.json").diff(folder / "want.json")
    assert str(saved) == str(found)


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_other_times_are_no_difference(data):
    world = data.draw(st.integers(2, 4))
    calls = {rank: [] for rank in range(world)}
    for op in data.draw(st.lists(operations(world), max_size=10)):
        for rank, call in expand(op).items():
            calls[rank].append(call)
    assert trace_of(calls, 1).diff(trace_of(calls, 2)), "only the times differ"
    assert trace_of(calls, 1).diff(trace_of(calls)), "an expected call has no dtype"


def test_the_sentences():
    assert said(changed(2, 2, ("all_reduce", 16384))) == (
        "rank 2, step 2: expected reduce_scatter of 4,096 bytes on ranks 0-3, got all_reduce of "
        "16,384; everything before is equal"
    )
    assert "trace ends after step 2 (reduce_scatter" in said(changed(1, 3))
    assert said(changed(1, 2)).startswith(
        "rank 1, step 2: expected reduce_scatter of 4,096 bytes on ranks 0-3, which is missing: "
        "all_reduce of 64 bytes on ranks 0-3 comes next"
    )
    assert "expected nothing more, got barrier on ranks 0-3, which is one too many" in said(
        changed(0, 3, ("all_reduce", 64), ("barrier", 0))
    )
    assert "got reduce_scatter of 4,096 on ranks 0 and 1" in said(
        changed(1, 2, ("reduce_scatter", 4096, None, [0, 1]))
    )
    swapped = expected_calls({r: [b, a, c] for r, (a, b, c) in BASE.items()})
    assert said(swapped) == (
        "rank 0, steps 1 and 2 are swapped: expected all_gather of 4,096 bytes on ranks 0-3 first, "
        "got reduce_scatter of 4,096; the same on ranks 1-3"
    )
    late = expected_calls({**BASE, 3: [*BASE[3][1:], ("barrier", 0), BASE[3][0]]})
    assert "all_gather of 4,096 bytes on ranks 0-3, which comes as step 4" in said(late)
    two = expected_calls({r: BASE[r] for r in range(2)})
    assert said(two).startswith("expected 4 ranks (ranks 0-3), got 2 (ranks 0 and 1)")
    assert "rank 0's trace has no calls; the same on ranks 1-3" in said(
        expected_calls({r: [] for r in range(4)})
    )
    roots = [expected_calls({r: [("broadcast", 8, root)] for r in range(2)}) for root in range(2)]
    assert (
        "expected broadcast of 8 bytes from rank 0 on ranks 0 and 1, got broadcast of 8 from "
        in (str(roots[1].diff(roots[0])))
    )
    assert said(expected_calls(BASE)) == "the traces are equal: 4 ranks, 12 communication calls"


def test_dtype_and_reduction_are_compared_where_both_traces_record_them():
    def one(**changes):
        fields = {"op": "all_reduce", "nbytes": 8, "shape": (2,), "dtype": torch.float32}
        fields |= {"group": (0,), "peer": None, "start_ns": 5, "end_ns": 9, "reduce": "sum"}
        return Trace([RankTrace(0, calls=[Call(**fields | changes)], end=10)])

    start = "rank 0, step 1: expected all_reduce of 8 bytes"
    assert (
        str(one(reduce="max").diff(one())) == f"{start} (sum) on rank 0, got all_reduce of 8 (max)"
    )
    assert "(bfloat16) on rank 0, got all_reduce of 8 (float32)" in str(
        one().diff(one(dtype=torch.bfloat16))
    )
    assert one().diff(expected_calls({0: [("all_reduce", 8)]})) and one().diff(one(where="there"))
    assert one().diff(one(reduce="")), "an older file"
    label = one(label="dp").diff(one(label="tp"))
    assert str(label) == f"{start} on group tp, got all_reduce of 8 on group dp"
    assert one(label="dp").diff(one())


def test_a_difference_that_follows_from_another_is_not_named():
    # a chain 2 -> 1 -> 0: rank 2 sends too little, and so do the others after it
    def chain(last):
        return {
            0: [("recv", last, 1)],
            1: [("recv", last, 2), ("send", last, 0)],
            2: [("barrier", 0, None, [2])] * 5 + [("send", last, 1)],
        }

    found = expected_calls(chain(32)).diff(expected_calls(chain(64)))
    assert str(found) == (
        "rank 2, step 6: expected send of 64 bytes to rank 1, got send of 32; everything before is "
        "equal; 3 more differences follow"
    )
    # the same where only a collective ties them: rank 3's comes first, though its step is later
    pair, rest = [2, 3], [0, 1, 2]
    calls = {r: [("all_reduce", 8, None, rest), ("all_reduce", 8, None, rest)] for r in (0, 1)}
    calls[2] = [("all_gather", 8, None, pair), *calls[0]]
    calls[3] = [("all_to_all", 8, None, [3]), ("all_to_all", 8, None, [3]), calls[2][0]]
    wrong = {r: [mine[0], ("all_reduce", 4, None, rest)] for r, mine in calls.items() if r < 2}
    wrong |= {2: [*calls[2][:2], ("all_reduce", 4, None, rest)]}
    wrong |= {3: [calls[3][0], ("all_to_all", 4, None, [3]), calls[3][2]]}
    found = expected_calls(wrong).diff(expected_calls(calls))
    assert found.differences[0].ranks == [3] and found.differences[1].ranks == [0, 1, 2]


def test_the_order_between_groups_and_peers_can_be_left_open():
    ring = {r: [("send", 8, 1 - r), ("recv", 8, 1 - r), ("barrier", 0)] for r in range(2)}
    ring4 = {r: [("send", 8, (r + 1) % 4), ("recv", 8, (r - 1) % 4)] for r in range(4)}
    early = {r: [recv, send, barrier] for r, (send, recv, barrier) in ring.items()}
    assert "swapped" in said(expected_calls(early), ring)
    assert expected_calls(early).diff(expected_calls(ring), order="group")
    early[1].pop(1)
    found = expected_calls(early).diff(expected_calls(ring), order="group")
    assert "rank 1" in str(found) and "send of 8 bytes to rank 0" in str(found)
    far = {r: [*mine[1:], ("send", 8, (r + 2) % 4)] for r, mine in ring4.items()}
    assert str(expected_calls(far).diff(expected_calls(ring4), order="group")) == (
        "rank 0, step 2: expected send of 8 bytes to rank 1, got send of 8 to rank 2; everything "
        "before is equal; 3 more differences follow"
    )
    with pytest.raises(ValueError, match="order is"):
        expected_calls(early).diff(expected_calls(ring), order="any")


def pictured(found):
    """The html of a difference, the texts of its picture, its width and height."""
    page = found._repr_mimebundle_()["text/html"]
    data = re.search(r"data:image/svg\+xml;base64,([^\"]+)", page)
    if not data:
        return page, [], (0, 0)
    svg = ElementTree.fromstring(base64.b64decode(data[1]))
    size = int(svg.get("width")), int(svg.get("height"))
    return page, [t.text for t in svg.iter() if t.tag.endswith("text")], size


def test_the_picture_shows_both_lanes_and_marks_the_first_difference():
    found = changed(2, 2, ("all_reduce", 16384)).diff(expected_calls(BASE))
    page, texts, size = pictured(found)
    assert str(found) in page and found._repr_mimebundle_()["text/plain"] == str(found)
    assert [t for t in texts if "first" in t] == ["▼ step 2: first"]
    assert texts.count("reduce_scatter") == 1 and texts.count("16,384 B, ranks 0-3") == 1
    assert {"rank 2", "expected", "got", "ranks 0, 1 and 3: equal"} <= set(texts)
    # the same on several ranks is drawn once; a long trace in a window
    many = {r: [("all_gather", n) for n in range(40)] for r in range(4)}
    wrong = {r: [*mine[:20], ("barrier", 0), *mine[21:]] for r, mine in many.items()}
    _, texts, longer = pictured(expected_calls(wrong).diff(expected_calls(many)))
    assert {"▼ step 21: first", "ranks 1-3: the same"} <= set(texts)
    assert "… 18 more before, 16 more after" in texts and "rank 1" not in texts
    assert longer[0] < 910 and longer[1] < 170 and size[0] <= longer[0]
    for equal in (expected_calls(BASE).diff(expected_calls(BASE)), two_worlds()):
        page, texts, _ = pictured(equal)
        assert html.unescape(page) == f"<div>{equal}</div>" and not texts
    odd = expected_calls({0: [("send", 8, 1)], 1: [("recv", 8, 0)]}, "<b>&", "<i>")
    page, texts, _ = pictured(odd.diff(expected_calls({0: [], 1: []})))
    assert "<i>" not in page and texts.count("nothing") == 2, "names are text"


def two_worlds():
    return expected_calls({0: []}).diff(expected_calls({0: [], 1: []}))


def _tensor_parallel(twice, size):
    mesh = dist.init_device_mesh(sb.device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(size, device=sb.device())
    dist.all_reduce(x, group=mesh["tp"].get_group())
    dist.all_reduce(x, group=mesh["dp"].get_group())
    twin = dist.new_group(range(4))
    dist.all_reduce(x, group=twin if twice else None)
    dist.all_reduce(x)
    with torch.no_grad():
        torch.nn.Linear(size, 3 if twice else 2).to(sb.device())(x)


def test_of_real_runs(tmp_path):
    one, two, other = (
        sb.run(_tensor_parallel, *args, world_size=4, trace=True)
        for args in ((False, 8), (False, 8), (True, 16))
    )
    assert two.trace.diff(one) and one.trace.diff(two), "a Result, too"
    found = other.trace.diff(one.trace)
    assert str(found).startswith(
        "rank 0, step 1: expected all_reduce of 32 bytes on group tp, got all_reduce of 64"
    )
    groups = sb.run(_tensor_parallel, True, 8, world_size=4, trace=True).trace
    found = groups.diff(one)
    assert found.differences[0].step == 4 and found.differences[0].ranks == [0, 1, 2, 3]
    assert "(group 2 of these)" in str(found)
    one.trace.save(tmp_path / "one.json")
    groups.save(tmp_path / "groups.json")
    assert str(sb.show(tmp_path / "groups.json").diff(tmp_path / "one.json")) == str(found)
    found = two.trace.diff(other, modules=True)
    assert not found and two.trace.diff(one, modules=True)
    (found,) = (d for d in found.differences if "forward of" in str(d))
    assert found.ranks == [0, 1, 2, 3] and found.step == 5
    assert "Linear (Linear float32[16] → float32[3])" in str(found)


@pytest.mark.parametrize(
    ("expected", "error", "says"),
    [
        ("none.json", OSError, "none.json can't be shown: there is no such file"),
        ({}, TypeError, "not a dict"),
        (sb.Result([1], [""]), ValueError, "was not traced"),
        (
            sb.show([{"ph": "X", "pid": 1, "tid": 1, "ts": 0, "name": "a"}]),
            ValueError,
            "no trace of",
        ),
    ],
)
def test_what_can_not_be_compared_is_said(expected, error, says, tmp_path):
    if expected == "none.json":
        expected = tmp_path / expected
    with pytest.raises(error, match=says):
        expected_calls(BASE).diff(expected)


def test_expected_calls_are_checked():
    for calls, says in [
        ([("all_sum", 8)], "is no call"),
        ([("send", 8)], "is no call"),
        ([("all_reduce", 8, 0)], "is no call"),
        ([("send", 8, 5)], "outside"),
        ([("all_reduce", 8, None, [1])], "outside"),
    ]:
        with pytest.raises(ValueError, match=f"rank 0, step 1: .*{says}"):
            expected_calls({0: calls, 1: []})


def test_the_command(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json.gz"
    expected_calls(BASE).save(good)
    changed(2, 2, ("all_reduce", 16384)).save(bad)
    assert diff_cli.main([str(good), str(good)]) == 0
    assert diff_cli.main([str(good), str(bad)]) == 1
    out = capsys.readouterr()
    assert "rank 2, step 2: expected reduce_scatter" in out.out and not out.err
    assert diff_cli.main([str(good), str(bad), "--json"]) == 1
    listed = json.loads(capsys.readouterr().out)
    assert not listed["equal"] and listed["differences"][0]["ranks"] == [2]
    events = {"no.json": None, "torn.json": "{", "profile.json": '[{"ph": "i", "name": "x"}]'}
    group = '"name": "all_reduce", "cat": "collective", "ph": "X", "ts": 0, "pid": 0, "args": {}'
    name = '{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}'
    events["args.json"] = f"[{name}, {{{group}}}]"
    for file, text in events.items():
        if text is not None:
            (tmp_path / file).write_text(text)
        for both in itertools.permutations([str(tmp_path / file), str(good)]):
            assert diff_cli.main(list(both)) == 2
            out = capsys.readouterr()
            assert file in out.err and out.err.count("\n") == 1 and not out.out


def test_the_command_is_listed():
    done = subprocess.run(
        [sys.executable, "-m", "shardbook", "diff"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "expected got" in done.stderr
