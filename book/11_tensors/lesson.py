# %% [markdown]
# # 11 · Tensors: storage, strides and views
#
# After this chapter you can
# - say where in memory an element lies, from sizes, strides and offset,
# - tell which operations are free and which copy, and why `view` fails after `permute`,
# - cut tensors into heads, patches, windows and shards, the moves that every parallel chapter
#   makes.
#
# Time: 40 minutes to read, 60 to 90 minutes for the lab. One process, no ranks yet.

# %%
import shardbook as sb

from itertools import pairwise

import torch
from torch import nn

from shardbook import plot
from shardbook.studies import layouts

device = sb.device()

# %% [markdown]
# ## What is a tensor?
#
# A one-dimensional piece of memory (the *storage*) and three things that say how to walk it:
# *sizes*, *strides* and an *offset*. Element `x[i, j]` lies at
#
# `storage[offset + i * stride[0] + j * stride[1]]`
#
# A stride is the number of elements to skip for one step in that dimension.

# %%
x = torch.arange(12, device=device).view(3, 4)
print("sizes  ", tuple(x.shape))
print("strides", x.stride())
print("offset ", x.storage_offset())

i, j = 2, 1
place = x.storage_offset() + i * x.stride(0) + j * x.stride(1)
storage = x.as_strided((12,), (1,), 0)
print(f"x[{i}, {j}] is {int(x[i, j])}, storage[{place}] is {int(storage[place])}")

# %% [markdown]
# The pictures of this chapter are drawn from the tensors themselves: on the left the elements as
# you index them, on the right the memory. **The colour is the first index.** White memory is not
# part of the tensor.

# %%
plot.storage({"x": x, "x.T": x.T, "x[:, 1:3]": x[:, 1:3], "x[1]": x[1]})
plot.show(
    "Four tensors beside the same 12 places of memory. Rows of x lie side by side; rows of x.T "
    "take every fourth place; x[:, 1:3] leaves gaps; x[1] is places 4 to 7."
)

# %% [markdown]
# Nothing moved. The transpose swaps two strides, a slice changes the offset and a size. Read the
# second row: the first row of `x.T` is blue, every fourth place of the memory, because its inner
# stride is 4.
#
# A stride may be 0: `expand` shows a row many times without copying it. And memory may be read
# twice: windows that overlap. Eight numbers, a window of 4 every 2: how many elements have the
# windows, and for how many is there memory?

# %% predict="predicted"
predicted = [3 * 4, 8]  # three windows of 4; no new memory

# %%
row = torch.arange(8, device=device)
windows = row.unfold(0, 4, 2)  # [3, 4]: a window of 4 every 2
plot.storage({"row": row, "row[:4].expand(3, 4)": row[:4].expand(3, 4), "windows": windows})
plot.show(
    "A row of 8, its first four expanded to 3 x 4, and 3 windows of 4. Expanded, places 0 to 3 "
    "have three colours each: every row reads them. Of the windows, places 2 to 5 have two."
)
held = windows.untyped_storage().nbytes() // windows.element_size()
sb.predict("elements in the windows, in memory", predicted, [windows.numel(), held])

# %% [markdown]
# Writing to such a tensor is a trap: one write shows in several places. torch refuses some
# in-place operations on it and accepts others.

# %%
repeated = torch.zeros(1, 3, device=device).expand(4, 3)
try:
    repeated += 1
except RuntimeError as error:
    print(str(error).split(".")[0])
repeated[0, 0] = 7  # goes through: one element is not the whole
print("column 0 is now", [int(v) for v in repeated[:, 0]])

# %% [markdown]
# ## Which operations move data?
#
# An operation is free when its result can be said with other sizes, strides and offset on the
# same memory. The tables below are measured: each line runs, the storages' addresses are compared,
# and the inverse is run as well and must give back what was given. `y` is what the operation
# returned; `t` is `x` permuted, so it is not contiguous; `row` is `x[:1]`.
#
# Guess before you read on: which of these seven copy?

# %% predict="predicted"
asked = ["x.view(6, 4)", "x.reshape(6, 4)", "t.reshape(8, 3)", "x.permute(2, 0, 1)"]
asked += ["row.expand(5, 3, 4)", "row.repeat(5, 1, 1)", "x.chunk(2, 2)"]
predicted = ["t.reshape(8, 3)", "row.repeat(5, 1, 1)"]

# %%
x = torch.arange(24, device=device).view(2, 3, 4)
named = {"x": x, "t": x.permute(2, 0, 1), "row": x[:1]}
inverses = {
    "x.view(6, 4)": "y.view(2, 3, 4)",
    "x.reshape(6, 4)": "y.view(2, 3, 4)",
    "t.reshape(8, 3)": "y.view(4, 2, 3)",
    "x.flatten(1)": "y.unflatten(1, (3, 4))",
    "x.unflatten(2, (2, 2))": "y.flatten(2)",
    "x.unsqueeze(1)": "y.squeeze(1)",
    "x.transpose(0, 1)": "y.transpose(0, 1)",
    "x.permute(2, 0, 1)": "y.permute(1, 2, 0)",
    "t.contiguous()": "y",
    "row.expand(5, 3, 4)": "y[:1]",
    "row.repeat(5, 1, 1)": "y[:1]",
    "row.repeat_interleave(5, 0)": "y[::5]",
    "x.chunk(2, 2)": "torch.cat(y, 2)",
}
table = layouts.operations(named, inverses)
copied = {row["operation"] for row in table if row["copies"]}
sb.predict("operations that copy", predicted, [name for name in asked if name in copied])
table

# %% [markdown]
# `reshape` appears on both sides: it is free where it can be and copies where it must, and **does
# not say which**. `expand` and `repeat` return the same values; only one of them has memory for
# them. Now taking apart, choosing, and putting together:

# %%
named |= {"pieces": x.unbind(0), "index": torch.tensor([2, 0], device=device)}
order = torch.tensor([2, 0, 3, 1], device=device)
named["order"] = order.expand(2, 3, 4)  # for each element of the result: which one of its row
named["back"] = order.argsort().expand(2, 3, 4)
inverses = {
    "x.split([1, 3], 2)": "torch.cat(y, 2)",
    "x.tensor_split(3, 2)": "torch.cat(y, 2)",
    "x.unbind(0)": "torch.stack(y)",
    "x.narrow(1, 0, 2)": None,
    "x.select(1, 2)": None,
    "x[:, ::2]": None,
    "x.unfold(2, 2, 2)": "y.flatten(2)",
    "torch.cat(pieces)": "y.chunk(2)",
    "torch.stack(pieces, 1)": "y.unbind(1)",
    "x[:, [0, 2]]": None,
    "x.index_select(1, index)": None,
    "x.gather(2, order)": "y.gather(2, back)",
    "x.flip(0)": "y.flip(0)",
    "x.roll(1, 2)": "y.roll(-1, 2)",
}
layouts.operations({"pieces": named["pieces"], **named}, inverses)

# %% [markdown]
# Taking apart is free (`chunk`, `split`, `unbind`, slices): each piece is a window on the old
# memory. `chunk` and `tensor_split` differ where the length does not divide: `tensor_split` gives
# as many pieces as you ask for. Putting together (`cat`, `stack`) always copies, because the
# pieces lie apart. A list of indices copies, since no stride walks any list. `flip` copies, since
# torch has no negative strides.

# %%
a = torch.arange(6, device=device).view(2, 3)
b = (torch.arange(6, device=device) + 6).view(2, 3)
left, right = a.chunk(2, dim=1)
plot.storage({"a": a, "left": left, "right": right, "a.unbind(1)[2]": a.unbind(1)[2]})
plot.show(
    "a of 2 x 3 in 6 places; left, the columns 0 and 1, is places 0, 1, 3 and 4; right, column 2, "
    "is places 2 and 5, and so is a.unbind(1)[2]. All in the memory of a."
)
joined = {"cat((a, b))": torch.cat((a, b)), "cat((a, b), 1)": torch.cat((a, b), 1)}
joined["stack((a, b), 1)"] = torch.stack((a, b), 1)
plot.storage({"a": a, **joined})
plot.show(
    "a, and three joins of a and b in new memory: cat((a, b)) holds 0 to 11 in order, "
    "cat((a, b), 1) and stack((a, b), 1) both hold 0 1 2 6 7 8 3 4 5 9 10 11."
)
assert torch.equal(joined["cat((a, b), 1)"].flatten(), joined["stack((a, b), 1)"].flatten())

# %% [markdown]
# `cat` along dimension 0 puts the memories end to end. Along dimension 1 it interleaves rows.
# `stack` makes a new dimension first: `stack((a, b), 1)` holds the same memory as `cat((a, b),
# 1)`, with other sizes.
#
# ## Why does `view` fail after `permute`?

# %%
x = torch.arange(12, device=device).view(3, 4)
print("x.view(12)   works, strides", x.view(12).stride())
try:
    x.T.view(12)
except RuntimeError as error:
    print("x.T.view(12) fails:", str(error).split(". ")[0])

# %% [markdown]
# A view of 12 elements in one dimension has one stride: from each element to the next the same
# step. Walk `x.T` row by row and note the places.

# %%
for name, tensor in {"x": x, "x.T": x.T}.items():
    places = [int(v) for v in tensor.reshape(-1)]  # x holds its own places: x[i, j] lies at x[i, j]
    steps = [b - a for a, b in pairwise(places)]
    print(f"{name:4} places {places}")
    print(f"     steps  {steps}")

# %% [markdown]
# For `x` every step is 1. For `x.T` the steps are 4, 4, -7: no single stride walks them. So the
# rule is about neighbouring dimensions:
#
# **dimensions i and i+1 can be merged only where `stride[i] == stride[i+1] * size[i+1]`**, that
# is, where leaving the inner dimension at its end lands exactly on the next step of the outer one.
# Splitting a dimension is always possible. (It is the condition in the documentation of
# [`Tensor.view`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.view.html).)

# %%
y = torch.empty(2, 3, 4, 5, device=device)
for name, t in {
    "fresh": y,
    "permute(0, 2, 1, 3)": y.permute(0, 2, 1, 3),
    "permute(2, 3, 0, 1)": y.permute(2, 3, 0, 1),
    "y[:, :2]": y[:, :2],
    "y[..., :4]": y[..., :4],
}.items():
    (n0, n1, n2, n3), (s0, s1, s2, s3) = t.shape, t.stride()
    merges = [s0 == s1 * n1, s1 == s2 * n2, s2 == s3 * n3]
    pairs = [pair for pair, ok in zip(["0-1", "1-2", "2-3"], merges, strict=True) if ok]
    print(f"{name:20} strides {t.stride()!s:16} can merge {', '.join(pairs) or 'nothing'}")

# %% [markdown]
# `permute(2, 3, 0, 1)` keeps two pairs together, so it can still be viewed as `[20, 6]`, although
# it is not contiguous. "Contiguous" is enough for `view`, not necessary.
#
# ## What breaks in practice
#
# **1. The write that is lost.** `reshape` gave a view yesterday. Today its input comes out of a
# transpose, and the same line writes into a copy.

# %%
for name, tensor in {"x": x.clone(), "x.T": x.clone().T}.items():
    flat = tensor.reshape(-1)
    flat[0] = 100
    print(f"{name:4} after flat[0] = 100: first element {int(tensor[0, 0])}")

# %% [markdown]
# Where a view is meant, write `view`: it fails loudly.
#
# **2. The reshape that mixes.** Attention needs `[B, S, H*D]` as `[B, H, S, D]`. A `view` straight
# to those sizes runs without complaint. Take 3 tokens of 2 heads of 2 channels; every value names
# its token: 10s for the token, then the channel.

# %%
tokens = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]], device=device)  # [S, H*D]
straight = tokens.view(2, 3, 2)  # [H, S, D], says the code
plot.storage({"tokens [S, H*D]": tokens, "view [H, S, D]": straight})
plot.show(
    "3 tokens of 4 values, and the same memory viewed as 2 heads of 3 tokens: head 0 takes the "
    "first six places, which are token 0 and half of token 1."
)
print("head 0, token 1 holds", [int(v) for v in straight[0, 1]], "expected", [10, 11])

# %% [markdown]
# The sizes are right and each head holds a mixture of tokens. Only split (`[S, H, D]`), then swap.
# You write it in the lab; the check compares values, because sizes prove nothing.
#
# **3. The shard that can't be sent.** Cut a weight into column shards and look at the memory:
# every shard is scattered over the whole of it. Communication libraries move contiguous buffers,
# so a column shard is copied before it is sent, a row shard is not.

# %%
weight = torch.arange(24, device=device).view(4, 6)
rows, columns = weight.chunk(2, dim=0), weight.chunk(2, dim=1)
plot.storage({"weight": weight, "row shard 1": rows[1], "column shard 1": columns[1]})
plot.show(
    "A weight of 4 x 6 in 24 places. Row shard 1 is the second half of them in one piece; column "
    "shard 1 is four pieces of three with gaps between."
)
print("row shard contiguous:   ", rows[1].is_contiguous())
print("column shard contiguous:", columns[1].is_contiguous())

# %% [markdown]
# **4. The small view that keeps a large tensor alive.** A view holds the whole storage. Keep
# `hidden[:, -1]` of every step for later and you keep every `hidden`.

# %%
hidden = torch.zeros(8, 1024, 64, device=device)
last = hidden[:, -1]  # [8, 64]
kept = last.clone()
for name, t in {"hidden[:, -1]": last, "hidden[:, -1].clone()": kept}.items():
    print(f"{name:22} {t.nbytes:7,} bytes of values, holds {t.untyped_storage().nbytes():9,} bytes")

# %% [markdown]
# **5. Chunks are not even.** `torch.chunk` rounds the size up, so the last piece is smaller, and
# there may be fewer pieces than you asked for. What do 5 rows over 4 ranks give?

# %% predict="predicted"
predicted = [2, 2, 1]  # rounded up: 2 rows each, while there are any
sb.predict("rows", predicted, [len(p) for p in torch.arange(5, device=device).chunk(4)])

# %%
for length in (12, 10, 9, 5, 2):
    pieces = [len(p) for p in torch.arange(length, device=device).chunk(4)]
    print(f"{length:2} rows over 4 ranks: {pieces}")

# %% [markdown]
# 5 rows over 4 ranks give three pieces. The fourth rank has nothing, and code that indexes
# `pieces[rank]` fails there, on that rank only. In the lab, `shard` gives it an empty piece
# instead.
#
# ## What does a copy cost?
#
# A view costs the same for one element and for a million. A copy reads and writes every byte, so
# its rate is twice the bytes over the time. What no cache holds can't be copied faster than the
# memory's bandwidth. Three copies of 32 MiB: into memory that was touched before, row by row; into
# such memory, but turned; and `clone`, which asks for fresh memory each time. Predict the order of
# the first two: is the plain copy the faster one? Timings differ from run to run.

# %% predict="predicted" tags=["nbval-ignore-output"]
predicted = True  # both move the same bytes, one of them along the rows
big = torch.ones(2048, 4096, device=device)  # 32 MiB
warm, turned = torch.zeros_like(big), torch.zeros(4096, 2048, device=device)
copies = {
    "warm.copy_(big)": lambda: warm.copy_(big),
    "turned.copy_(big.T)": lambda: turned.copy_(big.T),
    "big.clone()": lambda: big.clone(),
}
rates = {name: layouts.gigabytes_per_second(copy) for name, copy in copies.items()}
for name, rate in rates.items():
    print(f"{name:20} {rate:8.1f} GB/s")
plain, transposing, fresh = rates.values()
sb.predict("the plain copy is faster", predicted, plain > transposing)
assert plain > transposing
assert plain > fresh or device.type != "cpu"

# %% [markdown]
# The transposing copy is slower than the plain one though both move the same bytes: only one of
# its two sides can be walked along rows, and memory is fetched in lines of neighbouring bytes. On a CPU
# `clone` is slower than a copy into warm memory for another reason: the operating system hands out
# fresh pages and fills them at the first touch. (A device's allocator keeps its memory, so there
# the third is like the first.) Measure a copy cold and you measure the operating system.
#
# ## Where are the copies in attention?
#
# An attention block with a mark around each move. What to see in the picture: **views are hairlines,
# copies are bars**. Three `contiguous()` in the first bar go into the products, one in the second
# leads out; the transposes and the flatten between them take microseconds, whatever the size.


# %%
class Attention(nn.Module):
    """Self-attention with its moves marked. x [B, S, H*D]."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        qkv = self.qkv(x).chunk(3, -1)  # 3 of [B, S, H*D], views
        with sb.mark("views: cut heads, swap"):
            qkv = [p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in qkv]  # [B, H, S, D]
        with sb.mark("contiguous: q, k, v"):
            q, k, v = (p.contiguous() for p in qkv)
        with sb.mark("compute: scores, softmax, sum"):
            y = torch.softmax(q @ k.mT * self.scale, -1) @ v  # [B, H, S, D]
        with sb.mark("views: swap back"):
            y = y.transpose(1, 2)  # [B, S, H, D]
        with sb.mark("contiguous: y"):
            y = y.contiguous()
        with sb.mark("views: flatten"):
            y = y.flatten(2)  # [B, S, H*D]
        return self.out(y)


# %% tags=["nbval-ignore-output"]
attention = Attention(128, 4).to(device)
tokens = torch.ones(64, 64, 128, device=device)  # 2 MiB
with torch.no_grad():
    attention(tokens)  # once before: the first run sets things up
    with sb.trace(attention) as t:
        attention(tokens)
ms = layouts.marked(t)
views, copied = (sum(v for n, v in ms.items() if word in n) for word in ("views", "contiguous"))
print(f"views {views:.3f} ms, contiguous {copied:.3f} ms")
assert copied > views or device.type != "cpu"  # elsewhere a mark times the asking, not the work
t

# %% [markdown]
# The block could do with fewer: a product that takes strides needs no contiguous input, and a fused
# attention that takes `[B, S, H, D]` needs no swap either. Look for these bars in a profile before
# you look for a faster kernel.
#
# ## On a real cluster
#
# **Sizes.** Step-Video's 544x992x204 video is 75,888 tokens of 6,144 channels (36 x 34 x 62 latent
# places, 48 heads of 128; from its published configuration). One stray `contiguous()` on such an
# activation in bf16:

# %%
tokens, channels = 36 * 34 * 62, 48 * 128
nbytes = tokens * channels * 2
print(f"{tokens:,} tokens x {channels:,} channels = {nbytes / 1e6:.1f} MB")
print(f"a copy moves {2 * nbytes / 1e9:.3f} GB, at 3.35 TB/s {2 * nbytes / 3.35e12 * 1e3:.2f} ms")

# %% [markdown]
# (3.35 TB/s is the memory bandwidth of an H100 SXM in NVIDIA's data sheet; put your device's
# there.) With four of them in a block and 48 blocks it is no longer small.
#
# **NPU.** Besides strides, an Ascend tensor has a storage *format*: ND is the plain row-major one
# of this chapter, NZ and 5HD are tiled for the matrix unit. torch_npu converts between them on its
# own, which shows as TransData in a profile. Where it falls back to `as_strided` it warns, and
# names `torch.npu.config.allow_internal_format = False`, which keeps to ND, as what to try if
# values are off (in the log of [ComfyUI#7499](https://github.com/Comfy-Org/ComfyUI/issues/7499)).
# It is a switch to try, not a cure: with private formats Open-Sora's 3-D convolutions ran very
# slowly, without them the grouped one raised on CANN 8.0
# ([Ascend/pytorch#85](https://github.com/Ascend/pytorch/issues/85)). Many NPU kernels want
# contiguous inputs, so torch_npu inserts the copy for you: a permute that was free on paper is a
# kernel in the trace.
#
# **CUDA.** Kernels are fast when neighbouring threads read neighbouring addresses ("coalesced" in
# the CUDA C++ programming guide), so the innermost stride should be 1. Triton and CUDA kernels
# take strides as arguments or assert `is_contiguous()`; a kernel that does neither computes
# nonsense on a permuted input.
#
# **Many hosts.** NCCL, HCCL and Gloo take a pointer and a count: they know no strides. A
# transposed tensor is copied or refused. That is why a tensor-parallel layer keeps its shard as
# its own contiguous parameter, and why collectives written by hand receive into fresh contiguous
# buffers (chapter 13).
#
# Next: the [lab](../labs/11_tensors.ipynb). Then [chapter 12](12_tracing.ipynb) looks at a whole
# model.
