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

import matplotlib.pyplot as plt
import torch

from shardbook import plot

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
plt.show()

# %% [markdown]
# Nothing moved. The transpose swaps two strides, a slice changes the offset and a size. Read the
# second row: the first row of `x.T` is blue, every fourth place of the memory, because its inner
# stride is 4.
#
# A stride may be 0: `expand` shows a row many times without copying it. And memory may be read
# twice: windows that overlap.

# %%
row = torch.arange(8, device=device)
windows = row.unfold(0, 4, 2)  # [3, 4]: a window of 4 every 2
plot.storage({"row": row, "row[:4].expand(3, 4)": row[:4].expand(3, 4), "windows": windows})
plt.show()
print("elements in the windows:", windows.numel(), "· elements in memory:", row.numel())

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
# Guess before you read the table. An operation is free when its result can be said with other
# sizes, strides and offset on the same memory. The table is measured: it compares the addresses of
# the two storages.

# %%
x = torch.arange(24, device=device).view(2, 3, 4)


def same_memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def show(**results):
    for name, result in results.items():
        result = result[0] if isinstance(result, (tuple, list)) else result
        verdict = "free " if same_memory(result, x) else "COPY "
        print(f"{verdict} {name:22} {tuple(result.shape)!s:12} strides {result.stride()}")


print(f"      x                      {tuple(x.shape)!s:12} strides {x.stride()}")
show(
    view=x.view(6, 4),
    reshape=x.reshape(4, 6),
    permute=x.permute(2, 0, 1),
    transpose=x.transpose(0, 1),
    unsqueeze=x.unsqueeze(1),
    expand=x[:1].expand(5, 3, 4),
    slice=x[:, ::2],
    select=x[:, 1],
    unbind=x.unbind(0),
    chunk=x.chunk(2, dim=2),
    split=x.split([1, 2], dim=1),
    unfold=x.unfold(2, 2, 1),
)
print()
show(
    cat=torch.cat((x, x)),
    stack=torch.stack((x, x)),
    repeat=x.repeat(2, 1, 1),
    flip=x.flip(0),
    index_with_list=x[:, [0, 2]],
    permute_contiguous=x.permute(2, 0, 1).contiguous(),
    permute_reshape=x.permute(2, 0, 1).reshape(8, 3),
)

# %% [markdown]
# Taking apart is free (`chunk`, `split`, `unbind`, slices): each piece is a window on the old
# memory. Putting together (`cat`, `stack`) always copies, because the pieces lie apart. `flip`
# copies, since torch has no negative strides. `reshape` appears on both sides: it is free where it
# can be and copies where it must, and **does not say which**.

# %%
a = torch.arange(6, device=device).view(2, 3)
b = (torch.arange(6, device=device) + 6).view(2, 3)
left, right = a.chunk(2, dim=1)
plot.storage({"a": a, "left": left, "right": right, "a.unbind(1)[2]": a.unbind(1)[2]})
plt.show()
plot.storage(
    {
        "a": a,
        "cat((a, b))": torch.cat((a, b)),
        "cat((a, b), 1)": torch.cat((a, b), 1),
        "stack((a, b), 1)": torch.stack((a, b), 1),
    }
)
plt.show()

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
plt.show()
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
plt.show()
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
# there may be fewer pieces than you asked for.

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
# it can't be faster than twice the bytes over the memory bandwidth. The two copies below also get
# fresh memory, whose pages the operating system fills in at the first touch; that is most of what
# `clone` costs here, and far from the bandwidth of the memory. Timings differ from run to run.

# %% tags=["nbval-ignore-output"]
import time


def milliseconds(fn, repeats=5):
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = fn()
        float(result.flatten()[0])  # a device is asynchronous: wait for the value
        best = min(best, time.perf_counter() - start)
    return best * 1e3


big = torch.zeros(2048, 4096, device=device)  # 32 MiB
print(f"transpose               {milliseconds(lambda: big[:1].T):8.3f} ms")
print(f"clone                   {milliseconds(lambda: big.clone()):8.3f} ms")
print(f"transpose().contiguous() {milliseconds(lambda: big.T.contiguous()):7.3f} ms")

# %% [markdown]
# The transposing copy is slower than the plain one though both move the same bytes: it reads along
# rows and writes along columns, and memory is fetched in lines of neighbouring bytes. Into memory
# that has been touched before (`out.copy_(…)`) both are faster and lie further apart: try it.
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
