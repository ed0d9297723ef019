# %% [markdown]
# # 22 · Tensor and sequence parallel: the lab
#
# You write the layers that cut a transformer over ranks: three conjugate pairs, two linear layers,
# attention, the two ends at the vocabulary, and a sequence-parallel block. At the end the small
# model of this book trains with them. Two to three hours.
#
# Every check runs your code on real groups of 1 to 4 ranks and compares values, gradients, calls,
# bytes and memory with the unsharded layer. Groups need not begin at rank 0: use
# `dist.get_rank(group)`, never `dist.get_rank()`.

# %%
import shardbook as sb

import copy

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardbook import calls, plot
from shardbook.checks import tensor_parallel as check
from shardbook.basics.tiny import causal_attention, counting_batch, rotate, tiny_lm, token_loss

# What one rank does with a tensor. New tensors, the input stays as it is; autograd sees nothing.
from shardbook.parallel.tensor import (
    Group,  # a process group, or None for all ranks
    all_gathered,  # (x, dim, group): every rank's x, side by side along dim
    all_reduced,  # (x, group): the sum of every rank's x
    conjugate,  # (x, forward, backward): forward(x), and backward(grad) on the way back
    own_slice,  # (x, dim, group): this rank's equal part, ValueError if there is none
    reduce_scattered,  # (x, dim, group): this rank's part of the sum
    share_of,  # (total, size, what): total / size, or a ValueError that names what
    take_rows,  # (linear, rows): nn.Linear of these output rows, in memory of its own
)

# %% [markdown]
# ## Exercise 1: f and g
#
# `conjugate(x, forward, backward)` applies one function to the activations and another to the
# gradients. Write the two that every tensor-parallel layer begins and ends with.
#
# - `copy_to_group`: every rank goes on to use x in its own part of the work.
# - `reduce_from_group`: x is an addend of a sum over ranks, and every rank wants the sum.
#
# <details><summary>Hint 1</summary>
#
# Write down y as a function of what each rank has, then the derivative of the one loss by x.
# </details>
# <details><summary>Hint 2</summary>
#
# `copy_to_group`: the loss depends on x through P ranks, so its gradient has P addends.
# `reduce_from_group`: dy/dx is 1 for every addend.
# </details>
# <details><summary>Hint 3</summary>
#
# A function that returns its input should return `x.view_as(x)`: autograd wants another object.
# </details>

# %% exercise="shardbook.parallel.tensor.copy_to_group shardbook.parallel.tensor.reduce_from_group"

# %%
check.copy_to_group(copy_to_group)

# %%
check.reduce_from_group(reduce_from_group)

# %% [markdown]
# ## Exercise 2: two more pairs
#
# For cut activations: gather and scatter, all-gather and reduce-scatter. Mind the two gathers: they do the same forward and not the same backward.
# After `gather_from_group` every rank does the *same* with the result, after `all_gather_to_group`
# each rank does *another part* of the work.
#
# <details><summary>Hint 1</summary>
#
# The transpose of "take a slice" is "put slices side by side", and the other way round. The
# transpose of "sum over ranks" is "give it to all ranks".
# </details>
# <details><summary>Hint 2</summary>
#
# If all ranks did the same with the gathered tensor, they all have the same, whole gradient. If
# each did a part, the gradients have to be summed first.
# </details>
# <details><summary>Hint 3</summary>
#
# Backward: `gather_from_group` takes this rank's slice, `scatter_to_group` all-gathers,
# `reduce_scatter_to_group` all-gathers, `all_gather_to_group` reduce-scatters.
# </details>

# %% exercise="shardbook.parallel.tensor.gather_from_group shardbook.parallel.tensor.scatter_to_group shardbook.parallel.tensor.reduce_scatter_to_group shardbook.parallel.tensor.all_gather_to_group"

# %%
check.gather_from_group(gather_from_group)

# %%
check.scatter_to_group(scatter_to_group)

# %%
check.reduce_scatter_to_group(reduce_scatter_to_group)

# %%
check.all_gather_to_group(all_gather_to_group)

# %% [markdown]
# ## Exercise 3: linear layers
#
# Both are built from the full `nn.Linear`, the same on every rank, and keep their shard of it in
# `.weight` and `.bias`. Without a bias, `.bias` is None.
#
# First a prediction. An MLP of a column-parallel `Linear(64, 256)` and a row-parallel
# `Linear(256, 64)` on x `[4, 32, 64]` in fp32: how many bytes are all-reduced, forward and
# backward together? The weights are 64 x 256 each; do they matter?

# %% predict="predicted"
predicted = 2 * 4 * 32 * 64 * 4  # one g forward, one f backward, of [4, 32, 64]


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Column: rows of `weight` and of `bias`, since `nn.Linear` computes `x @ weight.T`. Row: columns
# of `weight`, the bias whole.
# </details>
# <details><summary>Hint 2</summary>
#
# `own_slice` gives memory of its own. A chunk of the full weight is a view and keeps all of it
# alive: the check looks.
# </details>
# <details><summary>Hint 3</summary>
#
# Where does the row-parallel bias go? Added before the sum it comes out P times. Divided by P and
# added before the sum, the output is right and its gradient P times too small.
# </details>
# <details><summary>Hint 4</summary>
#
# `gather_output`: what follows is the same on every rank. Which of the two gathers?
# </details>

# %% exercise="shardbook.parallel.tensor.ColumnParallelLinear shardbook.parallel.tensor.RowParallelLinear"

# %%
check.column_parallel_linear(ColumnParallelLinear)

# %%
check.row_parallel_linear(RowParallelLinear)


# %%
def mlp_bytes():
    up, down = (nn.Linear(*sizes).to(sb.device()) for sizes in ((64, 256), (256, 64)))
    up, down = ColumnParallelLinear(up), RowParallelLinear(down)
    x = torch.randn(4, 32, 64).to(sb.device()).requires_grad_()
    with calls.record() as log:
        down(F.gelu(up(x))).sum().backward()
    return sum(c.nbytes for c in log)


sb.predict("bytes all-reduced", predicted, sb.run(mlp_bytes).values[0])

# %% [markdown]
# ### A failure to provoke: forget f
#
# Leave `copy_to_group` out and let the check speak. Which properties still hold? Read the hint
# before you go on: forward values can't show this mistake.
#
# <details><summary>Answer</summary>
#
# The cell prints them. Outputs and the shards' own gradients are right, since neither needs f; what breaks
# is the gradient of the input, which lacks the addends of the other ranks, and the number of calls: the
# all-reduce that would have brought them is missing.
# </details>


# %%
def without_f():
    class Forgetful(ColumnParallelLinear):
        def forward(self, x):
            y = F.linear(x, self.weight, self.bias)
            return gather_from_group(y, -1, self.group) if self.gather_output else y

    return Forgetful


try:
    verdict = check.column_parallel_linear.examine(without_f())
    for p in verdict.properties:
        print("holds  " if p.ok else "BROKEN ", p.name)
    print(verdict.status + ("; hint: " + verdict.hint if verdict.hint else ""))
except NameError:
    print("write exercise 3 first")

# %% [markdown]
# Values can't show it, calls can: the traces of one step with your layer and without f. `diff` names
# the first call that differs. Was it made forward or backward?
#
# <details><summary>Answer</summary>
#
# Backward. Forward both make one all-reduce, g of the row-parallel layer; the second call, f's, is missing.
# </details>


# %%
def mlp_step(column):
    up, down = (nn.Linear(*sizes).to(sb.device()) for sizes in ((64, 256), (256, 64)))
    up, down = column(up), RowParallelLinear(down)
    x = torch.ones(4, 32, 64, device=sb.device(), requires_grad=True)
    down(F.gelu(up(x))).sum().backward()


def compare():
    right, wrong = (
        sb.run(mlp_step, column, world_size=2, trace=True).trace
        for column in (ColumnParallelLinear, without_f())
    )
    return wrong.diff(right)


print(compare())

# %% tags=["nbval-ignore-output"]
compare()

# %% [markdown]
# ### A hang to provoke: one rank leaves early
#
# Rank 1 returns before the sum. Everyone else waits for it. How does the message tell who?
#
# <details><summary>Answer</summary>
#
# Each rank's calls are recorded as they begin. The others stand in an all-reduce that rank 1 never began.
# </details>


# %%
def rank_1_leaves():
    down = RowParallelLinear(nn.Linear(8, 3).to(sb.device()))
    x = torch.randn(5, 8 // dist.get_world_size()).to(sb.device())
    if dist.get_rank() != 1:
        down(x)


try:
    sb.run(rank_1_leaves, timeout=20)
except sb.NotWritten:
    print("write exercise 3 first")
except sb.RankError as error:
    print("hung:", error.hung)
    print("names rank 1:", "rank 1" in str(error), "  names the call:", "all_reduce" in str(error))

# %% [markdown]
# ## Exercise 4: attention
#
# `qkv` is fused: rows of q, then of k, then of v, each head by head. A rank takes its heads of all
# three and its columns of `out`. With fewer kv heads than ranks, P / kv heads consecutive ranks
# hold the same kv head.
#
# `causal_attention(q, k, v)` takes `[B, H, S, d]` and fewer kv heads than heads; the reference
# rotates q and k with `rotate(q, positions)` if the call gives positions, as the small model does.
# `partial` is the part between f and g. Keep it apart: under sequence parallelism (exercise 6) an
# all-gather and a reduce-scatter take the places of f and g, and `partial` stays.
#
# <details><summary>Hint 1</summary>
#
# Think in heads: `torch.arange(rows).view(-1, head_dim)` gives the rows of each of the H + 2 Hkv
# heads. Pick heads, flatten, and `take_rows`.
# </details>
# <details><summary>Hint 2</summary>
#
# First kv head of a rank: `rank * num_kv_heads // size`, right for more ranks than kv heads, too.
# </details>
# <details><summary>Hint 3</summary>
#
# A copied kv head: each copy sees the gradient of its own queries. `conjugate(weight, identity,
# sum over the copies)` on the weight and on the bias. All-gather the gradients, then add up those
# of the ranks that have the same head.
# </details>
# <details><summary>Hint 4</summary>
#
# `out` is row parallel already: its columns are the heads, in order.
# </details>

# %% exercise="shardbook.parallel.tensor.ParallelAttention"

# %%
check.parallel_attention(ParallelAttention)

# %% [markdown]
# ## Exercise 5: the vocabulary
#
# The embedding looks up what this rank has and contributes zeros for the rest. The loss needs the
# largest logit, the sum of exponentials and the target's logit, each of one value per token.
#
# Predict the bytes of the three all-reduces for 40 tokens in fp32, a vocabulary of 128,000, 4 ranks.

# %% predict="predicted"
predicted = 3 * 40 * 4  # the vocabulary does not enter


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `local = tokens - first`: what is below 0 or beyond the shard is elsewhere. Look up row 0 for it
# and overwrite the *result* with zeros.
# </details>
# <details><summary>Hint 2</summary>
#
# The largest logit is a constant that cancels: no gradient has to flow through it. It must be the
# largest of all ranks, or exp overflows or the sums do not fit together.
# </details>
# <details><summary>Hint 3</summary>
#
# With g for the two sums, autograd's own backward is softmax minus one-hot on your columns.
# </details>
# <details><summary>Hint 4</summary>
#
# A target of -100 is on no rank, so the target's logit comes out 0; set its loss to 0 at the end.
# `masked_fill`, not a product with a mask: 0 times infinity is not 0.
# </details>

# %% exercise="shardbook.parallel.vocab.VocabParallelEmbedding shardbook.parallel.vocab.vocab_parallel_cross_entropy"

# %%
check.vocab_parallel_embedding(VocabParallelEmbedding)

# %%
check.vocab_parallel_cross_entropy(vocab_parallel_cross_entropy)


# %%
def loss_bytes():
    logits = torch.randn(40, 128_000 // 4).to(sb.device())
    targets = torch.arange(40, device=sb.device()) * 3000
    with calls.record() as log:
        vocab_parallel_cross_entropy(logits, targets)
    return sum(c.nbytes for c in log)


sb.predict("bytes all-reduced", predicted, sb.run(loss_bytes).values[0])

# %% [markdown]
# ## Exercise 6: sequence parallel
#
# `y = x + down(gelu(up(norm(x))))` for x `[B, S/P, D]`: norm and residual on this rank's tokens,
# the MLP on its hidden features. All-gather into the MLP, reduce-scatter out of it.
#
# Before you write: x is cut by tokens. The norm's weight is whole on every rank. Its gradient on
# rank 0 is computed from which tokens? And that of `mlp_down.bias`?
#
# <details><summary>Answer</summary>
#
# Both from rank 0's S/P tokens only: the bias is added after the reduce-scatter. Each is one addend of P.
# </details>
#
# `on_shard(module, x, group)` runs a module on this rank's tokens with its parameters sent through
# f, so that their gradients are summed.

# %%
from shardbook.parallel.sequence import on_shard

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Your linear layers hold the shards, but their `forward` would apply f and g. Use
# `F.linear(h, self.mlp_up.weight, self.mlp_up.bias)`.
# </details>
# <details><summary>Hint 2</summary>
#
# f on a *parameter* is "sum my gradient over the group". The bias of `mlp_down` needs it too.
# </details>
# <details><summary>Hint 3</summary>
#
# Hooks after accumulation (`register_post_accumulate_grad_hook`) sum the first micro-batch's
# gradient a second time.
# </details>

# %% exercise="shardbook.parallel.sequence.SequenceParallelBlock"

# %%
check.sequence_parallel_block(SequenceParallelBlock)

# %% [markdown]
# ## Your layers train the model
#
# The small model with your layers on four ranks, beside one process. The curves must coincide.


# %%
def my_model():
    """The small model, every layer replaced by yours: this rank's logits [B, S, V/P]."""
    model = tiny_lm().to(sb.device())
    model.embed = VocabParallelEmbedding(model.embed)
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        block.attn = ParallelAttention(attn.qkv, attn.out, attn.num_heads, attn.num_kv_heads)
        mlp.up, mlp.down = ColumnParallelLinear(mlp.up), RowParallelLinear(mlp.down)
    model.head = ColumnParallelLinear(model.head)
    return model


def train(parallel, steps=30):
    model = my_model() if parallel else tiny_lm().to(sb.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    positions, losses = torch.arange(64, device=sb.device()), []
    for step in range(steps):
        tokens, targets = (t.to(sb.device()) for t in counting_batch(step))
        logits = model(tokens, positions)
        if parallel:
            loss = vocab_parallel_cross_entropy(logits, targets).mean()
        else:
            loss = token_loss(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


one = sb.run(train, False, world_size=1).values[0]
mine = sb.run(train, True, world_size=4).values[0]
print("curves within 1e-3:", max(abs(a - b) for a, b in zip(one, mine, strict=True)) < 1e-3)
plot.curves({"one process": one, "your layers, 4 ranks": mine}, "step", "loss")
plt.show()

# %% [markdown]
# ### A trace to read
#
# One step of it. Between which two slices does each all-reduce lie? Which ranks wait in it, and for
# whom? Which all-reduces belong to no block?
#
# <details><summary>Answer</summary>
#
# Forward, after the row-parallel product of each half of a block (g); backward, after the column-parallel
# layer's (f). In each, whoever comes first waits for the last. To no block belong the embedding's at the
# beginning, the three of the loss at the end of forward, and the head's f at the beginning of backward.
# </details>


# %% tags=["nbval-ignore-output"]
def one_step():
    model = my_model()
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0))
    positions = torch.arange(64, device=sb.device())
    with sb.mark("forward"):
        loss = vocab_parallel_cross_entropy(model(tokens, positions), targets).mean()
    with sb.mark("backward"):
        loss.backward()


sb.run(one_step, world_size=2, trace=True).trace

# %% [markdown]
# ## On a real cluster
#
# - Keep the group inside a host (NVLink, HCCS): every all-reduce of this lab is on the critical
#   path, twice forward and twice backward in each layer.
# - Put this lab's functions into a `.py` file that ends in `sb.run(…)` (chapter 02 has an example) and
#   start it with `torchrun --nproc-per-node 8`: `sb.run` then uses the ranks that torchrun made. On an NPU the group is HCCL's, on a CUDA device NCCL's, and nothing in your
#   code names either.
# - HCCL and NCCL run collectives on a stream. A tensor that you overwrite right after an
#   asynchronous call may not have been sent yet; gloo on a CPU will not show you that.
# - Where P does not divide your vocabulary, pad it (and mask the padded logits with -inf in the
#   loss); where it does not divide your heads, take another P.
