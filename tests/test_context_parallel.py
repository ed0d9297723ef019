"""Context parallelism beyond the checks: whole models, torch's own ring, bf16, plans, traps."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import shardbook as sb
from shardbook import calls
from shardbook.basics.tiny import counting_batch, tiny_lm
from shardbook.parallel.context import (
    block_attention,
    merge_attention,
    shard_positions,
    zigzag_shard,
    zigzag_unshard,
)
from shardbook.parallel.ring import causal_plan, ring_attention, zigzag_plan, zigzag_ring_attention
from shardbook.parallel.ulysses import heads_for_sequence, sequence_for_heads, ulysses_attention
from shardbook.pictures import context as context_pictures
from shardbook.studies.context_lm import context_parallel_, context_parallel_step

B, D, S = 2, 8, 48


def draw(heads, kv_heads, seq=S, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = [(B, n, seq, D) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def whole(heads, kv_heads, causal, dtype=torch.float32):
    """out, dq, dk, dv of SDPA over the whole sequence, in float64."""
    *qkv, grad = (x.double() for x in draw(heads, kv_heads, dtype=dtype))
    leaves = [x.requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=heads != kv_heads)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def run_way(way, heads, kv_heads, causal, dtype=torch.float32):
    """Out and gradients of this rank's shard, computed with the library."""
    zigzag = way == "zigzag"
    held = shard_positions(S, dist.get_world_size(), dist.get_rank(), zigzag)
    q, k, v, grad = (x[:, :, held].to(sb.device()) for x in draw(heads, kv_heads, dtype=dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if zigzag:
        out = zigzag_ring_attention(*leaves)
    else:
        out = {"ring": ring_attention, "ulysses": ulysses_attention}[way](*leaves, causal=causal)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, grad))]


def all_ways(dtype, cases):
    return [run_way(*case, dtype=dtype) for case in cases]


def held_by(rank, world, way):
    return shard_positions(S, world, rank, way == "zigzag")


CASES = [
    (way, 8, kv, causal)
    for way in ("ring", "zigzag", "ulysses")
    for kv in (8, 2, 1)
    for causal in ((True,) if way == "zigzag" else (False, True))
]


@pytest.mark.parametrize("world", [2, 4])
def test_every_way_is_sdpa_with_grouped_heads(world):
    values = sb.run(all_ways, torch.float32, CASES, world_size=world).values
    for i, (way, heads, kv, causal) in enumerate(CASES):
        oracle = whole(heads, kv, causal)
        for rank, found in enumerate(values):
            held = held_by(rank, world, way)
            for name, got, want in zip(("out", "dq", "dk", "dv"), found[i], oracle, strict=True):
                error = (got - want[:, :, held]).abs().max()
                assert error < 1e-5, (way, kv, causal, rank, name, float(error))


def test_bf16_keeps_its_dtype_and_rounds_once():
    cases = [c for c in CASES if c[0] != "ulysses" and c[2] == 2]
    values = sb.run(all_ways, torch.bfloat16, cases, world_size=4).values
    for i, (way, heads, kv, causal) in enumerate(cases):
        oracle = whole(heads, kv, causal, torch.bfloat16)
        for rank, found in enumerate(values):
            held = held_by(rank, 4, way)
            for got, want in zip(found[i], oracle, strict=True):
                assert got.dtype == torch.bfloat16
                want = want[:, :, held]
                # fp32 inside; the result is rounded once (2^-9 of its size), and out enters
                # delta after that rounding.
                error = (got.double() - want).abs()
                assert (error <= 2**-7 * want.abs() + 2**-7).all()
                if got is found[i][0]:
                    assert (error <= 2**-8 * want.abs() + 1e-5).all(), "out is rounded once"


# torch's own ring, with the kernel of the CPU that returns lse


def torchs_ring(zigzag, rotate):
    """Ours and torch's: out, dq, dk, dv; K and V bytes that torch's calls carry."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    theirs._cp_options.enable_load_balance = zigzag
    theirs._cp_options.rotate_method = getattr(theirs._RotateMethod, rotate)
    forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def backward(grad_out, query, key, value, out, logsumexp, is_causal):
        return backward_op(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    held = shard_positions(S, dist.get_world_size(), dist.get_rank(), zigzag)
    q, k, v, grad = (x[:, :, held] for x in draw(4, 4))
    group = dist.group.WORLD
    with calls.record() as log:
        out, lse = theirs._templated_ring_attention(group, 2, forward_op, q, k, v, is_causal=True)
    grads = theirs._templated_ring_attention_backward(
        group, 2, backward, grad, "grad_out", q, k, v, out, lse, is_causal=True
    )
    ours = run_way("zigzag" if zigzag else "ring", 4, 4, True)
    return [out, *grads], ours, calls.summary(log)


@pytest.mark.parametrize("zigzag", [False, True])
def test_torchs_templated_ring_agrees(zigzag):
    if sb.device().type != "cpu":
        pytest.skip("the kernel with an lse is the CPU's")
    for rotate, op in (("ALL_GATHER", "all_gather"), ("ALL_TO_ALL", "all_to_all")):
        for theirs, ours, log in sb.run(torchs_ring, zigzag, rotate, world_size=4).values:
            assert set(log) == {op}
            for a, b in zip(theirs, ours, strict=True):
                assert (a - b).abs().max() < 1e-5


# the small model


def train(kinds, steps=5, prompt=0, kv_heads=2):
    curves = {}
    for kind in kinds:
        model = context_parallel_(tiny_lm(num_kv_heads=kv_heads).to(sb.device()), kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(steps):
            tokens, targets = counting_batch(step % 2, seq=32)
            targets[:, :prompt] = -100
            optimizer.zero_grad()
            losses.append(context_parallel_step(model, kind, tokens, targets))
            optimizer.step()
        curves[kind] = losses
    return curves


@pytest.mark.parametrize("prompt", [0, 9])  # of 32 tokens: rank 0 of 4 counts none, rank 1 seven
def test_model_trains_like_one_process(prompt):
    single = train(["whole"], prompt=prompt)["whole"]
    assert single[0] - single[-1] > 0.1, "the model learns in these steps"
    for found in sb.run(train, ["ring", "zigzag", "ulysses"], 5, prompt, world_size=4).values:
        for kind, losses in found.items():
            assert losses == pytest.approx(single, abs=1e-4), kind


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown kind 'rign'"):
        context_parallel_(tiny_lm(), "rign")


# Ulysses inside, a ring outside


def hybrid():
    rank = dist.get_rank()
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    held = zigzag_shard(torch.arange(S), 2, rank // 2, 0).chunk(2)[rank % 2]
    q, k, v, _ = (x[:, :, held].to(sb.device()) for x in draw(8, 2))
    q, k, v = (heads_for_sequence(x, inner) for x in (q, k, v))
    return held, sequence_for_heads(zigzag_ring_attention(q, k, v, outer), inner).cpu()


def test_hybrid_of_ulysses_and_zigzag():
    oracle = whole(8, 2, True)[0]
    for held, out in sb.run(hybrid, world_size=4).values:
        assert (out - oracle[:, :, held]).abs().max() < 1e-5


# without ranks


@given(world=st.integers(1, 9), pieces=st.integers(1, 4), zigzag=st.booleans())
def test_shards_are_a_partition(world, pieces, zigzag):
    length = 2 * world * pieces
    held = [shard_positions(length, world, r, zigzag) for r in range(world)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(length))
    if zigzag:
        x = torch.arange(length * 3).view(length, 3)
        shards = [zigzag_shard(x, world, r, 0) for r in range(world)]
        assert torch.equal(zigzag_unshard(shards, 0), x)


@given(world=st.integers(1, 9))
def test_plans_visit_every_visible_pair_once(world):
    for plan, zigzag in ((causal_plan, False), (zigzag_plan, True)):
        size = 4
        held = [shard_positions(world * size, world, r, zigzag) for r in range(world)]
        visits = torch.zeros(world * size, world * size, dtype=torch.int64)
        for rank in range(world):
            pairs = 0
            for owner in range(world):
                for rows, cols, causal in plan(rank, owner, size):
                    queries, keys = held[rank][rows], held[owner][cols]
                    pairs += len(queries) * len(keys)
                    mask = torch.ones(len(queries), len(keys), dtype=torch.bool)
                    if causal:
                        mask = mask.tril(len(keys) - len(queries))
                    visits[queries[:, None], keys] += mask
            if zigzag:
                assert pairs == (2 * world + 1) * size**2 // 4
        assert torch.equal(visits, torch.ones_like(visits).tril())


@settings(deadline=None, max_examples=40)
@given(data=st.data(), keys=st.integers(1, 12), scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]))
def test_merge_in_any_order_and_grouping(data, keys, scale):
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(1, 2, 3, D, generator=generator) * scale
    k, v = (torch.randn(1, 2, keys, D, generator=generator) for _ in "kv")
    cuts = sorted(data.draw(st.lists(st.integers(0, keys), max_size=3)))
    edges = [0, *cuts, keys]
    parts = []
    for a, b in itertools.pairwise(edges):
        if a < b:
            parts.append(block_attention(q, k[:, :, a:b], v[:, :, a:b], False))
        else:  # no key at all
            parts.append((torch.zeros(1, 2, 3, D), torch.full((1, 2, 3), -torch.inf)))
    parts = data.draw(st.permutations(parts))
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge_attention(out, lse, *part)
    want, want_lse = block_attention(q, k, v, False)
    assert out.isfinite().all()
    # lse has the relative accuracy of fp32, and a weight's relative error is lse's absolute one.
    assert torch.allclose(lse, want_lse, rtol=1e-6, atol=1e-5)
    assert (out - want).abs().max() < 2e-5 + 1e-6 * want_lse.abs().max()


def test_pictures_show_the_work_of_each_rank():
    titles = [ax.get_title() for ax in context_pictures.draw_rings().axes]
    assert [t.splitlines()[1] for t in titles] == [
        "work of ranks 4, 4, 4, 4",
        "work of ranks 0.5, 1.5, 2.5, 3.5",
        "work of ranks 2, 2, 2, 2",
    ]
    assert len(context_pictures.draw_ulysses().axes) == 2


def order_of_backward():
    """Whether dk and dv of a step travel while the next one is computed."""
    from shardbook.parallel import ring

    q, k, v = (torch.randn(1, 2, 4, 8, device=sb.device(), requires_grad=True) for _ in range(3))
    out = ring.ring_attention(q, k, v)
    happened, compute, exchange = [], ring.block_attention_backward, ring.exchange

    class Noted:
        def __init__(self, work, what):
            self.work, self.what = work, what

        def wait(self):
            happened.append(f"wait {self.what}")
            return self.work.wait()

    def noted(tensors, group):
        what = "keys" if tensors[0].data_ptr() in keys else "gradients"
        arriving, works = exchange(tensors, group)
        keys.update({arriving[0].data_ptr()} if what == "keys" else ())
        happened.append(f"send {what}")
        return arriving, [Noted(works[0], what), *works[1:]]

    def computed(*args):
        happened.append("compute")
        return compute(*args)

    keys = {k.data_ptr()}
    ring.block_attention_backward, ring.exchange = computed, noted
    out.sum().backward()
    return happened


def test_gradients_of_keys_travel_while_the_next_block_is_computed():
    step = ["send keys", "compute", "wait gradients", "send gradients", "wait keys"]
    first, last = [s for s in step if s != "wait gradients"], [s for s in step if "keys" not in s]
    for happened in sb.run(order_of_backward, world_size=3).values:
        assert happened == [*first, *step, *last, "wait gradients"]
