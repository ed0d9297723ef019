"""The stand-in npu on several ranks: torch's own parallelisms over hccl equal one process.

Each function runs in every rank, on the npu of its number; its asserts fail the run.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardbook as sb
from shardbook import calls
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(
        sb.device().type != "npu" or torch.accelerator.device_count() < 2,
        reason="runs on a stand-in with at least 2 devices: make test-npu",
    ),
]


def values(fn, *args, world_size=2):
    return sb.run(fn, *args, world_size=world_size, timeout=60).values


def close(actual, expected, tolerance=1e-5):
    # 1e-5: fp32 sums in another order
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=0, atol=tolerance)


def full(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (3,), float(value), device=sb.device())


# Where ranks land


def place():
    x = torch.ones(2, device=sb.device())
    y = torch.ones(2, device="npu")  # without a number: the current device
    return str(x.device), str(y.device), dist.get_backend()


def test_ranks_land_one_a_device():
    assert values(place) == [(f"npu:{r}", f"npu:{r}", "hccl") for r in range(2)]


def test_more_ranks_than_devices_run_on_the_cpu():
    count = torch.accelerator.device_count()
    with pytest.warns(UserWarning, match="More ranks than devices"):
        seen = values(lambda: (str(sb.device()), dist.get_backend()), world_size=count + 1)
    assert set(seen) == {("cpu", "gloo")}


# Collectives


def collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, size + 1))
    for op, expected in (
        (dist.ReduceOp.SUM, total),
        (dist.ReduceOp.MAX, size),
        (dist.ReduceOp.AVG, total / size),
    ):
        x = full(rank + 1)
        dist.all_reduce(x, op=op)
        y = full(rank + 1)
        dist.all_reduce(y, op=op, async_op=True).wait()
        assert x.tolist() == y.tolist() == [expected] * 3
    for dtype in (torch.bfloat16, torch.int64):
        x = torch.ones(3, dtype=dtype, device=sb.device())
        dist.all_reduce(x)
        assert x.tolist() == [size] * 3

    x = full(rank)
    dist.broadcast(x, 1)
    assert x.tolist() == [1] * 3
    x = full(1)
    dist.reduce(x, 0)
    assert rank or x.tolist() == [size] * 3
    parts = [full(0) for _ in range(size)] if rank == 0 else None
    dist.gather(full(rank), parts, 0)
    assert rank or [p[0].item() for p in parts] == list(range(size))
    x = full(0)
    dist.scatter(x, [full(i) for i in range(size)] if rank == 0 else None, 0)
    assert x.tolist() == [rank] * 3

    parts = [full(0) for _ in range(size)]
    dist.all_gather(parts, full(rank))
    assert torch.stack(parts)[:, 0].tolist() == list(range(size))
    x = torch.arange(3.0 * size, device=sb.device())
    out = full(0)
    dist.reduce_scatter_tensor(out, x.clone())
    assert out.tolist() == (x.view(size, 3)[rank] * size).tolist()
    out = full(0)
    dist.reduce_scatter(out, [full(i) for i in range(size)], op=dist.ReduceOp.AVG)
    assert out.tolist() == [rank] * 3

    out = torch.empty(size, device=sb.device())
    dist.all_to_all_single(out, torch.arange(float(size), device=sb.device()) + 10 * rank)
    assert out.tolist() == [10 * r + rank for r in range(size)]
    sizes = [r + 1 for r in range(size)]  # uneven: rank r sends r + 1 rows to everybody
    out = torch.empty(sum(sizes), device=sb.device())
    dist.all_to_all_single(out, full(rank, size * (rank + 1)), sizes, [rank + 1] * size)
    assert out.tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    outs = [full(0, r + 1) for r in range(size)]
    dist.all_to_all(outs, [full(rank, rank + 1) for _ in range(size)])
    assert [o[0].item() for o in outs] == list(range(size))


def test_collectives():
    values(collectives)


def point_to_point():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = full(rank)
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
        assert x.tolist() == [0] * 3
    received = full(-1)
    ring = [
        dist.P2POp(dist.isend, full(rank), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert received.tolist() == [(rank - 1) % size] * 3
    dist.barrier()
    names = [None] * size
    dist.all_gather_object(names, {"rank": rank})
    assert [n["rank"] for n in names] == list(range(size))
    group = dist.new_group([0, 1])
    if rank < 2:
        x = full(1)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2] * 3


def test_point_to_point_objects_and_groups():
    values(point_to_point, world_size=3)


def futures():
    import time

    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 1:
        time.sleep(0.3)
    start = time.monotonic()
    x = full(rank)
    work = dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True)
    doubled = work.get_future().then(lambda f: f.value()[0] * 2)
    waited = time.monotonic() - start
    work.wait()
    doubled.wait()
    assert doubled.value().tolist() == [sum(range(size)) / size * 2] * 3
    return waited


def test_a_future_does_not_wait():
    # rank 1 comes 0.3 s later: rank 0 must have had its future long before
    assert values(futures)[0] < 0.2


def unused_parameters():
    device, rank = sb.device(), dist.get_rank()
    torch.manual_seed(0)
    branches = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]).to(device)

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = branches

        def forward(self, x):
            return self.branches[rank % 2](x)

    model = nn.parallel.DistributedDataParallel(Either(), find_unused_parameters=True)
    x = torch.ones(4, 3, device=device)
    model(x).sum().backward()
    # each branch was used by one of two ranks: half of the 4 rows' gradient
    assert [b.weight.grad.tolist() for b in branches] == [[[2.0] * 3] * 2] * 2


def test_ddp_with_unused_parameters():
    values(unused_parameters)


def refusals():
    from torch.distributed import ReduceOp

    refused = {}
    integers = torch.ones(2, dtype=torch.int64, device=sb.device())
    attempts = {
        "bitwise": lambda: dist.all_reduce(integers, op=ReduceOp.BXOR),
        "fp8": lambda: dist.all_reduce(full(1).to(torch.float8_e4m3fn)),
        "any source": lambda: dist.recv(full(0)),
        "no dimension": lambda: dist.all_to_all_single(full(0, 1)[0], full(0, 1)[0]),
        "uneven": lambda: dist.all_to_all_single(full(0, 3), full(0, 3)),
        "cpu": lambda: dist.all_reduce(torch.ones(2)),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except RuntimeError as error:
            refused[name] = str(error)
    return refused


def test_hccl_refuses_what_hccl_refuses():
    refused = values(refusals)[0]
    assert "bitwise" in refused["bitwise"]
    assert "unsupported data type" in refused["fp8"]
    assert "any source" in refused["any source"]
    assert "0-dim" in refused["no dimension"]
    assert "does not divide" in refused["uneven"]
    assert "No backend type associated with device type cpu" in refused["cpu"]


def counted():
    with calls.record() as log:
        x = full(1, 5)
        dist.all_reduce(x)
        funcol.all_gather_tensor(x, 0, dist.group.WORLD).sum().item()
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    return calls.summary(log)


def test_calls_are_counted_as_on_the_cpu():
    common = {"all_reduce": (1, 20), "all_gather": (1, 40)}
    assert values(counted) == [common | {"send": (1, 20)}, common | {"recv": (1, 20)}]


# Torch's own parallelisms


def data_parallel():
    rank, size, device = dist.get_rank(), dist.get_world_size(), sb.device()
    model, alone = tiny_lm(dim=32), tiny_lm(dim=32)
    wrapped = nn.parallel.DistributedDataParallel(model.to(device), device_ids=[device.index])
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for step in range(2):
        tokens, targets = counting_batch(step, batch=2 * size, seq=16)
        mine = slice(2 * rank, 2 * rank + 2)
        losses = [
            token_loss(wrapped(tokens[mine].to(device)), targets[mine].to(device)),
            token_loss(alone(tokens), targets),
        ]
        for loss, opt in zip(losses, steps, strict=True):
            opt.zero_grad()
            loss.backward()
            opt.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        close(a, b)


def test_ddp_equals_one_process():
    values(data_parallel)


def fully_sharded(policy):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, size, device = dist.get_rank(), dist.get_world_size(), sb.device()
    mesh = init_device_mesh(device.type, (size,))
    model, alone = tiny_lm(dim=32).to(device), tiny_lm(dim=32)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    kwargs = {"mesh": mesh} | ({"mp_policy": mixed} if policy == "bf16" else {})
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    tokens, targets = counting_batch(0, batch=2 * size, seq=16)
    mine = slice(2 * rank, 2 * rank + 2)
    token_loss(model(tokens[mine].to(device)).float(), targets[mine].to(device)).backward()
    token_loss(alone(tokens), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    tolerance = 1e-5 if policy == "fp32" else 0.03 * expected.item()  # bf16 keeps 8 bits
    close(norm, expected, tolerance)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert a.to_local().numel() <= b.numel() // size + b.shape[-1]
        close(a.grad.full_tensor(), b.grad, 1e-5 if policy == "fp32" else 0.02)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_fsdp2_equals_one_process(policy):
    values(fully_sharded, policy)


def tensor_parallel():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    size, device = dist.get_world_size(), sb.device()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(4, 8)
    model = copy.deepcopy(alone).to(device)
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    here, there = model(x.to(device)), alone(x)
    here.pow(2).sum().backward()
    there.pow(2).sum().backward()
    close(here, there)
    assert model[0].weight.to_local().shape == (16 // size, 8)
    close(model[0].weight.grad.full_tensor(), alone[0].weight.grad)
    close(model[2].weight.grad.full_tensor(), alone[2].weight.grad)


def test_dtensor_tensor_parallel_equals_one_process():
    values(tensor_parallel)


def redistribute():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, randn

    size, device = dist.get_world_size(), sb.device()
    mesh = init_device_mesh(device.type, (size, 1), mesh_dim_names=("dp", "tp"))["dp"]
    whole = torch.arange(12.0).view(4, 3)
    rows = distribute_tensor(whole.to(device), mesh, [Shard(0)])
    assert rows.to_local().shape == (4 // size, 3)
    close(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    close((rows.redistribute(mesh, [Shard(1)]) @ rows.T).full_tensor(), whole @ whole.T)
    noise = randn(4, 4, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    assert noise.unique().numel() == 16  # no two ranks draw the same numbers


def test_dtensor_redistribute():
    values(redistribute)


def pipeline(kind):
    from torch.distributed import pipelining

    rank, size, device = dist.get_rank(), dist.get_world_size(), sb.device()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(size)))
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    mine = copy.deepcopy(layers[rank]).to(device)
    stage = pipelining.PipelineStage(mine, rank, size, device)
    schedule = getattr(pipelining, kind)(stage, 4, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x.to(device))
    elif rank == size - 1:
        schedule.step(target=target.to(device))
    else:
        schedule.step()
    nn.functional.mse_loss(layers(x), target).backward()
    close(mine.weight.grad, layers[rank].weight.grad)


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipeline_schedules_equal_one_process(kind):
    values(pipeline, kind)


def zero_one():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    device = sb.device()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(alone).to(device))
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    whole = torch.optim.AdamW(alone.parameters(), lr=0.1)
    x = torch.randn(5, 4)
    for _ in range(2):
        for m, opt, data in ((model, sharded, x.to(device)), (alone, whole, x)):
            opt.zero_grad()
            m(data).pow(2).mean().backward()
            opt.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        close(a, b)


def test_zero_1_equals_one_process():
    values(zero_one)


def checkpoint(folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    size, device = dist.get_world_size(), sb.device()
    mesh = init_device_mesh(device.type, (size,))
    model = tiny_lm(dim=32).to(device)
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = tiny_lm(seed=1, dim=32).to(device)
    fully_shard(other, mesh=mesh)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    for a, b in zip(other.parameters(), tiny_lm(dim=32).parameters(), strict=True):
        close(a.full_tensor(), b, 0)


def test_distributed_checkpoint(tmp_path):
    values(checkpoint, str(tmp_path))


def functional():
    size, world = dist.get_world_size(), dist.group.WORLD
    assert funcol.all_reduce(full(1), "sum", world).sum().item() == 3 * size
    assert funcol.all_gather_tensor(full(1), 0, world).sum().item() == 3 * size
    assert funcol.reduce_scatter_tensor(full(1, 2 * size), "sum", 0, world).sum().item() == 2 * size
    assert funcol.all_to_all_single(full(1, size), None, None, world).sum().item() == size
    from torch.distributed.nn.functional import all_reduce

    x = full(1).requires_grad_()
    all_reduce(x).sum().backward()
    assert x.grad.tolist() == [size] * 3


def test_functional_collectives_and_their_gradients():
    values(functional)
