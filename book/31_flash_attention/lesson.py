# %% [markdown]
# # 31 · FlashAttention
#
# After this chapter you can
# - say why attention's matrix, not its arithmetic, is what does not fit,
# - compute softmax in one pass over blocks, and undo it in backward without storing it,
# - read the arguments of the fused kernels (SDPA, `npu_fusion_attention`, flash-attn) and spot the
#   ones that are silently wrong in a port,
# - tell from a roofline whether a piece of work is bound by arithmetic or by memory.
#
# Time: 60 minutes to read, about three hours for the lab. Chapter 24 used the same sums between
# ranks; here they are inside one device.
#
# Letters: S queries and T keys (N where they are equal), H heads of size d (in shapes and in code, D
# where nothing else is called so), an on-chip memory of M elements.

# %%
import shardbook as sb

import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from shardbook import plot
from shardbook.attention import attend, kernel_for
from shardbook.attention.counting import largest_tensor, operator_traffic, tile_traffic
from shardbook.attention.flash import (
    attention_io,
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
    online_softmax_dot,
    tiles,
)
from shardbook.attention.masks import (
    block_kinds,
    causal,
    documents,
    masked_attention,
    sliding_window,
)
from shardbook.pictures.attention import DEVICES, draw_block_kinds, draw_roofline, draw_tiles


# %%
def draw(*shape, seed=0, scale=1.0):
    """Random normal data, the same on every device."""
    data = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return data.to(sb.device())


def plain_attention(q, k, v):
    """Attention by its definition, each step an operation of its own."""
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).softmax(-1) @ v  # [B, H, S, D]


# %% [markdown]
# ## What breaks without it?
#
# Attention compares every query with every key. For N tokens that is a matrix of N x N numbers per
# head, written to memory only to be read once by softmax and once by the product with v. How large
# is the largest tensor that plain attention makes, and that a tiled one makes? One head of size 64.

# %%
lengths = (1024, 2048, 4096)
largest = {"plain": {}, "tiled": {}}
for n in lengths:
    q, k, v = (draw(1, 1, n, 64, seed=s) for s in range(3))
    largest["plain"][str(n)] = 4 * largest_tensor(plain_attention, q, k, v) / 1e6
    largest["tiled"][str(n)] = 4 * largest_tensor(flash_attention_forward, q, k, v) / 1e6
for name, sizes in largest.items():
    print(f"{name:6}", {n: round(mb, 2) for n, mb in sizes.items()}, "MB")

# %% [markdown]
# Four times as much for twice the tokens, against twice as much. At 16,384 tokens and 32 heads in
# bf16 the matrix alone takes

# %%
print(f"{16_384**2 * 32 * 2 / 2**30:.0f} GiB per layer and sample, to keep for backward")

# %% [markdown]
# ### Peak memory, measured
#
# The same on this machine, from 1k to 16k tokens: the memory that the process holds at its peak
# beyond what it held before, for one head forward. Each length runs in a rank of its own, so that
# one does not profit from memory another left. Tiles of 512 x 512 here: fewer steps of Python.


# %%
def peak_megabytes(kind, n):
    """Peak memory of one forward beyond the start: the process's, or the device's if it counts."""
    import resource

    q, k, v = (draw(1, 1, n, 64, seed=s) for s in range(3))
    device = sb.device()
    with torch.no_grad():
        plain_attention(*[x[:, :, :64] for x in (q, k, v)])  # what torch sets up once
        if device.type == "cpu":
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        else:
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated() / 1e6
        if kind == "plain":
            plain_attention(q, k, v)
        else:
            flash_attention_forward(q, k, v, block_q=512, block_k=512)
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before
    return torch.accelerator.max_memory_allocated() / 1e6 - before


# %% tags=["nbval-ignore-output"]
peaks = {
    kind: {
        f"{n // 1024}k": sb.run(peak_megabytes, kind, n, world_size=1).values[0]
        for n in (1024, 4096, 16_384)
    }
    for kind in ("plain", "tiled")
}
for kind, values in peaks.items():
    print(f"{kind:6}", {n: f"{mb:.0f}" for n, mb in values.items()}, "MB")
assert peaks["tiled"]["16k"] < peaks["plain"]["16k"] / 10

# %% tags=["nbval-ignore-output"]
fig = plot.bars(peaks, ylabel="MB beyond the start", title="Peak memory of one head, forward")
fig.axes[0].set_yscale("log")
plt.show()

# %% [markdown]
# Four times the length takes the plain version about sixteen times the memory. What the tiled one
# makes grows with its output alone (the table above); a few megabytes more or less do not show
# in what a process holds anyway.
#
# ## Softmax in one pass
#
# Softmax divides by a sum over *all* scores, so it seems to need them all at once. It does not: keep
# the largest score so far, `m`, the sum `l` of `exp(score - m)`, and the same sum weighted by the
# values. When a block raises the maximum, what was summed so far shrinks by `exp(m - m_new)`
# (Milakov and Gimelshein, arXiv 1805.02867).

# %%
scores, values = draw(37, seed=1, scale=4.0), draw(37, 5, seed=2)
once = torch.softmax(scores, 0) @ values
for block in (1, 8, 37):
    out, lse = online_softmax_dot(scores, values, block)
    error = max((out - once).abs().max().item(), abs((lse - scores.logsumexp(0)).item()))
    print(f"blocks of {block:2}: within 1e-5 of softmax: {error < 1e-5}")
for dtype, last in ((torch.float32, 88), (torch.float16, 11)):
    finite = [bool(torch.tensor(float(x), dtype=dtype).exp() < torch.inf) for x in (last, last + 1)]
    print(f"{dtype}: exp({last}) finite: {finite[0]}, exp({last + 1}) finite: {finite[1]}")

# %% [markdown]
# Subtracting the maximum is no nicety: without it a score of 89 is infinite in fp32, one of 12 in
# fp16.
#
# ## Tiles
#
# Now a block of queries against a block of keys at a time. A tile of scores exists during its own step
# only; the block of queries, its m, l and its output stay for the whole row of tiles. With a causal mask the tiles above the diagonal hold nothing, and they
# are never visited; those on it are masked element by element.

# %%
draw_tiles(tiles(256, 256, True, 32, 32), 256, 256)
plt.show()

# %% [markdown]
# **Bottom-right.** With S queries and T keys, which keys does query i see? The flash-attn package
# aligns the mask so that the *last* query sees every key, as decoding needs; torch's `is_causal`
# aligns it so that the *first* query sees the first key only. For S = T they are the same, and
# tests with S = T don't tell.

# %%
draw_tiles(tiles(96, 224, True, 32, 32), 96, 224)
plt.show()

# %%
q, k, v = draw(1, 2, 3, 8, seed=3), draw(1, 2, 7, 8, seed=4), draw(1, 2, 7, 8, seed=5)
ours = flash_attention(q, k, v, causal=True)
torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
for i in range(3):
    same = torch.allclose(ours[:, :, i], torchs[:, :, i], atol=1e-5)
    print(f"query {i}: bottom-right sees {i + 5} keys, top-left {i + 1}; same output: {same}")

# %% [markdown]
# ### The trace of the tiles
#
# `flash_attention_forward` is two loops: over tiles of queries, each with an m, an l and an output of
# its own, and inside over tiles of keys. That is FlashAttention-2's order: nothing is written before a
# row of tiles is finished. Each step of the inner loop is a mark, so this is a trace of the loop itself.
# **Predict** how many steps it takes for 256 queries and keys in tiles of 64, with a causal mask and
# without, forward alone. Then find in the trace the steps that the full run has and the causal one not.

# %% predict="steps"
steps = {"causal": 4 + 3 + 2 + 1, "full": 4 * 4}

# %%
counted = {name: len([*tiles(256, 256, name == "causal", 64, 64)]) for name in steps}
sb.predict("steps of the inner loop", steps, counted)


# %% tags=["nbval-ignore-output"]
def real_loop():
    q, k, v = (draw(1, 2, 256, 32, seed=s) for s in range(3))
    flash_attention_forward(q, k, v)  # first calls are slow: leave them out
    with sb.trace() as t:
        for name in ("causal", "full"):
            with sb.mark(f"{name}, forward"):
                out, lse = flash_attention_forward(q, k, v, name == "causal")
            with sb.mark(f"{name}, backward"):
                flash_attention_backward(out, q, k, v, out, lse, name == "causal")
    return t


real_loop()

# %% [markdown]
# ### Other masks: grouped heads, a window, packed documents
#
# A kernel has to know of a tile only whether it is empty, whole, or cut. So the mask can be a function
# `sees(i, j)`: `masked_attention` runs it in tiles, with fewer kv heads than heads (grouped queries
# read their kv head in place, nothing is repeated). torch's FlexAttention works like this, and its
# `create_block_mask` sorts the tiles for the fused kernel. Do the two agree?

# %%
masks = {
    "causal": causal,
    "window of 64": sliding_window(64),
    "documents of 96, 40, 120": documents([96, 40, 120], sb.device()),
}
q, k, v = draw(1, 4, 256, 16, seed=1), draw(1, 2, 256, 16, seed=2), draw(1, 2, 256, 16, seed=3)
at, kinds = torch.arange(256, device=sb.device()), {}


def flex_tiles(sees):
    """(cut, whole): how many tiles torch's BlockMask has, on the host."""
    sizes = {"B": None, "H": None, "Q_LEN": 256, "KV_LEN": 256, "BLOCK_SIZE": 32, "device": "cpu"}
    mask = create_block_mask(lambda b, h, i, j: sees(i, j), **sizes)
    return int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())


for name, sees in masks.items():
    look = sees(at[:, None], at)  # [S, T]
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=look, enable_gqa=True)
    error = (masked_attention(q, k, v, sees, 32, 32)[0] - wanted).abs().max()
    kinds[name] = block_kinds(sees, 256, 256, 32, 32, sb.device())
    theirs = flex_tiles(documents([96, 40, 120]) if "documents" in name else sees)
    ours = int((kinds[name] == 1).sum()), int((kinds[name] == 2).sum())
    assert ours == theirs
    print(
        f"{name:25} equals SDPA: {bool(error < 1e-5)}; tiles cut, whole: {ours}, torch's {theirs}"
    )

# %%
draw_block_kinds(kinds)
plt.show()

# %% [markdown]
# The tokens of several documents in one row ("varlen", in flash-attn `cu_seqlens`) save the padding and
# cost no tile between documents. The work follows the coloured tiles, not the square of the length.
#
# ## How much moves?
#
# Arithmetic is the same as before, so why is it faster on a device? Because less moves. Count it:
# every operation of plain attention reads its inputs from device memory and writes its output; the
# tiled run loads the tiles it asks for, and a tile that lies on the chip is not loaded again.
#
# **Predict** the elements for N = 512, d = 32 and tiles of 64 queries.

# %% predict="plain tiled"
plain = 4 * 512**2 + 4 * 512 * 32  # scores and weights are each written and read; q, k, v and out
tiled = 2 * 512 * 32 + 2 * 512 * 32 * (512 // 64)  # q and out once, k and v once per row of tiles

# %%
q, k, v = (draw(1, 1, 512, 32, seed=s) for s in range(3))
scaled, keys = q * 32**-0.5, k.transpose(-1, -2)
moved = operator_traffic(lambda: (scaled @ keys).softmax(-1) @ v)
sb.predict("elements moved, plain", plain, moved)
sb.predict("elements moved, tiled", tiled, tile_traffic(flash_attention_forward, q, k, v))

# %% [markdown]
# The rows of a tile are limited by the chip's memory of M elements: q, k, v and the output's tile
# must fit, about M / 4d rows. This gives N² d² / M up to a constant (Dao et al., arXiv 2205.14135), and
# no exact algorithm can do better for M >= d² (arXiv 2402.07443).

# %%
M, d = 100 * 1024 // 2, 64  # 100 KiB of bf16
for n in (512, 2048, 8192):
    standard, flash = (attention_io(n, d, M, flash=f) for f in (False, True))
    bound = n * n * d * d // M
    print(
        f"N={n:5}  standard {standard:>11,}  tiled {flash:>10,}  N²d²/M {bound:>10,}"
        f"  standard/tiled {standard / flash:4.1f}  tiled/bound {flash / bound:4.1f}"
    )

# %% [markdown]
# ## Roofline
#
# A device does at most `peak` operations and moves at most `bandwidth` bytes per second. A workload of
# I operations per byte reaches at most `min(peak, I * bandwidth)`. Below the corner memory is the limit,
# above it arithmetic. Where do attention and its neighbours stand (bf16, d = 128, N = 8192)?
#
# Tiled attention stands between two bounds. Every row of tiles reads all K and V again. If each of these
# reads came from the device's memory (HBM), the intensity would be about the rows of a tile. But rows of
# tiles that run at the same time read the *same* K and V, and those of one head are 4 MB here, which fit
# into an L2 cache. What *has* to move is q, k, v in and the output out, about 4 N d numbers.

# %%
N, D = 8192, 128
flops = 4 * N * N * D
for rows in (64, 128, 256):
    every = flops / (2 * attention_io(N, D, 4 * D * rows, flash=True))
    print(f"tiles of {rows:3} queries: {every:4.0f} FLOPs per byte if every read comes from HBM")
workloads = {
    "one token of decoding": 2 * 1 / 2,  # a weight is read (2 bytes) for one multiply and add
    "attention, standard": flops / (2 * attention_io(N, D, M, flash=False)),
    "tiled, every re-read": flops / (2 * attention_io(N, D, M, flash=True)),
    "tiled, compulsory": flops / (2 * 4 * N * D),
    "MLP, 8192 tokens": 2 * N * 4096 * 16384 / (2 * (N * 4096 + 4096 * 16384 + N * 16384)),
}
for name, at in workloads.items():
    print(f"{name:24} {at:8.0f} FLOPs per byte")
draw_roofline(workloads)
plt.show()

# %% [markdown]
# What do the published kernels say? FlashAttention-2 reaches up to 73 % of an A100's peak (arXiv
# 2307.08691) and FlashAttention-3 740 TFLOP/s on an H100 (arXiv 2407.08608). The intensity that this
# takes at least, beside our two bounds:

# %%
published = {"A100 80GB": 0.73 * DEVICES["A100 80GB"][0], "H100 SXM": 740}
low, high = workloads["tiled, every re-read"], workloads["tiled, compulsory"]
for name, reached in published.items():
    needs = reached / DEVICES[name][1]
    print(f"{name}: needs {needs:.0f} FLOPs per byte; bounds {low:.0f} and {high:.0f}")
    assert low < needs < high

# %% [markdown]
# Both lie between: these kernels can't have fetched every re-read from HBM with a tile of ours. That is
# why it pays to keep the tiles of one head together in time, and to make tiles large.
#
# Training multiplies thousands of tokens with each weight it reads, so it is bound by arithmetic if
# attention does not spoil it. Decoding reads every weight and the whole cache for one token: it is
# bound by memory on every device of the picture, and chapter 32 is about that. Peak and bandwidth
# are the makers' figures (dense bf16, fp16 for Ascend 910B); no program reaches them.
#
# ## Backward
#
# The weights were never stored. Forward keeps the output and one number per row, the log-sum-exp;
# backward computes a tile's weights again as `exp(scores - lse)`. That is more arithmetic, less
# memory, and faster where memory is the limit. In five lines, with scores `s = scale q k^T`, weights
# `p = exp(s - lse)`, output `out = p v` and the output's gradient `g`:
#
# - `dv = p^T g`, and `dp = g v^T`: the two sides of the product `p v`.
# - softmax: `ds = p * (dp - delta)`, where `delta`, one number per query, is the sum of `p * dp` over its
#   *whole* row of keys. A tile does not have the row. But
# - `sum_j p_ij (g_i . v_j) = g_i . sum_j p_ij v_j = g_i . out_i`: delta is the sum of `g * out` over the
#   d features, known before the first tile.
# - `dq = scale ds k`, summed over the tiles of a row, and
# - `dk = scale ds^T q`, summed over those of a column.
#
# Forward has two matrix products per tile, backward five (s, dv, dp, dq, dk), the first for the second
# time.

# %%
q, k, v, g = (draw(1, 1, 50, 16, seed=s) for s in range(4))
weights = ((q * 16**-0.5) @ k.transpose(-1, -2)).softmax(-1)
whole_row = (weights * (g @ v.transpose(-1, -2))).sum(-1)  # p * dp over all keys
delta = (g * (weights @ v)).sum(-1)  # g * out over d features
print("delta is the same both ways:", bool((delta - whole_row).abs().max() < 1e-4))

# %%
leaves = [draw(2, 3, 77, 16, seed=s).requires_grad_() for s in range(3)]
pull = draw(2, 3, 77, 16, seed=9)
gradients = torch.autograd.grad(flash_attention(*leaves, causal=True), leaves, pull)
wanted = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True), leaves, pull)
for name, got, want in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
    print(f"{name} within 1e-5 of SDPA's: {bool((got - want).abs().max() < 1e-5)}")

# %% [markdown]
# ### Is it exact?
#
# It is the same sum in another order. Against float64, on the host, for scores of growing size:

# %%
for scale in (1.0, 8.0):
    q, k, v = (draw(1, 2, 600, 64, seed=s, scale=scale if s < 2 else 1.0) for s in range(3))
    exact = plain_attention(*[x.cpu().double() for x in (q, k, v)])
    results = {
        "plain": plain_attention(q, k, v),
        "tiled": flash_attention_forward(q, k, v)[0],
        "SDPA": F.scaled_dot_product_attention(q, k, v),
    }
    worst = {n: (r.cpu().double() - exact).abs().max().item() for n, r in results.items()}
    print(f"scale {scale:.0f}:", {n: f"within 1e-4: {e < 1e-4}" for n, e in worst.items()})

# %% [markdown]
# Inputs in bf16 are summed in fp32 and rounded once. Rounding the sums to bf16 after every tile adds
# an error per tile; the lab's check tells the two apart.
#
# ## What runs on each device
#
# | device | call | layout | trap |
# |---|---|---|---|
# | any | `F.scaled_dot_product_attention` | [B, H, S, D] | `is_causal` is top-left (`torch.nn.attention.bias.causal_lower_right` makes the other mask); a bool mask is True where a query *may* look |
# | NPU | `torch_npu.npu_fusion_attention(q, k, v, head_num, input_layout, …)` | "BNSD", "BSH", … | `scale` defaults to 1; the mask is True where a query may *not* look and does not broadcast ([diffusers#13451](https://github.com/huggingface/diffusers/pull/13451), an error); an additive mask turned into bool means the opposite ([#14396](https://github.com/huggingface/diffusers/pull/14396), silent); `pre_tockens`, `next_tockens` are spelt like this |
# | CUDA | `flash_attn_func(q, k, v, causal=)` | [B, S, H, D] | bottom-right since 2.1, top-left before |
#
# `shardbook.attention.attend` takes the kernel at hand and gives the same result everywhere.

# %%
q, k, v = draw(2, 6, 5, 8, seed=1), draw(2, 3, 9, 8, seed=2), draw(2, 3, 9, 8, seed=3)
repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
for mask in (False, True):
    error = (attend(q, k, v, mask) - flash_attention(q, *repeated, mask)).abs().max().item()
    print(f"attend equals the tiles (causal {mask}): {error < 1e-5}")

# %% tags=["nbval-ignore-output"]
print("here attend calls", kernel_for(q))


# %% [markdown]
# ### And how fast is it here?
#
# Beside SDPA's MATH path, which makes the matrix, and beside the kernel that SDPA chooses by itself
# (ratios of times in one run). Python around small matrix products loses to a fused one:


# %% tags=["nbval-ignore-output"]
def seconds(run):
    """The best of five: other work on the machine disturbs single runs."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        run()[0].sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return best


q, k, v = (draw(1, 4, 2048, 64, seed=s) for s in range(3))
with sdpa_kernel(SDPBackend.MATH):
    math_path = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
chosen = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
ours = seconds(lambda: flash_attention_forward(q, k, v, causal=True))
print(f"at 2,048 tokens, causal: tiled / MATH {ours / math_path:.2f}")
print(f"                  tiled / SDPA's choice {ours / chosen:.2f}")
assert ours > chosen or sb.device().type != "cpu"  # elsewhere there may be no fused kernel

# %% [markdown]
# ## On a real cluster
#
# - **NPU.** The tiles live in the AI core's unified buffer and L1; `npu_fusion_attention` is the kernel
#   and SDPA reaches it. A port fails in three ways. The scale is left at 1. A mask is passed with
#   SDPA's meaning, or not at all (a reviewer of
#   [sglang#31948](https://github.com/sgl-project/sglang/pull/31948) saw that the new NPU default would
#   drop the masks of two models). Or the operator takes a mask in a shape that it does not fully read:
#   `npu_fused_infer_attention_score` ignores a bool mask [1, 1, 1, T] beyond key 512
#   ([vllm-ascend#15503](https://github.com/vllm-project/vllm-ascend/issues/15503)). All give numbers,
#   not errors: compare with `flash_attention` above, on small shapes and on one long one.
# - **CUDA.** Three versions of one idea:
#
# | version | what is new | share of the peak | source |
# |---|---|---|---|
# | FlashAttention | tiles, one-pass softmax, recomputation | 25 to 40 % (A100) | arXiv 2205.14135, 2307.08691 |
# | FlashAttention-2 | fewer operations beside the products; one head's sequence over many blocks; less traffic between warps | 50 to 73 % (A100), 35 % (H100) | arXiv 2307.08691, 2407.08608 |
# | FlashAttention-3 | copies and products asynchronous, softmax interleaved with products, fp8 | up to 75 % (H100, fp16: 740 TFLOP/s) | arXiv 2407.08608 |
#
# - **Many ranks.** The log-sum-exp that backward needs is also what lets ranks merge their parts: that
#   was chapter 24. Tensor parallelism (chapter 22) cuts the heads and leaves the kernel as it is.
#
# <details><summary>Questions, answered</summary>
#
# - *Why is backward faster with more arithmetic?* Reading S x T weights back takes longer than
#   one more product per tile, where memory is the limit.
# - *Why does the inner loop go over keys?* Then m, l and the output of a row stay on the chip, and rows
#   are independent: different blocks take them at once. In the other order the output is written and
#   read again at each step.
# - *Does tiling change the result?* Only by the order of a sum in fp32.
# </details>
#
# Next: the [lab](../labs/31_flash_attention.ipynb), then [chapter 32](32_kv_cache.ipynb), where one
# query meets a cache.
