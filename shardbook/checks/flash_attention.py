"""Chapter 31: FlashAttention, judged against plain attention in float64 on the host."""

import functools
import gc
import math
import weakref

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .._seams import TorchDispatchMode, tree_leaves
from ..devices import device
from .compare import all_close, close, expect, random, same, unchanged
from .groups import tensors_of
from .report import check

# (B, H, S, T, D): pairwise distinct, lengths that no block size divides, S above and below T
SHAPES = [(2, 3, 37, 53, 5), (1, 2, 70, 41, 9), (3, 1, 1, 19, 4), (2, 1, 150, 131, 7)]


def _inputs(b: int, h: int, s: int, t: int, d: int, seed: int = 0):
    """q, k, v and the gradient of the output, fp32 on the host."""
    return (
        random(b, h, s, d, seed=seed + 1),
        random(b, h, t, d, seed=seed + 2),
        random(b, h, t, d, seed=seed + 3),
        random(b, h, s, d, seed=seed + 4),
    )


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    """(out, lse, weights) of the definition, in float64; a row without keys gives 0 and -inf."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        rows, keys = scores.shape[-2:]
        hidden = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return weights @ v, lse, weights


def _plain_gradients(q, k, v, grad, causal):
    """(dq, dk, dv) in float64, by the formulas, so that rows without keys give no nan."""
    out, _, weights = _plain(q, k, v, causal)
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    dv = weights.transpose(-1, -2) @ grad
    dp = grad @ v.transpose(-1, -2)
    ds = weights * (dp - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return ds @ k, ds.transpose(-1, -2) @ q, dv


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # views have no memory of their own, but an expanded mask is a matrix soon after
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


class _Reads(TorchDispatchMode):
    """Notes the largest tensor that a product, an exponential, a maximum or a sum reads."""

    def __init__(self):
        super().__init__()
        self.numel, self.name = 0, ""
        self.visits: list[tuple[int, int]] = []  # (storage, offset) of each block come to

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name != "expand" and any(w in name for w in ("exp", "max", "mm", "mv", "dot", "sum")):
            for t in tree_leaves(args):
                if isinstance(t, Tensor) and t.numel() > self.numel:
                    self.numel, self.name = t.numel(), name
        if not any(r.alias_info for r in func._schema.returns):  # a view reads nothing
            for t in tree_leaves(args):
                if isinstance(t, Tensor):
                    at = t.untyped_storage().data_ptr(), t.storage_offset()
                    last = next((v for v in reversed(self.visits) if v[0] == at[0]), None)
                    if at != last:
                        self.visits.append(at)
        return func(*args, **(kwargs or {}))


# (S, T, D), blocks, and the most elements that a tensor may have: a share of S x T, or the inputs
TILED = [((600, 500, 8), 64, 600 * 500 // 4), ((200, 150, 4), 16, 4 * 16 * 16)]


def _never_quadratic(run, shape, block: int, limit: int, what: str) -> None:
    with _Largest() as largest:
        run()
    s, t, _ = shape
    expect(
        largest.numel <= limit,
        f"{what} made a tensor of {largest.numel} elements for {s} queries and {t} keys in tiles "
        f"of {block} x {block}, expected at most {limit}",
    )


def _rounded(actual: Tensor, expected: Tensor, what: str) -> None:
    """A bf16 tensor that was summed in more than bf16, of inputs that were rounded before."""
    same(actual.dtype, torch.bfloat16, f"the dtype of {what}")
    same(tuple(actual.shape), tuple(expected.shape), f"the shape of {what}")
    error = float((actual.detach().cpu().double() - expected).abs().max() / expected.abs().max())
    # one rounding to bf16 is 2^-9 of a value; out was rounded as well before the backward
    expect(
        error < 1.5 * 2**-8,
        f"{what} is off by {error:.2g} of its largest value, rounding is 0.002",
    )


LOW = [(1, 2, 33, 700, 16), (1, 2, 700, 33, 16)]  # in bf16: long sums over keys, over queries


ALIGN = (
    "bottom-right: the last query sees every key, query i sees keys up to i + T - S; torch's own "
    "is_causal is top-left and differs where S and T do"
)
RESCALE = (
    "when a later block raises the running maximum, the sum AND the output so far shrink by "
    "exp(old maximum - new maximum)"
)


@check("online_softmax_dot")
def online_softmax_dot(answer, report):
    """One pass over scores and values."""
    where = device()
    with report.property(
        "equals softmax(scores) @ values for any block, also one that does not divide",
        hint=RESCALE + "; the last block may be shorter",
    ):
        for n, d, block in ((23, 4, 5), (7, 3, 7), (6, 5, 100), (31, 2, 1), (64, 6, 16)):
            for order in ("random", "rising", "falling"):
                scores, values = random(n, seed=n) * 4, random(n, d, seed=n + 1)
                if order != "random":
                    scores = scores.sort(descending=order == "falling").values
                inputs = scores.to(where), values.to(where)
                with unchanged("online_softmax_dot", *inputs):
                    out, lse = answer(*inputs, block)
                want = scores.double().softmax(0) @ values.double()
                what = f"{n} {order} scores in blocks of {block}"
                close(out, want.float(), f"out for {what}")
                got = torch.as_tensor(lse).float().reshape(())
                close(got, scores.double().logsumexp(0).float(), f"lse for {what}")
    with report.property(
        "goes through scores and values block by block",
        hint="a step sees one block: update the maximum, the sum and the output so far with it",
    ):
        scores, values = random(96, seed=7).to(where), random(96, 3, seed=8).to(where)
        with _Reads() as reads:
            answer(scores, values, 8)
        expect(
            reads.numel <= 8 * 3,
            f"{reads.name} reads {reads.numel} elements at once, a block of 8 has {8 * 3} values",
        )
        storage = scores.untyped_storage().data_ptr()
        offsets = [offset for at, offset in reads.visits if at == storage]
        expect(
            len(offsets) == len(set(offsets)),
            "it comes back to scores it has already passed, expected one pass: update what a "
            "block brings while it is there",
        )
    with report.property(
        "scores of 1000 and of -1000 neither overflow nor vanish",
        hint="subtract the running maximum before exp; start it at -inf, not at 0",
    ):
        for offset in (1000.0, -1000.0):
            scores, values = random(13, seed=3) + offset, random(13, 4, seed=4)
            out, lse = answer(scores.to(where), values.to(where), 4)
            close(out, (scores.double().softmax(0) @ values.double()).float(), f"at {offset:g}")
            expected = scores.double().logsumexp(0).float()
            close(torch.as_tensor(lse).reshape(()), expected, f"lse at {offset:g}")
    with report.property(
        "blocks of -inf (masked scores) count as nothing, all of them give 0 and lse -inf",
        hint="-inf minus -inf is nan: a block in which nothing is seen must be passed over",
    ):
        scores, values = random(12, seed=5), random(12, 3, seed=6)
        for hidden in (slice(0, 4), slice(8, 12), slice(2, 9)):
            masked = scores.clone()
            masked[hidden] = -torch.inf
            out, _ = answer(masked.to(where), values.to(where), 4)
            what = f"out where scores {hidden.start} to {hidden.stop - 1} of 12 are -inf"
            close(out, (masked.double().softmax(0) @ values.double()).float(), what)
        out, lse = answer(torch.full((12,), -torch.inf, device=where), values.to(where), 4)
        close(out, torch.zeros(3), "out where nothing is seen", 0.0)
        expect(float(lse) == -math.inf, f"lse is {float(lse)} where nothing is seen, not -inf")


def _blocks(shape):
    return [(64, 64), (16, 24), (7, 50), (1000, 3)] if shape == SHAPES[0] else [(32, 16)]


@check("flash_attention_forward")
def flash_attention_forward(answer, report):
    """Tiles, forward."""
    where = device()

    def judge(causal: bool) -> None:
        for shape in SHAPES:
            q, k, v, _ = _inputs(*shape)
            want, want_lse, _ = _plain(q, k, v, causal)
            inputs = [x.to(where) for x in (q, k, v)]
            for block_q, block_k in _blocks(shape):
                with unchanged("flash_attention_forward", *inputs):
                    out, lse = answer(*inputs, causal, block_q, block_k)
                what = f"S={shape[2]}, T={shape[3]}, blocks {block_q} x {block_k}"
                close(out, want.float(), f"out for {what}")
                close(lse, want_lse.float(), f"lse for {what}")

    with report.property(
        "out and lse equal plain attention, for lengths that no block divides",
        hint=RESCALE + "; scale the scores by D^-0.5; the last tile may be smaller",
    ):
        judge(False)
    with report.property("and with a causal mask", hint=ALIGN):
        judge(True)
    with report.property(
        "large scores do not overflow", hint="subtract the running maximum of the row before exp"
    ):
        q, k, v, _ = _inputs(1, 2, 40, 33, 8)
        q = q * 60
        out, lse = answer(*[x.to(where) for x in (q, k, v)], False, 16, 8)
        want, want_lse, _ = _plain(q, k, v, False)
        close(out, want.float(), "out for scores of a few hundred", 1e-4)
        close(lse, want_lse.float(), "lse for scores of a few hundred")
    with report.property(
        "inputs in bf16 give out in bf16, summed in fp32, and lse in fp32",
        hint="bf16 keeps 8 bits: convert a tile to fp32 before the products, round once at the end",
    ):
        q, k, v, _ = (x.bfloat16() for x in _inputs(*LOW[0]))
        for causal in (False, True):
            what = "with a causal mask" if causal else "without a mask"
            out, lse = answer(*[x.to(where) for x in (q, k, v)], causal, 16, 16)
            same(out.dtype, torch.bfloat16, f"the dtype of out {what}")
            same(lse.dtype, torch.float32, f"the dtype of lse {what}")
            want, want_lse, _ = _plain(q, k, v, causal)
            error = (out.cpu().double() - want).abs().max() / want.abs().max()
            # one rounding to bf16 is 2^-9 of a value
            expect(
                error < 2**-8,
                f"out is off by {error:.2g} of its largest value {what}, rounding is 0.002",
            )
            close(lse, want_lse.float(), f"lse {what}", 1e-4)
    with report.property(
        "a second call leaves the first result as it was",
        hint="accumulators kept from call to call are overwritten: allocate them in the call",
    ):
        _first_stays(answer, *(_inputs(1, 2, 33, 40, 8, seed=s)[:3] for s in (0, 10)))
    with report.property(
        "no tensor of S x T is made", hint="mask, scores and weights exist for one tile at a time"
    ):
        for shape, block, limit in TILED:
            q, k, v, _ = (x.to(where) for x in _inputs(1, 1, *shape))
            for causal in (False, True):
                run = functools.partial(answer, q, k, v, causal, block, block)
                _never_quadratic(run, shape, block, limit, "the forward")
    with report.property(
        "causal masking skips the tiles it empties",
        hint="a row of tiles ends at the last key its last query sees",
    ):
        q, k, v, _ = (x.to(where) for x in _inputs(1, 1, 512, 512, 8))
        _skips(lambda causal: answer(q, k, v, causal, 64, 64), 36 / 64)


def _skips(run, share: float) -> None:
    counts = []
    for causal in (False, True):
        with FlopCounterMode(display=False) as flops:
            run(causal)
        counts.append(flops.get_total_flops())
    expect(counts[0] > 0, "no matrix product was counted")
    got = counts[1] / counts[0]
    expect(
        got <= share + 0.01,
        f"the causal run computes {got:.2f} of the full one, expected at most {share:.2f}",
    )


def _first_stays(answer, *cases) -> None:
    """What the first case's call gives stays as it was while the others are answered."""
    first, *others = ([x.to(device()) for x in case] for case in cases)
    given = answer(*first, False, 16, 16)
    before = [t.clone() for t in given]
    for case in others:
        answer(*case, False, 16, 16)
    kept = all(map(torch.equal, given, before))
    expect(kept, "a second call changed what the first one gave: make new tensors in each", "kept")


def _all_three(got, wanted, where: str) -> None:
    """dq, dk and dv, with a message that tells which of them hold."""
    count = len(got) if isinstance(got, (tuple, list)) else type(got).__name__
    expect(count == 3, f"it gave {count}, expected a tuple of three: dq, dk, dv", "type")
    names = ("dq", "dk", "dv")
    pairs = zip(got, (w.float() for w in wanted), strict=True)
    all_close(dict(zip(names, pairs, strict=True)), where)


@check("flash_attention_backward")
def flash_attention_backward(answer, report):
    """Tiles, backward."""
    where = device()

    def judge(causal: bool) -> None:
        for shape in SHAPES:
            q, k, v, grad = _inputs(*shape)
            out, lse, _ = _plain(q, k, v, causal)
            wanted = _plain_gradients(q, k, v, grad, causal)
            inputs = [x.float().to(where) for x in (grad, q, k, v, out, lse)]
            for block_q, block_k in _blocks(shape):
                with unchanged("flash_attention_backward", *inputs):
                    got = answer(*inputs, causal, block_q, block_k)
                where_from = f"tiles of {block_q} x {block_k}, S={shape[2]}, T={shape[3]}"
                _all_three(got, wanted, where_from)

    with report.property(
        "dq, dk and dv equal plain attention's",
        hint="p = exp(scores - lse) from the saved lse; ds = p (grad v^T - delta) with delta the "
        "row's sum of grad * out; the scale D^-0.5 belongs to dq and dk",
    ):
        judge(False)
    with report.property(
        "and with a causal mask, also for rows that see no key",
        hint=ALIGN + ". Where lse is -inf every weight is 0",
    ):
        judge(True)
    with report.property(
        "gradients have the dtype of their input",
        hint="sum in fp32, convert at the end",
    ):
        q, k, v, grad = _inputs(1, 2, 33, 40, 8)
        out, lse, _ = _plain(q, k, v, False)
        low = [x.bfloat16().to(where) for x in (grad, q, k, v, out)]
        for name, g in zip(("dq", "dk", "dv"), answer(*low, lse.float().to(where)), strict=True):
            same(g.dtype, torch.bfloat16, f"the dtype of {name}")
        for shape in LOW:
            for causal in (False, True):
                q, k, v, grad = (x.bfloat16() for x in _inputs(*shape))
                out, lse, _ = _plain(q, k, v, causal)
                low = [x.to(where) for x in (grad, q, k, v, out.bfloat16(), lse.float())]
                got = answer(*low, causal, 16, 16)
                wanted = _plain_gradients(q, k, v, grad, causal)
                for name, g, w in zip(("dq", "dk", "dv"), got, wanted, strict=True):
                    _rounded(g, w, f"{name} in bf16 for S={shape[2]}, T={shape[3]}")
    with report.property(
        "a second call leaves the first result as it was",
        hint="accumulators kept from call to call are overwritten: allocate them in the call",
    ):
        cases = []
        for seed in (0, 10):
            q, k, v, grad = _inputs(1, 2, 33, 40, 8, seed=seed)
            out, lse, _ = _plain(q, k, v, False)
            cases.append((grad, q, k, v, out.float(), lse.float()))
        _first_stays(answer, *cases)
    with report.property(
        "no tensor of S x T is made", hint="compute the weights again, tile by tile"
    ):
        for shape, block, limit in TILED:
            q, k, v, grad = _inputs(1, 1, *shape)
            out, lse, _ = _plain(q, k, v, False)
            inputs = [x.float().to(where) for x in (grad, q, k, v, out, lse)]
            run = functools.partial(answer, *inputs, False, block, block)
            _never_quadratic(run, shape, block, limit, "the backward")
    with report.property(
        "causal masking skips the tiles it empties",
        hint="the tiles that the forward does not visit have no gradient either",
    ):
        q, k, v, grad = _inputs(1, 1, 512, 512, 8)
        inputs = []
        for causal in (False, True):
            out, lse, _ = _plain(q, k, v, causal)
            inputs.append([x.float().to(where) for x in (grad, q, k, v, out, lse)])
        _skips(lambda causal: answer(*inputs[causal], causal, 64, 64), 36 / 64)


def _attached(out: Tensor) -> list[Tensor]:
    """Tensors that autograd.Functions on the way to `out` keep as attributes of their ctx."""
    todo, seen, found = [out.grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [n for n, _ in node.next_functions]
        found += tensors_of(getattr(node, "__dict__", {}))
    return found


def _kept(answer, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a call keeps for the backward, and those of q, k, v, out and an fp32 lse."""
    leaves = [
        x.to(device(), dtype).requires_grad_() for x in _inputs(1, 2, 300, 310, 8, seed=1)[:3]
    ]
    saved: dict = {}

    def note(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = answer(*leaves, False)
    if not saved:
        return 0, 0
    for t in _attached(out):
        note(t)
    wanted = sum(x.numel() * x.element_size() for x in (*leaves, out))
    return sum(saved.values()), wanted + 4 * out.shape[:3].numel()


@check("flash_attention")
def flash_attention(answer, report):
    """Both, as one differentiable function."""
    where = device()
    with report.property(
        "values and gradients equal plain attention's, causal or not",
        hint="an autograd.Function whose forward saves what backward needs. " + ALIGN,
    ):
        for shape in SHAPES:
            for causal in (False, True):
                q, k, v, grad = _inputs(*shape)
                # as a model has them: heads split off the last dimension, [B, S, H, D] in memory
                laid = [x.transpose(1, 2).contiguous().to(where).transpose(1, 2) for x in (q, k, v)]
                leaves = [x.requires_grad_() for x in laid]
                out = answer(*leaves, causal)
                close(out, _plain(q, k, v, causal)[0].float(), f"out for {shape}")
                laid = grad.transpose(1, 2).contiguous().to(where).transpose(1, 2)
                got = torch.autograd.grad(out, leaves, laid)
                wanted = _plain_gradients(q, k, v, grad, causal)
                _all_three(got, wanted, f"S={shape[2]}, T={shape[3]}" + causal * ", causal")
    with report.property(
        "and in bf16, summed in fp32",
        hint="out and the gradients have the dtype of q, k and v and are rounded once, at the end",
    ):
        for shape in LOW:
            for causal in (False, True):
                q, k, v, grad = (x.bfloat16() for x in _inputs(*shape))
                leaves = [x.clone().to(where).requires_grad_() for x in (q, k, v)]
                out = answer(*leaves, causal)
                got = out, *torch.autograd.grad(out, leaves, grad.to(where))
                wanted = _plain(q, k, v, causal)[0], *_plain_gradients(q, k, v, grad, causal)
                for name, g, w in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
                    _rounded(g, w, f"{name} for S={shape[2]}, T={shape[3]}")
    with report.property(
        "only q, k, v, out and lse are kept for backward",
        hint="save_for_backward(q, k, v, out, lse): what autograd keeps by itself is S x T",
    ):
        for dtype in (torch.float32, torch.bfloat16):
            total, wanted = _kept(answer, dtype)
            expect(total > 0, "nothing was saved for backward: is it differentiable?")
            expect(
                total <= wanted,
                f"{total} bytes are kept for backward in {dtype}, expected {wanted}",
            )
        q, k, v, _ = (x.to(where).requires_grad_() for x in _inputs(1, 1, 20, 30, 4))
        leaves = [weakref.ref(x) for x in (q, k, v)]
        answer(q, k, v, False).sum().backward()
        del q, k, v
        gc.collect()
        alive = any(x() is not None for x in leaves)
        expect(not alive, "q, k and v are kept alive by something after the backward")
    with report.property(
        "causal masking skips the tiles it empties",
        hint="a row of tiles ends at the last key its last query sees",
    ):
        # long enough for the answer's own tiles, of up to 256 x 256: 10 of 16
        q, k, v, _ = (x.to(where) for x in _inputs(1, 1, 1024, 1024, 8))
        _skips(lambda causal: answer(q, k, v, causal), 10 / 16)


@check("attention_io")
def attention_io(answer, report):
    """Elements moved."""
    with report.property(
        "standard attention moves 4 N^2 + 4 N d elements",
        hint="q, k, v and out move once; scores and weights are each written and read",
    ):
        for n, d in ((7, 3), (1024, 64), (1000, 128)):
            want = 4 * n * n + 4 * n * d
            same(answer(n, d, 100_000, flash=False), want, f"elements for N={n}, d={d}")
    with report.property(
        "tiled, it moves 2 N d + 2 N d ceil(N / max(1, floor(M / 4d)))",
        hint="q and out once, k and v once a row of tiles; M / 4d rows fit, at least one",
    ):
        for n, d, m in ((1024, 64, 25_600), (1000, 64, 25_600), (77, 5, 90), (64, 64, 100)):
            rows = max(1, m // (4 * d))
            want = 2 * n * d + 2 * n * d * math.ceil(n / rows)
            same(answer(n, d, m, flash=True), want, f"elements for N={n}, d={d}, M={m}")
    with report.property("a whole number comes back", hint="use // and a ceiling of integers"):
        same(type(answer(100, 7, 300, flash=True)), int, "the type")
