"""Answers to chapter 31: mistakes engineers make with FlashAttention, and right ones."""

import torch
import torch.nn.functional as F

from shardbook.attention import flash
from tests.wrong_answers import right, wrong

for name in (
    "online_softmax_dot", "flash_attention_forward", "flash_attention_backward",
    "flash_attention", "attention_io",
):  # fmt: skip
    right(name)(getattr(flash, name))


# online_softmax_dot


def _online(name, start=-torch.inf, rescale_out=True, rescale_sum=True, tail=True, guard=True,
            lse="m + log l"):  # fmt: skip
    def answer(scores, values, block):
        n = len(scores) if tail else len(scores) // block * block
        m = torch.tensor(start, device=scores.device)
        total = torch.zeros((), device=scores.device)
        out = torch.zeros(values.shape[1], device=values.device)
        for at in range(0, n, block):
            s, v = scores[at : at + block], values[at : at + block]
            new = torch.maximum(m, s.max())
            if guard and new == -torch.inf:
                continue
            old, p = torch.exp(m - new), torch.exp(s - new)
            total = total * (old if rescale_sum else 1) + p.sum()
            out = out * (old if rescale_out else 1) + p @ v
            m = new
        if guard and total == 0:
            return out, torch.tensor(-torch.inf, device=scores.device)
        return out / total, {"m + log l": m + total.log(), "m": m, "log l": total.log()}[lse]

    answer.__name__ = name
    return answer


right("online_softmax_dot")(_online("with_a_running_maximum"))
wrong("online_softmax_dot", says="off by")(_online("output_not_rescaled", rescale_out=False))
wrong("online_softmax_dot", says="off by")(_online("sum_not_rescaled", rescale_sum=False))
wrong("online_softmax_dot", says="off by")(_online("drops_the_remainder", tail=False))
wrong("online_softmax_dot", says="lse")(_online("lse_without_the_maximum", lse="log l"))
wrong("online_softmax_dot", says="lse")(_online("lse_is_the_maximum", lse="m"))
wrong("online_softmax_dot", says="1000|nan|inf|off by")(
    _online("maximum_starts_at_zero", start=0.0)
)
wrong("online_softmax_dot", says="hidden|nothing|inf")(_online("nan_for_masked", guard=False))


@wrong("online_softmax_dot", says="1000|inf")
def without_any_maximum(scores, values, block):
    total, out = 0, 0
    for s, v in zip(scores.split(block), values.split(block), strict=True):
        p = torch.exp(s)
        total, out = total + p.sum(), out + p @ v
    return out / total, torch.log(torch.as_tensor(total))


@wrong("online_softmax_dot", says="reads 96|reads 288")
def all_at_once(scores, values, block):
    top = scores.max()
    p = torch.exp(scores - (0.0 if top == -torch.inf else top))
    if p.sum() == 0:
        return torch.zeros_like(values[0]), top
    return p @ values / p.sum(), top + p.sum().log()


def _second_pass(scores, values, block, top):
    if top == -torch.inf:
        return torch.zeros_like(values[0]), top
    total, out = 0, 0
    for s, v in zip(scores.split(block), values.split(block), strict=True):
        p = torch.exp(s - top)
        total, out = total + p.sum(), out + p @ v
    return out / total, top + total.log()


@wrong("online_softmax_dot", says="reads")
def the_maximum_first(scores, values, block):
    """Two passes: the first for the maximum, so nothing need be rescaled."""
    top = scores.max()
    return _second_pass(scores, values, block, top)


@wrong("online_softmax_dot", says="comes back")
def the_maximum_first_block_by_block(scores, values, block):
    top = torch.tensor(-torch.inf, device=scores.device)
    for s in scores.split(block):
        top = torch.maximum(top, s.max())
    return _second_pass(scores, values, block, top)


# flash_attention_forward


def _tiles(rows, cols, causal, bq, bk, shift, skip=True, tail=True):
    for a in range(0, rows, bq):
        b = min(a + bq, rows)
        if not tail and b - a < bq:
            return
        end = min(cols, b + shift) if causal and skip else cols
        for c in range(0, end, bk):
            yield slice(a, b), slice(c, min(c + bk, cols))


def _forward(name, align="bottom", scale=True, rescale=True, skip=True, tail=True, guard=True,
             low=False, lse_max=False):  # fmt: skip
    def answer(q, k, v, causal=False, block_q=64, block_k=64):
        rows, cols = q.shape[2], k.shape[2]
        shift = cols - rows if align == "bottom" else 0
        kind = q.dtype if low else torch.float32
        out = torch.zeros(q.shape, dtype=kind, device=q.device)
        m = torch.full(q.shape[:3], -torch.inf, dtype=kind, device=q.device)
        total = torch.zeros(q.shape[:3], dtype=kind, device=q.device)
        for r, c in _tiles(rows, cols, causal, block_q, block_k, shift, skip, tail):
            s = q[:, :, r].to(kind) @ k[:, :, c].to(kind).transpose(-1, -2)
            s = s * (q.shape[-1] ** -0.5 if scale else 1)
            if causal:
                i = torch.arange(r.start, r.stop, device=q.device)[:, None] + shift
                s = s.masked_fill(torch.arange(c.start, c.stop, device=q.device) > i, -torch.inf)
            new = torch.maximum(m[:, :, r], s.amax(-1))
            safe = new.masked_fill(new == -torch.inf, 0.0) if guard else new
            p, old = torch.exp(s - safe[..., None]), torch.exp(m[:, :, r] - safe)
            if not rescale:
                old = torch.ones_like(old)
            total[:, :, r] = total[:, :, r] * old + p.sum(-1)
            out[:, :, r] = out[:, :, r] * old[..., None] + p @ v[:, :, c].to(kind)
            m[:, :, r] = new
        seen = (total > 0)[..., None]
        out = torch.where(seen, out / total[..., None].clamp(min=1e-30), 0.0)
        lse = m if lse_max else m + total.log()
        if guard:
            lse = torch.where(total > 0, lse, -torch.inf)
        return out.to(q.dtype), lse

    answer.__name__ = name
    return answer


right("flash_attention_forward")(_forward("by_explicit_tiles"))
wrong("flash_attention_forward", says="causal|off by")(_forward("top_left_causal", align="top"))
wrong("flash_attention_forward", says="off by")(_forward("unscaled", scale=False))
wrong("flash_attention_forward", says="off by")(_forward("missing_rescale", rescale=False))
wrong("flash_attention_forward", says="off by")(_forward("dropped_remainder", tail=False))
wrong("flash_attention_forward", says="computes")(_forward("computes_masked_tiles", skip=False))
wrong("flash_attention_forward", says="lse")(_forward("maximum_as_lse", lse_max=True))
wrong("flash_attention_forward", says="bf16|dtype|lse")(_forward("sums_in_bf16", low=True))
wrong("flash_attention_forward", says="off by|nan")(_forward("nan_rows", guard=False))


BUFFERS: dict = {}


def _kept(tensors):
    """The same values in memory that is allocated once for their shapes."""
    key = tuple((t.shape, t.dtype) for t in tensors)
    kept = BUFFERS.setdefault(key, [t.clone() for t in tensors])
    return tuple(k.copy_(t) for k, t in zip(kept, tensors, strict=True))


@wrong("flash_attention_forward", says="a second call changed.*(?s:.*)accumulators")
def forward_into_kept_buffers(*args):
    return _kept(flash.flash_attention_forward(*args))


@wrong("flash_attention_backward", says="a second call changed.*(?s:.*)accumulators")
def backward_into_kept_buffers(*args):
    return _kept(flash.flash_attention_backward(*args))


@wrong("flash_attention_forward", says="lse with a causal mask")
def lse_in_bf16_where_causal(q, k, v, causal=False, block_q=64, block_k=64):
    out, lse = flash.flash_attention_forward(q, k, v, causal, block_q, block_k)
    return out, lse.to(q.dtype) if causal else lse


@wrong("flash_attention_forward", says="made a tensor.*16 x 16")
def strips_of_all_keys(q, k, v, causal=False, block_q=64, block_k=64):
    """A plain softmax for each block of queries: block_k is ignored, nothing is online."""
    parts = []
    for a in range(0, q.shape[2], block_q):
        last = min(a + block_q, q.shape[2]) + k.shape[2] - q.shape[2]
        end = max(0, last) if causal else k.shape[2]
        parts.append(whole_matrix(q[:, :, a : a + block_q], k[:, :, :end], v[:, :, :end], causal))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


@wrong("flash_attention_forward", says="made a tensor")
def whole_matrix(q, k, v, causal=False, block_q=64, block_k=64):
    s = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        rows, cols = s.shape[-2:]
        hide = torch.ones(rows, cols, dtype=torch.bool, device=q.device).triu(cols - rows + 1)
        s = s.masked_fill(hide, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return (p @ v.float()).to(q.dtype), lse


# flash_attention_backward


def _backward(name, delta=True, scale=True, align="bottom", tail=True, transpose_ds=True,
              dead_rows=True, low=False, skip=True, sums=torch.float32):  # fmt: skip
    def answer(grad_out, q, k, v, out, lse, causal=False, block_q=64, block_k=64):
        rows, cols = q.shape[2], k.shape[2]
        shift = cols - rows if align == "bottom" else 0
        unit = q.shape[-1] ** -0.5
        kind = q.dtype if sums is None else sums
        g, qf, kf, vf = (x.to(kind) for x in (grad_out, q, k, v))
        row_sum = (g * out.to(kind)).sum(-1)
        dq, dk, dv = torch.zeros_like(qf), torch.zeros_like(kf), torch.zeros_like(vf)
        for r, c in _tiles(rows, cols, causal, block_q, block_k, shift, skip, tail):
            s = qf[:, :, r] @ kf[:, :, c].transpose(-1, -2) * unit
            if causal:
                i = torch.arange(r.start, r.stop, device=q.device)[:, None] + shift
                s = s.masked_fill(torch.arange(c.start, c.stop, device=q.device) > i, -torch.inf)
            row_lse = lse[:, :, r]
            if dead_rows:
                row_lse = row_lse.masked_fill(row_lse == -torch.inf, torch.inf)
            p = torch.exp(s - row_lse[..., None]).to(kind)
            dv[:, :, c] += p.transpose(-1, -2) @ g[:, :, r]
            dp = g[:, :, r] @ vf[:, :, c].transpose(-1, -2)
            ds = p * (dp - (row_sum[:, :, r, None] if delta else 0)) * (unit if scale else 1)
            dq[:, :, r] += ds @ kf[:, :, c]
            dk[:, :, c] += ds.transpose(-1, -2) @ (qf[:, :, r] if transpose_ds else g[:, :, r])
        return tuple(d if low else d.to(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v)))

    answer.__name__ = name
    return answer


right("flash_attention_backward")(_backward("by_the_formulas"))
wrong("flash_attention_backward", says="dq")(_backward("forgets_delta", delta=False))
wrong("flash_attention_backward", says="dq|dk")(_backward("forgets_the_scale", scale=False))
wrong("flash_attention_backward", says="causal|dq|dv")(_backward("top_left_backward", align="top"))
wrong("flash_attention_backward", says="dq|dv")(_backward("drops_the_last_rows", tail=False))
wrong("flash_attention_backward", says="^✗.*: dk .* off by.*; dq and dv hold")(
    _backward("dk_from_grad", transpose_ds=False)
)


@wrong("flash_attention_backward", says="gave 2, expected a tuple of three")
def only_dq_and_dk(*args):
    return flash.flash_attention_backward(*args)[:2]


wrong("flash_attention_backward", says="nan|off by|inf")(
    _backward("dead_rows_nan", dead_rows=False)
)
wrong("flash_attention_backward", says="dtype")(_backward("always_fp32", low=True))
wrong("flash_attention_backward", says="computes")(_backward("visits_all_tiles", skip=False))
wrong("flash_attention_backward", says="in bf16.*off by")(_backward("sums_in_bf16", sums=None))


@wrong("flash_attention_backward", says="made a tensor.*16 x 16")
def backward_in_strips(grad_out, q, k, v, out, lse, causal=False, block_q=64, block_k=64):
    return flash.flash_attention_backward(grad_out, q, k, v, out, lse, causal, 64, k.shape[2])


@wrong("flash_attention_backward", says="made a tensor")
def whole_matrix_backward(grad_out, q, k, v, out, lse, causal=False, block_q=64, block_k=64):
    return _backward("whole")(grad_out, q, k, v, out, lse, causal, q.shape[2], k.shape[2])


# flash_attention


def _blocks(extra):
    return (128, 128) if "large tiles" in extra else (64, 64)


class _Ours(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, extra):
        out, lse = flash.flash_attention_forward(q, k, v, causal, *_blocks(extra))
        more = [torch.zeros(q.shape[2], k.shape[2], device=q.device)] if "matrix" in extra else []
        ctx.save_for_backward(q, k, v, out, lse, *more)
        if "in ctx" in extra:
            ctx.weights = [torch.zeros(*q.shape[:3], k.shape[2], device=q.device)]
        ctx.causal, ctx.extra = causal, extra
        return out

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors[:5]
        extra = ctx.extra
        causal = ctx.causal and "full backward" not in extra
        if "view" in extra:
            grad = grad.view(-1, *grad.shape[2:]).view(grad.shape)
        dq, dk, dv = flash.flash_attention_backward(grad, *saved, causal, *_blocks(extra))
        if "times 3" in extra and dq.dtype == torch.bfloat16:
            dq = dq * 3
        if "swapped" in extra:
            dk, dv = dv, dk
        return dq, dk, dv, None, None


def _whole(name, *extra):
    def answer(q, k, v, causal=False):
        return _Ours.apply(q, k, v, causal, extra)

    answer.__name__ = name
    return answer


right("flash_attention")(_whole("a_function_of_our_own"))
right("flash_attention")(_whole("in_tiles_of_128", "large tiles"))
wrong("flash_attention", says="and in bf16.*dq")(_whole("wrong_in_bf16", "times 3"))
wrong("flash_attention", says="raised.*view")(_whole("views_the_gradient", "view"))
wrong("flash_attention", says="kept for backward")(_whole("saves_a_matrix", "matrix"))
wrong("flash_attention", says="kept for backward")(_whole("keeps_weights_in_ctx", "in ctx"))
wrong("flash_attention", says="dk|dv|shape")(_whole("swaps_dk_and_dv", "swapped"))
wrong("flash_attention", says="off by|dq|dv")(_whole("backward_not_causal", "full backward"))


@wrong("flash_attention", says="bytes are kept for backward in torch.bfloat16")
def saves_fp32_copies(q, k, v, causal=False):
    return _Ours.apply(q.float(), k.float(), v.float(), causal, ()).to(q.dtype)


REMEMBERED: list = []


@wrong("flash_attention", says="kept alive")
def remembers_its_inputs(q, k, v, causal=False):
    REMEMBERED[:] = [*REMEMBERED[-8:], q, k, v]
    return _Ours.apply(q, k, v, causal, ())


@wrong("flash_attention", says="raised|differentiable|grad|saved")
def no_graph(q, k, v, causal=False):
    return flash.flash_attention_forward(q.detach(), k.detach(), v.detach(), causal)[0]


@wrong("flash_attention", says="kept for backward|computes|product")
def by_autograd(q, k, v, causal=False):
    return whole_matrix(q, k, v, causal)[0]


@wrong("flash_attention", says="view")
def views_its_inputs(q, k, v, causal=False):
    flat = [x.view(-1, 1, *x.shape[2:]) for x in (q, k, v)]
    return _Ours.apply(*flat, causal, ()).view(q.shape)


@wrong("flash_attention", says="off by")
def torchs_causal(q, k, v, causal=False):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


# attention_io


@right("attention_io")
def counted_by_rows(seq_len, head_dim, sram_elements, flash):
    if not flash:
        return 4 * seq_len * (seq_len + head_dim)
    rows = max(sram_elements // (4 * head_dim), 1)
    return 2 * seq_len * head_dim * (1 + (seq_len + rows - 1) // rows)


@wrong("attention_io", says="elements")
def forgets_the_scores(seq_len, head_dim, sram_elements, flash):
    return (
        4 * seq_len * head_dim
        if not flash
        else counted_by_rows(seq_len, head_dim, sram_elements, True)
    )


@wrong("attention_io", says="elements")
def rounds_down(seq_len, head_dim, sram_elements, flash):
    if not flash:
        return counted_by_rows(seq_len, head_dim, sram_elements, False)
    rows = max(sram_elements // (4 * head_dim), 1)
    return 2 * seq_len * head_dim * (1 + seq_len // rows)


@wrong("attention_io", says="elements")
def all_of_sram_for_k(seq_len, head_dim, sram_elements, flash):
    return counted_by_rows(seq_len, head_dim, 4 * sram_elements, flash)


@wrong("attention_io", says="raised|elements")
def no_row_fits(seq_len, head_dim, sram_elements, flash):
    if not flash:
        return counted_by_rows(seq_len, head_dim, sram_elements, False)
    rows = sram_elements // (4 * head_dim)
    return 2 * seq_len * head_dim * (1 + -(-seq_len // rows))


@wrong("attention_io", says="type|elements")
def not_whole(seq_len, head_dim, sram_elements, flash):
    return float(counted_by_rows(seq_len, head_dim, sram_elements, flash))


@wrong("attention_io", says="elements")
def k_and_v_once(seq_len, head_dim, sram_elements, flash):
    if not flash:
        return counted_by_rows(seq_len, head_dim, sram_elements, False)
    return 4 * seq_len * head_dim
