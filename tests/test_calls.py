"""The calls a rank makes, whoever makes them: ops, bytes, shapes, groups, peers, ends."""

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import shardbook as sb
from shardbook import calls

pytestmark = pytest.mark.usefixtures("on_cpu")  # on hccl: test_standin_ranks.py

P = 3
N = 8  # bytes of a tensor of two floats


def all_reduce():
    dist.all_reduce(torch.ones(2))


def all_gather():
    dist.all_gather([torch.empty(2) for _ in range(P)], torch.ones(2))


def all_gather_single():
    dist.all_gather_single(torch.empty(2 * P), torch.ones(2))


def reduce_scatter():
    dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(P)])


def reduce_scatter_single():
    dist.reduce_scatter_single(torch.empty(2), torch.ones(2 * P))


def all_to_all():
    dist.all_to_all([torch.empty(2) for _ in range(P)], [torch.ones(2) for _ in range(P)])


def all_to_all_uneven():
    rank = dist.get_rank()
    sent = [rank + 1, 0, 2]
    received = [[1, 2, 3][i] if rank == 0 else 0 if rank == 1 else 2 for i in range(P)]
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)


def broadcast():
    dist.broadcast(torch.ones(2), src=1)


def reduce():
    dist.reduce(torch.ones(2), dst=1)


def gather():
    dist.gather(torch.ones(2), [torch.empty(2)] * P if dist.get_rank() == 1 else None, dst=1)


def scatter():
    dist.scatter(torch.empty(2), [torch.ones(2)] * P if dist.get_rank() == 1 else None, src=1)


def barrier():
    dist.barrier()


def functional():
    funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).wait()


def functional_gather():
    funcol.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD).wait()


def functional_scatter():
    funcol.reduce_scatter_tensor(torch.ones(2 * P), "sum", 0, dist.group.WORLD).wait()


def nn_functional():
    dist.nn.functional.all_reduce(torch.ones(2))


def in_inference_mode():
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2))


def recorded(fn):
    with calls.record() as log:
        fn()
    return log


ONE_CALL = [  # function, op, bytes by rank, peer
    (all_reduce, "all_reduce", [N] * P, None),
    (all_gather, "all_gather", [N * P] * P, None),
    (all_gather_single, "all_gather", [N * P] * P, None),
    (reduce_scatter, "reduce_scatter", [N * P] * P, None),
    (reduce_scatter_single, "reduce_scatter", [N * P] * P, None),
    (all_to_all, "all_to_all", [N * P] * P, None),
    (all_to_all_uneven, "all_to_all", [12, 16, 20], None),
    (broadcast, "broadcast", [N] * P, 1),
    (reduce, "reduce", [N] * P, 1),
    (gather, "gather", [N, N * P, N], 1),
    (scatter, "scatter", [N, N * P, N], 1),
    (barrier, "barrier", [0] * P, None),
    (functional, "all_reduce", [N] * P, None),
    (functional_gather, "all_gather", [N * P] * P, None),
    (functional_scatter, "reduce_scatter", [N * P] * P, None),
    (nn_functional, "all_reduce", [N] * P, None),
    (in_inference_mode, "all_reduce", [N] * P, None),
]


def every_single_call():
    return [recorded(fn) for fn, *_ in ONE_CALL]


@pytest.fixture(scope="module")
def single_calls():
    return sb.run(every_single_call, world_size=P).values


@pytest.mark.parametrize("at", range(len(ONE_CALL)), ids=[f[0].__name__ for f in ONE_CALL])
def test_one_call_is_seen_once(single_calls, at):
    _, op, nbytes, peer = ONE_CALL[at]
    for rank in range(P):
        (call,) = single_calls[rank][at]
        assert (call.op, call.nbytes, call.peer) == (op, nbytes[rank], peer)
        assert call.group == (0, 1, 2) and call.end_ns > call.start_ns
        file, _, line = call.where.rpartition(":")
        assert file == __file__ and int(line) > 0
        if op != "barrier":
            assert call.dtype == torch.float32


def reduces():
    x, whole = torch.ones(2), torch.ones(2 * P)
    with calls.record() as log:
        dist.all_reduce(x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.reduce(x, dst=0, op=dist.ReduceOp.MIN)
        dist.reduce_scatter_single(x, whole)
        dist.reduce_scatter(x, list(whole.chunk(P)), op=dist.ReduceOp.PRODUCT)
        funcol.all_reduce(x, "max", dist.group.WORLD).wait()
        dist.broadcast(x, src=0)
    return [c.reduce for c in log]


def test_a_call_knows_how_it_reduces():
    expected = ["sum", "max", "min", "sum", "product", "max", ""]
    assert sb.run(reduces, world_size=P).values == [expected] * P


def exchange():
    rank = dist.get_rank()
    with calls.record() as log:
        if rank == 0:
            dist.send(torch.ones(2, 3, dtype=torch.float64), dst=2, tag=7)
        elif rank == 2:
            dist.recv(torch.ones(2, 3, dtype=torch.float64), src=0, tag=7)
            dist.recv(torch.ones(4))
        else:
            dist.isend(torch.ones(4), dst=2).wait()
        ops = [
            dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % P),
            dist.P2POp(dist.irecv, torch.ones(2), (rank - 1) % P),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return [(c.op, c.nbytes, c.shape, c.peer, c.tag) for c in log]


def test_send_and_receive():
    values = sb.run(exchange, world_size=P).values
    batch = [
        [("send", 8, (2,), (rank + 1) % P, 0), ("recv", 8, (2,), (rank - 1) % P, 0)]
        for rank in range(P)
    ]
    assert values[0] == [("send", 48, (2, 3), 2, 7), *batch[0]]
    assert values[1] == [("send", 16, (4,), 2, 0), *batch[1]]
    assert values[2] == [("recv", 48, (2, 3), 0, 7), ("recv", 16, (4,), None, 0), *batch[2]]


def in_a_subgroup():
    pair = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    with calls.record() as log:
        dist.broadcast(torch.ones(2), src=2, group=pair)
    return log[0].group, log[0].peer, log[0].group_name == pair.group_name


def test_groups_and_peers_are_global_ranks():
    assert sb.run(in_a_subgroup, world_size=P).values[1:] == [((1, 2), 2, True)] * 2


def ddp():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 5))
    for _ in range(3):  # after the first step the buckets are final
        with calls.record() as log:
            model(torch.ones(2, 3)).sum().backward()
    return calls.summary(log)


def test_the_reducer_of_ddp_is_seen():
    assert sb.run(ddp, world_size=2).values == [{"all_reduce": (1, (3 * 5 + 5) * 4)}] * 2


def waits_late():
    with calls.record() as log:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        returned = log[0].end_ns
        time.sleep(0.2)
        work.wait()
    return (log[0].end_ns - returned) / 1e9


def test_an_async_call_ends_when_it_is_waited_for():
    assert all(0.2 <= s < 10 for s in sb.run(waits_late, world_size=2).values)


def test_a_work_that_another_thread_waits_for_meanwhile(monkeypatch):
    class Work:
        def is_completed(self):  # and at this moment the other thread has waited
            calls._open.pop(id(self))
            return True

    told, work = [], Work()
    monkeypatch.setattr(calls, "watch", lambda what, call: told.append(what))
    calls._open[id(work)] = (work, None, set())
    calls._close_finished()
    assert told == []  # the one that waited tells


def leaves_nothing():
    alive = []
    for wait in (True, False):
        for _ in range(5):
            x = torch.ones(1000)
            alive.append(weakref.ref(x))
            work = dist.all_reduce(x, async_op=True)
            if wait:
                work.wait()
            del work, x
    funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).wait()
    dist.barrier()
    dist.barrier()
    gc.collect()
    return sum(ref() is not None for ref in alive), len(calls._open)


def test_no_tensor_is_kept():
    assert sb.run(leaves_nothing, world_size=2).values == [(0, 0)] * 2


def nests_and_ends():
    with calls.record() as outer:
        dist.all_reduce(torch.ones(1))
        with calls.record() as inner:
            dist.all_reduce(torch.ones(2))
    try:
        with calls.record() as broken:
            raise ValueError
    except ValueError:
        pass
    dist.all_reduce(torch.ones(3))
    return len(outer), len(inner), len(broken), calls.summary(outer)


def test_recordings_nest_and_end():
    assert sb.run(nests_and_ends, world_size=2).values[0] == (2, 1, 0, {"all_reduce": (2, 12)})


def sparse():
    x = torch.eye(3).to_sparse()
    with calls.record() as log:
        dist.all_reduce(x)
    return x.to_dense().trace().item(), log[0].op, log[0].shape


def test_sparse_tensors_pass():
    assert sb.run(sparse, world_size=2).values == [(6.0, "all_reduce", (3, 3))] * 2


def results_are_right():
    calls.install()
    rank = dist.get_rank()
    x = torch.full((2,), float(rank), requires_grad=True)
    y = funcol.all_reduce(x * 1, "sum", dist.group.WORLD)
    with calls.record():
        z = dist.nn.functional.all_reduce(x * 2)
    (z.sum() + y.sum()).backward()
    return y.tolist(), z.tolist(), x.grad.tolist()


def test_watching_changes_no_result():
    y, z, grad = sb.run(results_are_right, world_size=2).values[0]
    assert (y, z) == ([1.0, 1.0], [2.0, 2.0])
    assert grad == [1 * 2 + 2 * 2] * 2  # an all-reduce's gradient is an all-reduce, over two ranks
