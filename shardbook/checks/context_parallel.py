"""Chapter 24: context parallel, judged against attention over the whole sequence."""

import functools
import gc
import math
import time
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..devices import device
from .compare import close, expect, random, total
from .families import agrees, kept
from .functions import called
from .groups import refusal
from .report import Report, check
from .seen import WORLD, Here, Runs, Seen
from .wrong import hints

SIZES = (1, 2, 3, 4)  # group sizes
B, H, HKV, S, D = 2, 12, 6, 48, 5  # 48 positions divide by twice each group size


# ---- oracles: the whole sequence in one process, float64 on the host


def _qkv(kv_heads: int = HKV, heads: int = H, seq: int = S, dim: int = D) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [random(B, n, seq, dim, seed=i + 1) for i, n in enumerate(counts)]


def _whole(causal: bool, kv_heads: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gqa = q.shape[1] != kv_heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)


@functools.cache
def _everything(causal: bool, kv_heads: int) -> dict[str, Tensor]:
    """The output and the gradients of attention over all positions."""
    q, k, v, grad = (x.double().requires_grad_() for x in _qkv(kv_heads))
    out = _whole(causal, kv_heads, q, k, v)
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))
    return dict(zip(("out", "dq", "dk", "dv"), (x.float() for x in found), strict=True))


def _positions(seq: int, world: int, rank: int, zigzag: bool = False) -> Tensor:
    everything = torch.arange(seq)
    if not zigzag:
        return everything.view(world, -1)[rank]
    chunks = everything.view(2 * world, -1)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])


# ---- merge_attention


def _part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)


def _merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([lse_a, lse_b]).double()  # [2, B, H, S]
    lse = both.logsumexp(0)
    share = (both - lse).exp().nan_to_num(0.0)[..., None]
    return (share[0] * out_a + share[1] * out_b).float(), lse.float()


@check("merge_attention")
def merge_attention(answer, report):
    """Two partial softmaxes."""
    scores, values = random(2, 3, 4, 11, seed=1), random(2, 3, 11, 5, seed=2)

    def sides(cut: int) -> tuple[Tensor, ...]:
        a, b = (
            _part(scores[..., :cut], values[:, :, :cut]),
            _part(scores[..., cut:], values[:, :, cut:]),
        )
        return (*a, *b)

    def drawn(seed: int) -> tuple[Tensor, ...]:
        shapes = [(2, 3, 4, 5), (2, 3, 4)] * 2
        return tuple(random(*shape, seed=seed + i) for i, shape in enumerate(shapes))

    it = report.function(answer, _merged, names=("out", "lse"))
    it.value(
        "two sets of keys merge to attention over both",
        *map(sides, (1, 4, 10)),
        oracle=lambda *_: _part(scores, values),
        hint="each side's output counts with exp(lse_side - lse of both); the lse of both is "
        "log(exp(lse_a) + exp(lse_b))",
    )
    a, _, b, _ = drawn(3)
    full = functools.partial(torch.full, (2, 3, 4))
    it.value(
        "scores of any size: nothing overflows, nothing becomes nan",
        *(
            called(f"where the lse are {one:g} and {two:g}", a, full(one), b, full(two))
            for one, two in ((300.0, 299.0), (-300.0, -301.0), (1e4, -1e4), (-1e4, 1e4))
        ),
        hint="exp of a difference that is at most 0 can't overflow; exp(lse) can",
    )
    out, lse, *_ = drawn(5)
    zero, nothing = torch.zeros(2, 3, 4, 5), full(-torch.inf)
    it.value(
        "a side that saw no key (lse -inf) changes nothing, two of them give 0 and -inf",
        called("where one side saw no key", out, lse, zero, nothing),
        called("where one side saw no key", zero, nothing, out, lse),
        called("where no side saw a key", zero, nothing, zero, nothing),
        called("where no side saw a key", out, nothing, zero, nothing),  # what it holds is nothing
        hint="-inf minus -inf is nan: treat the case where both saw nothing",
    )
    it.gradient(
        "gradients reach all four inputs",
        drawn(11),
        hint="merge with torch operations, outside no_grad",
    )
    with report.property(
        "the lse of bf16 outputs stays fp32",
        hint="bf16 has 8 bits: an lse of 100 in it is off by up to 0.25, its exp by a quarter",
    ):
        out_a, lse_a, out_b, lse_b = (x.to(device()) for x in sides(4))
        out, lse = answer(out_a.bfloat16(), lse_a + 100, out_b.bfloat16(), lse_b + 100)
        want, want_lse = _part(scores, values)
        close(lse, want_lse + 100, "lse")
        close(out.float(), want, "out of bf16 sides", 0.02)
    a, lse_a, b, lse_b = drawn(7)
    lse_a[0], lse_a[:, 1] = lse_a[0] + 500, -torch.inf
    lse_b[0], lse_b[..., 2] = lse_b[0] + 500, -torch.inf
    it.value(
        "each query by itself: rows of any size, and rows without keys, side by side",
        called("where rows differ", a, lse_a, b, lse_b),
        # around 500 numbers of fp32 lie 3e-5 apart, and so do the weights that come of them
        tolerance=1e-4,
        hint="take the larger lse of each row, not of the tensor, and choose with torch.where, "
        "not with an if",
    )


# ---- who holds what

ALONG = ((0, (48, 3)), (1, (2, 24, 3)), (2, (2, 5, 48, 7)), (-1, (3, 24)))  # dimension, shape
GRADIENTS = "gradients go back to where the values came from"
DIFFERENTIABLE = "chunk and cat are differentiable"


def _zigzag(x: Tensor, world: int, rank: int, dim: int) -> Tensor:
    return x.index_select(dim, _positions(x.shape[dim], world, rank, True))


@check("zigzag_shard")
def zigzag_shard(answer, report):
    """Chunks r and 2P-1-r."""
    it = report.function(answer, _zigzag)
    it.value(
        "rank r holds chunks r and 2P-1-r of 2P, in this order, along any dimension",
        *(
            called(f"of rank {rank} of {n} along dimension {dim}", random(*shape), n, rank, dim)
            for n in SIZES
            for dim, shape in ALONG
            for rank in range(n)
        ),
        tolerance=0.0,
        hint="2P chunks, not P; the early one first",
    )
    it.refuses(
        "ValueError where the length does not divide by twice the ranks",
        ((random(10, 3), 2, 0, 0), "10 positions over 2 ranks"),
        ((random(9, 3), 3, 1, 0), "9 positions over 3 ranks"),
        hint="unequal chunks would give ranks unequal work",
    )
    it.gradient(GRADIENTS, (random(3, 24), 3, 1, 1), hint=DIFFERENTIABLE)


@check("zigzag_unshard")
def zigzag_unshard(answer, report):
    """The inverse."""

    def whole(shards: list[Tensor], dim: int) -> Tensor:
        world, joined = len(shards), torch.cat(shards, dim)
        order = [_positions(joined.shape[dim], world, r, True) for r in range(world)]
        return joined.index_select(dim, torch.cat(order).argsort())

    it = report.function(answer, whole)
    it.value(
        "the whole tensor from all ranks' shards, along any dimension",
        *(
            called(
                f"of {n} shards along dimension {dim}",
                [_zigzag(random(*shape, seed=n), n, r, dim) for r in range(n)],
                dim,
            )
            for n in SIZES
            for dim, shape in ALONG
        ),
        tolerance=0.0,
        hint="first halves in rank order, then second halves in the opposite order",
    )
    shards = [random(3, 8, seed=r) for r in range(3)]
    it.gradient(GRADIENTS, (shards, 1), hint=DIFFERENTIABLE)


@check("shard_positions")
def shard_positions(answer, report):
    """Positions for the rotary embedding."""

    def asked(*zigzag: bool) -> list:
        every = [(n, rank) for n in SIZES for rank in range(n)]
        return [called(f"of rank {r} of {n}", 48, n, r, *zigzag) for n, r in every]

    it = report.function(answer, _positions, what="the positions")
    dtype = "positions look rows up in a table: their dtype is int64"
    it.value(
        "contiguous shards: rank r holds positions r S/P up to (r+1) S/P",
        *asked(),
        hint=hints("the positions count from the start of the WHOLE sequence", dtype=dtype),
    )
    it.value(
        "zigzag shards: the positions of chunks r and 2P-1-r",
        *asked(True),
        hint=hints("in the order in which zigzag_shard holds them", dtype=dtype),
    )
    it.refuses(
        "ValueError where the length does not divide",
        ((10, 4, 0), "10 positions over 4 ranks"),
        ((12, 4, 0, True), "12 positions over 4 ranks in a zigzag"),
        hint="by P, or by 2P for zigzag",
    )


# ---- attention on ranks


def _as_projected(x: Tensor) -> Tensor:
    """x as a model has it: [B, S, H, D] in memory, since heads are split off the last dimension."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _kwargs(kind: str) -> dict[str, bool]:
    return {} if kind == "zigzag" else {"causal": kind == "causal"}


def _attend(answer, here: Here, kind: str, kv_heads: int = HKV) -> Seen:
    keep = _positions(S, here.size, here.place, kind == "zigzag")
    q, k, v, grad = (_as_projected(x[:, :, keep].to(device())) for x in _qkv(kv_heads))
    options = {"group": here.group} | _kwargs(kind)
    return here.see(lambda q, k, v: answer(q, k, v, **options), grad, True, q=q, k=k, v=v)


def _equal(kind: str, kv_heads: int) -> Callable[[Seen], None]:
    """out and gradients are those of the whole sequence, and the input stays as it was."""

    def judge(s: Seen) -> None:
        keep = _positions(S, s.size, s.place, kind == "zigzag")
        whole = _everything(kind != "full", kv_heads)
        agrees(s, {name: want[:, :, keep] for name, want in whole.items()})
        kept(s)

    return judge


HANG = (
    "a ring waits where every rank sends before it receives: start the send and the receive "
    "together (batch_isend_irecv), and make the same number of steps on every rank"
)

PLAIN = [  # dtype, kv heads, head dimension: all heads their own keys, one for all, bf16
    (torch.float32, H, 8),
    (torch.float32, 1, 3),
    (torch.bfloat16, HKV, D),
]


def _plainly(answer, here: Here, kind: str) -> Seen:
    """Outputs of the cases of PLAIN without gradients; `held` is how many q still live."""
    keep, outs, given = _positions(S, here.size, here.place, kind == "zigzag"), [], []
    for dtype, kv_heads, dim in PLAIN:
        q, k, v, _ = _qkv(kv_heads, dim=dim)
        q, k, v = (_as_projected(x[:, :, keep].to(device(), dtype)) for x in (q, k, v))
        given.append(weakref.ref(q))
        with torch.no_grad():
            outs.append(answer(q, k, v, group=here.group, **_kwargs(kind)).cpu())
        del q, k, v
    gc.collect()
    return Seen(outs, held=sum(ref() is not None for ref in given))


def _without_gradients(report: Report, answer, kind: str) -> None:
    wholes = []
    for dtype, kv_heads, dim in PLAIN:
        q, k, v = (x.to(dtype).double() for x in _qkv(kv_heads, dim=dim)[:3])
        wholes.append(_whole(kind != "full", kv_heads, q, k, v).to(dtype))

    def judge(s: Seen) -> None:
        keep = _positions(S, s.size, s.place, kind == "zigzag")
        for (dtype, kv_heads, dim), out, whole in zip(PLAIN, s.value, wholes, strict=True):
            kinds = f"{str(dtype).removeprefix('torch.')}, {kv_heads} kv heads of {dim}"
            rough = 0.1 if dtype == torch.bfloat16 else 1e-5  # some sum in bf16
            close(out, whole[:, :, keep], f"out without gradients, {kinds}, on {s.where}", rough)
        alive = f"still holds the q of {s.held} of {len(PLAIN)} calls"
        expect(s.held <= 1, f"{s.where} {alive}: memory that grows with every call", "memory")

    more = report.on_groups(_plainly, answer, kind)
    more.holds(
        "the same without gradients, for any kv heads and head dimension, and in bf16",
        judge,
        hint="scores are divided by the square root of q.shape[-1]; evaluation takes the same way "
        "as training; out has q's dtype",
    )


def _next_only(s: Seen) -> None:
    block = B * HKV * (S // s.size) * D * 4  # bytes of K, and of V
    wanted, found = 2 * (s.size - 1) * block, total(s.forward, "send")[1]
    text = f"{s.where} sent {found} bytes forward, expected 2 (P-1) blocks = {wanted}"
    expect(found == wanted, text, "traffic")
    other = [c.op for c in s.forward + s.backward if c.op not in ("send", "recv")]
    text = f"{s.where} used {other[:1]}: keys travel point to point, rank to rank"
    expect(not other, text, "traffic")
    peers, after = {c.peer for c in s.sent}, s.ranks[(s.place + 1) % s.size]
    text = f"{s.where} sent to global ranks {sorted(peers)}, expected the next one only"
    expect(s.size == 1 or peers == {after}, text, "traffic")
    most = (4 * s.size - 2) * block  # K, V (P-1 times) and their gradients (P times)
    found = total(s.backward, "send")[1]
    text = f"{s.where} sent {found} bytes backward, expected at most {most}"
    expect(found <= most, text, "traffic")


def _ring(report: Report, answer, kind: str, seen: Runs, hint: str) -> None:
    """What a ring costs: traffic, and what a rank keeps and holds."""

    def own(s: Seen) -> int:
        part = B * (S // s.size)
        return 2 * HKV * part * D + 2 * H * part * D + 2 * H * part + 64  # k, v, q, out and lse

    name = "K and V are sent P-1 times, to the next rank, and nothing else moves forward"
    seen.holds(name, _next_only, hint)
    seen.at_most(
        "only the rank's own q, k, v, out and lse are saved for backward",
        "saves {} elements for backward",
        lambda s: s.saved,
        own,
        hint="write an autograd.Function: what autograd saves by itself keeps all blocks alive",
    )
    more = report.on_groups(_visitors, answer, kind, rounds=WORLD)
    more.at_most(
        "a rank holds at most two blocks of keys and values beyond its own",
        "holds the keys of {} other ranks at once",
        lambda s: s.held,
        lambda s: 2,  # the block it computes with and the one that arrives
        hint="compute with a block as soon as it is there, and let go of it when the next has come",
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


def _visitors(answer, here: Here, kind: str) -> Seen:
    """`held`: the most other ranks' keys that a forward pass has in memory at once."""
    rank, world = here.place, here.size
    held = [_positions(S, world, r, kind == "zigzag") for r in range(world)]
    whole = _qkv()
    marks = [whole[1][0, 0, held[r][0], 0].item() for r in range(world) if r != rank]
    q, k, v = (x[:, :, held[rank]].contiguous().to(device()) for x in whole[:3])
    for x in (q, k, v):
        x.requires_grad_()  # what an answer keeps for backward counts too
    del whole, x
    with _Visitors(marks) as visitors:
        answer(q, k, v)
    return Seen(held=visitors.most)


FLOPS = 1.01 * 4 * B * H * S * S * D  # of attention over the whole sequence

BACK = (
    "send K and V round again in backward: the block in your hands is not the one you saved. Its "
    "gradients travel with it and make one step more, to the rank that owns it"
)


@check("ring_attention")
def ring_attention(answer, report):
    """Keys and values travel."""
    full, causal = (report.on_groups(_attend, answer, kind) for kind in ("full", "causal"))
    step = (
        "every step: start sending your block to the next rank and receiving the one before's, "
        "compute with the block you hold, merge, wait. "
    )
    full.holds(
        "out and gradients equal attention over the whole sequence, 1 to 4 ranks",
        _equal("full", HKV),
        hint=hints(step + BACK, hang=HANG),
    )
    causal.holds(
        "and with a causal mask",
        _equal("causal", HKV),
        hint="blocks of earlier ranks are seen whole, your own by its triangle, later ones not at "
        "all; a row that has seen nothing yet has lse -inf",
    )
    _without_gradients(report, answer, "full")
    hint = "the last block need not be sent on; kv heads travel as they are, not repeated"
    _ring(report, answer, "full", full, hint)
    causal.at_most(
        "the work is a P-th of the whole: what is masked out is not computed",
        "computes {} FLOPs",
        lambda s: s.flops,
        lambda s: FLOPS * (s.place + 1) / s.size**2,
        hint="rank r of a causal ring needs r+1 of P blocks",
    )


@check("zigzag_ring_attention")
def zigzag_ring_attention(answer, report):
    """Equal causal work."""
    seen = report.on_groups(_attend, answer, "zigzag")
    halves = (
        "from an earlier rank only its early half is seen, by all your queries; from a later rank "
        "both halves are seen, by your late half only; your own by causality. "
    )
    seen.holds(
        "out and gradients equal causal attention over the whole sequence, 1 to 4 ranks",
        _equal("zigzag", HKV),
        hint=hints(halves + BACK, hang=HANG),
    )
    _without_gradients(report, answer, "zigzag")
    seen.at_most(
        "every rank computes at most (2P+1)/(4P^2) of the full attention",
        "computes {} FLOPs",
        lambda s: s.flops,
        lambda s: FLOPS * (2 * s.size + 1) / (4 * s.size**2),
        hint="of the four pairs of halves from another rank two are empty: don't compute and mask",
    )
    hint = "the zigzag is in who holds what; the ring is the same"
    _ring(report, answer, "zigzag", seen, hint)


@check("ulysses_attention")
def ulysses_attention(answer, report):
    """Heads for sequence."""
    full, causal = (report.on_groups(_attend, answer, kind, H) for kind in ("full", "causal"))
    shared = {n: report.on_groups(_attend, answer, "causal", n) for n in (1, 2, 6)}
    with report.property(
        "out and gradients equal attention over the whole sequence, 1 to 4 ranks",
        hint="after the all-to-all a rank holds ALL positions, in rank order, of H/P heads; the "
        "backward of an all-to-all is the all-to-all the other way",
    ):
        full.each(_equal("full", H))
        causal.each(_equal("causal", H))
    with report.property(
        "kv heads that do not divide by the ranks are replicated until they do",
        hint="copies stand next to their original, and their gradients are summed",
    ):
        for kv_heads, seen in shared.items():
            seen.each(_equal("causal", kv_heads))
    _without_gradients(report, answer, "full")
    with report.property(
        "kv heads travel as often as they must, not as often as there are query heads",
        hint="the smallest multiple of the kv heads that divides by the ranks: lcm(Hkv, P) heads; "
        "attention itself groups the query heads that share one",
    ):
        for kv_heads, seen in shared.items():
            seen.each(functools.partial(_few_kv_heads, kv_heads))
    full.holds(
        "at most four all-to-alls each way, of one shard each, and nothing else",
        _four_all_to_alls,
        hint="q, k, v in, the output back; their gradients take the same ways",
    )
    more = report.on_groups(_refused, answer, rounds=WORLD)
    more.refused(
        "ValueError where the heads do not divide by the ranks",
        hint="12 heads fit on 2, 3 and 4 ranks, 10 heads do not fit on 4",
    )


def _few_kv_heads(kv_heads: int, s: Seen) -> None:
    heads = 2 * H + 2 * math.lcm(kv_heads, s.size)  # q and out, k and v
    most, (_, found) = B * heads * (S // s.size) * D * 4, total(s.forward, "all_to_all")
    text = f"{s.where} handed {found} bytes of {kv_heads} kv heads to all-to-alls"
    expect(found <= most, f"{text}, expected at most {most}", "traffic")


def _four_all_to_alls(s: Seen) -> None:
    most = 4 * B * H * (S // s.size) * D * 4
    for where, log in (
        (f"forward on {s.where}", s.forward),
        (f"backward on {s.where}", s.backward),
    ):
        count, nbytes = total(log, "all_to_all")
        other = [c.op for c in log if c.op != "all_to_all"]
        expect(not other, f"{where} used {other[:1]}", "traffic")
        expect(count <= 4, f"{where} made {count} all-to-alls, expected at most 4", "traffic")
        text = f"{where} handed {nbytes} bytes to all-to-alls, expected {most}"
        expect(nbytes <= most, text, "traffic")
        expect(count > 0 or s.size == 1, f"{where} never communicated", "traffic")


def _refused(answer, here: Here) -> Seen:
    q, k, v, _ = (x.to(device()) for x in _qkv(10, 10, 12))
    return Seen(refused=refusal(answer, q, k, v, what="10 heads on 4 ranks"))
