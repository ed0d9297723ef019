"""Traces of several ranks: one timeline, arrows from send to recv, shards of a DTensor."""

import copy
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import shardbook as sb
from shardbook import calls
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss
from shardbook.tracing import merge, validate


def _all_kinds():
    rank, size = dist.get_rank(), dist.get_world_size()
    model = tiny_lm(num_layers=1).to(sb.device())
    x, y = (t.to(sb.device()) for t in counting_batch(rank))
    token_loss(model(x), y).backward()
    dist.all_reduce(model.head.weight.grad)
    work = dist.all_reduce(model.embed.weight.grad, async_op=True)
    sb.pace(5, "matmul")
    work.wait()
    right, left = (rank + 1) % size, (rank - 1) % size
    for i in range(3):
        there = torch.full((i + 1,), float(rank), device=sb.device())
        here = torch.empty_like(there)
        ops = [dist.P2POp(dist.isend, there, right), dist.P2POp(dist.irecv, here, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    pair = torch.zeros(2, device=sb.device())
    if rank == 0:
        dist.send(pair, 1, tag=7)
        dist.send(pair, 1, tag=8)
    if rank == 1:
        waits = [dist.irecv(pair.clone(), 0, tag=t) for t in (8, 7)]
        for work in waits:
            work.wait()


def test_all_ranks_on_one_timeline(tmp_path):
    trace = sb.run(_all_kinds, world_size=3, trace=True).trace
    chrome = trace.chrome()
    assert validate(chrome) == []
    slices = [e for e in chrome["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1, 2}
    assert {e["name"] for e in slices} >= {"TinyLM", "blocks.0.attn.qkv (backward)", "all_reduce"}
    ends = {}
    for e in chrome["traceEvents"]:
        if e["ph"] in "sf":
            holder = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (e["pid"], e["tid"])
                and s["ts"] < e["ts"] < s["ts"] + s["dur"]
            ]
            assert len(holder) == 1
            ends.setdefault(e["id"], {})[e["ph"]] = holder[0]
    assert len(ends) == 3 * 3 + 2
    for pair in ends.values():
        sent, received = pair["s"], pair["f"]
        assert sent["name"] == f"send to {received['pid']}"
        assert received["name"] == f"recv from {sent['pid']}"
        assert sent["args"]["bytes"] == received["args"]["bytes"]
    tracks = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in chrome["traceEvents"]
        if e["name"] == "thread_name"
    }
    kinds = [tracks[e["pid"], e["tid"]] for e in slices if e["name"] == "all_reduce"]
    assert sorted(kinds) == ["async collectives"] * 3 + ["collectives"] * 3

    table = trace.comm()
    row = next(r for r in table if (r["rank"], r["op"]) == (1, "all_reduce"))
    assert (row["calls"], row["bytes"]) == (2, 2 * 64 * 64 * 4)
    row = next(r for r in table if (r["rank"], r["op"]) == (2, "send"))
    assert (row["calls"], row["bytes"]) == (3, (1 + 2 + 3) * 4)
    assert len([r for r in trace.table() if r["name"] == "TinyLM" or not r["name"]]) == 3


def _sharded():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = tiny_lm(num_layers=1, dim=16).to(sb.device())
    mesh = dist.init_device_mesh(sb.device().type, (2,), mesh_dim_names=("tp",))
    mlp = model.blocks[0].mlp
    parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(2, 3, 16).to(sb.device())
    with sb.trace(mlp, tp=dist.get_rank()) as t:
        mlp(x).sum().backward()
    return t


def test_parameters_of_a_dtensor_show_shard_and_full_shape():
    trace = merge(sb.run(_sharded, world_size=2).values)
    chrome = trace.chrome()
    assert validate(chrome) == []
    rows = [r for r in trace.table() if r["rank"] == 1]
    up = next(r for r in rows if r["name"] == "up")
    assert up["own"]["weight"].startswith("float32[32, 16] of [64, 16]")
    assert (up["parameters"], up["local_parameters"]) == (64 * 17, 32 * 17)
    assert rows[0]["parameters"] == 2 * 64 * 16 + 64 + 16
    assert "on this rank" in str(trace.table())
    ops = {(r["rank"], r["op"]) for r in trace.comm()}
    assert (0, "all_reduce") in ops and (1, "all_reduce") in ops
    titles = [e["args"]["name"] for e in chrome["traceEvents"] if e["name"] == "process_name"]
    assert titles == ["rank 0 (tp=0)", "rank 1 (tp=1)"]
    # the all-reduce is a hook of the module down: it lies inside its slice
    down = next(e for e in chrome["traceEvents"] if e["name"] == "down" and e["pid"] == 0)
    reduce = next(e for e in chrome["traceEvents"] if e["name"] == "all_reduce" and e["pid"] == 0)
    assert down["ts"] < reduce["ts"] < down["ts"] + down["dur"]


def _hosts_with_other_clocks():
    from shardbook.tracing import clock

    late = {0: 0, 1: 0, 2: 5_000_000_000}[dist.get_rank()]  # rank 2 is on a host that booted later
    now = time.monotonic_ns
    try:
        time.monotonic_ns = lambda: now() - late
        one = clock.offset()
        clock._host = lambda: "a host" if dist.get_rank() < 2 else "another"
        return one, clock.offset()
    finally:
        time.monotonic_ns = now


def test_clocks_of_other_hosts_are_measured():
    found = sb.run(_hosts_with_other_clocks, world_size=3).values
    assert [one for one, _ in found] == [0, 0, 0], "one host: its clock is everybody's"
    assert [two for _, two in found[:2]] == [0, 0]
    assert abs(found[2][1] - 5_000_000_000) < 50_000_000


def test_a_rank_on_another_clock_is_moved_in_the_merge():
    with sb.trace() as t, sb.mark("work"):
        pass
    here, there = (copy.deepcopy(t.ranks[0]) for _ in range(2))
    there.rank = 1
    there.marks = [(n, i, a - 5000, b - 5000, *rest) for n, i, a, b, *rest in there.marks]
    there.memory = [(at - 5000, value) for at, value in there.memory]
    there.clock = 5000
    slices = [e for e in merge([there, here]).chrome()["traceEvents"] if e["ph"] == "X"]
    assert [e["pid"] for e in slices] == [0, 1]
    assert slices[0]["ts"] == slices[1]["ts"]


LATE = 0.3  # seconds


def _until(true) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def _not_waited_for(folder):
    rank, x, came = dist.get_rank(), torch.ones(3, device=sb.device()), []

    def joined(name):  # rank 1 comes LATE after rank 0 is in it, however busy the machine is
        if rank == 1:
            _until((folder / name).exists)
            time.sleep(LATE)
            came.append(time.monotonic_ns())
        work = dist.all_reduce(x, async_op=True)
        (folder / name).touch()
        return work

    dist.barrier()
    with sb.trace() as t, calls.record() as log:
        work = joined("first")
        with sb.mark("goes on"):
            _until(lambda: log[-1].complete)
        work.wait()
    with sb.trace() as cut:
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            time.sleep(0.05)
    if rank == 0:
        (folder / "cut").touch()
    else:
        _until((folder / "cut").exists)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    with sb.trace() as left:  # nobody ever waits
        joined("second")
        dist.barrier()
    return t, cut, left, came


def test_an_async_collective_lasts_until_its_peer_came(tmp_path):
    (early, cut, left, _), (late, _, _, came) = sb.run(
        _not_waited_for, tmp_path, world_size=2
    ).values
    for trace in (early, left, cut):
        assert validate(trace.chrome()) == []
    ends = {}
    for rank, trace in enumerate((early, late)):
        slices = {s.name: s for s in trace.ranks[0].slices()}
        call, mark = slices["all_reduce"], slices["goes on"]
        assert call.track == "async collectives" and call.end < mark.end
        if rank == 0:  # rank 1's may be over before it goes on: rank 0 is there already
            assert mark.start < call.end
        assert call.end > came[0], "until rank 1 came, and not until it was waited for"
        ends[rank] = call.end - call.start
    assert ends[0] / 1e9 > LATE, "rank 0's lasts while rank 1 is not there yet"
    assert ends[1] < ends[0], "rank 1's does not, since rank 0 is there already"
    (call,) = (s for s in left.ranks[0].slices() if s.name == "all_reduce")
    assert came[1] < call.end and "unfinished" not in call.args
    assert (call.end - call.start) / 1e9 > LATE
    (call,) = cut.ranks[0].slices()
    assert call.args["unfinished"] and call.end == cut.ranks[0].end


LEAVES = """
import sys, time, torch, torch.distributed as dist
import shardbook as sb
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.barrier()
if sys.argv[2] == "0":
    with sb.trace() as t:
        dist.all_reduce(torch.ones(3), async_op=True)
        time.sleep(0.1)
        print(t.ranks)
        sys.exit(7)
time.sleep(1)
"""


def test_a_collective_nobody_joins_keeps_no_process_alive(tmp_path):
    address = f"file://{tmp_path}/store"
    command = [sys.executable, "-c", LEAVES, address]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    try:
        assert [rank.wait(60) for rank in ranks] == [7, 0]
    finally:
        for rank in ranks:
            rank.kill()
