"""Chapter 24: context parallel, judged against attention over the whole sequence."""

import gc
import math
import time
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .. import calls
from .._seams import TorchDispatchMode
from ..devices import device
from .compare import close, expect, random, refuses, same, total, unchanged
from .groups import last_ranks
from .report import check

SIZES = (1, 2, 3, 4)  # group sizes; the groups are the last ranks, so their first is not rank 0
B, H, HKV, S, D = 2, 12, 6, 48, 5  # 48 positions divide by twice each group size


# ---- oracles: the whole sequence in one process, float64 on the host


def _qkv(kv_heads: int = HKV, heads: int = H, seq: int = S, dim: int = D):
    return (
        random(B, heads, seq, dim, seed=1),
        random(B, kv_heads, seq, dim, seed=2),
        random(B, kv_heads, seq, dim, seed=3),
        random(B, heads, seq, dim, seed=4),  # the gradient of the output
    )


def _whole(causal: bool, kv_heads: int = HKV, heads: int = H, seq: int = S):
    """(out, dq, dk, dv) of attention over all positions."""
    q, k, v, grad = (x.double().requires_grad_() for x in _qkv(kv_heads, heads, seq))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
    return [x.float() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))]


def _positions(seq: int, world: int, rank: int, zigzag: bool) -> Tensor:
    everything = torch.arange(seq)
    if not zigzag:
        return everything.view(world, -1)[rank]
    chunks = everything.view(2 * world, -1)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])


# ---- merge_attention


def _part(scores: Tensor, values: Tensor):
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.softmax(scores, dim=-1).nan_to_num(0.0) @ values
    return out, lse


@check("merge_attention")
def merge_attention(answer, report):
    """Two partial softmaxes."""
    where = device()
    scores, values = random(2, 3, 4, 11, seed=1), random(2, 3, 11, 5, seed=2)
    with report.property(
        "two sets of keys merge to attention over both",
        hint="each side's output counts with exp(lse_side - lse of both); the lse of both is "
        "log(exp(lse_a) + exp(lse_b))",
    ):
        for cut in (1, 4, 10):
            a = _part(scores[..., :cut], values[:, :, :cut])
            b = _part(scores[..., cut:], values[:, :, cut:])
            inputs = [x.to(where) for x in (*a, *b)]
            with unchanged("merge_attention", *inputs):
                out, lse = answer(*inputs)
            want, want_lse = _part(scores, values)
            close(out, want, "out")
            close(lse, want_lse, "lse")
    with report.property(
        "scores of any size: nothing overflows, nothing becomes nan",
        hint="exp of a difference that is at most 0 can't overflow; exp(lse) can",
    ):
        a, b = (random(2, 3, 4, 5, seed=s).to(where) for s in (3, 4))
        for big_a, big_b in ((300.0, 299.0), (-300.0, -301.0), (1e4, -1e4), (-1e4, 1e4)):
            lse_a = torch.full((2, 3, 4), big_a, device=where)
            lse_b = torch.full((2, 3, 4), big_b, device=where)
            out, lse = answer(a, lse_a, b, lse_b)
            share = torch.sigmoid(torch.tensor(big_a - big_b, dtype=torch.float64))
            want = (share * a.cpu().double() + (1 - share) * b.cpu().double()).float()
            close(out, want, f"out where the lse are {big_a:g} and {big_b:g}")
            top = max(big_a, big_b) + float(
                torch.log1p(torch.exp(torch.tensor(-abs(big_a - big_b))))
            )
            close(lse, torch.full((2, 3, 4), top), f"lse for {big_a:g} and {big_b:g}")
    with report.property(
        "a side that saw no key (lse -inf) changes nothing, two of them give 0 and -inf",
        hint="-inf minus -inf is nan: treat the case where both saw nothing",
    ):
        out_a, lse_a = random(2, 3, 4, 5, seed=5).to(where), random(2, 3, 4, seed=6).to(where)
        nothing = torch.full((2, 3, 4), -torch.inf, device=where)
        zero = torch.zeros(2, 3, 4, 5, device=where)
        for args in ((out_a, lse_a, zero, nothing), (zero, nothing, out_a, lse_a)):
            out, lse = answer(*args)
            close(out, out_a, "out where one side saw no key")
            close(lse, lse_a, "lse where one side saw no key")
        for nowhere in (zero, out_a):  # whatever such a side holds counts for nothing
            out, lse = answer(nowhere, nothing, zero, nothing)
            close(out, zero, "out where no side saw a key", 0.0)
            close(lse, nothing, "lse where no side saw a key", 0.0)
    with report.property(
        "gradients reach all four inputs", hint="merge with torch operations, outside no_grad"
    ):
        parts = [
            *(random(2, 3, 4, 5, seed=11), random(2, 3, 4, seed=12)),
            *(random(2, 3, 4, 5, seed=13), random(2, 3, 4, seed=14)),
        ]
        pulls = random(2, 3, 4, 5, seed=15), random(2, 3, 4, seed=16)
        leaves = [x.to(where).requires_grad_() for x in parts]
        merged = answer(*leaves)
        expect(merged[0].requires_grad, "out carries no gradient")
        got = torch.autograd.grad(merged, leaves, [x.to(where) for x in pulls])
        exact = [x.double().requires_grad_() for x in parts]
        both = torch.stack([exact[1], exact[3]])
        share = both.softmax(0)[..., None]
        merged = share[0] * exact[0] + share[1] * exact[2], both.logsumexp(0)
        want = torch.autograd.grad(merged, exact, [x.double() for x in pulls])
        for name, a, b in zip(("out_a", "lse_a", "out_b", "lse_b"), got, want, strict=True):
            close(a, b.float(), f"the gradient of {name}")
    with report.property(
        "the lse of bf16 outputs stays fp32",
        hint="bf16 has 8 bits: an lse of 100 in it is off by up to 0.25, its exp by a quarter",
    ):
        a, b = _part(scores[..., :4], values[:, :, :4]), _part(scores[..., 4:], values[:, :, 4:])
        halves = a[0].bfloat16(), a[1] + 100, b[0].bfloat16(), b[1] + 100
        out, lse = answer(*(x.to(where) for x in halves))
        want, want_lse = _part(scores, values)
        close(lse, want_lse + 100, "lse")
        close(out.float(), want, "out of bf16 sides", 0.02)
    with report.property(
        "each query by itself: rows of any size, and rows without keys, side by side",
        hint="take the larger lse of each row, not of the tensor, and choose with torch.where, "
        "not with an if",
    ):
        a, b = (random(2, 3, 4, 5, seed=s) for s in (7, 8))
        lse_a, lse_b = (random(2, 3, 4, seed=s) for s in (9, 10))
        lse_a[0], lse_a[:, 1] = lse_a[0] + 500, -torch.inf
        lse_b[0], lse_b[..., 2] = lse_b[0] + 500, -torch.inf
        out, lse = answer(*(x.to(where) for x in (a, lse_a, b, lse_b)))
        both = torch.stack([lse_a, lse_b]).double()  # [2, B, H, S]
        total_lse = both.logsumexp(0)
        share = (both - total_lse).exp().nan_to_num(0.0)[..., None]
        # around 500 numbers of fp32 lie 3e-5 apart, and so do the weights that come of them
        close(out, (share[0] * a + share[1] * b).float(), "out where rows differ", 1e-4)
        close(lse, total_lse.float(), "lse where rows differ")


# ---- who holds what


@check("zigzag_shard")
def zigzag_shard(answer, report):
    """Chunks r and 2P-1-r."""
    with report.property(
        "rank r holds chunks r and 2P-1-r of 2P, in this order, along any dimension",
        hint="2P chunks, not P; the early one first",
    ):
        for world in SIZES:
            for dim, shape in ((0, (48, 3)), (1, (2, 24, 3)), (2, (2, 5, 48, 7)), (-1, (3, 24))):
                x = random(*shape, seed=world)
                for rank in range(world):
                    keep = _positions(x.shape[dim], world, rank, True)
                    got = answer(x.to(device()), world, rank, dim)
                    want = x.index_select(dim, keep)
                    close(got, want, f"rank {rank} of {world} along dimension {dim}", 0.0)
    with report.property(
        "ValueError where the length does not divide by twice the ranks",
        hint="unequal chunks would give ranks unequal work",
    ):
        refuses(answer, random(10, 3), 2, 0, 0, what="10 positions over 2 ranks")
        refuses(answer, random(9, 3), 3, 1, 0, what="9 positions over 3 ranks")
    with report.property(
        "gradients go back to where the values came from", hint="chunk and cat are differentiable"
    ):
        x, pull = random(3, 24, seed=1).to(device()).requires_grad_(), random(3, 8, seed=2)
        got = answer(x, 3, 1, 1)
        expect(got.requires_grad, "the shard carries no gradient")
        (dx,) = torch.autograd.grad(got, x, pull.to(device()))
        want = torch.zeros(3, 24).index_copy(1, _positions(24, 3, 1, True), pull)
        close(dx, want, "the gradient of the whole tensor", 0.0)


@check("zigzag_unshard")
def zigzag_unshard(answer, report):
    """The inverse."""
    with report.property(
        "the whole tensor from all ranks' shards, along any dimension",
        hint="first halves in rank order, then second halves in the opposite order",
    ):
        for world in SIZES:
            for dim, shape in ((0, (48, 3)), (1, (2, 24, 3)), (2, (2, 5, 48, 7)), (-1, (3, 24))):
                x = random(*shape, seed=world)
                shards = [
                    x.index_select(dim, _positions(x.shape[dim], world, r, True)).to(device())
                    for r in range(world)
                ]
                close(answer(shards, dim), x, f"{world} shards along dimension {dim}", 0.0)
    with report.property(
        "gradients go back to where the values came from", hint="chunk and cat are differentiable"
    ):
        shards = [random(3, 8, seed=r).to(device()).requires_grad_() for r in range(3)]
        pull, got = random(3, 24, seed=4), answer(shards, 1)
        expect(got.requires_grad, "the whole carries no gradient")
        grads = torch.autograd.grad(got, shards, pull.to(device()))
        for r, grad in enumerate(grads):
            want = pull.index_select(1, _positions(24, 3, r, True))
            close(grad, want, f"the gradient of shard {r}", 0.0)


@check("shard_positions")
def shard_positions(answer, report):
    """Positions for the rotary embedding."""
    with report.property(
        "contiguous shards: rank r holds positions r S/P up to (r+1) S/P",
        hint="the positions count from the start of the WHOLE sequence",
    ):
        for world in SIZES:
            for rank in range(world):
                got = answer(48, world, rank)
                same(got.dtype, torch.int64, "the dtype of the positions")
                close(got, _positions(48, world, rank, False), f"rank {rank} of {world}", 0.0)
    with report.property(
        "zigzag shards: the positions of chunks r and 2P-1-r",
        hint="in the order in which zigzag_shard holds them",
    ):
        for world in SIZES:
            for rank in range(world):
                got = answer(48, world, rank, zigzag=True)
                close(got, _positions(48, world, rank, True), f"rank {rank} of {world}", 0.0)
    with report.property(
        "ValueError where the length does not divide", hint="by P, or by 2P for zigzag"
    ):
        refuses(answer, 10, 4, 0, what="10 positions over 4 ranks")
        refuses(answer, 12, 4, 0, zigzag=True, what="12 positions over 4 ranks in a zigzag")


# ---- attention on ranks


def _attend(answer, kind: str, kv_heads: int = HKV):
    """Values, gradients, calls, work and what stays in memory, for every group size."""
    results = []
    for size, group, rank in last_ranks():
        heads = H
        zigzag = kind == "zigzag"
        keep = _positions(S, size, rank, zigzag)
        q, k, v, grad = (_as_projected(x[:, :, keep].to(device())) for x in _qkv(kv_heads, heads))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        kwargs = {} if zigzag else {"causal": kind == "causal"}
        saved = []
        pack = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.append(t.numel() if t.dim() > 2 else 0), t)[1],
            lambda t: t,
        )
        before = [x.detach().clone() for x in leaves]
        with calls.record() as log, FlopCounterMode(display=False) as flops, pack:
            out = answer(*leaves, group=group, **kwargs)
        forward = list(log)
        with calls.record() as log:
            grads = torch.autograd.grad(out, leaves, grad)
        same_inputs = all(torch.equal(a, b.detach()) for a, b in zip(before, leaves, strict=True))
        tensors = [x.detach().cpu() for x in (out, *grads)]
        results.append(
            (size, rank, tensors, forward, log, flops.get_total_flops(), sum(saved), same_inputs)
        )
    return results


PLAIN = [  # dtype, kv heads, head dimension: all heads their own keys, one for all, bf16
    (torch.float32, H, 8),
    (torch.float32, 1, 3),
    (torch.bfloat16, HKV, D),
]


def _plainly(answer, kind: str) -> list:
    """(size, place, outputs of the cases of PLAIN without gradients, how many q still live)."""
    results = []
    for size, group, rank in last_ranks():
        keep = _positions(S, size, rank, kind == "zigzag")
        kwargs = {} if kind == "zigzag" else {"causal": kind == "causal"}
        outs, given = [], []
        for dtype, kv_heads, dim in PLAIN:
            q, k, v, _ = _qkv(kv_heads, dim=dim)
            q, k, v = (_as_projected(x[:, :, keep].to(device(), dtype)) for x in (q, k, v))
            given.append(weakref.ref(q))
            with torch.no_grad():
                outs.append(answer(q, k, v, group=group, **kwargs).cpu())
            del q, k, v
        gc.collect()
        results.append((size, rank, outs, sum(ref() is not None for ref in given)))
    return results


PLAINLY = "the same without gradients, for any kv heads and head dimension, and in bf16"
PLAINLY_HINT = (
    "scores are divided by the square root of q.shape[-1]; evaluation takes the same way as "
    "training; out has q's dtype"
)


def _judge_plainly(values, kind: str) -> None:
    for number, (dtype, kv_heads, dim) in enumerate(PLAIN):
        q, k, v = (x.to(dtype).double() for x in _qkv(kv_heads, dim=dim)[:3])
        gqa = kv_heads != H
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=kind != "full", enable_gqa=gqa)
        for results in values:
            for size, rank, outs, alive in results:
                where = f"rank {rank} of {size}"
                want = whole[:, :, _positions(S, size, rank, kind == "zigzag")].to(dtype)
                name = str(dtype).removeprefix("torch.")
                case = f"out without gradients, {name}, {kv_heads} kv heads of {dim}, on {where}"
                rough = 0.1 if dtype == torch.bfloat16 else 1e-5  # some sum in bf16
                close(outs[number], want, case, rough)
                expect(
                    alive <= 1,
                    f"{where} still holds the q of {alive} of {len(outs)} calls: memory that "
                    "grows with every call",
                )


def _as_projected(x: Tensor) -> Tensor:
    """x as a model has it: [B, S, H, D] in memory, since heads are split off the last dimension."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _judge(values, kind: str, kv_heads: int = HKV) -> None:
    whole = _whole(kind != "full", kv_heads)
    for results in values:
        for size, rank, tensors, *_, kept in results:
            keep = _positions(S, size, rank, kind == "zigzag")
            for name, got, want in zip(("out", "dq", "dk", "dv"), tensors, whole, strict=True):
                close(got, want[:, :, keep], f"{name} on rank {rank} of {size}")
            expect(kept, f"rank {rank} of {size} changed its input")


def _ring_traffic(values) -> None:
    for results in values:
        for size, rank, _, forward, backward, *_ in results:
            block = B * HKV * (S // size) * D * 4  # bytes of K, and of V
            where = f"rank {rank} of {size}"
            _, sent = total(forward, "send")
            wanted = 2 * (size - 1) * block
            expect(
                sent == wanted,
                f"{where} sent {sent} bytes forward, expected 2 (P-1) blocks = {wanted}",
            )
            other = [c.op for c in forward + backward if c.op not in ("send", "recv")]
            expect(not other, f"{where} used {other[:1]}: keys travel point to point, rank to rank")
            if size > 1:
                peers = {c.peer for c in forward if c.op == "send"}
                first = 4 - size
                expect(
                    peers == {first + (rank + 1) % size},
                    f"{where} sent to global ranks {sorted(peers)}, expected the next one only",
                )
            back = total(backward, "send")[1]
            most = (4 * size - 2) * block  # K, V (P-1 times) and their gradients (P times)
            expect(back <= most, f"{where} sent {back} bytes backward, expected at most {most}")


def _memory(values) -> None:
    for results in values:
        for size, rank, *_, saved, _ in results:
            part = B * (S // size) * D
            mine = 2 * HKV * part + 2 * H * part + 2 * B * H * (S // size)  # k, v, q, out and lse
            expect(
                saved <= mine + 64,
                f"rank {rank} of {size} saves {saved} elements for backward, expected at most "
                f"q, k, v, out and lse of its own positions ({mine})",
            )


class _Visitors(TorchDispatchMode):
    """At every product: of how many other ranks are keys in this process's memory?"""

    def __init__(self, marks: list[float]):
        super().__init__()
        self.marks, self.most = marks, 0  # a mark is a value that one rank's keys alone have

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:  # memory that is used again may still hold a former visitor
            result.zero_()
        if "mm" in func.__name__ or "attention" in func.__name__:
            readings = [self.count()]
            while readings[-1] > 2 and len(readings) < 6:
                time.sleep(0.02)  # a message's thread lets go a moment after the wait for it
                readings.append(self.count())
            self.most = max(self.most, readings[-1])
        return result

    def count(self) -> int:
        tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        here = [t.detach().cpu() for t in tensors if t.is_floating_point()]
        return sum(any(bool((t == mark).any()) for t in here) for mark in self.marks)


def _visitors(answer, kind: str) -> int:
    """The most other ranks' keys that a forward pass on all ranks has in memory at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    held = [_positions(S, world, r, kind == "zigzag") for r in range(world)]
    whole = _qkv()
    marks = [whole[1][0, 0, held[r][0], 0].item() for r in range(world) if r != rank]
    q, k, v = (x[:, :, held[rank]].contiguous().to(device()) for x in whole[:3])
    for x in (q, k, v):
        x.requires_grad_()  # what an answer keeps for backward counts too
    del whole, x
    with _Visitors(marks) as visitors:
        answer(q, k, v)
    return visitors.most


def _holds_few(values) -> None:
    for rank, most in enumerate(values):
        expect(
            most <= 2,
            f"rank {rank} of 4 holds the keys of {most} other ranks at once, expected at most 2: "
            "the block it computes with and the one that arrives",
        )


HOLD = "a rank holds at most two blocks of keys and values beyond its own"
HOLD_HINT = "compute with a block as soon as it is there, and let go of it when the next has come"

RING_HINT = (
    "every step: start sending your block to the next rank and receiving the one before's, compute "
    "with the block you hold, merge, wait"
)
BACK_HINT = (
    "send K and V round again in backward: the block in your hands is not the one you saved. Its "
    "gradients travel with it and make one step more, to the rank that owns it"
)


@check("ring_attention")
def ring_attention(answer, report):
    """Keys and values travel."""
    full = causal = None
    with report.property(
        "out and gradients equal attention over the whole sequence, 1 to 4 ranks",
        hint=RING_HINT + ". " + BACK_HINT,
    ):
        full = report.ranks(_attend, 4, answer, "full")
        _judge(full, "full")
    with report.property(
        "and with a causal mask",
        hint="blocks of earlier ranks are seen whole, your own by its triangle, later ones not at "
        "all; a row that has seen nothing yet has lse -inf",
    ):
        causal = report.ranks(_attend, 4, answer, "causal")
        _judge(causal, "causal")
    with report.property(PLAINLY, hint=PLAINLY_HINT):
        _judge_plainly(report.ranks(_plainly, 4, answer, "full"), "full")
    with report.property(
        "K and V are sent P-1 times, to the next rank, and nothing else moves forward",
        hint="the last block need not be sent on; kv heads travel as they are, not repeated",
    ):
        _ring_traffic(full or report.ranks(_attend, 4, answer, "full"))
    with report.property(
        "only the rank's own q, k, v, out and lse are saved for backward",
        hint="write an autograd.Function: what autograd saves by itself keeps all blocks alive",
    ):
        _memory(full or report.ranks(_attend, 4, answer, "full"))
    with report.property(HOLD, hint=HOLD_HINT):
        _holds_few(report.ranks(_visitors, 4, answer, "full"))
    with report.property(
        "the work is a P-th of the whole: what is masked out is not computed",
        hint="rank r of a causal ring needs r+1 of P blocks",
    ):
        for results in causal or report.ranks(_attend, 4, answer, "causal"):
            for size, rank, *_, flops, _, _ in results:
                most = 4 * B * H * S * S * D * (rank + 1) / size**2
                expect(
                    flops <= 1.01 * most,
                    f"rank {rank} of {size} computes {flops} FLOPs, expected at most {most:.0f}",
                )


@check("zigzag_ring_attention")
def zigzag_ring_attention(answer, report):
    """Equal causal work."""
    values = None
    with report.property(
        "out and gradients equal causal attention over the whole sequence, 1 to 4 ranks",
        hint="from an earlier rank only its early half is seen, by all your queries; from a later "
        "rank both halves are seen, by your late half only; your own by causality. " + BACK_HINT,
    ):
        values = report.ranks(_attend, 4, answer, "zigzag")
        _judge(values, "zigzag")
    with report.property(PLAINLY, hint=PLAINLY_HINT):
        _judge_plainly(report.ranks(_plainly, 4, answer, "zigzag"), "zigzag")
    with report.property(
        "every rank computes at most (2P+1)/(4P^2) of the full attention",
        hint="of the four pairs of halves from another rank two are empty: don't compute and mask",
    ):
        for results in values or report.ranks(_attend, 4, answer, "zigzag"):
            for size, rank, *_, flops, _, _ in results:
                most = 4 * B * H * S * S * D * (2 * size + 1) / (4 * size**2)
                expect(
                    flops <= 1.01 * most,
                    f"rank {rank} of {size} computes {flops} FLOPs, expected at most {most:.0f}",
                )
    with report.property(
        "K and V are sent P-1 times, to the next rank, and nothing else moves forward",
        hint="the zigzag is in who holds what; the ring is the same",
    ):
        _ring_traffic(values or report.ranks(_attend, 4, answer, "zigzag"))
    with report.property(
        "only the rank's own q, k, v, out and lse are saved for backward",
        hint="write an autograd.Function: what autograd saves by itself keeps all blocks alive",
    ):
        _memory(values or report.ranks(_attend, 4, answer, "zigzag"))
    with report.property(HOLD, hint=HOLD_HINT):
        _holds_few(report.ranks(_visitors, 4, answer, "zigzag"))


def _four_all_to_alls(log, size: int, where: str) -> None:
    count, nbytes = total(log, "all_to_all")
    other = [c.op for c in log if c.op != "all_to_all"]
    expect(not other, f"{where} used {other[:1]}")
    expect(count <= 4, f"{where} made {count} all-to-alls, expected at most 4")
    shard = B * H * (S // size) * D * 4
    expect(
        nbytes <= 4 * shard, f"{where} handed {nbytes} bytes to all-to-alls, expected {4 * shard}"
    )
    expect(count > 0 or size == 1, f"{where} never communicated")


@check("ulysses_attention")
def ulysses_attention(answer, report):
    """Heads for sequence."""
    full, shared = None, {}
    with report.property(
        "out and gradients equal attention over the whole sequence, 1 to 4 ranks",
        hint="after the all-to-all a rank holds ALL positions, in rank order, of H/P heads; the "
        "backward of an all-to-all is the all-to-all the other way",
    ):
        full = report.ranks(_attend, 4, answer, "full", 12)
        _judge(full, "full", 12)
        _judge(report.ranks(_attend, 4, answer, "causal", 12), "causal", 12)
    with report.property(
        "kv heads that do not divide by the ranks are replicated until they do",
        hint="copies stand next to their original, and their gradients are summed",
    ):
        shared = {n: report.ranks(_attend, 4, answer, "causal", n) for n in (1, 2, 6)}
        for kv_heads, values in shared.items():
            _judge(values, "causal", kv_heads)
    with report.property(PLAINLY, hint=PLAINLY_HINT):
        _judge_plainly(report.ranks(_plainly, 4, answer, "full"), "full")
    with report.property(
        "kv heads travel as often as they must, not as often as there are query heads",
        hint="the smallest multiple of the kv heads that divides by the ranks: lcm(Hkv, P) heads; "
        "attention itself groups the query heads that share one",
    ):
        for kv_heads, values in shared.items():
            for results in values:
                for size, rank, _, forward, *_ in results:
                    heads = 2 * H + 2 * math.lcm(kv_heads, size)  # q and out, k and v
                    most = B * heads * (S // size) * D * 4
                    _, nbytes = total(forward, "all_to_all")
                    expect(
                        nbytes <= most,
                        f"rank {rank} of {size} handed {nbytes} bytes of {kv_heads} kv heads to "
                        f"all-to-alls, expected at most {most}",
                    )
    with report.property(
        "at most four all-to-alls each way, of one shard each, and nothing else",
        hint="q, k, v in, the output back; their gradients take the same ways",
    ):
        for results in full or report.ranks(_attend, 4, answer, "full", 12):
            for size, rank, _, forward, backward, *_ in results:
                for way, log in (("forward", forward), ("backward", backward)):
                    _four_all_to_alls(log, size, f"{way} on rank {rank} of {size}")
    with report.property(
        "ValueError where the heads do not divide by the ranks",
        hint="12 heads fit on 2, 3 and 4 ranks, 10 heads do not fit on 4",
    ):
        for problem in report.ranks(_refused, 4, answer):
            expect(problem is None, problem or "")


def _refused(answer) -> str | None:
    q, k, v, _ = (x.to(device()) for x in _qkv(10, 10, 12))
    try:
        refuses(answer, q, k, v, what="10 heads on 4 ranks")
    except AssertionError as error:
        return str(error)
    return None
