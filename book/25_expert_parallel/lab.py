# %% [markdown]
# # 25 · Expert parallel: the lab
#
# You write a mixture of experts and spread it over ranks: the router, the balance loss, the
# capacity, the journey of the tokens to their experts and back, and the layer. At the end the small
# model of this book trains with it. Two to three hours.
#
# Every check compares your code with a loop over tokens, on real groups of 1 to 4 ranks with
# different numbers of tokens; one rank has none. Groups need not begin at rank 0: use
# `dist.get_rank(group)`, never `dist.get_rank()`.

# %%
import shardbook as sb

import dataclasses

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardbook import calls, plot
from shardbook.checks import expert_parallel as check
from shardbook.basics.tiny import counting_batch, token_loss
from shardbook.parallel.expert import Group  # a process group, or None for all ranks
from shardbook.studies.expert_lm import average_moe_gradients_, expert_groups, moe_lm
from shardbook.tracing import merge

# %% [markdown]
# ## Exercise 1: the router's choice
#
# Logits `[T, E]` in, weights `[T, k]` and experts `[T, k]` out, the largest first.
#
# <details><summary>Hint 1</summary>
#
# Softmax over *all* experts, then `topk`. Softmax of the chosen logits is right only for normalised
# weights.
# </details>
# <details><summary>Hint 2</summary>
#
# `keepdim=True` where you divide, and no `detach`: the weights are the router's only gradient.
# </details>

# %% exercise="shardbook.parallel.expert.route_top_k"

# %%
check.route_top_k(route_top_k)

# %% [markdown]
# ## Exercise 2: the balance loss
#
# `E * sum of f_e p_e`. Before you write: what is it if all T tokens choose the same expert (k = 1)
# and the router is certain of it, with 8 experts?

# %% predict="predicted"
predicted = 8  # E * 1 * 1: f and p are 1 for that expert, 0 for the others

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# f_e counts *choices*: T k of them, so the f_e sum to 1 for any k. `torch.bincount` counts.
# </details>
# <details><summary>Hint 2</summary>
#
# p_e is the mean over all tokens of the softmax, whether the expert was chosen or not.
# </details>
# <details><summary>Hint 3</summary>
#
# `bincount` refuses -1. A dropped choice counts for no expert: shift all by one, and leave the first
# count out.
# </details>

# %% exercise="shardbook.parallel.expert.load_balancing_loss"

# %%
check.load_balancing_loss(load_balancing_loss)

# %%
certain = torch.zeros(16, 8)
certain[:, 3] = 100.0
worst = load_balancing_loss(certain, torch.full((16, 1), 3))
sb.predict("the loss at its worst", predicted, round(worst.item(), 3))

# %% [markdown]
# ## Exercise 3: capacity
#
# Which choices does an expert keep if it takes `capacity` rows? Token order, and every token's first
# choice before any token's second. An expert of -1 takes no room and is not kept.
#
# <details><summary>Hint 1</summary>
#
# Put the choices into the order in which they are served: `experts.t().flatten()`.
# </details>
# <details><summary>Hint 2</summary>
#
# For each choice: how many up to here went to the same expert? One-hot, then `cumsum` down the rows.
# </details>
# <details><summary>Hint 3</summary>
#
# `F.one_hot` refuses -1: clamp, and multiply by `order >= 0`. At the end undo the transposition:
# `unflatten(0, (k, T)).t()`.
# </details>

# %% exercise="shardbook.parallel.expert.apply_capacity"

# %%
check.apply_capacity(apply_capacity)

# %% [markdown]
# ## Exercise 4: dispatch
#
# Rank r owns experts r E/P to (r+1) E/P - 1. Tokens travel to their experts. You get the all-to-all
# of rows with its backward, and a record for what `combine` will need, with N rows sent by this rank
# and M that it receives:
#
# | field of `Dispatched` | shape | what it is |
# |---|---|---|
# | `counts` | a list of E/P numbers | rows for each local expert, as `received` is ordered |
# | `choices` | `[N]` | which choice each row sent is, token * k + its place, in the order it was sent |
# | `shape` | T, k | that of `experts` |
# | `send` | a list of P numbers | rows to each rank; their sum is N |
# | `receive` | a list of P numbers | rows from each rank; their sum is M |
# | `arrival` | `[M]` | where each row of `received` stood when it arrived |
#
# Change the record if your way needs other things, the checks read `counts` only.

# %%
from shardbook.parallel.expert import Dispatched, _AllToAllRows

for field in dataclasses.fields(Dispatched):
    print(field.name)

# %% [markdown]
# `_AllToAllRows.apply(x, send, receive, group)` sends `send[r]` consecutive rows of x to rank r and
# returns the `sum(receive)` rows that arrive, ordered by source rank.
#
# First a prediction. 4 ranks have 3, 7, 0 and 2 tokens of width 5 in fp32, k = 2, nothing is
# dropped. How many bytes of rows do all ranks together hand to the all-to-all of `dispatch`?

# %% predict="predicted"
predicted = (3 + 7 + 0 + 2) * 2 * 5 * 4  # a row for each choice, padding for nobody

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Work on choices, not on tokens: `experts.flatten()`; choice c belongs to token `c // k`. A stable
# `argsort` by expert puts together what goes to one rank, since a rank's experts are consecutive.
# </details>
# <details><summary>Hint 2</summary>
#
# -1 sorts to the front: cut these choices off.
# </details>
# <details><summary>Hint 3</summary>
#
# A receiver must know its sizes. All-to-all the E counts, E/P for each rank; what you get is, by
# source rank, the rows for each of your experts. Sums give `receive`, sums the other way `counts`.
# </details>
# <details><summary>Hint 4</summary>
#
# Rows arrive by source, inside one by expert. You know the counts, so you know each row's local
# expert: `repeat_interleave`, then a stable `argsort`. Keep this order for the way home.
# </details>

# %% exercise="shardbook.parallel.expert.dispatch"

# %%
check.dispatch(dispatch)


# %%
def rows_sent():
    rank = dist.get_rank()
    tokens = (3, 7, 0, 2)[rank]
    x = torch.randn(tokens, 5).to(sb.device())
    experts = torch.randint(12, (tokens, 2), generator=torch.Generator().manual_seed(rank))
    with calls.record() as log:
        dispatch(x, experts.to(sb.device()), 12)
    return sum(c.nbytes for c in log if c.dtype.is_floating_point)


sb.predict("bytes of rows", predicted, sum(sb.run(rows_sent, world_size=4).values))

# %% [markdown]
# ## Exercise 5: combine
#
# The same way home: rows back into the order in which they arrived, the all-to-all with `send` and
# `receive` exchanged, times the weight of the choice, summed up by token. No counts travel: they are
# known.
#
# <details><summary>Hint 1</summary>
#
# If `received = arrived[arrival]`, what is the inverse permutation? `back[arrival] = arange`.
# </details>
# <details><summary>Hint 2</summary>
#
# What comes home is in the order in which you sent it, so row n is choice `choices[n]`.
# </details>
# <details><summary>Hint 3</summary>
#
# A token has up to k rows: `index_add`, which has a gradient. Plain assignment keeps the last one.
# </details>

# %% exercise="shardbook.parallel.expert.combine"

# %%
check.combine(combine)

# %% [markdown]
# ## Exercise 6: the layer
#
# Built from the full router and the full list of experts, keeps the router in `.router` and its own
# experts in `.experts` (an `nn.ModuleList`). Nothing here needs a hook or a division. If the experts
# do not divide by the ranks, the constructor raises `ValueError`.
#
# <details><summary>Hint 1</summary>
#
# `received.split(state.counts)` gives each local expert its rows.
# </details>
# <details><summary>Hint 2</summary>
#
# Let an expert without rows run on its empty part: `nn.Linear` maps `[0, D]` to `[0, D]`, and the
# gradient is zero instead of missing.
# </details>
# <details><summary>Hint 3</summary>
#
# A slice of a list does not hold the other experts; `nn.ModuleList(experts)[…]` stored as an
# attribute does not either, but the list itself, stored anywhere, keeps all of them in memory.
# </details>

# %% exercise="shardbook.parallel.expert.ExpertParallelMoE"

# %%
check.expert_parallel_moe(ExpertParallelMoE)

# %% [markdown]
# **Compare two traces.** Your layer should call what your `dispatch` and `combine` call, and nothing
# beside it. `diff` names the first call in which two traces differ, or says that none does.


# %%
def forward_only(as_layer):
    moe, generator = moe_lm().blocks[0].mlp.to(sb.device()), torch.Generator().manual_seed(7)
    x = torch.randn(5 + dist.get_rank(), 64, generator=generator).to(sb.device())
    layer = ExpertParallelMoE(moe.router, list(moe.experts), moe.k)
    with sb.trace() as t:
        if as_layer:
            layer(x)
        else:
            weights, experts = route_top_k(moe.router(x), moe.k)
            rows, state = dispatch(x, experts, len(moe.experts))
            combine(rows, weights, state)
    return t


by_hand, layer = (merge(sb.run(forward_only, way, world_size=4).values) for way in (False, True))
print(layer.diff(by_hand))

# %% [markdown]
# ### A failure to provoke: no way back
#
# `dist.all_to_all_single` called in a forward pass has no backward. This layer does what would
# happen: the rows that travel have lost their graph. Nothing raises, the router still gets a
# gradient and the loss will fall. Which properties still hold?


# %%
class NoWayBack(nn.Module):
    """An expert whose rows arrive without their graph."""

    def __init__(self, expert):
        super().__init__()
        self.expert = expert

    def forward(self, rows):
        return self.expert(rows.detach())


def without_way_back(router, experts, k, group=None):
    return ExpertParallelMoE(router, [NoWayBack(e) for e in experts], k, group)


verdict = check.expert_parallel_moe.examine(without_way_back)
for p in verdict.properties:
    print("holds  " if p.ok else "BROKEN ", p.name)

# %% [markdown]
# ### A hang to provoke: nothing to do
#
# Rank 2 has no token and goes home. Its experts do not know that others have tokens for them.


# %%
def goes_home():
    moe = moe_lm().blocks[0].mlp.to(sb.device())
    layer = ExpertParallelMoE(moe.router, list(moe.experts), moe.k)
    x = torch.randn(0 if dist.get_rank() == 2 else 5, 64).to(sb.device())
    return layer(x) if len(x) else x


try:
    sb.run(goes_home, world_size=4, timeout=30, echo=False)
except sb.NotWritten:
    print("write exercise 6 first")
except sb.RankError as error:
    print("hung:", error.hung)
    print("names rank 2:", "rank 2" in str(error), "  names the call:", "all_to_all" in str(error))

# %% [markdown]
# ## Your layer trains the model
#
# Four ranks with a sequence each, two of them share a set of experts, beside one process with all
# four sequences. `average_moe_gradients_` averages the whole layers over all ranks and the experts
# over their copies, and divides these by the two ranks that share them. Multiply the experts'
# gradients by 2 after it and see how far the curve goes astray.


# %%
def train(parallel, steps=20):
    model, rank, world = moe_lm().to(sb.device()), dist.get_rank(), dist.get_world_size()
    if parallel:
        sharing, copies = expert_groups(2)
        for block in model.blocks:
            moe = block.mlp
            block.mlp = ExpertParallelMoE(moe.router, list(moe.experts), moe.k, sharing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(steps):
        tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(step))
        loss = token_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        if parallel:
            average_moe_gradients_(model, copies)
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return (losses / world).tolist()


one = sb.run(train, False, world_size=1).values[0]
mine = sb.run(train, True, world_size=4).values[0]
print("curves within 1e-3:", max(abs(a - b) for a, b in zip(one, mine, strict=True)) < 1e-3)
plot.curves({"one process": one, "your layer, 4 ranks": mine}, "step", "loss")
plt.show()

# %% [markdown]
# ### A trace to read
#
# One step on two ranks. Each block has three all-to-alls forward (which is the small one?). How many
# does it have backward, and why one less? Which rank waits in `combine`?


# %% tags=["nbval-ignore-output"]
def one_step():
    model = moe_lm().to(sb.device())
    for block in model.blocks:
        moe = block.mlp
        block.mlp = ExpertParallelMoE(moe.router, list(moe.experts), moe.k)
    tokens, targets = (t.to(sb.device()) for t in counting_batch(dist.get_rank()))
    with sb.mark("forward"):
        loss = token_loss(model(tokens), targets)
    with sb.mark("backward"):
        loss.backward()


sb.run(one_step, world_size=2, trace=True).trace

# %% [markdown]
# ## On a real cluster
#
# - `.tolist()` of the counts waits for the device. On an NPU or a GPU this is a stop in every layer,
#   and the reason why capacity, padding and fused kernels exist.
# - Put this lab's functions into a `.py` file that ends in `sb.run(…)` (chapter 02 has an example) and
#   start it with `torchrun --nproc-per-node 8`: `sb.run` then uses the ranks that torchrun made. The group is HCCL's on an NPU, NCCL's on a CUDA device; nothing in your code
#   names either.
# - Experts of uneven load make *memory* uneven too: a hot rank receives more rows than any test
#   showed, and runs out of memory in step 30,000. Bound it: capacity, or recomputation.
# - A checkpoint written with 8 ranks holds expert r E/P + i under the name `experts.i`. Save global
#   numbers, or P = 16 loads the wrong experts without an error.
