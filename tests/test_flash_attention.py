"""FlashAttention against SDPA over random shapes, what it counts, and attend on each device."""

import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shardbook.attention import attend, flash, kernel_for, kernels
from shardbook.attention.counting import largest_tensor, operator_traffic, tile_traffic


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask(rows, cols):
    return torch.ones(rows, cols, dtype=torch.bool).tril(cols - rows)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 90), min_size=3, max_size=3, unique=True),
    blocks=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_sdpa_forward_and_backward(sizes, blocks, causal, seed):
    rows, cols, dim = sizes
    if causal and rows > cols:
        rows, cols = cols, rows  # a row without keys is nan in SDPA; the checks hold that case
    q, k, v = (draw(2, 3, n, dim, seed=seed + i) for i, n in enumerate((rows, cols, cols)))
    grad = draw(2, 3, rows, dim, seed=seed + 3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*leaves, attn_mask=mask(rows, cols) if causal else None)
    wanted = torch.autograd.grad(want, leaves, grad)
    plain = [x.detach() for x in leaves]
    out, lse = flash.flash_attention_forward(*plain, causal, *blocks)
    got = flash.flash_attention_backward(grad, *plain, out, lse, causal, *blocks)
    torch.testing.assert_close(out, want.detach(), atol=1e-5, rtol=1e-5)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-5)


def test_gradcheck_of_the_function():
    """Against numerical differences, in fp32 (sums are fp32 by contract), so coarsely."""
    q, k, v = (draw(1, 1, n, 3, seed=i).requires_grad_() for i, n in enumerate((5, 7, 7)))
    grads = torch.autograd.grad(flash.flash_attention(q, k, v, True).sum(), (q, k, v))
    for x, g in zip((q, k, v), grads, strict=True):
        step = torch.zeros_like(x)
        step[..., 1, 2] = 1e-2
        with torch.no_grad():
            args = [[y + s if y is x else y for y in (q, k, v)] for s in (step, -step)]
            up, down = (flash.flash_attention(*a, True).sum() for a in args)
        assert abs((up - down) / 2e-2 - g[..., 1, 2].sum()) < 1e-2


@pytest.mark.parametrize(("n", "d", "rows"), [(64, 8, 16), (100, 16, 32), (77, 4, 77)])
def test_counted_traffic_is_the_closed_form(n, d, rows):
    q, k, v = (draw(1, 1, n, d, seed=i) for i in range(3))
    moved = tile_traffic(flash.flash_attention_forward, q, k, v, block_q=rows, block_k=13)
    assert moved == flash.attention_io(n, d, 4 * d * rows, flash=True)
    plain = operator_traffic(lambda: (q @ k.transpose(-1, -2)).softmax(-1) @ v)
    assert plain == flash.attention_io(n, d, 1, flash=False)


def test_largest_tensor_sees_the_matrix():
    q, k, v = (draw(1, 1, 300, 4, seed=i) for i in range(3))
    assert largest_tensor(lambda: (q @ k.transpose(-1, -2)).softmax(-1) @ v) == 300 * 300
    assert largest_tensor(lambda: flash.flash_attention_forward(q, k, v)) == 64 * 64


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(5, 5), (3, 8), (8, 3)])
def test_attend_is_bottom_right_with_grouped_heads(causal, rows, cols):
    q, k, v = draw(2, 6, rows, 4, seed=1), draw(2, 3, cols, 4, seed=2), draw(2, 3, cols, 4, seed=3)
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    want = flash.flash_attention(q, *repeated, causal)
    torch.testing.assert_close(attend(q, k, v, causal), want, atol=1e-5, rtol=1e-5)


def test_attend_says_which_heads_do_not_fit():
    with pytest.raises(ValueError, match="5 heads do not divide by 3 kv heads"):
        attend(draw(1, 5, 2, 4, seed=1), *[draw(1, 3, 2, 4, seed=2)] * 2)


def test_attend_passes_the_npu_kernel_what_it_wants(monkeypatch):
    """torch_npu's op stands in as plain attention with ITS conventions: scale 1, True hides."""

    def fusion(q, k, v, head_num, layout, atten_mask=None, scale=1.0):
        assert layout == "BNSD" and head_num == q.shape[1]
        k, v = (x.repeat_interleave(head_num // k.shape[1], dim=1) for x in (k, v))
        scores = q.float() @ k.float().transpose(-1, -2) * scale
        if atten_mask is not None:
            scores = scores.masked_fill(atten_mask, -1e30)
        return ((scores.softmax(-1) @ v.float()).to(q.dtype),)

    monkeypatch.setattr(kernels, "kernel_for", lambda q: "npu_fusion_attention")
    fake = types.SimpleNamespace(npu_fusion_attention=fusion)
    monkeypatch.setattr(torch.ops, "npu", fake, raising=False)
    for rows, cols in ((4, 4), (2, 7), (7, 2)):
        q, k, v = (draw(1, 2, n, 4, seed=n + i) for i, n in enumerate((rows, cols, cols)))
        for causal in (False, True):
            want = flash.flash_attention(q, k, v, causal)
            torch.testing.assert_close(attend(q, k, v, causal), want, atol=1e-5, rtol=1e-5)


def test_without_a_fused_kernel_attend_takes_sdpa():
    assert kernel_for(torch.zeros(1, 1, 1, 1)) == "sdpa"


@pytest.mark.parametrize("args", [((1, 2, 3, 4), (1, 3, 3, 4)), ((1, 2, 3, 4), (1, 2, 3, 5))])
def test_shapes_that_do_not_fit_are_named(args):
    q, k = (torch.zeros(a) for a in args)
    with pytest.raises(ValueError, match="do not fit"):
        flash.flash_attention_forward(q, k, k)
