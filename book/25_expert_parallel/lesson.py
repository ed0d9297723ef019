# %% [markdown]
# # 25 · Expert parallel
#
# After this chapter you can
# - route tokens to experts, keep the load even with a loss or with a bias, and say what a capacity costs,
# - say what today's layers add: a sigmoid gate, fine-grained and shared experts, grouped products, a row
#   per rank instead of one per expert,
# - spread experts over ranks with two all-to-alls, forward and backward, and predict their bytes,
# - see a hot expert in a trace,
# - scale the gradients of experts right when expert and data parallel meet,
# - compare your layer with transformers' Mixtral: values, gradients and memory.
#
# Time: 70 minutes to read, two to three hours for the lab. Chapter 13 has the all-to-all, chapter
# 21 the averaging of gradients.
#
# Letters: T tokens of width D, E experts of which a token meets k, P ranks; an expert's inner width
# is I.

# %%
import shardbook as sb

import math
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardbook import calls, plot
from shardbook.memory import storage_bytes
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss
from shardbook.parallel.expert import (
    ExpertParallelMoE,
    apply_capacity,
    combine,
    dispatch,
    load_balancing_loss,
    route_top_k,
)
from shardbook.studies.expert_lm import (
    MoE,
    average_moe_gradients_,
    expert_groups,
    expert_parallel_,
    is_expert,
    moe_lm,
)
from shardbook.studies.moe_today import (
    grouped,
    once_per_rank,
    one_by_one,
    padded,
    router_z_loss,
    train_with_favourites,
)

# %% [markdown]
# ## What breaks without it?
#
# A mixture of experts replaces the MLP by E smaller ones, and each token goes through k of them.
# Parameters grow with E, the work a token does with k. The small model of this book with k = 2, and
# the state a rank holds for training it (weights, gradients, Adam's moments in fp32: 16 bytes per
# parameter), if every rank has all experts and if four ranks share them:


# %%
def held(num_experts, spread):
    """(bytes of weights on this rank, parameters in all, parameters that one token meets)."""
    model = moe_lm(num_experts)
    expert = sum(p.numel() for p in model.blocks[0].mlp.experts[0].parameters())
    total = sum(p.numel() for p in model.parameters())
    met = total - len(model.blocks) * (num_experts - 2) * expert
    if spread:
        expert_parallel_(model)
    return storage_bytes(model.to(sb.device()).parameters()), total, met


def all_held(sizes):
    return {(n, spread): held(n, spread) for n in sizes for spread in (False, True)}


found = sb.run(all_held, (4, 8, 16, 32), world_size=4).values[0]
state = {"all experts on every rank": {}, "experts over 4 ranks": {}}
for num_experts in (4, 8, 16, 32):
    (whole, total, met), (mine, *_) = (found[num_experts, spread] for spread in (False, True))
    label = f"{num_experts} experts"
    state["all experts on every rank"][label] = 4 * whole / 1e6
    state["experts over 4 ranks"][label] = 4 * mine / 1e6
    print(
        f"{num_experts:2} experts: {total:>9,} parameters, a token meets {met:,}; "
        f"state of a rank {4 * whole / 1e6:5.2f} MB, shared {4 * mine / 1e6:.2f} MB"
    )

# %%
plot.bars(state, "MB per rank", "Training state of the small model with experts")
plt.show()

# %% [markdown]
# Down the table a token's work hardly changes, and a rank's memory grows more than sixfold. Data parallel copies
# all of it to every rank, though a rank's tokens use a part at a time. ZeRO-3 would cut it, and
# gather every expert for every layer. Expert parallel leaves the weights where they are and moves
# the *tokens*.
#
# ## Routing
#
# The router is one linear layer, `[T, D] -> [T, E]`. Softmax over all experts, then the k largest.
# Mixtral (arXiv 2401.04088) divides the k weights by their sum, Switch (2101.03961) does not.

# %%
torch.manual_seed(0)
logits = torch.randn(3, 5)  # [T, E]
for normalise in (True, False):
    weights, experts = route_top_k(logits, k=2, normalise=normalise)
    print("normalise =", normalise)
    for token in range(3):
        shares = ", ".join(
            f"{w:.2f} of expert {e}"
            for w, e in zip(weights[token].tolist(), experts[token].tolist(), strict=True)
        )
        print(f"  token {token}: {shares}")
top = logits.topk(2).values.softmax(-1)
print("softmax of the chosen logits alone = normalised:", torch.allclose(
    top, route_top_k(logits, 2)[0]))  # fmt: skip

# %% [markdown]
# Which experts were chosen is a list of integers: no gradient. The router learns through the
# *weights*. With k = 1 and normalised weights every weight is 1, and the router learns nothing; this
# is why Switch does not normalise.
#
# ## Balance
#
# An expert that is chosen often learns fast, and is chosen more often. Here we set two favourites by
# hand, with a bias of 3 in the router, where a random initialisation or a change of data may make
# them, and train the small model. Does it even out by itself? The auxiliary loss of Switch is `E * sum of f_e p_e`, with f_e the share of
# the choices that went to expert e and p_e the mean probability it got. At perfect balance it is 1,
# and it grows as choices and probability gather on the same experts. f_e is a count, so the gradient comes through p_e: experts with many tokens get
# their probability lowered. The model trains for 40 steps only, so the loss counts 0.1 here; Switch
# takes 0.01.
#
# Today's models often balance without a loss (arXiv 2408.15664). The gate is a **sigmoid**: each expert
# has a score of its own. Each expert also has a **bias**, which no gradient touches. It is added to the
# score *after* the sigmoid and takes part in the choice only, not in the weights:
#
# ```python
# scores = logits.sigmoid()                            # [T, E]
# experts = (scores + bias).topk(k, dim=-1).indices    # the bias chooses
# weights = scores.gather(-1, experts)                 # and does not weigh
# bias += speed * sign(mean load - load)               # after each step
# ```
#
# DeepSeek-V3 (arXiv 2412.19437) works like this, and keeps a small balance loss within each sequence
# beside it. Here the speed is 0.05, for 40 steps. All of this is `train_with_favourites` in
# `shardbook/studies/moe_today.py`.

# %%
without, with_loss = train_with_favourites(), train_with_favourites(alpha=0.1)
with_bias = train_with_favourites(speed=0.05)
print("without: the two favourites keep over 3x the mean load:", without[0][-1] > 3)
print("with the balance loss: below 2.2x:", with_loss[0][-1] < 2.2)
print("with the bias: below 2.2x:", sum(with_bias[0][-5:]) / 5 < 2.2)
print("all three models learn:", max(way[1][-1] for way in (without, with_loss, with_bias)) < 1)

# %%
fig, axes = plot.figure(9, 3, columns=2)
ways = {"without": without, "0.1 x balance loss": with_loss, "sigmoid and bias": with_bias}
for label, (loads, losses, _) in ways.items():
    axes[0].plot(loads, label=label)
    axes[1].plot(losses, label=label)
axes[0].set(
    xlabel="step", ylabel="max / mean load", ylim=(0, 4.3), title="Load of 8 experts, k = 2"
)
axes[0].axhline(1, color=plot.COLOURS[7], linewidth=0.8)
axes[1].set(xlabel="step", ylabel="loss of the tokens", ylim=(0, None), title="The model learns")
axes[1].legend()
plt.show()

# %% [markdown]
# 4 is the largest possible load: every token chooses both favourites. Nothing in the loss of the
# tokens complains. Six of eight experts are memory that nobody uses, and the ranks that hold them
# wait for the two that work.
#
# Where several ranks compute the balance loss, each counts its own tokens. The mean of the ranks'
# losses is not the loss of all tokens: it asks every rank's batch to be balanced by itself, more than
# you need. Sum the counts over the ranks (one all-reduce of E integers) to ask for balance of the
# whole batch (arXiv 2501.11873). The bias's loads want the same sum.
#
# One more loss, for another fault: softmax doesn't change if a constant is added to all logits, so
# nothing keeps them small, and in 16 bits large logits are coarse. The **z-loss** is the mean of
# `log(sum(exp(logits)))²` (arXiv 2202.08906). The same logits, moved by a constant:

# %%
logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(4))
exact = logits.softmax(-1)
for shift in (0.0, 10.0, 100.0):
    off = ((logits + shift).bfloat16().softmax(-1).float() - exact).abs().max()
    print(f"moved by {shift:5.0f}: z-loss {router_z_loss(logits + shift):8.0f}, ", end="")
    print(f"probabilities of bf16 logits off by up to {off:.2f}")

# %% [markdown]
# ## Capacity
#
# Static shapes, or a bound on memory, want a limit: an expert takes
# `capacity = factor * T k / E` rows and the rest is dropped. A dropped choice adds 0: the token skips
# that expert, and if all its choices are dropped, only the residual carries it on. First come, first kept; first choices before second ones. A limit trades two
# evils, here on the choices of the two routers above:

# %%
factors = [0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4]


def with_capacity(logits, factor):
    """(share of the choices dropped, load of the fullest expert over the mean of the choices)."""
    experts = route_top_k(logits, 2)[1]
    mean = experts.numel() / 8
    keep = apply_capacity(experts, 8, int(factor * mean))
    load = torch.bincount(experts[keep], minlength=8)
    return 1 - keep.float().mean().item(), load.max().item() / mean


fig, axes = plot.figure(9, 3, columns=2)
for (*_, logits), label in ((without, "without"), (with_loss, "0.1 x balance loss")):
    drops, loads = zip(*(with_capacity(logits, f) for f in factors), strict=True)
    axes[0].plot(factors, loads, marker="o", markersize=3, label=label)
    axes[1].plot(factors, [100 * d for d in drops], marker="o", markersize=3, label=label)
axes[0].set(
    xlabel="capacity factor", ylabel="max / mean load", title="What the slowest rank computes"
)
axes[1].set(xlabel="capacity factor", ylabel="% of choices", title="Dropped")
axes[1].legend()
plt.show()

dropped = {
    name: with_capacity(z, 1.25)[0] for name, z in (("no", without[2]), ("yes", with_loss[2]))
}
print("dropped at a factor of 1.25, more than half without the loss:", dropped["no"] > 0.5)
print("and less than a quarter with it:", dropped["yes"] < 0.25)

# %% [markdown]
# Below a factor of 1 even perfect balance must drop. The balanced router is nearly free of drops at
# 1.5; the one with favourites drops most of its work or waits for the fullest expert. (The waiting is
# computed from the counts of one process, as if each expert were a rank.) The code below needs no
# capacity: its all-to-all takes pieces of any size ("dropless", MegaBlocks, arXiv 2211.15841).
#
# Trap: which tokens are dropped depends on who else is in the batch. Evaluation with another batch
# size gives another result for the same text, and with a capacity counted on each rank, so does
# another number of ranks.
#
# ## Which tensor is cut, and which collective pays?
#
# The *experts* are cut by number: rank r holds E/P consecutive ones. Tokens are cut by rank already
# (each rank has its part of the batch). Let us follow real rows: four ranks, five tokens each,
# k = 1, eight experts. Each row carries its home rank and its expert.


# %%
def follow():
    """Rows (home rank, expert) at four stations of this rank."""
    rank = dist.get_rank()
    experts = torch.randint(8, (5, 1), generator=torch.Generator().manual_seed(20 + rank))  # [T, 1]
    rows = torch.cat((torch.full((5, 1), float(rank)), experts.float()), dim=1).to(sb.device())
    experts = experts.to(sb.device())
    received, state = dispatch(rows, experts, 8)
    home = combine(received, torch.ones(5, 1).to(sb.device()), state)
    return [
        t.cpu().tolist() for t in (rows, rows[experts[:, 0].argsort(stable=True)], received, home)
    ]


stations = sb.run(follow, world_size=4).values
fig, axes = plot.figure(10, 3.2, columns=4)
names = ["tokens at home", "sorted by expert", "received, by local expert", "home again"]
for at, (ax, name) in enumerate(zip(axes, names, strict=True)):
    for rank, rows in enumerate(s[at] for s in stations):
        for i, (origin, expert) in enumerate(rows):
            box = plt.Rectangle(
                (i, -rank), 0.9, 0.8, facecolor=plot.COLOURS[int(origin)], alpha=0.6
            )
            ax.add_patch(box)
            ax.text(i + 0.45, 0.38 - rank, str(int(expert)), ha="center", va="center", fontsize=9)
        if at in (0, 2):
            owns = f" ({2 * rank}, {2 * rank + 1})" if at == 2 else ""
            ax.text(-0.3, 0.38 - rank, f"rank {rank}{owns}", ha="right", va="center", fontsize=8)
    ax.set(xlim=(-2.9, 6.2), ylim=(-3.3, 1), aspect="equal")
    ax.set_title(name, fontsize=10)
    ax.axis("off")
plt.show()
print("rows received:", [len(s[2]) for s in stations], "of 5 sent by each")

# %% [markdown]
# A colour is a home rank, a number an expert. Between the second and the third station lies the first
# all-to-all, between the third and the fourth the second. A rank sends as many rows as it has choices
# and receives as many as its experts were chosen, so first the *counts* travel (E integers), since a
# receiver must know its sizes. What arrives is ordered by source rank; the experts want it ordered
# by expert.
#
# Backward is the same journey in reverse: the gradient of an all-to-all is the all-to-all with the
# sizes exchanged, so the gradient of `dispatch` is a `combine` and the other way round.
#
# ## How many bytes?
#
# Each rank has T = 256 tokens of width D = 64 in fp32, k = 2, on P = 4 ranks. Forward, `dispatch`
# sends T k rows and `combine` brings them back. How many bytes of rows do all ranks together hand
# to the all-to-alls, forward and backward?

# %% predict="predicted"
T, D, K, P = 256, 64, 2, 4
predicted = 2 * 2 * P * T * K * D * 4  # out and home, forward and backward, rows of 4 D bytes


# %%
def journey():
    """Bytes of rows and of counts handed to all-to-alls, and the rows that left this rank."""
    model = moe_lm()
    moe = model.blocks[0].mlp.to(sb.device())
    layer = ExpertParallelMoE(moe.router, list(moe.experts), moe.k)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = x.to(sb.device()).requires_grad_()
    with calls.record() as log:
        layer(x).sum().backward()
    rows = sum(c.nbytes for c in log if c.dtype.is_floating_point)
    counts = [c.nbytes for c in log if not c.dtype.is_floating_point]
    _, state = dispatch(x, route_top_k(layer.router(x), K)[1], 8)
    away = sum(state.send) - state.send[dist.get_rank()]
    return rows, counts, away, {c.op for c in log}


values = sb.run(journey, world_size=4).values
sb.predict("bytes of rows, all ranks", predicted, sum(v[0] for v in values))
print("counts: one call of", values[0][1], "bytes a rank; operations:", *values[0][3])
share = sum(v[2] for v in values) / (P * T * K)
print(f"share of the rows that left their rank: {share:.2f}, (P-1)/P = {(P - 1) / P}")

# %% [markdown]
# So about `2 k T D (P-1)/P` values leave each rank in the forward pass and as many in the backward
# pass, however large the experts are. Moving the *weights* instead (ZeRO-3) would gather E experts
# twice a step and layer. Which is less?

# %%
expert_bytes = storage_bytes(moe_lm().blocks[0].mlp.experts.parameters())
print(f"tokens:  {2 * 2 * K * T * D * 4 * (P - 1) // P:>9,} bytes a rank, layer and step")
print(f"weights: {(2 + 1) * expert_bytes * (P - 1) // P:>9,} bytes (two gathers, a reduce-scatter)")
deepseek = 3 * 256 * 3 * 7168 * 2048 / (4 * 8 * 4096 * 7168)  # values, 4096 tokens a rank
print(f"a layer of DeepSeek-V3: weights are {deepseek:.0f} times the tokens of a rank")

# %% [markdown]
# Tokens win as long as the experts of a layer are larger than what its tokens need; the tokens of a
# rank are a matter of batch size, the experts are a matter of the model.
#
# ## Fine-grained and shared experts, and a row per rank
#
# DeepSeekMoE (arXiv 2401.06066) cuts experts finer: four times as many, a quarter as wide, four times
# the k. A token meets as many parameters and has more sets of experts to choose from. A **shared** expert
# takes every token beside the chosen ones, and needs no router and no all-to-all. transformers knows
# DeepSeek-V3's numbers:

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress")  # no progress bars are needed here

from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

for experts, k, width in ((8, 2, 128), (32, 8, 32)):
    moe = moe_lm(experts, k, width).blocks[0].mlp
    each = sum(p.numel() for p in moe.experts[0].parameters())
    print(
        f"{experts:2} experts of width {width:3}: a token meets {k * each:,} parameters, ", end=""
    )
    print(f"{math.comb(experts, k):>10,} sets of {k}")
v3 = DeepseekV3Config()
print(f"DeepSeek-V3: {v3.n_routed_experts} routed experts, k = {v3.num_experts_per_tok}, ", end="")
print(f"{v3.n_shared_experts} shared, of width {v3.moe_intermediate_size}")

# %% [markdown]
# With k = 8 on 4 ranks, some of a token's experts share a rank, and `dispatch` sends the same row
# there several times. Send it **once per rank** instead, with its weights and choices beside it, and let
# that rank add up what its experts give before the one row goes home (`once_per_rank`: it uses
# `dispatch` with ranks in the place of experts). What share of the bytes of rows is left, at most?

# %% predict="at_most"
at_most = 4 / 8  # min(k, P) rows per token instead of k


# %%
def rows_per_token():
    """(rows sent per token, largest difference of the outputs) for both ways."""
    moe = moe_lm(32, k=8, hidden=32).blocks[0].mlp.to(sb.device())
    layer = ExpertParallelMoE(moe.router, list(moe.experts), moe.k)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(dist.get_rank())).to(sb.device())
    outputs, sent = [], []
    for way in (layer, lambda x: once_per_rank(layer, x)):
        with calls.record() as log:
            outputs.append(way(x))
        rows = sum(c.nbytes for c in log if c.dtype.is_floating_point and c.shape[-1] == D)
        sent.append(rows)
    return sent, (outputs[0] - outputs[1]).abs().max().item()


values = sb.run(rows_per_token, world_size=4).values
each, once = (sum(sent[i] for sent, _ in values) for i in (0, 1))
print(f"bytes of rows per expert {each:,}, per rank {once:,}: {once / each:.2f} of them")
print("within the bound:", once / each <= at_most, "  equal:", max(e for _, e in values) < 1e-5)

# %% [markdown]
# DeepSeek-V3 does the same with hosts: a token goes once to each of at most 4, and from there on
# to their ranks.
#
# ## The experts of a rank as one product
#
# A rank's experts are many small matrix products of uneven sizes. A loop launches two kernels per
# expert. `torch.bmm` needs equal sizes, so rows are padded to those of the fullest expert.
# `torch.nn.functional.grouped_mm` takes the rows as they lie and the place where each expert's end.

# %%
generator = torch.Generator().manual_seed(0)
load = torch.rand(64, generator=generator).square()  # uneven
counts = (load * 2048 / load.sum()).int().tolist()
rows = torch.randn(sum(counts), 64, generator=generator)
up, down = (torch.randn(64, *s, generator=generator) / 8 for s in ((64, 32), (32, 64)))
wanted = one_by_one(rows, counts, up, down)
for way in (padded, grouped):
    print(
        f"{way.__name__:7} equals the loop:",
        torch.allclose(way(rows, counts, up, down), wanted, atol=1e-4),
    )
print(f"rows {sum(counts)}, padded to {max(counts) * len(counts)}")
assert max(counts) * len(counts) > 2 * sum(counts), "padding more than doubles the work"

# %% tags=["nbval-ignore-output"]
best = {}
for way in (one_by_one, padded, grouped):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        way(rows, counts, up, down)
        times.append(time.perf_counter() - start)
    best[way] = min(times)
    print(f"{way.__name__:10} {1000 * min(times):6.2f} ms on this machine's CPU")
assert best[grouped] < best[padded], "three times as many rows take longer"

# %% [markdown]
# Padding is slower than the grouped product, even on a CPU. On an accelerator each small product of the loop is also a
# launch that fills a part of the device, and the grouped kernel is one launch.
#
# ## Does it train?
#
# The same model, the same batches: one process with the batch of four sequences, then four ranks with
# a sequence each, their experts spread over all four; and spread over two, so that {0, 1} and {2, 3}
# each hold all experts, and {0, 2} and {1, 3} hold copies.


# %%
def train(sharing, steps=30, sgd=False, forget=False):
    """Mean loss of all ranks by step. `sharing` ranks hold a set of experts, 0 means one process."""
    model, rank, world = moe_lm().to(sb.device()), dist.get_rank(), dist.get_world_size()
    if sharing:
        experts, copies = expert_groups(sharing)
        expert_parallel_(model, experts)
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(step))
        loss = token_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        if sharing:
            average_moe_gradients_(model, copies)
        if forget:  # that an expert's gradient is a sum over the ranks that share it
            for name, p in model.named_parameters():
                if is_expert(name):
                    p.grad *= sharing
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return (losses / world).tolist()


curves = {
    "one process": sb.run(train, 0, world_size=1).values[0],
    "experts over 4 ranks": sb.run(train, 4, world_size=4).values[0],
    "experts over 2 ranks, 2 copies": sb.run(train, 2, world_size=4).values[0],
}
one, *others = curves.values()
print("the loss falls below 1:", one[-1] < 1)
for other in others:
    print("curves within 1e-3:", max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-3)
(ax,) = plot.curves(curves, "step", "loss", "The three curves lie on each other").axes
ax.lines[2].set(linestyle="--", color=plot.COLOURS[5])
ax.legend()
plt.show()

# %% [markdown]
# ## The scale of an expert's gradient
#
# Each rank's loss is the mean of its own tokens, and we want the gradient of the mean of the ranks'
# losses. For a layer that every rank holds, average over the ranks. An expert lives on one rank, and
# backward already brought it the gradient of *all* ranks' tokens, as a **sum**. No collective is
# missing, but the division by P is: a data-parallel wrapper told to leave experts alone, or to
# average them over their copies only, makes them P times too large. What does the loss show?

# %%
wholes = {"SGD": sb.run(train, 0, 30, True, world_size=1).values[0], "AdamW": one}
for optimizer, whole in wholes.items():
    for forget in (False, True):
        ours = sb.run(train, 4, 30, optimizer == "SGD", forget, world_size=4).values[0]
        worst = max(abs(a - b) for a, b in zip(whole, ours, strict=True))
        print(
            f"{optimizer:5} {'forgotten' if forget else 'divided  '}  "
            f"curve within 1e-3: {worst < 1e-3!s:5}  within 0.1: {worst < 0.1!s:5}  "
            f"falls: {ours[-1] < ours[0]}"
        )

# %% [markdown]
# SGD shows it: experts learn with four times the learning rate. AdamW divides by the gradient's size
# and hides it, which is how it stays unseen in real code: [megablocks#86](https://github.com/databricks/megablocks/issues/86) (explains the
# division), [pytorch#160285](https://github.com/pytorch/pytorch/issues/160285) (doubled at EP = 2, "loss curves are equivalent"),
# [DeepSpeed#6546](https://github.com/deepspeedai/DeepSpeed/pull/6546) (the fix). It comes out when gradients are *clipped*: the norm is dominated by the
# experts and everything else is scaled down with them. And the norm itself needs a sum over the ranks
# for experts, not for the layers that all hold. Test for it as above: SGD, one process beside P ranks.
#
# ## Hot experts in the trace
#
# Rows of work for each rank, from a router that is even and from one that sends half of the choices
# to expert 0. Kernels are **paced**: 3 ms a row of a rank's experts, so that four ranks on any
# machine show the schedule that four devices would have. Tokens and all-to-alls are real. A rank
# sends 64 rows, k = 1. Predict the rows of the fullest rank over the mean: the paced step is longer
# by nearly the same factor (nearly, since the all-to-alls take their time in both).

# %% predict="predicted"
hot = 64 * 4 * (0.5 + 0.5 / 8) + 64 * 4 * 0.5 / 8  # rows of the rank with expert 0 and expert 1
predicted = hot / 64  # over the mean: T k = 64 rows a rank


# %%
def hot_or_not(share):
    """Rows of this rank's experts where `share` of the choices go to expert 0, the rest evenly."""
    tokens = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(sb.device())
    experts = torch.arange(64) % 8
    experts[: int(64 * share)] = 0
    experts = experts[:, None].to(sb.device())  # [T, 1]
    weights = torch.ones(64, 1, device=sb.device())
    dispatch(tokens, experts, 8)  # the first calls are slow, and the ranks start together
    start = time.monotonic()
    with sb.mark("dispatch"):
        received, state = dispatch(tokens, experts, 8)
    for expert, rows in enumerate(state.counts):
        sb.pace(3 * rows, f"expert {2 * dist.get_rank() + expert}: {rows} rows")
    with sb.mark("combine"):
        combine(received, weights, state)
    return len(received), time.monotonic() - start


even, skewed = (sb.run(hot_or_not, share, world_size=4) for share in (0.0, 0.5))
for name, result in (("even", even), ("half to expert 0", skewed)):
    print(f"{name:16} rows of each rank:", [rows for rows, _ in result.values])
rows = [r for r, _ in skewed.values]
sb.predict("fullest rank over the mean", predicted, max(rows) / (sum(rows) / 4))

# %% tags=["nbval-ignore-output"]
ratio = max(t for _, t in skewed.values) / max(t for _, t in even.values)
print(f"paced step: {ratio:.2f} times as long")
sb.run(hot_or_not, 0.5, world_size=4, trace=True).trace

# %% [markdown]
# Three ranks have finished their experts and stand in the all-to-all of `combine` until rank 0 comes.
# The trace blames the collective; the cause is a count. If an all-to-all is slow in your profile,
# read the rows that each rank received before you tune the network.
#
# ## Transformers' Mixtral
#
# The same layer as `MixtralSparseMoeBlock`: its experts are fused into two weights, `[E, 2 I, D]`
# and `[E, D, I]`, gated with silu. We copy them into modules and spread these over four ranks.


# %%
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import (
    MixtralSparseMoeBlock,
    load_balancing_loss_func,
)


class Gated(nn.Module):
    """One expert of Mixtral: down(silu(gate(x)) * up(x)), from fused weights."""

    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)  # [2I, D], [D, I]

    def forward(self, x):
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


def over_ranks(router, gate_up, down, x, pull):
    """Output, input gradient and gate_up's gradient of this rank, and the bytes it holds."""
    linear = nn.Linear(*router.shape[::-1], bias=False)
    linear.weight = nn.Parameter(router)
    experts = [Gated(g.clone(), d.clone()) for g, d in zip(gate_up, down, strict=True)]
    layer = ExpertParallelMoE(linear, experts, k=2).to(sb.device())
    x, pull = (t.chunk(dist.get_world_size())[dist.get_rank()].to(sb.device()) for t in (x, pull))
    y = layer(x.requires_grad_())
    (y * pull).sum().backward()
    grads = torch.stack([e.gate_up.grad for e in layer.experts])  # [E/P, 2I, D]
    found = (y.detach(), x.grad, grads)
    return [t.cpu() for t in found], storage_bytes(layer.parameters())


torch.manual_seed(3)
config = MixtralConfig(
    hidden_size=24,
    intermediate_size=40,
    num_local_experts=8,
    num_experts_per_tok=2,
    experts_implementation="eager",
)
theirs = MixtralSparseMoeBlock(config)
for p in theirs.parameters():
    nn.init.normal_(p, std=0.3)
x, pull = torch.randn(8, 11, 24), torch.randn(8, 11, 24)
weights = [
    p.detach().clone()
    for p in (theirs.gate.weight, theirs.experts.gate_up_proj, theirs.experts.down_proj)
]
theirs.to(sb.device())
on_device = x.clone().to(sb.device()).requires_grad_()
y = theirs(on_device)
(y * pull.to(sb.device())).sum().backward()
found = sb.run(over_ranks, *weights, x, pull, world_size=4).values
oracle = (y.detach(), on_device.grad, theirs.experts.gate_up_proj.grad)
for i, name in enumerate(("output", "gradient of x", "gradient of gate_up")):
    ours = torch.cat([tensors[i] for tensors, _ in found])
    error = (ours - oracle[i].cpu()).abs().max() / oracle[i].abs().max().cpu()
    print(f"{name:19} within 1e-5 of its largest value: {bool(error < 1e-5)}")
print(
    f"bytes of weights: transformers {storage_bytes(theirs.parameters()):,}, a rank {found[0][1]:,}"
)

# %% [markdown]
# Their auxiliary loss is k times ours: its f_e sum to k, not to 1. A coefficient copied from a config
# into another code base is off by k.

# %%
logits = torch.randn(40, 8)
for k in (1, 2, 3):
    hf = load_balancing_loss_func((logits,), num_experts=8, top_k=k)
    ours = load_balancing_loss(logits, route_top_k(logits, k)[1])
    print(f"k = {k}: transformers / ours = {hf / ours:.3f}")

# %% [markdown]
# ## A failure to provoke: a rank without tokens
#
# The last batch has no sequence left for rank 2. Its author saves the work:


# %%
def saves_work():
    moe = moe_lm().blocks[0].mlp.to(sb.device())
    layer = ExpertParallelMoE(moe.router, list(moe.experts), moe.k)
    x = torch.randn(0 if dist.get_rank() == 2 else 5, 64).to(sb.device())
    if len(x) == 0:
        return x  # nothing to do
    return layer(x)


try:
    sb.run(saves_work, world_size=4, timeout=30, echo=False)
except sb.RankError as error:
    print(str(error).split(" (")[0], "…")
    print("hung:", error.hung)

# %% [markdown]
# Rank 2 has no token, but it has *experts*, and others have tokens for these. It must enter every
# all-to-all, with empty pieces, forward and backward.
#
# The second form is an expert without tokens on a rank that has some. `if len(rows): expert(rows)`
# looks harmless. The output is right. But its parameters get no gradient, and:


# %%
def gradients_of_the_idle(skip):
    """Which of this rank's two experts have a gradient, where all tokens go to expert 0."""
    moe = moe_lm().blocks[0].mlp.to(sb.device())
    layer = ExpertParallelMoE(moe.router, list(moe.experts), 1)
    received, state = dispatch(
        torch.ones(3, 64, device=sb.device()),
        torch.zeros(3, 1, dtype=torch.int64, device=sb.device()),
        8,
    )
    for expert, rows in zip(layer.experts, received.split(state.counts), strict=True):
        if len(rows) or not skip:
            expert(rows).sum().backward()
    return [all(p.grad is not None for p in expert.parameters()) for expert in layer.experts]


for skip in (True, False):
    values = sb.run(gradients_of_the_idle, skip, world_size=4).values
    print("skipped:       " if skip else "run on 0 rows: ", *values)

# %% [markdown]
# With copies of experts ({0, 2} and {1, 3} above), one copy then has a gradient and the other None. A
# loop "all-reduce what has a gradient" makes the two ranks call different collectives: it hangs, or,
# worse, sums the gradients of different experts. Running the expert on 0 rows gives zeros on both.
# (AdamW then still decays the weights and moments of an idle expert; None would skip it.)
#
# ## On a real cluster
#
# - **The all-to-all crosses hosts.** A tensor-parallel group fits into a host, 256 experts do not.
#   DeepSeek-V3 limits a token to experts of 4 hosts, and sends a token *once* to each host over RDMA,
#   then on to its ranks over NVLink (arXiv 2412.19437).
# - **NPU/HCCL**: `all_to_all_single` with split sizes is `HcclAlltoAllV`; sizes must be on the host,
#   so `.tolist()` of the counts waits for the device in every layer. Kernels that fuse routing and
#   sending exist (`npu_moe_distribute_dispatch` and `npu_moe_distribute_combine` of torch_npu). On a
#   CloudMatrix384 the unified bus reaches all 384 NPUs (arXiv 2506.12708), so experts may be spread
#   over hundreds of ranks.
# - **CUDA/NCCL**: an all-to-all is sends and receives in one group, and the counts make the host wait
#   in the same way. (Ours waits about six times in `dispatch`: each `int(...)`, each `.tolist()` and
#   the `repeat_interleave` is one. Reading all counts at once would make it one.) DeepEP has kernels of its own; its low-latency ones, for decoding, do
#   without the wait: every receiver keeps room for the most that may come. Its second version has one
#   interface for both, and can use the counts of an earlier call again where the choices stay.
# - **Many small products**: the grouped product above is `npu_grouped_matmul` on an NPU.
# - **Overlap**: `dispatch` of one micro-batch beside the experts of another, as Domino does in
#   chapter 22; a shared expert that every token visits can run while rows travel.
#
# | published | figure | source |
# |---|---|---|
# | Mixtral 8x7B | 47B parameters, a token meets 13B | arXiv 2401.04088 |
# | DeepSeek-V3, 256 experts, k = 8, experts over 64 GPUs of 8 hosts | 671B parameters, a token meets 37B | arXiv 2412.19437 |
# | Switch Transformer | capacity factors 1.0 to 1.25, balance loss times 0.01 | arXiv 2101.03961 |
# | DeepEP's first version (V1) on H800, 8 ranks, 4096 tokens of 7168, k = 8, fp8 out, bf16 home | dispatch 153, combine 158 GB/s of about 160 (NVLink) | DeepEP, docs/legacy.md |
# | the same, 64 ranks | dispatch 51, combine 50 GB/s (RDMA, 50 GB/s per card) | DeepEP, docs/legacy.md |
#
# Ours beside the first two: how much of the model does a token meet?

# %%
for name, share in (("Mixtral 8x7B", 13 / 47), ("DeepSeek-V3", 37 / 671)):
    print(f"{name:20} {share:.3f}")
for num_experts in (8, 32):
    _, total, met = held(num_experts, False)
    print(f"ours, {num_experts:2} experts     {met / total:.3f}")

# %% [markdown]
# Now write it: [the lab](../labs/25_expert_parallel.ipynb). Then
# [chapter 31](31_flash_attention.ipynb) looks inside attention.
