"""Data parallel and ZeRO beyond the exercises' checks: beside PyTorch's, and at the edges."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardbook as sb
from shardbook import calls
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss
from shardbook.memory import held_bytes, storage_bytes
from shardbook.parallel.data import BucketedDataParallel, average_gradients_, make_buckets
from shardbook.parallel.zero import (
    FullySharded,
    ZeroAdamW,
    clip_grad_norm_sharded_,
    training_memory,
)


def part(step, batch=8):
    rank, world = dist.get_rank(), dist.get_world_size()
    return [t.chunk(world)[rank].to(sb.device()) for t in counting_batch(step, batch)]


def sharded(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullySharded(block)
    return FullySharded(model)


def train(strategy, steps=4, clip=None):
    """Losses of this rank, and the parameters at the end where they are whole."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = tiny_lm().to(sb.device())
    plain = model
    if strategy == "bucketed":
        model = BucketedDataParallel(model, bucket_bytes=50_000)
    elif strategy in ("ddp", "zero redundancy"):
        model = DistributedDataParallel(model)
    elif strategy == "sharded":
        model = sharded(model)
    elif strategy == "fully_shard":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    adamw = torch.optim.AdamW
    if strategy == "zero":
        optimizer = ZeroAdamW(model.parameters(), lr=1e-2, eps=1e-4)
    elif strategy == "zero redundancy":
        params = model.parameters()
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class=adamw, lr=1e-2, eps=1e-4)
    else:
        optimizer = adamw(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in range(steps):
        tokens, targets = part(step)
        loss = token_loss(model(tokens), targets)
        loss.backward()
        if strategy == "bucketed":
            model.finish()
        if clip and strategy == "sharded":
            clip_grad_norm_sharded_(model.parameters(), clip)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, None if "shard" in strategy else [p.detach().cpu() for p in plain.parameters()]


PAIRS = [("bucketed", "ddp"), ("zero", "zero redundancy"), ("sharded", "fully_shard")]


def train_pairs(clip=None):
    return [[train(name, clip=clip) for name in pair] for pair in PAIRS]


@pytest.mark.parametrize("world", [1, 3, 4])
def test_trains_as_pytorchs_own_do(world):
    for found in sb.run(train_pairs, world_size=world).values:
        for (mine, my_params), (theirs, their_params) in found:
            # Adam divides by small roots, which widens rounding: a little more than 1e-5.
            assert mine == pytest.approx(theirs, abs=2e-5)
            if my_params:
                for a, b in zip(my_params, their_params, strict=True):
                    torch.testing.assert_close(a, b, atol=5e-5, rtol=0)


def clipped():
    return train("sharded", clip=0.3)[0], train("fully_shard", clip=0.3)[0]


def test_clipping_equals_fully_shards():
    for mine, theirs in sb.run(clipped, world_size=4).values:
        assert mine == pytest.approx(theirs, abs=2e-5)


class Edges(nn.Module):
    """Tied weights, a weight used twice, a checkpointed part, a buffer, and an unused parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 9)
        self.tied = nn.Linear(6, 9, bias=False)
        self.tied.weight = self.first.weight
        self.back = nn.Linear(9, 6)
        self.unused = nn.Parameter(torch.randn(5))
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x):
        x = self.back(torch.tanh(self.first(x) + self.tied(x))) + self.shift
        x = checkpoint(lambda x: self.back(torch.relu(self.first(x))), x, use_reentrant=False)
        return {"out": x, "untouched": 3}


def edges():
    full = Edges().to(sb.device())
    model = FullySharded(copy.deepcopy(full))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).to(sb.device())
    found = []
    for m in (full, model):
        y = x.clone().requires_grad_()
        m(m(y)["out"])["out"].square().sum().backward()  # the module twice in one graph
        found.append(
            (y.grad.cpu(), sum(p.grad.square().sum() for p in m.parameters() if p.grad is not None))
        )
    squares = found[1][1].clone()
    dist.all_reduce(squares)
    return found[0][0], found[1][0], found[0][1].cpu(), squares.cpu()


def test_fully_sharded_with_tied_reused_checkpointed_and_unused_weights():
    for world in (1, 4):
        for expected, actual, norm, sharded_norm in sb.run(edges, world_size=world).values:
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(sharded_norm, norm, atol=1e-4, rtol=1e-5)


def reentrant():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=True)

    model = FullySharded(Inside().to(sb.device()))
    x = torch.ones(2, 6, device=sb.device(), requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(x).sum().backward()


def test_a_reentrant_checkpoint_inside_is_refused():
    sb.run(reentrant, world_size=2)


def frozen_and_partial():
    model = nn.Linear(5, 3).to(sb.device()).requires_grad_(False)
    wrapped = FullySharded(copy.deepcopy(model))
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).to(sb.device())
    x.requires_grad_()
    wrapped(x).sum().backward()
    frozen = (x.grad - model.weight.sum(0)).abs().max().item(), wrapped.full is None

    trained = FullySharded(nn.Linear(5, 3).to(sb.device()))
    (grad,) = torch.autograd.grad(trained(x).sum(), x)  # the shard's gradient is not asked for
    return frozen, grad.shape, trained.full is None, trained.shard.grad is None


def test_frozen_parameters_and_partial_backward_let_the_parameters_go():
    for (error, released), shape, also_released, no_grad in sb.run(
        frozen_and_partial, world_size=2
    ).values:
        assert error < 1e-6 and released
        assert shape == (2, 5) and also_released and no_grad


def released_after_an_error():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
            self.fail = True

        def forward(self, x):
            if self.fail:
                raise KeyError("broken")
            return x * self.weight

    model = FullySharded(Breaks().to(sb.device()))
    with pytest.raises(KeyError, match="broken"):
        model(torch.ones(6, device=sb.device()))
    model.module.fail = False
    return model.full is None, model(torch.ones(6, device=sb.device())).sum().item()


def test_a_module_that_raises_leaves_no_parameters_behind():
    assert sb.run(released_after_an_error, world_size=2).values == [(True, 6.0)] * 2


def refusals():
    messages = []
    mixed = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).bfloat16()).to(sb.device())
    half_frozen = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).requires_grad_(False))
    inner = FullySharded(nn.Linear(2, 3).to(sb.device()))
    for module in (mixed, half_frozen.to(sb.device()), nn.Tanh(), inner):
        with pytest.raises(ValueError) as raised:
            FullySharded(module)
        messages.append(str(raised.value))
    with pytest.raises(ValueError, match="bucket"):
        BucketedDataParallel(nn.Linear(2, 3).to(sb.device()), bucket_bytes=0)
    model = BucketedDataParallel(nn.Linear(2, 3).to(sb.device()))
    x = torch.ones(1, 2, device=sb.device())
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="finish"):
        model(x).sum().backward()
    model.finish()
    return messages


def test_refuses_with_a_sentence():
    mixed, half_frozen, empty, twice = sb.run(refusals, world_size=2).values[0]
    assert "one dtype" in mixed and "frozen" in half_frozen
    assert "no parameters" in empty and "no parameters" in twice


def saved_and_loaded():
    model = tiny_lm().to(sb.device())
    optimizer = ZeroAdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def step(model, optimizer, i):
        tokens, targets = part(i)
        token_loss(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(2):
        step(model, optimizer, i)
        schedule.step()
    again = copy.deepcopy(model)
    loaded = ZeroAdamW(again.parameters(), lr=1.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (again, loaded)):
        step(m, o, 2)
    return max(
        (a - b).abs().max().item()
        for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_zero_adamw_saves_loads_and_follows_a_schedule():
    assert sb.run(saved_and_loaded, world_size=3).values == [0.0] * 3


def mixed_dtypes():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6).bfloat16()).to(sb.device())
    wrapped = BucketedDataParallel(model, bucket_bytes=10**6)
    x = torch.ones(2, 4, device=sb.device()) * (1 + dist.get_rank())
    model[1](model[0](x).bfloat16()).float().sum().backward()
    with calls.record() as log:
        wrapped.finish()
    dtypes = [b.params[0].dtype for b in wrapped.buckets]
    zero = ZeroAdamW(model.parameters(), lr=0.1)
    zero.step()
    finite = all(p.isfinite().all().item() for p in model.parameters())
    return [str(d) for d in dtypes], finite, len(log)


def test_buckets_and_shards_hold_one_dtype_each():
    for dtypes, finite, _ in sb.run(mixed_dtypes, world_size=2).values:
        assert dtypes == ["torch.bfloat16", "torch.float32"] and finite


def test_make_buckets_respects_the_size_but_for_one_large_parameter():
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 4, 20, 1, 2)]
    buckets = make_buckets(params, bucket_bytes=32)
    assert [[p.numel() for p in b.params] for b in buckets] == [[3, 4], [20], [1, 2]]
    assert [b.nbytes for b in buckets] == [28, 80, 12]
    assert make_buckets([], 10) == []


def nothing_to_average():
    model = nn.Linear(3, 2).to(sb.device())
    with calls.record() as log:
        average_gradients_(model)
        average_gradients_(nn.Tanh())
        ZeroAdamW(model.parameters(), lr=0.1).step()
    return [p.grad for p in model.parameters()], sum(c.nbytes for c in log)


def test_nothing_to_average_is_nothing_to_send():
    for grads, nbytes in sb.run(nothing_to_average, world_size=2).values:
        assert grads == [None, None]
        assert nbytes <= 2 * 2 * 8  # flags only


def large_gradients():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(6_250_001))
    model.to(sb.device())
    model.weight.grad = torch.full_like(model.weight, float(dist.get_rank()))
    with calls.record() as log:
        average_gradients_(model)
    sent = [c.nbytes for c in log if c.dtype.is_floating_point]
    return sent, model.weight.grad.unique().tolist()


def test_a_message_has_at_most_25_mb():
    for sent, values in sb.run(large_gradients, world_size=2).values:
        assert sent == [25_000_000, 4]
        assert values == [0.5]


def test_held_bytes_leaves_out_what_lies_nowhere():
    before = held_bytes()
    meta = torch.ones(1000, device="meta")
    exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))  # holds fake tensors
    held = held_bytes() - before
    assert 0 < held < 1000, f"{held} bytes"
    del meta, exported


def test_held_bytes_counts_storages_once_and_gradients_too():
    before = held_bytes()
    x = torch.zeros(1000, requires_grad=True)
    views = [x.detach()[i:] for i in range(5)]
    assert held_bytes() - before == 4000
    x.sum().backward()
    assert held_bytes() - before == 8000
    assert storage_bytes([x, *views, None]) == 4000


def test_training_memory_is_the_papers():
    total = [sum(training_memory(7_500_000_000, 64, stage).values()) / 1e9 for stage in range(4)]
    assert [round(t, 1) for t in total] == [120.0, 31.4, 16.6, 1.9]


def warned(dtype):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ZeroAdamW([nn.Parameter(torch.ones(3, dtype=dtype))], lr=0.1)
    return [str(w.message) for w in seen]


def test_16_bit_parameters_without_a_master_copy_are_warned_of():
    assert warned(torch.float32) == []
    (said,) = warned(torch.bfloat16)
    assert "give it fp32 parameters" in said


def unread_flags():
    """What has_gradient says, and how often the sum was read from the device."""
    from shardbook.parallel.data import has_gradient

    read, tolist = [], torch.Tensor.tolist
    torch.Tensor.tolist = lambda t: read.append(1) or tolist(t)
    params = [nn.Parameter(torch.ones(2, device=sb.device())) for _ in range(2)]
    found = []
    for missing in (False, True):  # the second time rank 0 lacks one
        for p in params:
            p.grad = torch.ones_like(p)
        if missing and dist.get_rank() == 0:
            params[1].grad = None
        found.append((has_gradient(params), len(read)))
    torch.Tensor.tolist = tolist
    return found


def test_a_rank_with_all_gradients_does_not_wait_for_the_flags():
    first, second = sb.run(unread_flags, world_size=2).values
    assert first == [([True, True], 0), ([True, True], 1)]
    assert second == [([True, True], 0), ([True, True], 0)]
