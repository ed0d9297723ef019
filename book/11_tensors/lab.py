# %% [markdown]
# # 11 · Tensors: the lab
#
# You write the nine small functions that cut and join tensors in every chapter after this one, and
# look at their trace. The hardest one is the last. Each has a check: run it as often as you like.
# 60 to 90 minutes.
#
# What holds for all that take tensors: any dtype, device and strides; the input stays as it is; the
# result has its dtype and device, and gradients go through it. No value is computed, so every
# value arrives as it was.
#
# A check prints ✓ and ✗ lines and, where something does not hold, a hint. Hints under the
# exercises unfold one at a time.

# %%
import shardbook as sb

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardbook import plot
from shardbook.checks import tensors as check
from shardbook.studies import layouts

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
# ## Exercise 2: attention heads
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
plot.show(
    "3 tokens of 4 values as 2 heads. The wrong view gives head 0 the first six places; mine gives "
    "it the first two of each token."
)

# %% [markdown]
# ## Exercise 3: shards
#
# Ranks number 0 to P-1. `shard` gives one of them its piece along a dimension, `unshard` puts all
# pieces together. Sizes as `torch.chunk` gives them, with one difference: where chunk runs out of
# rows, a rank gets an empty piece: length 0 along `dim`, the other sizes kept. A parallel program
# in which one rank raises stops all of them. `dim` may count from the end; `unshard` takes a list
# or a tuple of pieces in rank order, empty ones included.

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
# <details><summary>Hint 3</summary>
#
# Start at `min(rank * size, length)` and take `min(size, length - start)`. On the way back `cat`
# joins along a dimension that is there; `stack` would make a new one.
# </details>

# %% exercise="shardbook.basics.tensors.shard shardbook.basics.tensors.unshard"

# %%
check.shard(shard)

# %%
check.unshard(unshard)

# %% [markdown]
# **Read it.** A shard along dimension 0 is one piece of memory, along dimension 1 it is scattered.
# Which of the two can be sent as it is?
#
# <details><summary>Answer</summary>
#
# The shard along dimension 0: `contiguous: True` below. Send and receive take a pointer and a
# count, so the other one is copied to a buffer first.
# </details>

# %%
weight = torch.arange(24, device=device).view(4, 6)
pieces = {f"rank {r}, dim {dim}": shard(weight, 3, r, dim) for dim in (0, 1) for r in (0, 2)}
plot.storage({"weight": weight, **pieces})
plot.show(
    "A weight of 4 x 6 over 3 ranks. Along dim 0 rank 0 has places 0 to 11 and rank 2 none; along "
    "dim 1 each has two places of every six."
)
for name, piece in pieces.items():
    print(f"{name}: {piece.numel()} values, contiguous: {piece.is_contiguous()}")

# %% [markdown]
# ## Exercise 4: patches
#
# A vision transformer and a DiT read an image as squares of p x p pixels, each flattened to a
# token: `[B, C, H, W]` to `[B, (H/p)*(W/p), p*p*C]`. The squares go in row order. Inside a square:
# rows, columns, channels last. `unpatchify` goes back. Sizes that don't divide are a ValueError.
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
plot.show(
    "Three handwritten digits, 0 1 2, whole where the tokens are in row order; in column order "
    "their upper and lower halves are mixed up."
)
print("tokens:", tuple(tokens.shape))

# %% [markdown]
# ## Exercise 5: windows on the same memory
#
# `[S, D]` to `[W, size, D]`: window w is rows w*step to w*step+size, and W is (S - size) // step
# + 1: what is left at the end is in no window. Local attention and convolution see sequences this
# way. No value is copied, whatever the strides of x. A window that is longer than x is a ValueError.
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
windows = {"windows of x": sliding_windows(x, 3, 2), "windows of x.T": sliding_windows(x.T, 2, 1)}
plot.storage({"x": x, **windows})
plot.show(
    "x of 8 x 2 in 16 places; 3 windows of 3 rows every 2, which share a row with their "
    "neighbours; one window of both rows of x.T, which covers all 16 places."
)

# %% [markdown]
# ## Exercise 6: will `view` work?
#
# From sizes and strides alone, say whether `x.view(new_shape)` works. The lesson gave the rule for
# two neighbours: they merge where `stride[i] == stride[i + 1] * size[i + 1]`. Splitting always
# works. Another number of elements does not; no elements at all fit any shape of none. Return True
# or False. `new_shape` has no -1; strides may be 0 (expanded) and sizes 1, whose stride is never
# used.
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
# ## A trace to read
#
# Your functions in one small model: an image is cut into patches, attention runs on them, and the
# patches become an image again. Which of these four move memory? Predict by name before you run it.


# %%
class PatchAttention(nn.Module):
    """Self-attention over the patches of images [B, C, H, W], with a mark around each function."""

    def __init__(self, patch, channels, heads):
        super().__init__()
        width = patch * patch * channels
        self.patch, self.heads, self.qkv = patch, heads, nn.Linear(width, 3 * width)

    def forward(self, images):
        _, channels, height, _ = images.shape
        with sb.mark("patchify"):
            tokens = patchify(images, self.patch)  # [B, S, H*D]
        q, k, v = self.qkv(tokens).chunk(3, -1)
        with sb.mark("split_heads"):
            q, k, v = (split_heads(p, self.heads) for p in (q, k, v))  # [B, H, S, D]
        with sb.mark("attention"):
            y = torch.softmax(q @ k.mT, -1) @ v
        with sb.mark("merge_heads"):
            y = merge_heads(y)
        with sb.mark("unpatchify"):
            return unpatchify(y, self.patch, channels, height)


# %% predict="predicted"
predicted = ["merge_heads", "patchify", "unpatchify"]  # of the four, in the order of the alphabet
images = torch.ones(1, 4, 8, 8, device=device)
tokens = patchify(images, 4)
heads = torch.ones(1, 4, 4, 16, device=device)  # as a product leaves it: contiguous
pairs = {"patchify": (images, tokens), "split_heads": (tokens, split_heads(tokens, 4))}
pairs["merge_heads"] = (heads, merge_heads(heads))
pairs["unpatchify"] = (tokens, unpatchify(tokens, 4, 4, 8))
moved = sorted(name for name, (a, b) in pairs.items() if not layouts.shares_memory(a, b))
sb.predict("functions that move memory", predicted, moved)

# %% [markdown]
# Now the trace: your functions are marks. Which of the four is the longest, and which can
# hardly be seen?
#
# <details><summary>Answer</summary>
#
# `split_heads` is a hairline: sizes and strides change, no value is read. The other three copy the
# whole batch; `patchify` and `unpatchify` take the longest of them, since they pick up runs of
# only a few values (a row of a square, a channel) where `merge_heads` moves the runs of a head.
# The products of attention copy too: they need q, k and v in rows and find them scattered.
# </details>

# %% tags=["nbval-ignore-output"]
model = PatchAttention(4, 8, 4).to(device)
images = torch.ones(64, 8, 32, 32, device=device)  # 2 MiB
with torch.no_grad():
    model(images)  # the first run sets things up
    with sb.trace(model) as t:
        model(images)
for name, ms in layouts.marked(t).items():
    print(f"{name:12} {ms:7.3f} ms")
t

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
