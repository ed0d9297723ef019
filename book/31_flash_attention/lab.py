# %% [markdown]
# # 31 · Lab: FlashAttention
#
# You write attention that never stores its matrix: the one-pass softmax, the tiles forward and
# backward, and the count of what moves. The checks of 1 to 4 compare with plain attention in float64,
# watch how large a tensor your code makes, and count the work it does.
#
# Time: about 3 hours. Exercises 1 and 5 are short, 2 and 3 medium, 4 is short once they hold. They
# do not depend on each other, except that exercise 4 calls your 2 and 3.

# %%
import shardbook as sb

import inspect

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor

from shardbook import plot
from shardbook.attention.counting import largest_tensor
from shardbook.tracing import mark
from shardbook.pictures.attention import draw_tiles
from shardbook.checks import flash_attention as check


def draw(*shape, seed=0):
    """Random normal data, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(sb.device())


# %% [markdown]
# ## Exercise 1: softmax in one pass
#
# `scores` [S] and `values` [S, D] arrive block by block, and a block is seen once. Return
# `softmax(scores) @ values` and the log-sum-exp of the scores. Keep three things: the largest score
# so far `m`, the sum of `exp(score - m)`, and the same sum weighted by the values.
#
# <details><summary>Hint 1</summary>
#
# When a block raises the maximum from `m` to `m_new`, everything summed so far was divided by
# `exp(m)` and should have been divided by `exp(m_new)`: multiply it by `exp(m - m_new)`.
# </details>
# <details><summary>Hint 2</summary>
#
# `m` starts at -inf. A block whose scores are all -inf (masked) leaves it there, and
# `-inf - -inf` is nan: pass such a block over.
# </details>
# <details><summary>Hint 3</summary>
#
# Per block: `m_new = max(m, s.max())`, `old = exp(m - m_new)`, `p = exp(s - m_new)`; then the sum becomes
# `total * old + p.sum()` and the output `out * old + p @ v`. At the end divide, and `lse = m + log(total)`.
# </details>

# %% exercise="shardbook.attention.flash.online_softmax_dot"

# %%
check.online_softmax_dot(online_softmax_dot)

# %% [markdown]
# ## Exercise 2: forward, tile by tile
#
# The same for a matrix of queries, in two loops: over tiles of queries, and inside over tiles of keys.
# `row_of_tiles(rows, cols, causal, shift, block_k)` gives the tiles of keys that the queries `rows` meet,
# each with a flag that says whether the mask cuts through it (`tiles` gives those of all rows in turn);
# `_scores(q, k, rows, cols, masked, shift)` gives one tile of scaled, masked scores [B, H, bq, bk]
# with `shift = T - S`. They are printed below, for you to read.
#
# Put `with mark(f"q {rows.start} k {cols.start}"):` round the body of the inner loop: the trace after
# the check shows your steps.
#
# Causal is **bottom-right** aligned: the last query sees every key, query i sees keys up to
# `i + T - S`. A row that sees no key gives 0 and a log-sum-exp of -inf.

# %%
from shardbook.attention.flash import _alike, _scores, row_of_tiles, tiles

print(inspect.getsource(row_of_tiles))
print(inspect.getsource(tiles))
print(inspect.getsource(_scores))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A tile of queries has its own `m` [B, H, bq], sum [B, H, bq] and output [B, H, bq, D]. They start
# before the inner loop and are written to their rows of the results after it.
# </details>
# <details><summary>Hint 2</summary>
#
# Divide by the sum once, at the end. Sums are fp32 also for bf16 inputs; the output is rounded once.
# </details>
# <details><summary>Hint 3</summary>
#
# A row of a tile may be masked as a whole while other rows are not: then its maximum stays -inf.
# Subtract 0 instead of -inf there, and its weights are `exp(-inf) = 0`.
# </details>

# %% exercise="shardbook.attention.flash.flash_attention_forward"

# %%
check.flash_attention_forward(flash_attention_forward)

# %% [markdown]
# **Predict, then measure.** 1 head, 1,000 queries and keys, head size 32. How many elements does the
# largest tensor have that your forward makes with tiles of 64 x 64? And that of plain attention?

# %% predict="tiled plain"
tiled = 1_000 * 32  # the output; a tile has 64 * 64 = 4,096
plain = 1_000 * 1_000  # the scores


# %%
q, k, v = (draw(1, 1, 1_000, 32, seed=s) for s in range(3))


def by_definition():
    return ((q @ k.transpose(-1, -2)) * 32**-0.5).softmax(-1) @ v


sb.predict("elements, tiled", tiled, largest_tensor(flash_attention_forward, q, k, v))
sb.predict("elements, plain", plain, largest_tensor(by_definition))

# %% [markdown]
# **Your loop, traced.** 256 queries and keys in tiles of 64, causal and then full. Count the slices of
# each: ten and sixteen. Which steps are missing from the causal run?


# %% tags=["nbval-ignore-output"]
def traced():
    q, k, v = (draw(1, 2, 256, 32, seed=s) for s in range(3))
    flash_attention_forward(q, k, v)  # first calls are slow: leave them out
    with sb.trace() as t:
        for name in ("causal", "full"):
            with sb.mark(name):
                flash_attention_forward(q, k, v, name == "causal")
    return t


traced()

# %% [markdown]
# **A picture to read.** The tiles that a causal run visits, numbered in order; hatched where the mask
# cuts through. Change S and T, and find the rows of tiles that see nothing.

# %%
draw_tiles([*tiles(150, 200, True, 32, 32)], 150, 200)
plt.show()

# %% [markdown]
# ## Exercise 3: backward, tile by tile
#
# Forward saved q, k, v, the output and the log-sum-exp, nothing of size S x T. Backward computes the
# weights of a tile again, `p = exp(scores - lse)`. With g for `grad_out`, and `delta_i` = the sum
# over the D features of `grad_out * out` at query i:
#
# $$dv = p^T\,g \qquad ds = p \odot (g\,v^T - \delta) \qquad dq = ds\,k/\sqrt D \qquad dk = ds^T q/\sqrt D$$
#
# <details><summary>Hint 1</summary>
#
# `lse` is that of *all* keys, so `exp(scores - lse)` is the final weight: no maximum, no rescaling.
# </details>
# <details><summary>Hint 2</summary>
#
# `dq` gathers from all tiles of a row, `dk` and `dv` from all tiles of a column: keep all three in fp32
# and add each tile's part to its slice.
# </details>
# <details><summary>Hint 3</summary>
#
# Where `lse` is -inf a query saw nothing and `-inf - -inf` would be nan. Put +inf in its place:
# `exp(-inf - inf)` is 0.
# </details>

# %% exercise="shardbook.attention.flash.flash_attention_backward"

# %%
check.flash_attention_backward(flash_attention_backward)

# %% [markdown]
# ## Exercise 4: one differentiable function
#
# Put your two functions into a `torch.autograd.Function` and save q, k, v, out and lse only.
#
# <details><summary>Hint 1</summary>
#
# `ctx.save_for_backward` takes the five tensors; `causal` is no tensor: keep it as `ctx.causal`.
# </details>
# <details><summary>Hint 2</summary>
#
# Backward gets the gradient of out, and its tensors from `ctx.saved_tensors`.
# </details>
# <details><summary>Hint 3</summary>
#
# It returns a gradient for each argument of forward, in their order: dq, dk, dv, and None for `causal`.
# </details>

# %% exercise="shardbook.attention.flash._Flash shardbook.attention.flash.flash_attention" blank="forward backward flash_attention"

# %%
check.flash_attention(flash_attention)

# %% [markdown]
# **A failure to provoke.** One new token against a cache of nine keys: S = 1, T = 9. torch's own
# `is_causal=True` is aligned to the *top left*: query 0 sees key 0 only. Yours is aligned to the
# bottom right. Which of the two is what decoding needs?

# %%
q, k, v = draw(1, 1, 1, 4, seed=1), draw(1, 1, 9, 4, seed=2), draw(1, 1, 9, 4, seed=3)
top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)
print("torch's is_causal returns the first value:", bool(torch.allclose(top_left, v[:, :, :1])))
ours = flash_attention(q, k, v, causal=True)
everything = F.scaled_dot_product_attention(q, k, v)
print("bottom-right sees all nine keys:", bool(torch.allclose(ours, everything, atol=1e-6)))

# %% [markdown]
# No error, no warning, a text that makes no sense. flash-attention was aligned to the top left too
# until 2.1 ([flash-attention#282](https://github.com/Dao-AILab/flash-attention/issues/282) asks why
# decoding has to turn `causal` off); for torch a change is proposed
# ([pytorch#108108](https://github.com/pytorch/pytorch/issues/108108)).
#
# ## Exercise 5: count what moves
#
# Elements read from and written to device memory by one head, forward. Standard attention writes
# and reads scores and weights: `4 N² + 4 N d`. Tiled, q and the output move once, k and v once for
# every row of tiles: `2 N d + 2 N d ⌈N / r⌉`, where `r = max(1, ⌊M / 4d⌋)` rows fit into an SRAM of
# M elements.
#
# <details><summary>Hint 1</summary>
#
# `flash` chooses between two formulas; only the tiled one needs the SRAM.
# </details>
# <details><summary>Hint 2</summary>
#
# Whole numbers only: `//` for the rows that fit, and at least one row.
# </details>
# <details><summary>Hint 3</summary>
#
# `-(-a // b)` is the ceiling of a / b.
# </details>

# %% exercise="shardbook.attention.flash.attention_io"

# %%
check.attention_io(attention_io)


# %%
def ratio(n, d=64, sram=100 * 1024 // 2):  # 100 KiB of bf16
    return attention_io(n, d, sram, flash=False) / attention_io(n, d, sram, flash=True)


print({n: round(ratio(n), 1) for n in (256, 1024, 4096, 16384)})

# %% [markdown]
# ## On a real cluster
#
# You would not ship this function: PyTorch's SDPA calls a fused kernel on every device, and
# `shardbook.attention.attend` picks the one at hand. What you now can do is read that kernel's
# arguments (layout, scale, alignment of the mask, what it saves), say what it costs, and notice when
# a port calls it with the wrong ones. Chapter 24 cut the same sums over ranks.
