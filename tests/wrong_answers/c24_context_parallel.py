"""Answers to chapter 24: mistakes engineers make with context parallelism, and right ones."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardbook.parallel import context, ring, ulysses
from shardbook.parallel.context import block_attention, block_attention_backward
from shardbook.parallel.ring import exchange
from shardbook.parallel.ulysses import heads_for_sequence, sequence_for_heads
from tests.wrong_answers import right, wrong

for name in ("merge_attention", "zigzag_shard", "zigzag_unshard", "shard_positions"):
    right(name)(getattr(context, name))
right("ring_attention")(ring.ring_attention)
right("zigzag_ring_attention")(ring.zigzag_ring_attention)
right("ulysses_attention")(ulysses.ulysses_attention)


# merge_attention


@right("merge_attention")
def by_logaddexp(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    out = (lse_a - safe).exp()[..., None] * out_a + (lse_b - safe).exp()[..., None] * out_b
    return out, lse


@wrong("merge_attention", says="nan|inf|off by")
def overflows(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp(), lse_b.exp()
    return (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], (a + b).log()


@wrong("merge_attention", says="off by")
def plain_mean(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


@wrong("merge_attention", says="off by")
def takes_the_larger(out_a, lse_a, out_b, lse_b):
    return torch.where((lse_a > lse_b)[..., None], out_a, out_b), torch.maximum(lse_a, lse_b)


@wrong("merge_attention", says="lse")
def forgets_the_lse(out_a, lse_a, out_b, lse_b):
    return by_logaddexp(out_a, lse_a, out_b, lse_b)[0], lse_a


@wrong("merge_attention", says="saw|off by")
def nan_where_nothing_is_seen(out_a, lse_a, out_b, lse_b):
    share = torch.sigmoid(lse_b - lse_a)[..., None]
    return out_a + share * (out_b - out_a), lse_a - F.logsigmoid(lse_a - lse_b)


@wrong("merge_attention", says="rows differ")
def one_maximum_for_all_rows(out_a, lse_a, out_b, lse_b):
    top = torch.maximum(lse_a.max(), lse_b.max())
    if top == -torch.inf:
        return torch.zeros_like(out_a), lse_a
    a, b = (lse_a - top).exp(), (lse_b - top).exp()
    both = (a + b).clamp(min=1e-38)
    out = (a[..., None] * out_a + b[..., None] * out_b) / both[..., None]
    return out, torch.where(a + b > 0, top + both.log(), -torch.inf)


@wrong("merge_attention", says="rows differ")
def all_rows_saw_nothing_or_none(out_a, lse_a, out_b, lse_b):
    if torch.isinf(lse_a).all():
        return (torch.zeros_like(out_b) if torch.isinf(lse_b).all() else out_b), lse_b
    if torch.isinf(lse_b).all():
        return out_a, lse_a
    lse = lse_a - F.logsigmoid(lse_a - lse_b)
    return out_a - torch.sigmoid(lse_b - lse_a)[..., None] * (out_a - out_b), lse


@wrong("merge_attention", says="no side saw")
def keeps_what_nobody_saw(out_a, lse_a, out_b, lse_b):
    out, lse = by_logaddexp(out_a, lse_a, out_b, lse_b)
    return torch.where((lse == -torch.inf)[..., None], out_a, out), lse


@wrong("merge_attention", says="off by|changed")
def adds_in_place(out_a, lse_a, out_b, lse_b):
    out, lse = by_logaddexp(out_a, lse_a, out_b, lse_b)
    out_a.copy_(out)
    return out_a, lse


# zigzag_shard, zigzag_unshard, shard_positions


@right("zigzag_shard")
def by_chunks(x, world_size, rank, dim):
    if x.shape[dim] % (2 * world_size):
        raise ValueError(f"{x.shape[dim]} positions do not divide by twice {world_size} ranks")
    chunks = x.chunk(2 * world_size, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


@wrong("zigzag_shard", says="off by|differs|rank")
def contiguous_shard(x, world_size, rank, dim):
    if x.shape[dim] % (2 * world_size):
        raise ValueError(f"{x.shape[dim]} positions do not divide by twice {world_size} ranks")
    return x.chunk(world_size, dim)[rank]


@wrong("zigzag_shard", says="off by|differs|rank")
def late_half_first(x, world_size, rank, dim):
    a, b = by_chunks(x, world_size, rank, dim).chunk(2, dim)
    return torch.cat([b, a], dim)


@wrong("zigzag_shard", says="off by|differs|rank")
def pairs_the_next_chunk(x, world_size, rank, dim):
    by_chunks(x, world_size, rank, dim)
    chunks = x.chunk(2 * world_size, dim)
    return torch.cat([chunks[rank], chunks[(rank + world_size) % (2 * world_size)]], dim)


@wrong("zigzag_shard", says="shape|off by|dimension|raised")
def always_dim_2(x, world_size, rank, dim):
    return by_chunks(x, world_size, rank, min(2, x.dim() - 1))


@wrong("zigzag_shard", says="accepted|expected ValueError")
def any_length(x, world_size, rank, dim):
    chunks = x.chunk(2 * world_size, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


@wrong("zigzag_shard", says="off by|differs|rank")
def stripes(x, world_size, rank, dim):
    by_chunks(x, world_size, rank, dim)
    return x.index_select(dim, torch.arange(rank, x.shape[dim], world_size, device=x.device))


@right("zigzag_unshard")
def by_scatter(shards, dim):
    world = len(shards)
    length = shards[0].shape[dim] * world
    chunks = torch.arange(length, device=shards[0].device).chunk(2 * world)
    order = torch.cat([c for r in range(world) for c in (chunks[r], chunks[-1 - r])])
    return torch.cat(shards, dim).index_select(dim, order.argsort())


@wrong("zigzag_unshard", says="off by")
def just_concatenates(shards, dim):
    return torch.cat(shards, dim)


@wrong("zigzag_unshard", says="off by")
def second_halves_in_rank_order(shards, dim):
    halves = [s.chunk(2, dim) for s in shards]
    return torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim)


@wrong("zigzag_unshard", says="off by")
def reversed_inside(shards, dim):
    halves = [s.chunk(2, dim) for s in shards]
    return torch.cat([h[0] for h in halves] + [h[1].flip(dim) for h in reversed(halves)], dim)


@wrong("zigzag_unshard", says="shape|off by|raised")
def joins_along_dim_1(shards, dim):
    return by_scatter(shards, 1)


@wrong("zigzag_unshard", says="shape|off by")
def forgets_the_late_halves(shards, dim):
    return torch.cat([s.chunk(2, dim)[0] for s in shards], dim)


@right("shard_positions")
def positions_from_a_view(seq_len, world_size, rank, zigzag=False):
    n = 2 * world_size if zigzag else world_size
    if seq_len % n:
        raise ValueError(f"{seq_len} positions do not divide by {n}")
    rows = torch.arange(seq_len).view(n, -1)
    return rows[[rank, n - 1 - rank]].flatten() if zigzag else rows[rank]


@wrong("shard_positions", says="differs|rank")
def local_positions(seq_len, world_size, rank, zigzag=False):
    positions_from_a_view(seq_len, world_size, rank, zigzag)
    return torch.arange(seq_len // world_size)


@wrong("shard_positions", says="differs|rank")
def ignores_zigzag(seq_len, world_size, rank, zigzag=False):
    positions_from_a_view(seq_len, world_size, rank, zigzag)
    return positions_from_a_view(seq_len, world_size, rank)


@wrong("shard_positions", says="dtype")
def in_floats(seq_len, world_size, rank, zigzag=False):
    return positions_from_a_view(seq_len, world_size, rank, zigzag).float()


@wrong("shard_positions", says="differs|rank")
def off_by_one_rank(seq_len, world_size, rank, zigzag=False):
    return positions_from_a_view(seq_len, world_size, (rank + 1) % world_size, zigzag)


@wrong("shard_positions", says="accepted|expected ValueError|shape|differs")
def rounds_down(seq_len, world_size, rank, zigzag=False):
    n = 2 * world_size if zigzag else world_size
    return positions_from_a_view(seq_len // n * n, world_size, rank, zigzag)


@wrong("shard_positions", says="differs|rank")
def zigzag_in_reverse(seq_len, world_size, rank, zigzag=False):
    got = positions_from_a_view(seq_len, world_size, rank, zigzag)
    return torch.cat([got.chunk(2)[0], got.chunk(2)[1].flip(0)]) if zigzag else got


# ring_attention


def _positions(size, owner, world, zigzag):
    return context.shard_positions(size * world, world, owner, zigzag)


class _Simple(torch.autograd.Function):
    """A ring by masks and positions; `faults` switches single mistakes on."""

    @staticmethod
    def forward(ctx, q, k, v, causal, zigzag, group, faults):
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, device=q.device)
        keys, values = k.contiguous(), v.contiguous()
        if "as they lie" in faults:
            keys, values = k, v
        passed = []
        for step in range(world):
            owner = (rank - step) % world
            if "keeps all" in faults or ("for backward" in faults and any(ctx.needs_input_grad)):
                passed.append((keys, values))
            if not causal or zigzag or owner <= rank or "no skip" in faults:
                plan = _plan(q, rank, owner, world, causal, zigzag, faults)
                plan = plan[:1] if "whole mask" in faults else plan
                for rows, cols, masked in plan:
                    if "whole mask" in faults:
                        part = _masked(q, keys, values, rank, owner, world, zigzag)
                    else:
                        part = block_attention(
                            q[:, :, rows], keys[:, :, cols], values[:, :, cols], masked
                        )
                    at = slice(None) if "whole mask" in faults else rows
                    if "last wins" in faults:
                        out[:, :, at], lse[:, :, at] = part
                    else:
                        merged = by_logaddexp(out[:, :, at], lse[:, :, at], *part)
                        out[:, :, at], lse[:, :, at] = merged
            last = step == world - 1
            if not last or ("one round too many" in faults and world > 1):
                (keys, values), works = exchange([keys, values], group)
                for work in works:
                    work.wait()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.args = causal, zigzag, group, faults
        ctx.blocks = passed if any(ctx.needs_input_grad) else None
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        causal, zigzag, group, faults = ctx.args
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        delta = (grad * out).sum(-1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        keys, values = k.contiguous(), v.contiguous()
        for step in range(world):
            owner = (rank - step) % world
            if not causal or zigzag or owner <= rank:
                for rows, cols, masked in _plan(q, rank, owner, world, causal, zigzag, ()):
                    kk, vv = (k, v) if "stale keys" in faults else (keys, values)
                    parts = block_attention_backward(
                        grad[:, :, rows], delta[:, :, rows], q[:, :, rows], kk[:, :, cols],
                        vv[:, :, cols], lse[:, :, rows], masked,
                    )  # fmt: skip
                    dq[:, :, rows] += parts[0]
                    dk[:, :, cols] += parts[1]
                    dv[:, :, cols] += parts[2]
            moving = [keys, values, dk, dv]
            if "gradients stay" in faults:
                moving = moving[:2]
            if world > 1 and (step < world - 1 or "no way home" not in faults):
                if step == world - 1:
                    moving = moving[2:]
                if moving:
                    moved, works = exchange([m.contiguous() for m in moving], group)
                    for work in works:
                        work.wait()
                    if step == world - 1:
                        dk, dv = moved
                    elif len(moved) == 4:
                        keys, values, dk, dv = moved
                    else:
                        keys, values = moved
        return dq, dk, dv, None, None, None, None


def _plan(q, rank, owner, world, causal, zigzag, faults):
    size = q.shape[2]
    if zigzag:
        return ring.zigzag_plan(rank, owner, size)
    return [(slice(None), slice(None), causal and owner == rank and "no triangle" not in faults)]


def _masked(q, k, v, rank, owner, world, zigzag):
    size = q.shape[2]
    rows, cols = (_positions(size, r, world, zigzag).to(q.device) for r in (rank, owner))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(cols > rows[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return weights @ v, lse


def _ring(name, *faults):
    def answer(q, k, v, causal=False, group=None):
        return _Simple.apply(q, k, v, causal, False, group, faults)

    answer.__name__ = name
    return answer


right("ring_attention")(_ring("simple_ring"))
wrong("ring_attention", says="gradient|dk|dv|dq")(_ring("stale_keys_in_backward", "stale keys"))
wrong("ring_attention", says="dk|dv")(_ring("gradients_stay_where_they_are", "gradients stay"))
wrong("ring_attention", says="dk|dv")(_ring("gradients_end_one_rank_short", "no way home"))
wrong("ring_attention", says="out")(_ring("last_block_wins", "last wins"))
wrong("ring_attention", says="out|causal")(_ring("no_triangle_in_the_own_block", "no triangle"))
wrong("ring_attention", says="sent|bytes")(_ring("one_round_too_many", "one round too many"))
wrong("ring_attention", says="holds the keys of 3")(_ring("lets_go_of_no_block", "keeps all"))
wrong("ring_attention", says="holds the keys of 3")(
    _ring("keeps_the_blocks_in_ctx_for_backward", "for backward")
)
wrong("ring_attention", says="contiguous")(_ring("sends_keys_as_they_lie", "as they lie"))


@wrong("ring_attention", says="out")
def local_attention(q, k, v, causal=False, group=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@wrong("ring_attention", says="point to point|sent")
def gathers_everything(q, k, v, causal=False, group=None):
    return _gathered(q, k, v, causal, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x, group=group)
        return torch.cat(pieces, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None


def _gathered(q, k, v, causal, group):
    rank, size = dist.get_rank(group), q.shape[2]
    k, v = _Gather.apply(k, group), _Gather.apply(v, group)
    mask = None
    if causal:
        rows = torch.arange(rank * size, (rank + 1) * size, device=q.device)
        mask = torch.arange(k.shape[2], device=q.device) <= rows[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@wrong("ring_attention", says="saves|memory")
def autograd_keeps_all_blocks(q, k, v, causal=False, group=None):
    """Right values, but every block that passes is kept for backward."""
    out = ring.ring_attention(q, k, v, causal, group)
    extra = [torch.zeros_like(k).requires_grad_() for _ in range(dist.get_world_size(group))]
    return out + sum((e * e.detach()).sum() for e in extra)


# zigzag_ring_attention


def _zigzag(name, *faults):
    def answer(q, k, v, group=None):
        return _Simple.apply(q, k, v, True, True, group, faults)

    answer.__name__ = name
    return answer


right("zigzag_ring_attention")(_zigzag("simple_zigzag"))
wrong("zigzag_ring_attention", says="computes|FLOPs")(_zigzag("masks_whole_blocks", "whole mask"))
wrong("zigzag_ring_attention", says="dk|dv|dq")(_zigzag("zigzag_stale_keys", "stale keys"))
wrong("zigzag_ring_attention", says="dk|dv")(_zigzag("zigzag_gradients_stay", "gradients stay"))
wrong("zigzag_ring_attention", says="sent|bytes")(
    _zigzag("zigzag_round_too_many", "one round too many")
)
wrong("zigzag_ring_attention", says="out")(_zigzag("zigzag_last_block_wins", "last wins"))
wrong("zigzag_ring_attention", says="holds the keys of 3")(
    _zigzag("zigzag_lets_go_of_no_block", "keeps all")
)


@wrong("zigzag_ring_attention", says="out")
def contiguous_mask_on_zigzag_shards(q, k, v, group=None):
    return ring.ring_attention(q, k, v, True, group)


@wrong("zigzag_ring_attention", says="out")
def zigzag_not_causal(q, k, v, group=None):
    return ring.ring_attention(q, k, v, False, group)


# ulysses_attention


@right("ulysses_attention")
def one_message_for_k_and_v(q, k, v, causal=False, group=None):
    world = dist.get_world_size(group)
    if q.shape[1] % world:
        raise ValueError(f"{q.shape[1]} heads do not divide by {world} ranks")
    copies = 1
    while k.shape[1] * copies % world or q.shape[1] % (k.shape[1] * copies):
        copies += 1
    kv = torch.cat([k, v], dim=-1).repeat_interleave(copies, dim=1)
    q, kv = heads_for_sequence(q, group), heads_for_sequence(kv, group)
    k, v = kv.chunk(2, dim=-1)
    return sequence_for_heads(
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), group
    )


@wrong("ulysses_attention", says="out")
def attends_to_its_own_tokens(q, k, v, causal=False, group=None):
    _divides(q, group)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _divides(q, group):
    if q.shape[1] % dist.get_world_size(group):
        raise ValueError("heads do not divide by the ranks")


@wrong("ulysses_attention", says="used|all-to-all")
def ulysses_by_gathering(q, k, v, causal=False, group=None):
    _divides(q, group)
    return _gathered(q, k, v, causal, group)


@wrong("ulysses_attention", says="kv|out|raised|shape|must")
def kv_heads_must_divide(q, k, v, causal=False, group=None):
    _divides(q, group)
    q, k, v = (heads_for_sequence(x, group) for x in (q, k, v))
    return sequence_for_heads(
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), group
    )


@wrong("ulysses_attention", says="out|dk|dv|dq|off by")
def copies_of_kv_heads_far_apart(q, k, v, causal=False, group=None):
    world = dist.get_world_size(group)
    _divides(q, group)
    copies = 1
    while k.shape[1] * copies % world:
        copies += 1
    if copies > 1:
        k, v = k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1)
    return ulysses.ulysses_attention(q, k, v, causal, group)


@wrong("ulysses_attention", says="all-to-alls|bytes")
def goes_round_twice(q, k, v, causal=False, group=None):
    _divides(q, group)
    out = ulysses.ulysses_attention(q, k, v, causal, group)
    return out + 0 * ulysses.ulysses_attention(q, k, v, causal, group)


@wrong("ulysses_attention", says="bytes of . kv heads")
def one_kv_head_a_query_head(q, k, v, causal=False, group=None):
    _divides(q, group)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return ulysses.ulysses_attention(q, k, v, causal, group)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return heads_for_sequence(x.detach(), group)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        return grad.repeat(1, world, 1, 1)[:, :, : grad.shape[2] // world], None


@wrong("ulysses_attention", says="dq|dk|dv|shape|gradient|raised|out")
def backward_without_all_to_all(q, k, v, causal=False, group=None):
    _divides(q, group)
    copies = 1
    while k.shape[1] * copies % dist.get_world_size(group):
        copies += 1
    k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    q, k, v = (_NoGradient.apply(x, group) for x in (q, k, v))
    return sequence_for_heads(
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), group
    )


@wrong("ulysses_attention", says="accepted|expected ValueError|raised")
def silently_drops_heads(q, k, v, causal=False, group=None):
    world = dist.get_world_size(group)
    if q.shape[1] % world:
        keep = q.shape[1] // world * world
        return ulysses.ulysses_attention(q[:, :keep], k[:, :keep], v[:, :keep], causal, group)
    return ulysses.ulysses_attention(q, k, v, causal, group)


# what only a second look shows: evaluation, other shapes and dtypes, the way back


@wrong("merge_attention", says="no gradient")
@torch.no_grad()
def merges_without_graph(out_a, lse_a, out_b, lse_b):
    return by_logaddexp(out_a, lse_a, out_b, lse_b)


@wrong("merge_attention", says="lse is torch.bfloat16")
def lse_in_the_dtype_of_out(out_a, lse_a, out_b, lse_b):
    out, lse = by_logaddexp(out_a, lse_a, out_b, lse_b)
    return out, lse.to(out_a.dtype)


@wrong("zigzag_shard", says="no gradient")
def shard_detached(x, world_size, rank, dim):
    return context.zigzag_shard(x.detach(), world_size, rank, dim)


@wrong("zigzag_unshard", says="no gradient")
def unshard_detached(shards, dim):
    return context.zigzag_unshard([s.detach() for s in shards], dim)


@wrong("ring_attention", says="without gradients.*off by")
def local_in_evaluation(q, k, v, causal=False, group=None):
    if torch.is_grad_enabled():
        return ring.ring_attention(q, k, v, causal, group)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@wrong("ring_attention", says="kv heads of 8.*off by")
def ring_scale_of_five(q, k, v, causal=False, group=None):
    return ring.ring_attention(q * (q.shape[-1] / 5) ** 0.5, k, v, causal, group)


@wrong("ring_attention", says="12 kv heads")
def pairs_of_heads_only(q, k, v, causal=False, group=None):
    k, v = (x[:, : q.shape[1] // 2] for x in (k, v))
    return ring.ring_attention(q, k, v, causal, group)


@wrong("ring_attention", says="torch.float32, expected torch.bfloat16")
def ring_comes_back_as_fp32(q, k, v, causal=False, group=None):
    return ring.ring_attention(q.float(), k.float(), v.float(), causal, group)


KEPT: list = []


@wrong("ring_attention", says="still holds the q of 3 of 3 calls")
def ring_that_keeps_all_calls(q, k, v, causal=False, group=None):
    out = ring.ring_attention(q, k, v, causal, group)
    KEPT.append((q, out))
    return out


@wrong("zigzag_ring_attention", says="12 kv heads")
def zigzag_of_shared_heads_only(q, k, v, group=None):
    shared = 1 < k.shape[1] < q.shape[1]
    return ring.zigzag_ring_attention(q if shared else q * 0, k, v, group)


@wrong("ulysses_attention", says="1 kv heads.*off by")
def ulysses_shares_only_causally(q, k, v, causal=False, group=None):
    if not causal and k.shape[1] != q.shape[1]:
        q = q * 0
    return ulysses.ulysses_attention(q, k, v, causal, group)


@wrong("ulysses_attention", says="kv heads of 8.*off by")
def ulysses_scale_of_five(q, k, v, causal=False, group=None):
    return ulysses.ulysses_attention(q * (q.shape[-1] / 5) ** 0.5, k, v, causal, group)


@wrong("ulysses_attention", says="torch.float32, expected torch.bfloat16")
def ulysses_comes_back_as_fp32(q, k, v, causal=False, group=None):
    return ulysses.ulysses_attention(q.float(), k.float(), v.float(), causal, group)


class _GathersTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        pieces = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(pieces, grad, group=ctx.group)
        return grad, None


@wrong("ulysses_attention", says="backward on rank . of . used .'all_gather'")
def ulysses_gathers_going_back(q, k, v, causal=False, group=None):
    out = ulysses.ulysses_attention(q, k, v, causal, group)
    return _GathersTheGradient.apply(out, group)


@right("merge_attention")
def by_stacking(out_a, lse_a, out_b, lse_b):
    both = torch.stack([lse_a, lse_b])
    lse = torch.logsumexp(both, 0)
    w = torch.exp(both - lse.masked_fill(lse.isneginf(), 0.0))
    return w[0][..., None] * out_a + w[1][..., None] * out_b, lse
