# %% [markdown]
# # 11 · Tensors: the lab
#
# You write the nine small functions that cut and join tensors in every chapter after this one.
# Each has a check: run it as often as you like. 60 to 90 minutes.
#
# A check prints ✓ and ✗ lines and, where something does not hold, a hint. Hints under the
# exercises unfold one at a time.

# %%
import shardbook as sb

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from shardbook import plot
from shardbook.checks import tensors as check

device = sb.device()

# %% [markdown]
# ## Exercise 1: strides from sizes
#
# A fresh tensor lies row by row: the last dimension's neighbours touch. Give the strides torch
# reports for it, as a tuple of ints, for any number of dimensions, zero included.
#
# <details><summary>Hint 1</summary>
#
# One step in dimension i skips as many elements as lie in all dimensions right of it.
# </details>
# <details><summary>Hint 2</summary>
#
# Walk through the sizes from the right and keep a running product. Note the product before you
# multiply by the size.
# </details>
# <details><summary>Hint 3</summary>
#
# A size of 0 would make every stride left of it 0. torch counts it as 1.
# </details>

# %% exercise="shardbook.basics.tensors.contiguous_strides"

# %%
check.contiguous_strides(contiguous_strides)

# %% [markdown]
# ## Exercise 2: will `view` work?
#
# From sizes and strides alone, say whether `x.view(new_shape)` works. The lesson gave the rule for
# two neighbours: they merge where `stride[i] == stride[i + 1] * size[i + 1]`. Splitting always
# works.
#
# Predict first: which of the four views of this permuted tensor work?

# %% predict="predicted"
shape, strides = (4, 5, 6), (30, 1, 5)  # torch.empty(4, 6, 5).permute(0, 2, 1)
predicted = [False, True, False, True]  # view as (120,), (4, 5, 2, 3), (20, 6), (2, 2, 5, 6)?
x = torch.empty(4, 6, 5, device=device).permute(0, 2, 1)
measured = []
for new_shape in [(120,), (4, 5, 2, 3), (20, 6), (2, 2, 5, 6)]:
    try:
        x.view(new_shape)
        measured.append(True)
    except RuntimeError:
        measured.append(False)
sb.predict("view works", predicted, measured)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Settle the easy cases first: another number of elements (no), no elements at all (yes).
# </details>
# <details><summary>Hint 2</summary>
#
# Leave out dimensions of size 1, their stride is never used. Then merge what can be merged: what
# remains is a short list of runs, each with one stride.
# </details>
# <details><summary>Hint 3</summary>
#
# A view can cut a run into pieces, but a new dimension may not reach over the border of two runs.
# Go through the new sizes from the right and use up the runs.
# </details>

# %% exercise="shardbook.basics.tensors.can_view"

# %%
check.can_view(can_view)

# %% [markdown]
# ## Exercise 3: attention heads
#
# A linear layer gives `[B, S, H*D]`. Attention works on `[B, H, S, D]`. Cut without a copy, and
# put the heads back together afterwards.
#
# <details><summary>Hint 1</summary>
#
# Two steps: cut the last dimension in two, then swap two dimensions.
# </details>
# <details><summary>Hint 2</summary>
#
# `unflatten(-1, (heads, width))` cuts one dimension, whatever the strides of the others.
# </details>
# <details><summary>Hint 3</summary>
#
# On the way back H and D are not neighbours in memory, so a copy is needed before they can merge.
# With one head `reshape` finds a way without: then the result is a view, and may be strided.
# </details>

# %% exercise="shardbook.basics.tensors.split_heads shardbook.basics.tensors.merge_heads"

# %%
check.split_heads(split_heads)

# %%
check.merge_heads(merge_heads)

# %% [markdown]
# **Provoke it.** The sizes of a wrong split are right, so nothing raises. Two heads of 2 channels,
# 3 tokens; the tens name the token. A head should hold two channels of every token; colour is the
# head.

# %%
tokens = torch.tensor([[[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]], device=device)
wrong = tokens.view(1, 2, 3, 2)
mine = split_heads(tokens, 2)
print("same sizes: ", wrong.shape == mine.shape)
print("same values:", torch.equal(wrong, mine))
plot.storage({"tokens [S, H*D]": tokens[0], "wrong [H, S, D]": wrong[0], "mine [H, S, D]": mine[0]})
plt.show()

# %% [markdown]
# ## Exercise 4: shards
#
# Ranks number 0 to P-1. `shard` gives one of them its piece along a dimension, `unshard` puts all
# pieces together. Sizes as `torch.chunk` gives them, with one difference: where chunk runs out of
# rows, a rank gets an empty piece. A parallel program in which one rank raises stops all of them.

# %% predict="predicted"
predicted = [3, 3, 3, 1]  # rows of each of 4 ranks, when 10 rows are sharded
measured = [len(piece) for piece in torch.zeros(10, 3, device=device).chunk(4)]
sb.predict("rows by rank", predicted, measured)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The piece size is the length over the ranks, rounded up: `-(-length // world_size)`.
# </details>
# <details><summary>Hint 2</summary>
#
# `narrow(dim, start, length)` takes any dimension, and a length of 0. The start may not lie beyond
# the end.
# </details>

# %% exercise="shardbook.basics.tensors.shard shardbook.basics.tensors.unshard"

# %%
check.shard(shard)

# %%
check.unshard(unshard)

# %% [markdown]
# **Read it.** A shard along dimension 0 is one piece of memory, along dimension 1 it is scattered.
# Which of the two can be sent as it is?

# %%
weight = torch.arange(24, device=device).view(4, 6)
pieces = {f"rank {r}, dim {dim}": shard(weight, 3, r, dim) for dim in (0, 1) for r in (0, 2)}
plot.storage({"weight": weight, **pieces})
plt.show()
for name, piece in pieces.items():
    print(f"{name}: {piece.numel()} values, contiguous: {piece.is_contiguous()}")

# %% [markdown]
# ## Exercise 5: patches
#
# A vision transformer and a DiT read an image as squares of p x p pixels, each flattened to a
# token: `[B, C, H, W]` to `[B, (H/p)*(W/p), p*p*C]`. The squares go in row order. Inside a square:
# rows, columns, channels last. `unpatchify` goes back.
#
# <details><summary>Hint 1</summary>
#
# Name the six dimensions you need: batch, channel, square row, row inside, square column, column
# inside. One reshape makes them.
# </details>
# <details><summary>Hint 2</summary>
#
# One permute puts them in the order you want: `[B, h, w, p, p, C]`. One reshape merges three and
# two of them.
# </details>
# <details><summary>Hint 3</summary>
#
# For the way back, write the permute that undoes the first. The number of columns is not given: it
# follows from the number of tokens and the height.
# </details>

# %% exercise="shardbook.basics.tensors.patchify shardbook.basics.tensors.unpatchify"

# %%
check.patchify(patchify)

# %%
check.unpatchify(unpatchify)

# %% [markdown]
# **See it.** A picture, and the same picture with its tokens put back in the wrong order: what a
# model would draw if sampling used another order than training.

# %%
from sklearn.datasets import load_digits

digits = torch.tensor(load_digits().images[10:13], dtype=torch.float32, device=device)
image = torch.cat(list(digits), dim=1)[None, None]  # [1, 1, 8, 24]
tokens = patchify(image, 4)  # [1, 12, 16]
columns_first = tokens.view(1, 2, 6, 16).transpose(1, 2).reshape(1, 12, 16)
fig, axes = plot.figure(9, 1.8, columns=2)
for ax, title, shown in zip(
    axes, ["row order", "column order"], [tokens, columns_first], strict=True
):
    ax.imshow(unpatchify(shown, 4, 1, 8)[0, 0].cpu(), cmap="gray_r")
    ax.set_title(title, fontsize=10)
    ax.axis("off")
plt.show()
print("tokens:", tuple(tokens.shape))

# %% [markdown]
# ## Exercise 6: windows on the same memory
#
# `[S, D]` to `[W, size, D]`: window w is rows w*step to w*step+size. Local attention and
# convolution see sequences this way. No value is copied, whatever the strides of x.
#
# Predict before you write: x has 1,000 rows of 16 floats. How many bytes of memory do windows of
# 64 rows every 1 row hold? How many would a copy of them hold?

# %% predict="predicted"
predicted = [1000 * 16 * 4, (1000 - 64 + 1) * 64 * 16 * 4]  # [shared, copied]
x = torch.zeros(1000, 16, device=device)
windows = x.unfold(0, 64, 1)
measured = [windows.untyped_storage().nbytes(), windows.clone().untyped_storage().nbytes()]
sb.predict("bytes held", predicted, measured)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many elements does one step in each of the three dimensions skip? Use the strides x has.
# </details>
# <details><summary>Hint 2</summary>
#
# `x.as_strided(sizes, strides)` makes such a tensor and keeps x's offset. `x.unfold(0, size,
# step)` does it too, and puts the window dimension last.
# </details>
# <details><summary>Hint 3</summary>
#
# `as_strided` does not know where x ends: one window too many reads whatever lies there.
# </details>

# %% exercise="shardbook.basics.tensors.sliding_windows"

# %%
check.sliding_windows(sliding_windows)

# %%
x = torch.arange(16, device=device).view(8, 2)
plot.storage({"x": x, "windows": sliding_windows(x, 3, 2), "x.T": sliding_windows(x.T, 2, 1)})
plt.show()

# %% [markdown]
# ## On a real cluster
#
# Run the checks there as they are: every tensor in them is made on `sb.device()`. Then look at
# what `split_heads` becomes: on CUDA, attention kernels take strides, so the transpose stays free.
# On an NPU, fused attention takes a layout name (`BNSD`, `BSND`, `BSH`), so pass the one you have
# instead of permuting to the one you are used to; a `contiguous()` in front of each attention
# shows as its own kernel in a profile.
#
# `shard` along dimension 0 is what a collective can send. Tensor parallelism cuts weights along
# both dimensions once, when it loads them, and keeps the copies (chapter 22).
