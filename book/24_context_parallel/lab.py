# %% [markdown]
# # 24 · Context parallel: the lab
#
# You write attention over a sequence that lies in parts on the ranks: the merge of partial softmaxes,
# who holds what, a ring with its backward, the zigzag that balances it, and Ulysses. At the end the
# small model trains with them. Two to three hours.
#
# Shapes are `[B, H, S, D]`, S being this rank's part; k and v may have fewer heads. Every check runs
# your code on real groups of 1 to 4 ranks and compares values and gradients with attention over the
# whole sequence, and calls, bytes, work and memory with the closed forms. Groups need not begin at
# rank 0: use `dist.get_rank(group)`.

# %%
import shardbook as sb

import math
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardbook import calls, plot
from shardbook.checks import context_parallel as check
from shardbook.basics.tiny import counting_batch, tiny_lm

# Given: attention over one block of keys, and its gradients.
from shardbook.parallel.context import (
    block_attention,  # (q, k, v, causal): out [B, H, S, D] in fp32, lse [B, H, S]
    block_attention_backward,  # (grad, delta, q, k, v, lse, causal): dq, dk, dv of this block
)

# Given: one step of the ring, and the names that the plans below use.
from shardbook.parallel.ring import (
    ALL,  # slice(None)
    Group,  # a process group, or None for all ranks
    Part,  # (rows, cols, causal): these of the queries, those of the keys
    Plan,  # plan(rank, owner of the keys, S): a list of parts to compute
    _grouped,  # ValueError where heads don't divide by kv heads
    exchange,  # (tensors, group): (what will arrive, works to wait for)
    full_plan,
)

# %% [markdown]
# ## Exercise 1: merge two softmaxes
#
# `out_a`, `lse_a` are attention over some keys, `out_b`, `lse_b` over others. Return both for all of
# them. An lse may be 10,000 or -inf, and nothing may become nan.
#
# <details><summary>Hint 1</summary>
#
# The denominators are `exp(lse_a)` and `exp(lse_b)`, and they add up. Each out counts with its share.
# </details>
# <details><summary>Hint 2</summary>
#
# Take the larger lse out of the sum: what is left are exponentials of differences that are at most 0.
# </details>
# <details><summary>Hint 3</summary>
#
# Where both are -inf, the larger one is -inf too, and `-inf - -inf` is nan. `torch.where` can put
# a 0 there before you subtract, and the -inf back at the end.
# </details>

# %% exercise="shardbook.parallel.context.merge_attention"

# %%
check.merge_attention(merge_attention)

# %% [markdown]
# ## Exercise 2: who holds what
#
# Contiguous: rank r has the r-th of P pieces. Zigzag: chunks r and 2P-1-r of 2P, in this order.
# `shard_positions` gives the positions in the whole sequence, for the rotary embedding;
# `zigzag_shard` cuts any tensor along any dimension; `zigzag_unshard` puts the shards of all ranks
# together. A length that does not divide is a `ValueError`.
#
# <details><summary>Hint 1</summary>
#
# `shard_positions` first. The other two can use it, or `chunk`.
# </details>
# <details><summary>Hint 2</summary>
#
# Unshard: the first halves are in rank order. And the second halves?
# </details>

# %% exercise="shardbook.parallel.context.shard_positions shardbook.parallel.context.zigzag_shard shardbook.parallel.context.zigzag_unshard"

# %%
check.shard_positions(shard_positions)

# %%
check.zigzag_shard(zigzag_shard)

# %%
check.zigzag_unshard(zigzag_unshard)

# %% [markdown]
# ## Exercise 3: the ring
#
# First a prediction. B=1, 6 heads, 2 kv heads of 8, 96 tokens on 3 ranks, fp32: the bytes that a
# rank sends forward, and those it sends backward (K, V and their gradients, all fp32).

# %% predict="forward_bytes backward_bytes"
forward_bytes = 2 * (3 - 1) * (1 * 2 * 32 * 8 * 4)  # K and V, P-1 times, B Hkv S/P D values
backward_bytes = forward_bytes + 2 * 3 * (1 * 2 * 32 * 8 * 4)  # and dK and dV, P times


# %% [markdown]
# A *plan* says what a rank computes while it holds the keys of `owner`. `full_plan` is
# `[(ALL, ALL, False)]`: all queries, all keys, no mask. Write `causal_plan` for contiguous shards,
# and the two directions of `_Ring`.
#
# Forward, in each of P steps: start the exchange (not in the last), compute the plan's parts with
# the block in your hands, merge them into `out` and `lse`, wait. Save only what is yours.
#
# Backward, the same ring once more. dq stays. dk and dv belong to the block in your hands.
#
# <details><summary>Hint 1</summary>
#
# After `step` exchanges you hold the keys of rank `(rank - step) % world`.
# </details>
# <details><summary>Hint 2</summary>
#
# Begin with out 0 and lse -inf, in fp32: the merge then needs no special case. Assign into
# `out[:, :, rows]` and `lse[:, :, rows]`.
# </details>
# <details><summary>Hint 3</summary>
#
# `delta = (grad * out).sum(-1)` is needed once. `block_attention_backward` takes the lse over ALL
# keys, the one you saved.
# </details>
# <details><summary>Hint 4</summary>
#
# `k` and `v` from `ctx.saved_tensors` are yours, and right in the first step only. After the step's
# gradients are added, send dk and dv on, in the last step too: which rank gets them then?
# </details>

# %% exercise="shardbook.parallel.ring.causal_plan shardbook.parallel.ring._Ring shardbook.parallel.ring.ring_attention" blank="causal_plan forward backward"

# %%
check.ring_attention(ring_attention)


# %%
def ring_bytes():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 32, 8, generator=generator).to(sb.device()) for n in (6, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with calls.record() as forward:
        out = ring_attention(*leaves, causal=True)
    with calls.record() as backward:
        out.sum().backward()
    return calls.summary(forward)["send"][1], calls.summary(backward)["send"][1]


measured = sb.run(ring_bytes, world_size=3).values[1]
sb.predict("bytes sent forward ", forward_bytes, measured[0])
sb.predict("bytes sent backward", backward_bytes, measured[1])

# %% [markdown]
# ### A failure to provoke
#
# "Under a causal mask rank 0 needs nobody's keys, so it can stop after its own block." It saves
# messages, too. Predict what happens on which rank, then run it.


# %% tags=["nbval-ignore-output"]
def stops_early(q, k, v):
    """A causal ring in which a rank takes part only while it has something to compute."""
    rank, world = dist.get_rank(), dist.get_world_size()
    keys, values = k, v
    for step in range(world):
        owner = (rank - step) % world
        if owner > rank:
            return "rank has all it needs"
        block_attention(q, keys, values, owner == rank)
        if step < world - 1:
            (keys, values), works = exchange([keys, values], None)
            for work in works:
                work.wait()
    return "went all the way round"


def run_it():
    x = torch.ones(1, 2, 4, 8, device=sb.device())
    return stops_early(x, x, x)


try:
    sb.run(run_it, world_size=4, timeout=20)
except sb.RankError as error:
    print(error)

# %% [markdown]
# Rank 0 did its one exchange and left. Rank 1 waits for a block that only rank 0 could pass on. A
# ring is a collective: each rank forwards what others need, also where it needs nothing itself.
#
# ## Exercise 4: zigzag
#
# The ring is the same, the plan is not. Both shards have an early and a late half. Return the parts
# for keys of the own rank (`owner == rank`), of an earlier and of a later one. Masking computes what
# it throws away: the check counts FLOPs.
#
# What part of the whole S x S attention does each of 4 ranks compute, if of its own block the early
# queries meet the early keys, and the late queries all of its keys?

# %% predict="predicted"
predicted = (3 + 2 * 3) / (4 * 16)  # (2P + 1) / (4 P^2): pairs of halves, of (2P)^2


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Draw P=2: chunks 0 and 3 on rank 0, 1 and 2 on rank 1. Which of the four pairs of chunks have any
# visible key?
# </details>
# <details><summary>Hint 2</summary>
#
# From an earlier rank: its early chunk is before all your queries, its late chunk after all of them.
# </details>
# <details><summary>Hint 3</summary>
#
# `causal` is bottom-right aligned: the last query of the part sees every key of the part. Late
# queries against all own keys fit that.
# </details>

# %% exercise="shardbook.parallel.ring.zigzag_plan shardbook.parallel.ring.zigzag_ring_attention" blank="zigzag_plan"

# %%
check.zigzag_ring_attention(zigzag_ring_attention)

# %% [markdown]
# **Compare two traces.** "The ring is the same": then both must make the same calls, forward and
# backward. `diff` names the first call in which two traces differ, or says that none does.


# %%
def ring_step(attention):
    q, k, v = (torch.ones(1, n, 32, 8, device=sb.device(), requires_grad=True) for n in (6, 2, 2))
    attention(q, k, v).sum().backward()


contiguous, zigzag = (
    sb.run(ring_step, way, world_size=4, trace=True).trace
    for way in (partial(ring_attention, causal=True), zigzag_ring_attention)
)
print(zigzag.diff(contiguous, order="group"))

# %%
work = {rank: 0 for rank in range(4)}
for rank in work:
    for owner in range(4):
        for rows, cols, _ in zigzag_plan(rank, owner, 2):
            work[rank] += len(range(2)[rows]) * len(range(2)[cols])
sb.predict("share of each rank", [predicted] * 4, [w / 64 for w in work.values()])

# %% [markdown]
# ## Exercise 5: Ulysses
#
# `_AllToAll` splits dimension `cut` over the ranks and gathers dimension `join`. Write it with
# `dist.all_to_all_single`, and its backward. Two functions name its uses. Then `ulysses_attention`:
# heads for sequence, any attention, sequence for heads. Heads that do not divide by the ranks are a
# `ValueError`; kv heads that don't are copied until they do.
#
# <details><summary>Hint 1</summary>
#
# `all_to_all_single` cuts the first dimension: stack the pieces, piece i goes to rank i, and what
# arrives is in rank order, which is the order of positions.
# </details>
# <details><summary>Hint 2</summary>
#
# What came from rank i goes back to rank i: backward is the same with `cut` and `join` changed over.
# </details>
# <details><summary>Hint 3</summary>
#
# Copies of a kv head have to lie next to it, or queries meet other heads' keys:
# `repeat_interleave`, not `repeat`. The number of kv heads to reach is a common multiple.
# </details>

# %% exercise="shardbook.parallel.ulysses._AllToAll shardbook.parallel.ulysses.heads_for_sequence shardbook.parallel.ulysses.sequence_for_heads shardbook.parallel.ulysses.ulysses_attention" blank="forward backward ulysses_attention"

# %%
check.ulysses_attention(ulysses_attention)

# %% [markdown]
# ## Your attention trains the model
#
# The small model with a quarter of each sequence on each rank, by your three ways, beside one
# process. Only `attend` is replaced. Read the line of the loss: what would a mean of each rank do?


# %%
def train(kind, steps=30):
    rank, world = dist.get_rank(), dist.get_world_size()
    held = torch.arange(64) if kind == "one" else shard_positions(64, world, rank, kind == "zigzag")
    model = tiny_lm().to(sb.device())
    for block in model.blocks:
        if kind == "zigzag":
            block.attn.attend = zigzag_ring_attention
        elif kind != "one":
            way = {"ring": ring_attention, "ulysses": ulysses_attention}[kind]
            block.attn.attend = partial(way, causal=True)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        tokens, targets = counting_batch(step)
        mine, wanted = (x[:, held].to(sb.device()) for x in (tokens, targets))
        logits = model(mine, held.to(sb.device()))  # [B, S/P, V]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        loss = loss / targets.numel()  # the tokens of all ranks
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for x in [total, *(p.grad for p in model.parameters())]:
            dist.all_reduce(x)
        optimizer.step()
        losses.append(total.item())
    return losses


curves = {"one process": sb.run(train, "one", world_size=1).values[0]}
for kind in ("ring", "zigzag", "ulysses"):
    curves[f"your {kind}, 4 ranks"] = sb.run(train, kind, world_size=4).values[0]
    pairs = zip(curves["one process"], curves[f"your {kind}, 4 ranks"], strict=True)
    print(f"{kind:8} within 1e-3:", max(abs(a - b) for a, b in pairs) < 1e-3)
plot.curves(curves, "step", "loss")
plt.show()

# %% [markdown]
# ### A trace to read
#
# One step of your attention forward and backward, on four ranks; "block" and "block backward" are
# what a rank computes between messages. How many rounds does K make, how many dK? How many bytes has
# a message of each? For which rank does nobody have to wait? Replace `ring_attention` by your zigzag
# and look again: the messages are the same, only what is computed between them moves.
#
# <details><summary>Answers</summary>
#
# K makes three rounds forward and three backward, dK four. A message is 1 x 4 x 256 x 16 x 4 = 65,536
# bytes. Rank r computes r+1 blocks each way: rank 0 has one, passes on what it gets at once, and
# nobody waits for it.
# </details>


# %% tags=["nbval-ignore-output"]
def one_attention():
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (torch.randn(1, 4, 256, 16, generator=generator).to(sb.device()) for _ in "qkv")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with sb.mark("forward"):
        out = ring_attention(*leaves, causal=True)
    with sb.mark("backward"):
        out.sum().backward()


sb.run(one_attention, world_size=4, trace=True).trace

# %% [markdown]
# ## On a real cluster
#
# - In a `.py` file that ends in `sb.run(…)` (chapter 02 has an example), started with
#   `torchrun --nproc-per-node 8`, `sb.run` runs in place on the ranks that torchrun made; HCCL, NCCL
#   or gloo, whatever `sb.backend()` says.
# - Replace `block_attention` by a kernel that returns lse: flash attention on CUDA,
#   `npu_fusion_attention` on an Ascend NPU (its softmax maximum and sum give
#   lse = max + log(sum)). Check out *and* gradients against one process again: a kernel's backward
#   may read what it saved instead of what you hand it.
# - Measure a step of the ring, kernel and message, before you choose: if the kernel is longer, the
#   message costs nothing. Where it is not, take Ulysses inside the host and the ring across hosts.
# - On CUDA and NPU the message that `exchange` starts runs on a stream of its own. Keep what you
#   send alive and unchanged until its work is waited for.
