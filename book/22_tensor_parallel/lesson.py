# %% [markdown]
# # 22 · Tensor and sequence parallel
#
# After this chapter you can
# - cut any layer of a transformer over ranks, and say which tensor is cut and which collective
#   pays for it,
# - predict the bytes a tensor-parallel layer sends before you run it,
# - find the gradient all-reduce that somebody forgot,
# - compare your model with PyTorch's `parallelize_module`: values, bytes and memory.
#
# Time: 75 minutes to read, two to three hours for the lab. Chapter 13 has the collectives,
# chapter 21 data parallelism and ZeRO.
#
# Letters: B sequences of S tokens, model width D, H heads (Hkv of keys and values), V words in the
# vocabulary, P ranks.

# %%
import shardbook as sb

import time
from concurrent.futures import ThreadPoolExecutor

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardbook import calls, plot
from shardbook.memory import storage_bytes
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss
from shardbook.parallel.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    all_reduced,
    copy_to_group,
    reduce_from_group,
)
from shardbook.studies import overlap
from shardbook.studies.tensor_lm import SequenceParallelLM, parallel_token_loss, tensor_parallel_
from shardbook.pictures.tensor import draw_half_block
from shardbook.parallel.vocab import vocab_parallel_cross_entropy

# %% [markdown]
# ## What breaks without it?
#
# Data parallelism cuts the batch, ZeRO cuts what lies in memory between two layers. While a layer
# computes, its whole weight and all its activations are on the device. With one long sequence per
# rank, there is no batch left to cut. What does a rank then hold?
#
# We run the small model of this book on one sequence of 256 tokens and count: the state (weights,
# gradients and Adam's two moments, fp32, so four times the weights) and the activations that
# autograd keeps for backward.


# %%
def build(kind):
    """The same model, whole or in parallel: (model, loss function)."""
    model = tiny_lm().to(sb.device())
    if kind == "tensor":
        return tensor_parallel_(model), parallel_token_loss
    if kind.startswith("sequence"):
        return SequenceParallelLM(model, keeps_shard="shard" in kind), parallel_token_loss
    return model, token_loss


def memory(kind, batch, seq):
    """Bytes a rank holds: (weights, what autograd saved for backward besides them)."""
    model, loss_fn = build(kind)
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, batch, seq))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss_fn(model(tokens, torch.arange(seq, device=sb.device())), targets)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    activations = (t for t in saved if t.untyped_storage().data_ptr() not in weights)
    return storage_bytes(model.parameters()), storage_bytes(activations)


# %% tags=["nbval-ignore-output"]
held = {
    "1 rank, or data parallel": sb.run(memory, "whole", 1, 256, world_size=1).values[0],
    "tensor, 2 ranks": sb.run(memory, "tensor", 1, 256, world_size=2).values[0],
    "tensor, 4 ranks": sb.run(memory, "tensor", 1, 256, world_size=4).values[0],
    "tensor + sequence, 4 ranks": sb.run(memory, "sequence", 1, 256, world_size=4).values[0],
    "keeping shards, 4 ranks": sb.run(memory, "sequence, shard", 1, 256, world_size=4).values[0],
}
for name, (weights, activations) in held.items():
    print(f"{name:27}  state {4 * weights:>9,} bytes   activations {activations:>9,} bytes")
assert [a for _, a in held.values()] == sorted((a for _, a in held.values()), reverse=True)

# %%
labels = [n.replace(", ", ",\n").replace(" + ", " +\n") for n in held]
state, activations = zip(*held.values(), strict=True)
plot.bars(
    {
        "state": {n: 4 * w / 1e6 for n, w in zip(labels, state, strict=True)},
        "activations": {n: a / 1e6 for n, a in zip(labels, activations, strict=True)},
    },
    ylabel="MB per rank",
    title="One sequence of 256 tokens",
)
plt.show()

# %% [markdown]
# The second and third row make both smaller: on four ranks the state by almost 4, the activations
# by 2.3, since norms and residuals stay whole (the last two rows come to that). They do it by cutting
# *inside* a layer: a rank never has the whole weight, nor the whole hidden activation, not even for a
# moment.
#
# ## Which tensor is cut, and which collective pays?
#
# Read the picture from left to right: `x @ W`, one colour for each of four ranks, grey for what every
# rank has whole. It is half a block. Attention and MLP are both of this form: a product
# whose output features are cut, something that works feature by feature (or head by head), and a
# product whose input features are cut.

# %%
draw_half_block()
plt.show()

# %% [markdown]
# - **Column parallel**: `W = [W_0 … W_3]` by output features. Each rank has its columns of
#   `x @ W`, and nothing was sent.
# - **Row parallel**: `W` by input features, as its input already is. Each rank has an addend of
#   full shape, and an all-reduce sums the four.
#
# In between stands gelu. This is why the first cut is by columns: gelu of a sum is not the sum of
# the gelus, so partial sums would have to be all-reduced *before* it.

# %%
torch.manual_seed(0)
x, up, down = torch.randn(7, 6), torch.randn(6, 20), torch.randn(20, 6)
whole = F.gelu(x @ up) @ down
columns_first = sum(
    F.gelu(x @ u) @ d for u, d in zip(up.chunk(4, 1), down.chunk(4, 0), strict=True)
)
rows_first = F.gelu(x.chunk(2, 1)[0] @ up.chunk(2, 0)[0]) + F.gelu(
    x.chunk(2, 1)[1] @ up.chunk(2, 0)[1]
)
print("columns, gelu, rows: within 1e-4:", bool((columns_first - whole).abs().max() < 1e-4))
print("rows, gelu, columns: within 1e-4:", bool((rows_first @ down - whole).abs().max() < 1e-4))

# %% [markdown]
# ## Backward: f and g
#
# The dotted arrows are the gradients' way. What enters the cut region is used by every rank, so
# its gradient is a *sum over ranks*: `f` is the identity forward and an all-reduce backward. What
# leaves is a sum, and each addend has the gradient of the sum: `g` is an all-reduce forward and
# the identity backward.
#
# Each is a conjugate of the other, and autograd knows neither. It does not see a bare
# `dist.all_reduce` inside a forward: gradients pass through unchanged, so it happens to act as `g`,
# and nothing acts as `f`. `torch.distributed.nn.functional.all_reduce` has a backward that reduces again. Try three
# ways on a column- and a row-parallel layer of an MLP. In the second, `no_backward` is `g` written
# out; only `f` is missing.


# %%
def mlp_gradient(enter, leave):
    """Norms of output and input's gradient, a two-layer MLP over the ranks; None: the whole MLP."""
    torch.manual_seed(1)
    up, down, x = nn.Linear(6, 20), nn.Linear(20, 6), torch.randn(7, 6)
    up, down, x = up.to(sb.device()), down.to(sb.device()), x.to(sb.device()).requires_grad_()
    if enter is None:
        y = down(F.gelu(up(x)))
    else:
        up, down = ColumnParallelLinear(up), RowParallelLinear(down)
        h = F.gelu(F.linear(enter(x), up.weight, up.bias))  # [7, 20/P]
        y = leave(F.linear(h, down.weight)) + down.bias
    y.square().sum().backward()
    return y.detach().norm().item(), x.grad.norm().item()


def no_backward(x):
    y = x.detach().clone()
    dist.all_reduce(y)
    return y + (x - x.detach())  # the value of the sum, the gradient of x


def again(x):
    return copy_to_group(reduce_from_group(x))  # what torch.distributed.nn's does


def identity(x):
    return x


whole_output, whole = sb.run(mlp_gradient, None, None, world_size=1).values[0]
for name, enter, leave in [
    ("f and g", copy_to_group, reduce_from_group),
    ("f forgotten", identity, no_backward),
    ("all-reduced twice", copy_to_group, again),
]:
    outputs, norms = zip(*sb.run(mlp_gradient, enter, leave, world_size=4).values, strict=True)
    forward = all(abs(n - whole_output) < 1e-3 for n in outputs)
    right = all(abs(n - whole) < 1e-3 for n in norms)
    alike = max(norms) - min(norms) < 1e-3
    ratio = norms[0] / whole
    print(
        f"{name:18} output right: {forward}  gradient right: {right!s:5}  "
        f"same on all ranks: {alike!s:5}  rank 0 / whole: {ratio:.2f}"
    )

# %% [markdown]
# The forward pass is right in all three, so nothing raises and the first loss is the right one. A
# forgotten `f` makes ranks disagree about the gradient of everything *below* the layer. One
# all-reduce too many scales it by the number of ranks, and Adam, which divides by the gradient's
# size, hides that.
#
# The second row in public code: [torchtitan#1805](https://github.com/pytorch/torchtitan/issues/1805),
# a reduce-scatter missing in the backward of experts under tensor parallelism. And a quiz:
# [flash-attention#1244](https://github.com/Dao-AILab/flash-attention/issues/1244) asks why the
# library's all-reduce has a "wrong" backward, one that communicates nothing. Is it wrong? (It is `g`,
# and right here; the backward that the question calls correct is that of the third row.
# [Megatron-LM#559](https://github.com/NVIDIA/Megatron-LM/issues/559) asks the same and a maintainer
# answers with two scalars.)
#
# ## How many bytes?
#
# A layer has two halves. Each half sends one all-reduce forward (`g`) and one backward (`f`), of a
# tensor `[B, S, D]`: the size of the *activations*, whatever the size of the weights. Predict what
# the two layers of the small model all-reduce forward for B=4, S=64, D=64 in fp32, then add the
# embedding (one) and the loss (three of one value per token).

# %% predict="predicted"
B, S, D = 4, 64, 64
predicted = (2 * 2 + 1) * B * S * D * 4 + 3 * B * S * 4  # two halves a layer, the embedding, loss


# %%
def one_step(kind, batch=4, seq=64):
    """{"forward" | "backward": calls and bytes}, loss, a norm's gradient, bytes of weights."""
    model, loss_fn = build(kind)
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, batch, seq))
    with calls.record() as forward:
        loss = loss_fn(model(tokens, torch.arange(seq, device=sb.device())), targets)
    with calls.record() as backward:
        loss.backward()
    return {
        "forward": calls.summary(forward),
        "backward": calls.summary(backward),
        "loss": loss.item(),
        "norm": model.norm.weight.grad.cpu(),
        "weights": storage_bytes(model.parameters()),
        "gradients": storage_bytes(p.grad for p in model.parameters()),
    }


single = sb.run(one_step, "whole", world_size=1).values[0]
tensor = sb.run(one_step, "tensor", world_size=4).values[0]
measured = tensor["forward"]["all_reduce"][1]
sb.predict("bytes all-reduced forward", predicted, measured)

# %% [markdown]
# Backward has the `f` of the two halves of each layer and of the head. An all-reduce of n bytes
# makes each rank send `2 (P-1)/P n` of them in the best algorithm (chapter 13).

# %%
print("forward: ", tensor["forward"])
print("backward:", tensor["backward"])
print("loss equals the whole model's within 1e-5:", abs(tensor["loss"] - single["loss"]) < 1e-5)
error = (tensor["norm"] - single["norm"]).abs().max()
print("last norm's gradient within 1e-5:", bool(error < 1e-5))

# %% [markdown]
# ### The trace of four ranks
#
# Every all-reduce stops all ranks: nothing in a layer can start before the sum is there. Find the
# two of each block, and the three small ones of the loss at the end of the forward pass. They are
# small in bytes; as slices they may be long, since a slice includes the wait for the slowest rank.


# %% tags=["nbval-ignore-output"]
def traced_step(kind):
    model, loss_fn = build(kind)
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0))
    positions = torch.arange(64, device=sb.device())
    loss_fn(model(tokens, positions), targets).backward()  # first calls are slow: leave them out
    dist.barrier()
    with sb.trace(model) as t:
        with sb.mark("forward"):
            loss = loss_fn(model(tokens, positions), targets)
        with sb.mark("backward"):
            loss.backward()
    return t


from shardbook.tracing import merge

merge(sb.run(traced_step, "tensor", world_size=4).values, title="tensor parallel, one step")

# %% [markdown]
# ## Heads
#
# For attention the columns are heads. The fused `qkv` weight holds q, then k, then v: cut into four
# equal pieces, rank 0 gets queries only. Each of the three has to be cut apart. The shapes of a
# naive cut are right and nothing raises:


# %%
def attention_error(naive):
    """Worst error of four-rank attention, where qkv is cut as one matrix or by heads."""
    model = tiny_lm()
    attn = model.blocks[0].attn.to(sb.device())
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3)).to(sb.device())
    positions = torch.arange(9, device=sb.device())
    ours = ParallelAttention(attn.qkv, attn.out, attn.num_heads, attn.num_kv_heads)
    with torch.no_grad():
        if naive:
            q, k, v = attn.qkv.weight.chunk(4)[dist.get_rank()].chunk(3)
            ours.q.weight.copy_(q)
            ours.kv.weight.copy_(torch.cat((k, v)))
        return (ours(x, positions) - attn(x, positions)).abs().max().item()


for naive in (False, True):
    worst = sb.run(attention_error, naive, world_size=4).values[0]
    print("cut as one matrix" if naive else "cut by heads", "within 1e-5:", worst < 1e-5)

# %% [markdown]
# With grouped queries there may be fewer kv heads than ranks. Then a kv head is *copied* to the
# ranks whose queries read it, and its gradient is summed over these copies, or they drift apart.
# Eight heads with two kv heads on four ranks:


# %%
def heads_of_a_rank(num_heads, num_kv_heads):
    qkv, out = nn.Linear(24, (num_heads + 2 * num_kv_heads) * 6), nn.Linear(num_heads * 6, 24)
    a = ParallelAttention(qkv.to(sb.device()), out.to(sb.device()), num_heads, num_kv_heads)
    return a.heads, a.kv_heads, a.replicas


for kv in (8, 4, 2, 1):
    heads, kv_heads, copies = sb.run(heads_of_a_rank, 8, kv, world_size=4).values[0]
    print(
        f"8 heads, {kv} kv heads: a rank has {heads} heads, {kv_heads} kv heads, {copies} copies each"
    )

try:
    sb.run(heads_of_a_rank, 12, 3, world_size=4, echo=False)
except sb.RankError as error:
    print(error.causes[0])

# %% [markdown]
# Without copies, a rank gets half a head. That is at least loud: the reshape into heads fails in the
# forward pass, in [transformers#48307](https://github.com/huggingface/transformers/issues/48307) and
# in what [torchtitan#2577](https://github.com/pytorch/torchtitan/pull/2577) now refuses when the
# configuration is read. Copies whose gradients nobody sums are the silent mistake.
#
# ## The vocabulary
#
# The embedding and the head, cut by rows of the vocabulary, are often the largest single weights of
# a model (not of ours, with its 64 words). A rank looks up the tokens it has, gives zeros for the
# others, and `g` sums.
#
# The loss is the interesting end. Logits `[B, S, V/P]` could be gathered, but
#
# `loss = log(sum of exp(z_j)) - z_target`
#
# needs two sums over the vocabulary, of one value per token, and for safety the largest logit. That
# is three all-reduces of `B S` values and no gather of `B S V`:


# %%
def loss_bytes(gathered):
    V = 32_000
    logits = torch.randn(2, 16, V, generator=torch.Generator().manual_seed(5)) * 100
    targets = torch.randint(V, (2, 16), generator=torch.Generator().manual_seed(6))
    mine = logits.chunk(4, -1)[dist.get_rank()].to(sb.device())
    with calls.record() as log:
        if gathered:
            pieces = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in "0123"]
            dist.all_gather(pieces, mine.contiguous())
            loss = token_loss(torch.cat(pieces, -1), targets.to(sb.device()))
        else:
            loss = vocab_parallel_cross_entropy(mine, targets.to(sb.device())).mean()
    return loss.item(), sum(c.nbytes for c in log)


(loss, few), (reference, many) = (
    sb.run(loss_bytes, g, world_size=4).values[0] for g in (False, True)
)
print(f"vocabulary 32,000: {few:,} bytes instead of {many:,}, a factor of {many // few:,}")
print("same loss within 1e-3 of about", round(reference), ":", abs(loss - reference) < 1e-3)

# %% [markdown]
# ## Sequence parallel: the same bytes, less memory
#
# In the first picture `x` and `norm(x)` are grey: whole on every rank, computed P times. Norms,
# residuals and dropouts treat each token by itself, so a rank can do them for S/P of the tokens.
# An all-reduce *is* a reduce-scatter followed by an all-gather. Put the norm between the two:

# %%
draw_half_block(sequence_parallel=True)
plt.show()

# %% predict="predicted"
# Forward, two layers: reduce_scatter and all_gather of [B, S, D] for each half (and one
# all_gather before the head). How many bytes are reduce-scattered?
predicted = 2 * 2 * B * S * D * 4

# %%
sequence = sb.run(one_step, "sequence", world_size=4).values[0]
sb.predict("bytes reduce-scattered forward", predicted, sequence["forward"]["reduce_scatter"][1])
for way in ("forward", "backward"):
    for name, step in (("tensor", tensor), ("tensor + sequence", sequence)):
        table = ", ".join(f"{op} {n} x, {b:,} bytes" for op, (n, b) in step[way].items())
        print(f"{way:8}  {name:17}  {table}")

# %% [markdown]
# A ring sends as much for an all-reduce as for a reduce-scatter and an all-gather, so each half of a block
# sends the same bytes as before. At the ends ours sends more: forward it all-reduces the embedding and
# cuts the sum, where a reduce-scatter would do, and gathers before the head. In backward the all-gather of
# the embedding's gradient and the reduce-scatter before the head take the place of the head's all-reduce,
# and there are fourteen small all-reduces.
# They are the price of cutting the tokens: a norm's weight meets only this rank's tokens, so its
# gradient is one addend of P. The same holds for the biases added after the reduce-scatter.
#
# The first table of this chapter has what it buys. The fourth row keeps the gathered input of each half
# of a block for backward. Megatron-LM keeps the shard and gathers it again, and so does the fifth row:
# one more all-gather for each half and the head, `B S D (P-1)/P` values less to hold.
#
# **Predict** the bytes that this saves a rank, for the sequence of 256 tokens.

# %% predict="saved"
# two layers of two halves, and the head: five inputs [1, 256, D], of which 3/4 are not kept
saved = 5 * 256 * D * 3 // 4 * 4

# %%
(_, gathered), (_, shards) = list(held.values())[3:]
sb.predict("bytes of activations saved", saved, gathered - shards)
again = sb.run(one_step, "sequence, shard", world_size=4).values[0]
more = again["backward"]["all_gather"][0] - sequence["backward"]["all_gather"][0]
print("all-gathers more in backward:", more)
print("same loss:", abs(again["loss"] - sequence["loss"]) < 1e-6)

# %% [markdown]
# ### The two side by side
#
# On one timeline: ranks 0 and 1 run a step of the tensor-parallel model, ranks 2 and 3 one of the
# sequence-parallel model. Where in a block the upper two have an all-reduce, the lower two have a reduce-scatter and
# an all-gather of the same tensor (click one: the bytes stand beside its name), of which a ring sends half
# as much each. The many short all-reduces in the lower backward are the norms' gradients and the biases';
# between processes of one machine they cost more time than their few bytes suggest.


# %% tags=["nbval-ignore-output"]
def side_by_side():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    model = tiny_lm().to(sb.device())
    cut = tensor_parallel_ if dist.get_rank() < 2 else SequenceParallelLM
    model, positions = cut(model, mine), torch.arange(64, device=sb.device())
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0))
    parallel_token_loss(model(tokens, positions), targets, mine).backward()  # the first is slow
    dist.barrier()
    with sb.trace() as t:
        with sb.mark("forward"):
            loss = parallel_token_loss(model(tokens, positions), targets, mine)
        with sb.mark("backward"):
            loss.backward()
    return t


merge(sb.run(side_by_side, world_size=4).values, title="tensor above, sequence below")

# %% [markdown]
# ## Does it train?
#
# The same model, the same batches, Adam: one process, four tensor-parallel ranks, four ranks with
# sequence parallelism.


# %%
def train(kind, steps=30):
    model, loss_fn = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    positions, losses = torch.arange(64, device=sb.device()), []
    for step in range(steps):
        tokens, targets = (t.to(sb.device()) for t in counting_batch(step))
        loss = loss_fn(model(tokens, positions), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


curves = {
    "one process": sb.run(train, "whole", world_size=1).values[0],
    "tensor parallel, 4 ranks": sb.run(train, "tensor", world_size=4).values[0],
    "tensor + sequence parallel, 4 ranks": sb.run(train, "sequence", world_size=4).values[0],
}
whole, *others = curves.values()
print("loss of the first step", round(whole[0], 2), "and of the last", round(whole[-1], 2))
for other in others:
    print("curves within 1e-3:", max(abs(a - b) for a, b in zip(whole, other, strict=True)) < 1e-3)
(ax,) = plot.curves(curves, "step", "loss", "The three curves lie on each other").axes
ax.lines[2].set(linestyle="--", color=plot.COLOURS[5])
ax.legend()
plt.show()

# %% [markdown]
# ## PyTorch's own
#
# `parallelize_module` replaces parameters by `DTensor`s and lets each layer's plan say where the
# collectives go. `loss_parallel` is its vocabulary-parallel loss. It cuts a fused `qkv` as one
# matrix, so its rows have to be put in rank order first, and the number of heads divided by hand.


# %%
def torchs_own():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model, ranks = tiny_lm().to(sb.device()), dist.get_world_size()
    for block in model.blocks:
        attn = block.attn
        rows = torch.arange(attn.qkv.out_features).view(3, ranks, -1)  # q, k, v; rank; its rows
        rows = rows.transpose(0, 1).flatten().to(sb.device())
        with torch.no_grad():
            attn.qkv.weight.copy_(attn.qkv.weight[rows])
            attn.qkv.bias.copy_(attn.qkv.bias[rows])
        attn.num_heads //= ranks
        attn.num_kv_heads //= ranks
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attn.qkv": ColwiseParallel(),
        "blocks.*.attn.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, init_device_mesh(sb.device().type, (ranks,)), plan)
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0))
    positions = torch.arange(64, device=sb.device())
    with sb.trace(model) as t, loss_parallel():
        with calls.record() as forward:
            loss = F.cross_entropy(model(tokens, positions).flatten(0, -2), targets.flatten())
        with calls.record() as backward:
            loss.backward()
    return {
        "forward": calls.summary(forward),
        "backward": calls.summary(backward),
        "loss": loss.full_tensor().item(),
        "norm": model.norm.weight.grad.cpu(),
        "weights": storage_bytes(model.parameters()),
        "gradients": storage_bytes(p.grad for p in model.parameters()),
    }, t.table().rows


theirs, rows = sb.run(torchs_own, world_size=4).values[0]
print("loss within 1e-5:          ", abs(theirs["loss"] - tensor["loss"]) < 1e-5)
error = (theirs["norm"] - tensor["norm"]).abs().max()
print("norm's gradient within 1e-5:", bool(error < 1e-5))
for what in ("forward", "backward", "weights", "gradients"):
    same = theirs[what] == tensor[what]
    print(f"{what:9}  ours {tensor[what]}, torch's {'the same' if same else theirs[what]}")

# %% [markdown]
# Values, calls, bytes and the weights' memory agree. The gradients do not: torch 2.13 leaves the
# embedding's gradient whole on every rank (64 x 64 instead of 16 x 64 values).
#
# The table of the traced model shows shard and full shape of every parameter; on a model of yours,
# this is the first thing to read.

# %%
for row in rows:
    for name, shape in row["own"].items():
        print(f"{row['name'] + '.' + name:24} {shape}")

# %% [markdown]
# `norm` weights, row-parallel biases: whole on every rank. All else is cut. A parameter that you
# expected to be cut and that is whole is a layer your plan missed, such as the column-parallel head
# that silently stayed a plain `nn.Linear` in [picotron#23](https://github.com/huggingface/picotron/issues/23).
#
# ## A failure to provoke: the forgotten all-reduce
#
# Under sequence parallelism the norms look like ordinary modules with ordinary parameters. Forget
# that their gradients need a sum, and nothing raises. Each rank is a process of its own, so we
# can break it there: `on_shard` is the line that sums.


# %%
def train_forgetful(steps=30):
    from shardbook.parallel import sequence
    from shardbook.studies import tensor_lm

    def forgetful(module, x, group=None):
        return module(x)  # instead of copy_to_group on each of its parameters

    sequence.on_shard = tensor_lm.on_shard = forgetful
    model, loss_fn = SequenceParallelLM(tiny_lm().to(sb.device())), parallel_token_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    positions, losses = torch.arange(64, device=sb.device()), []
    for step in range(steps):
        tokens, targets = (t.to(sb.device()) for t in counting_batch(step))
        loss = loss_fn(model(tokens, positions), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole = {n: p for n, p in model.named_parameters() if "norm" in n or n.endswith("out.bias")}
    return losses, drifted(whole)


def drifted(parameters):
    """Names of the parameters that should be the same on every rank and are not."""
    names = []
    for name, p in parameters.items():
        low, high = p.detach().clone(), p.detach().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            names.append(name)
    return names


losses, names = sb.run(train_forgetful, world_size=4).values[0]
worst = max(abs(a - b) for a, b in zip(whole, losses, strict=True))
print("the loss falls to less than 1:", losses[-1] < 1)
print("the right curve within 1e-3:  ", worst < 1e-3)
print("the right curve within 0.1:   ", worst < 0.1)
print("drifted:", ", ".join(names))

# %% [markdown]
# The loss falls, and in a plot the curve looks like the right one: it is off by more than rounding,
# and by less than 0.1. Adam divides by the gradient's size, so here an addend of the gradient does
# nearly what the whole would. That is so for this toy and its 30 steps: gpt-neox measured very poor
# convergence with the same omission, the loss went flat near 8
# ([gpt-neox#1257](https://github.com/EleutherAI/gpt-neox/pull/1257)). And the norms of the ranks have become different parameters: a
# checkpoint of rank 0 is not the model that was trained, and P = 8 will not continue what P = 4
# began. `attn.out.bias` is in step, its sum is elsewhere. Run `drifted` now and then in a real job:
# in [Megatron-LM#1446](https://github.com/NVIDIA/Megatron-LM/issues/1446) the gradients of the last
# norm differ between tensor ranks, in
# [TransformerEngine#441](https://github.com/NVIDIA/TransformerEngine/issues/441) the weights of the
# norms do after one step.
#
# ## Dropout and the random state
#
# Dropout draws random masks, so the random state matters too. On an activation that is *whole* (the
# residual), every rank must draw the same mask. On one that is *cut* (hidden features, attention
# weights of its own heads), every rank must draw a different one. One seed for all ranks does the
# first, a seed for each rank the second; a model needs both at once, so it keeps two generators
# (Megatron-LM's second is called `model-parallel-rng`; under sequence parallelism it went unused from
# June 2023 on, an `and` where a comma was meant,
# [Megatron-LM#1256](https://github.com/NVIDIA/Megatron-LM/issues/1256)).


# %%
def masks(seeds):
    """Dropout masks on a whole and on a cut activation, from generators seeded as told."""
    rank = dist.get_rank()
    seed = {"one seed": (7, 7), "a seed a rank": (7 + rank, 7 + rank), "both": (7, 107 + rank)}
    whole_rng, cut_rng = (torch.Generator().manual_seed(s) for s in seed[seeds])
    residual = torch.rand(5, 64, generator=whole_rng) > 0.1
    hidden = torch.rand(5, 256 // dist.get_world_size(), generator=cut_rng) > 0.1
    return residual, hidden


for seeds in ("one seed", "a seed a rank", "both"):
    (r0, h0), (r1, h1), *_ = sb.run(masks, seeds, world_size=4).values
    agree, repeat = torch.equal(r0, r1), torch.equal(h0, h1)
    verdict = "right" if agree and not repeat else "wrong"
    print(
        f"{seeds:14} residual masks agree: {agree!s:5} hidden masks repeat: {repeat!s:5} {verdict}"
    )

# %% [markdown]
# With one seed, features 0, 64, 128 and 192 of the hidden layer always drop together: the network
# trains, but its masks are not the independent ones you asked for. With a seed for each rank the residual streams drift
# apart at once. Under sequence parallelism the residual is cut as well, and takes the rank's own
# generator.
#
# ## Hiding the all-reduce: Domino
#
# In a layer the all-reduce depends on the product before it, and the next product on the
# all-reduce. There is nothing to overlap, until the batch is cut in two (Domino, arXiv 2409.15241):
# while half a's sum travels, half b computes.
#
# Two cores cannot show this with real kernels, so the kernels are **paced**: `sb.pace(ms)` sleeps
# for a product's time, and a link that carries one transfer at a time takes a known time for each.
# The layers and the all-reduces are real, on two ranks. Kernel and transfer of a whole batch take
# 100 ms each, of half a batch 50. Predict the time of two layers (four halves of a block), serial
# and cut.

# %% predict="predicted"
C = T = 100  # ms: a kernel, a transfer
serial = 4 * (C + T)
domino = 4 * C + T / 2  # all kernels back to back, and the last half's transfer in the open
predicted = domino / serial


# %%
def transfer(x, ms):
    """A real all-reduce that takes at least `ms`: the link is paced, too."""
    start = time.monotonic()
    dist.all_reduce(x)
    sb.pace(max(0.0, ms - 1e3 * (time.monotonic() - start)), "rest of the transfer")


def two_layers(parts):
    """Seconds and output of four half blocks, MLPs whose sums travel, on `parts` micro-batches."""
    torch.manual_seed(2)
    layers = [(nn.Linear(24, 96), nn.Linear(96, 24)) for _ in range(4)]
    layers = [
        (ColumnParallelLinear(u.to(sb.device())), RowParallelLinear(d.to(sb.device())))
        for u, d in layers
    ]
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(4)).to(sb.device())
    xs = list(x.chunk(parts))
    with torch.no_grad(), ThreadPoolExecutor(1) as link:  # one transfer at a time

        def compute(i, up, down):
            sb.pace(C / parts, f"half {i}" if parts > 1 else "product")
            h = F.gelu(F.linear(xs[i], up.weight, up.bias))
            h = F.linear(h, down.weight)  # a partial sum
            return link.submit(transfer, h, T / parts), h

        def finish(i, sent):
            sent[0].result()
            xs[i] = xs[i] + sent[1]

        link.submit(transfer, torch.zeros(1, device=sb.device()), 0).result()  # start together
        start, sent = time.monotonic(), [None] * parts
        for up, down in layers:
            for i in range(parts):
                if sent[i]:
                    finish(i, sent[i])
                sent[i] = compute(i, up, down)
        for i in range(parts):
            finish(i, sent[i])
        return time.monotonic() - start, torch.cat(xs).cpu()


# %% tags=["nbval-ignore-output"]
one = sb.run(two_layers, 1, world_size=2, trace=True)
two = sb.run(two_layers, 2, world_size=2, trace=True)
ratio = two.values[0][0] / one.values[0][0]
print(f"paced: serial {one.values[0][0]:.3f} s, cut in two {two.values[0][0]:.3f} s")
print(f"ratio predicted {predicted:.3f}, measured {ratio:.3f}")
assert ratio < 0.8, "cut in two is faster"
one.trace

# %% [markdown]
# Serial: a product, then its sum on the link, never both. Cut in two, a sum travels under the other
# half's product:

# %% tags=["nbval-ignore-output"]
two.trace

# %%
same = (one.values[0][1] - two.values[0][1]).abs().max() < 1e-5
print("same output:", bool(same))

# %% [markdown]
# The price: products on half the rows, which fill a device less well, and twice as many, smaller
# messages.
#
# ## Two more places to hide
#
# **In backward** a column-parallel layer has two products: one for its input's gradient, which has to be
# summed over the ranks, and one for its weight's, which nobody waits for. Start the sum after the first,
# and run the second behind it (Megatron-LM does so). **With sequence parallelism** the gather itself can
# come in pieces: multiply the tokens at hand while they travel on around the ring and the next ones come.
#
# Predict both, paced, where each product and each message takes 40 ms: three layers backward; and four
# pieces of a gather, each multiplied.

# %% predict="backward_ratio pieces_ratio"
backward_ratio = (3 * 2 * 40) / (3 * 3 * 40)  # the sum is behind the weight's gradient
pieces_ratio = (4 * 40) / (3 * 40 + 4 * 40)  # three messages behind the first three products


# %%
def hidden_messages():
    """[(seconds, result)] of backward and of a gathered product, serial and overlapped."""
    data = torch.Generator().manual_seed(dist.get_rank())
    x, g = (torch.randn(8, 16, generator=data).to(sb.device()) for _ in "xg")
    weights = [torch.randn(16, 16, generator=data).to(sb.device()) for _ in range(3)]
    found = []
    for behind in (False, True):
        with sb.mark("backward, weights behind" if behind else "backward, serial"):
            found.append(overlap.timed(overlap.backward_of_layers, x, g, weights, behind, 40))
    for pieces in (False, True):
        with sb.mark("gather in pieces" if pieces else "gather, then multiply"):
            found.append(overlap.timed(overlap.gathered_product, x, weights[0], pieces, 40))
    return [(seconds, result) for seconds, result in found]


# %% tags=["nbval-ignore-output"]
run = sb.run(hidden_messages, world_size=4, trace=True)
(a, _), (b, _), (c, _), (d, _) = run.values[0]
print(f"paced backward: {b / a:.2f} of serial, predicted {backward_ratio:.2f}")
print(f"paced gather and product: {d / c:.2f} of serial, predicted {pieces_ratio:.2f}")
assert b < a and d < c
run.trace

# %%
for (_, (one_grad, ones)), (_, (other_grad, others)), (_, y), (_, z) in run.values:
    pairs = [(one_grad, other_grad), (y, z), *zip(ones, others, strict=True)]
    assert all(torch.allclose(p, q, rtol=1e-4, atol=1e-3) for p, q in pairs)
print("same gradients and products on every rank")

# %% [markdown]
# ## When is a layer bound by its messages?
#
# A layer's products do `24 B S D²` operations forward, over P ranks. Its two all-reduces move `2 B S D`
# bytes each in half precision, of which the link carries `2 (P-1)/P`. Batch and sequence cancel: time of
# messages over time of products is
#
# $$\frac{8\,(P-1)/P\; BSD\,/\,\text{bandwidth}}{24\,BSD^2/P\,/\,\text{speed}} = \frac{(P-1)\;\text{speed}}{3\,D\;\text{bandwidth}}$$
#
# (attention's scores not counted). With an H100's 989 TFLOP/s dense bf16, of which we assume half, NVLink's
# 450 GB/s each way, and in the last column eight cards in eight hosts, with 50 GB/s of RDMA for each:


# %%
def messages_over_products(width, ranks, bandwidth, speed=0.5 * 989e12):
    """Time of a layer's all-reduces over that of its products, forward."""
    return (ranks - 1) * speed / (3 * width * bandwidth)


NVLINK, RDMA = 450e9, 50e9  # a card's
print("width    " + "".join(f"P = {p:<8}" for p in (2, 4, 8)) + "P = 8 over RDMA")
for width in (1024, 4096, 8192, 16_384):
    ratios = [messages_over_products(width, p, NVLINK) for p in (2, 4, 8)]
    ratios.append(messages_over_products(width, 8, RDMA))
    print(f"{width:6,}   " + "".join(f"{r:<12.2f}" for r in ratios))
assert messages_over_products(8192, 8, NVLINK) < 1 < messages_over_products(8192, 8, RDMA)

# %% [markdown]
# Above 1 the device waits more than it computes, unless the messages hide. Narrow models don't pay for
# many ranks, wide ones do; with one card per host none of these does.
#
# **A model of 70B parameters on 80 GB cards.** 80 layers, D = 8192; mixed precision with Adam keeps 18
# bytes per parameter (Megatron-LM's recipe, chapter 21), and a layer's activations of one sequence of 8,192 tokens are
# `34 S D / P` bytes with sequence parallelism (the formula below). Sixteen cards are two hosts of eight,
# each with an adapter per card, whose rates NCCL adds up
# ([nccl#412](https://github.com/NVIDIA/nccl/issues/412)).

# %%
for ranks in (1, 2, 4, 8, 16):
    state = 70e9 * 18 / ranks / 1e9
    activations = 80 * 34 * 8192 * 8192 / ranks / 1e9
    link, name = (NVLINK, "NVLink") if ranks <= 8 else (8 * RDMA, "8 x RDMA")
    ratio = messages_over_products(8192, ranks, link)
    print(
        f"P = {ranks:2}: state {state:5.0f} GB, activations {activations:4.0f} GB per rank; "
        f"messages / products {ratio:4.2f} ({name})"
    )

# %% [markdown]
# Tensor parallelism alone does not fit: P = 16 would still need 79 GB of state beside its activations, and
# through two hosts' adapters its messages take more than twice the share they take at P = 8, before any
# latency. So **TP 8, because** the host ends there and the messages take less than a third of the products'
# time; the remaining factor of the state, three or more, is the pipeline's (chapter 23) or ZeRO's
# (chapter 21).
#
# ## On a real cluster
#
# - **Tensor parallelism stays where the fast links are.** Four all-reduces of `[B, S, D]` a layer
#   are on the critical path. An H100 has 900 GB/s of NVLink (both directions together, NVIDIA's
#   data sheet) and typically 50 GB/s of RDMA to other hosts, so the group ends at the host's border:
#   P = 8. An Ascend 910C in a CloudMatrix384 has 392 GB/s each way to all 384 over the unified bus
#   and 400 Gb/s of RDMA beyond (arXiv 2506.12708); in an 8-card host the group stays inside HCCS.
# - **HCCL and NCCL** want the same group order on all ranks; the rank numbers of one tensor group
#   are consecutive on a host, so that the mesh's innermost dimension is the tensor dimension.
#   SUM, PRODUCT, MIN and MAX exist in both, and AVG, which torch_npu makes of a sum and a division.
#   `ASCEND_RT_VISIBLE_DEVICES` and `CUDA_VISIBLE_DEVICES` renumber
#   devices, so check that neighbours in the group are neighbours on the board.
# - **Small P first.** The products become `D x 4D/P`: at P = 8 of a 7B model a rank's kernels fill
#   the device badly. Sequence parallelism costs the norms' small sums and, where shards are kept, a gather
#   more for each half in backward, and saves what the first table shows.
# - **bf16 sums in another order.** Losses of P = 1 and P = 8 differ by bf16's rounding; the curves of an
#   fp32 run lie much closer (within 1e-3 above).
#
# | published | figure | source (arXiv) |
# |---|---|---|
# | 8.3B parameters, 8-way tensor and 64-way data parallel, 512 V100 | 15.1 PFLOP/s, 76 % of linear | 1909.08053 |
# | sequence parallel, selective recomputation | activations 5x less | 2205.05198 |
# | the same, 530B parameters on 2240 A100 | 54.2 % MFU, before 42.1 % | 2205.05198 |
# | Domino on DGX-H100 | up to 1.3x over Megatron-LM | 2409.15241 |
#
# The second paper also has a formula for the activations of a layer, in bytes at half precision,
# with H heads: `SBD(34 + 5HS/D)` whole, `SBD(10 + 24/P + 5HS/(DP))` tensor parallel, and the first
# over P with sequence parallelism. Ours beside it, as parts of what one rank keeps:

# %% tags=["nbval-ignore-output"]
(_, whole_a), *parts = held.values()
formula = {  # fused attention keeps no scores, so without 5HS/D; then without the masks' 2 bytes, too
    "tensor 2": ((10 + 24 / 2) / 34, (8 + 24 / 2) / 32),
    "tensor 4": ((10 + 24 / 4) / 34, (8 + 24 / 4) / 32),
    "tensor + sequence 4": (1 / 4, (4 + 28 / 4) / 32),  # two gathered inputs of 2 bytes stay whole
    "keeping shards 4": (1 / 4, 1 / 4),
}
for (name, (paper, no_masks)), (_, a) in zip(formula.items(), parts, strict=True):
    print(f"{name:20} measured {a / whole_a:.2f}   formula {paper:.2f}, for ours {no_masks:.2f}")
    if sb.device().type == "cpu":  # elsewhere attention's kernel may keep other tensors
        assert abs(a / whole_a - no_masks) < 0.02

# %% [markdown]
# The formula counts dropout masks, of which ours has none, and shards kept, which the third row does not.
# With both put right, it meets what was measured within 0.02; embedding, logits and the rotated queries
# and keys are in the rest. Scores do not count where attention is fused (chapter 31); where they are kept,
# the term `5HS/D` is cut by heads as well.
#
# Now write it: [the lab](../labs/22_tensor_parallel.ipynb). Then
# [chapter 23](23_pipeline_parallel.ipynb) cuts between layers.
