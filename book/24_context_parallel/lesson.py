# %% [markdown]
# # 24 · Context parallel
#
# After this chapter you can
# - cut a sequence over ranks and still attend to all of it, forward and backward,
# - merge partial softmaxes without overflow,
# - say why causal attention leaves most ranks idle, and deal the sequence so that it doesn't,
# - choose between a ring and Ulysses from heads, length and bandwidth,
# - give every shard its positions and its share of the loss, and find the gradients that a ring
#   got wrong in silence.
#
# Time: 75 minutes to read, two to three hours for the lab. Chapter 13 has point-to-point messages
# and all-to-all, chapter 21 the sum of gradients. Two things come from chapter 31 and are used here
# before it: a block kernel that returns the log of its softmax's denominator (lse), and its backward.
# They are told where they are needed; read 31 first if you would rather have them derived.
#
# Letters: B sequences of S tokens over P ranks, H query heads and Hkv kv heads of size d (in comments
# of the code, [B, H, S, D], the last one is this d).

# %%
import shardbook as sb

import time
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardbook import calls, plot
from shardbook.memory import storage_bytes
from shardbook.basics.tiny import counting_batch, tiny_lm
from shardbook.parallel.context import (
    block_attention,
    block_attention_backward,
    merge_attention,
    shard_positions,
    zigzag_shard,
)
from shardbook.studies.context_lm import context_parallel_, context_parallel_step, held_positions
from shardbook.pictures.context import draw_rings, draw_ulysses
from shardbook.parallel.ring import (
    causal_plan,
    exchange,
    ring_attention,
    zigzag_plan,
    zigzag_ring_attention,
)
from shardbook.parallel.ulysses import heads_for_sequence, sequence_for_heads, ulysses_attention
from shardbook.tracing import merge

# %% [markdown]
# ## What breaks without it?
#
# Length. One sequence of a million tokens is a batch of one, so data parallelism has nothing to
# cut. Tensor parallelism ends at the number of heads. What grows with the sequence are the
# activations: those of the linear layers with S, the scores of attention with S².
#
# We count what autograd keeps for backward in the small model, for one sequence of growing length:
# with attention written out as `softmax(q k^T) v`, with attention that keeps only q, k, v, the
# output and one number per query, and with the latter on four ranks that hold a quarter of the
# sequence each.


# %%
def written_out(q, k, v):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [B, H, S, S]
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def keeps(model, length):
    """Bytes that autograd keeps besides the weights, for one sequence over the ranks."""
    tokens, _ = counting_batch(0, 1, length)
    held = held_positions(length, "ring")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(tokens[:, held].to(sb.device()), held.to(sb.device()))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return storage_bytes(t for t in saved if t.untyped_storage().data_ptr() not in weights)


def activations(kind, lengths):
    model = context_parallel_(tiny_lm().to(sb.device()), "ring")
    if kind == "scores":
        for block in model.blocks:
            block.attn.attend = written_out
    return [keeps(model, length) for length in lengths]


# %% tags=["nbval-ignore-output"]
lengths = [128, 256, 512, 1024]
kept = {
    "scores kept, 1 rank": sb.run(activations, "scores", lengths, world_size=1).values[0],
    "no scores, 1 rank": sb.run(activations, "ring", lengths, world_size=1).values[0],
    "no scores, 4 ranks": sb.run(activations, "ring", lengths, world_size=4).values[0],
}
print(f"{'tokens':22}" + "".join(f"{n:>14,}" for n in lengths))
for name, sizes in kept.items():
    print(f"{name:22}" + "".join(f"{size:>14,}" for size in sizes))

# %%
fig, (ax,) = plot.figure()
for (name, sizes), style in zip(kept.items(), ("o-", "s-", "^-"), strict=True):
    ax.plot(lengths, [size / 1e6 for size in sizes], style, label=name)
ax.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="MB a rank keeps")
ax.set_xticks(lengths, [str(n) for n in lengths], minor=False)
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# The first line bends towards the square of the length. Not keeping scores (chapter 31) makes it linear.
# Only cutting the sequence makes it a fraction. Predict the fraction that each of four ranks keeps,
# with everything that is not attention included:

# %% predict="predicted"
predicted = 1 / 4  # every activation has a dimension of tokens, and that is cut

# %%
measured = round(kept["no scores, 4 ranks"][-1] / kept["no scores, 1 rank"][-1], 3)
sb.predict("of the activations, on each of 4 ranks", predicted, measured)

# %% [markdown]
# ## Which tensor is cut, and what pays for it?
#
# Tokens `[B, S]` are cut by position, and with them every activation, in all layers, to the loss.
# Weights are whole. Embedding, norms, MLP and loss treat every token by itself and notice nothing.
# Attention does: a query on rank 0 needs the keys on rank 3.
#
# (A matter of names: Megatron-LM's *sequence parallelism* of chapter 22 cuts tokens only where tensor
# parallelism leaves them whole, and attention still sees all tokens of its heads. *Context
# parallelism* cuts them everywhere. DeepSpeed calls the latter sequence parallelism as well.)
#
# **Ring attention** (arXiv 2310.01889) leaves queries where they are and sends keys and values
# round: in each step a rank computes with the block it has while that block is on its way to the
# next rank and another arrives. The picture is the matrix of scores: a row of queries has the
# colour of its rank, the number is the step in which the square is computed.

# %%
draw_rings()
plt.show()

# %% [markdown]
# The other two panels come later. First: how can a rank attend to one block of keys at a time?
#
# ## Merging partial softmaxes
#
# Softmax needs the sum over *all* keys. From attention over a block one keeps the output, and the
# log of its denominator, `lse = log(sum of exp(scores))`. Two blocks then merge exactly:
#
# `lse = log(exp(lse_a) + exp(lse_b))`, &nbsp; `out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b`

# %%
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 2, n, 16, generator=generator).to(sb.device()) for n in (5, 40, 40))
whole = F.scaled_dot_product_attention(q, k, v)
a = block_attention(q, k[:, :, :30], v[:, :, :30], causal=False)  # out [B, H, S, D], lse [B, H, S]
b = block_attention(q, k[:, :, 30:], v[:, :, 30:], causal=False)
merged, _ = merge_attention(*a, *b)
print("merged by lse, within 1e-5:   ", bool((merged - whole).abs().max() < 1e-5))
print("mean of both, within 1e-5:    ", bool(((a[0] + b[0]) / 2 - whole).abs().max() < 1e-5))
print(
    "mean by keys, within 1e-5:    ", bool((0.75 * a[0] + 0.25 * b[0] - whole).abs().max() < 1e-5)
)

# %% [markdown]
# Written like this, it fails as soon as a score is large: `exp(89)` is infinite in fp32, and
# infinity over infinity is not a number. Far below zero, it divides zero by zero. Only differences
# may be exponentiated, and only differences of at most 0: `lse + log(1 + exp(block_lse - lse))` is
# written with a difference and overflows as soon as a later block's lse is larger by 89. That line
# of ring-flash-attention was found by a user of another library
# ([EasyContext#14](https://github.com/jzhang38/EasyContext/issues/14)); the fix is
# `lse - logsigmoid(lse - block_lse)`
# ([ring-flash-attention#30](https://github.com/zhuzilin/ring-flash-attention/pull/30)). Ours takes the
# larger one out.

# %%
out_a, out_b = a[0], b[0]
for size in (1.0, 80.0, 100.0, -200.0):
    lse_a = torch.full_like(a[1], size)
    lse_b = lse_a - 1
    share = torch.exp(lse_a) / (torch.exp(lse_a) + torch.exp(lse_b))
    naive = share[..., None] * out_a + (1 - share[..., None]) * out_b
    safe, _ = merge_attention(out_a, lse_a, out_b, lse_b)
    finite = [bool(x.isfinite().all()) for x in (naive, safe)]
    print(f"lse about {size:6.0f}   naive finite: {finite[0]!s:5}   ours finite: {finite[1]}")

# %% [markdown]
# One more case: under a causal mask a query may see *no* key of a block. Its lse is -inf, its
# weight 0. `-inf - -inf` is the trap; `merge_attention` treats it.
#
# ## Forward and backward, in bytes
#
# Forward, K and V move P-1 times. For backward, keeping the visiting blocks would undo the whole
# point, so only a rank's own are kept, and the ring turns again. In each step a rank finds the
# weights of the block in its hands from the kept lse, and with them dq, which stays, and dk and dv,
# which belong to somebody else. They travel with their keys, and make one step more: home.
#
# Predict for B=2, 8 heads, 2 kv heads of 16, 128 tokens, 4 ranks, fp32: the bytes a rank sends.

# %% predict="forward_bytes backward_bytes"
block = 2 * 2 * (128 // 4) * 16 * 4  # bytes of a rank's K, and of its V: B, Hkv, S/P, D, fp32
forward_bytes = 2 * (4 - 1) * block
backward_bytes = 2 * (4 - 1) * block + 2 * 4 * block  # K and V, then dK and dV


# %%
def qkv(rank_positions, heads=8, kv_heads=2, seq=128, batch=2, dtype=torch.float32):
    """This rank's part of q, k, v, and of a gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, n, seq, 16) for n in (heads, kv_heads, kv_heads, heads)]
    whole = [torch.randn(*shape, generator=generator) for shape in shapes]
    return [x[:, :, rank_positions].to(sb.device(), dtype) for x in whole]


WAYS = {
    "ring": (partial(ring_attention, causal=True), False),
    "zigzag": (zigzag_ring_attention, True),
    "Ulysses": (partial(ulysses_attention, causal=True), False),
}


def attend(way, **sizes):
    """What a rank computes, sends, and how many FLOPs that takes."""
    attention, zigzag = WAYS[way]
    rank, world = dist.get_rank(), dist.get_world_size()
    held = shard_positions(sizes.get("seq", 128), world, rank, zigzag)
    q, k, v, grad = qkv(held, **sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with calls.record() as forward, FlopCounterMode(display=False) as flops:
        out = attention(*leaves)
    with calls.record() as backward:
        grads = torch.autograd.grad(out, leaves, grad)
    return {
        "tensors": [x.detach().cpu() for x in (out, *grads)],
        "forward": calls.summary(forward),
        "backward": calls.summary(backward),
        "flops": flops.get_total_flops(),
    }


def one_process(**sizes):
    q, k, v, grad = qkv(slice(None), **sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=grouped)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, grad))]


def right(values, zigzag=False):
    """Which of out, dq, dk, dv equal the whole sequence's on all ranks."""
    whole, found = one_process(), {}
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        errors = []
        for rank, tensors in enumerate(values):
            held = shard_positions(128, len(values), rank, zigzag)
            errors.append((tensors[i] - whole[i][:, :, held]).abs().max())
        found[name] = bool(max(errors) < 1e-5)
    return found


ring = sb.run(attend, "ring", world_size=4).values
sb.predict("bytes sent forward ", forward_bytes, ring[1]["forward"]["send"][1])
sb.predict("bytes sent backward", backward_bytes, ring[1]["backward"]["send"][1])
print("within 1e-5 of one process:", right([r["tensors"] for r in ring]))

# %% [markdown]
# Grouped queries help twice: two kv heads travel for eight heads. Note what is *not* sent in
# proportion to: the number of query heads, or of parameters.
#
# ### The trace of four ranks
#
# Every arrow is a block of K or V going from a rank to the next; forward three rounds, backward
# three of K and V and four of their gradients. The slices "block" and "block backward" are what a rank
# computes between messages: rank r has r+1 of each. So rank 0 has the least to do, passes on what it
# gets at once, and nobody has to wait for it; it waits for rank 3, which computes in every round.
# In backward a round's gradients travel while the next block is computed.


# %% tags=["nbval-ignore-output"]
def traced_ring(way):
    attention, zigzag = WAYS[way]
    held = shard_positions(1024, dist.get_world_size(), dist.get_rank(), zigzag)
    q, k, v, grad = qkv(held, heads=4, kv_heads=4, seq=1024, batch=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attention(*leaves).backward(grad)  # first calls are slow: leave them out
    dist.barrier()
    with sb.trace() as t:
        with sb.mark("forward"):
            out = attention(*leaves)
        with sb.mark("backward"):
            out.backward(grad)
    return t


merge(sb.run(traced_ring, "ring", world_size=4).values, title="ring attention, causal")

# %% [markdown]
# ## Causal: most ranks wait
#
# The middle panel above. With contiguous shards a rank skips the blocks of all later ranks: rank 0
# computes one block, rank P-1 all P of them. Skipping saves energy but no time: the ring turns at
# the speed of the slowest, and in every step some rank has a full block to do.
#
# Work in blocks of (S/P)²: rank r needs r+1 where, unlike in the picture, the diagonal block is
# computed whole and masked. The mean is (P+1)/2, the time P. So at most `(P+1)/(2P)` of the ranks'
# time is used: 62.5 % at 4, 56 % at 8, one half for many. A kernel that skips the masked half of the
# diagonal block makes both smaller by half a block, P/2 and P - 1/2, and the bound P/(2P-1).
#
# **Zigzag** deals the sequence in 2P chunks, and rank r gets chunks r and 2P-1-r: an early one,
# which sees little, and a late one, which sees much. From an earlier rank only its early half is
# visible, to all own queries. From a later one both halves are, to the own late queries. Either is
# half a block, in every step, on every rank: the right panel.

# %% predict="zigzag_share"
# What part of the whole S x S attention does a rank compute, of 4? Own block: three of the four
# pairs of half shards (two of them masked triangles). Other blocks: two of four.
zigzag_share = (3 + 2 * (4 - 1)) / (4 * 4**2)  # = (2P + 1) / (4 P^2)

# %%
zigzag = sb.run(attend, "zigzag", world_size=4).values
everything = 4 * 2 * 8 * 128 * 128 * 16  # 4 B H S^2 D: two products, multiply and add
shares = [r["flops"] / everything for r in zigzag]
sb.predict("share of every rank, in zigzag", [zigzag_share] * 4, shares)
print("contiguous:", [r["flops"] / everything for r in ring])
print("within 1e-5 of one process:", right([r["tensors"] for r in zigzag], zigzag=True))

# %%
plot.bars(
    {
        "contiguous": {f"rank {i}": r["flops"] / everything * 16 for i, r in enumerate(ring)},
        "zigzag": {f"rank {i}": r["flops"] / everything * 16 for i, r in enumerate(zigzag)},
    },
    ylabel="blocks of (S/P)²",
    title="Work of a rank, counted",
)
plt.show()

# %% [markdown]
# Does equal work make equal time? Two cores can't show four kernels at once, so they are **paced**:
# `sb.pace(ms)` sleeps for the time of a product. Messages are real and so is the plan of who
# computes what. Predict the time of zigzag as a part of the contiguous ring's.

# %% predict="predicted"
predicted = (2 * 4 + 1) / 4 / 4  # (2P+1)/4 blocks on every rank, against P on the last

# %%
BLOCK = 200  # ms, paced: a block of S/P queries by S/P keys


def paced_ring(plan, size=32):
    """Seconds of a ring whose kernels sleep in proportion to their work."""
    rank, world = dist.get_rank(), dist.get_world_size()
    moving = [torch.zeros(1, 4, size, 16, device=sb.device()) for _ in "kv"]
    dist.barrier()
    start = time.monotonic()
    for step in range(world):
        owner = (rank - step) % world
        if step < world - 1:
            arriving, works = exchange(moving, None)
        parts = plan(rank, owner, size)
        pairs = sum(len(range(size)[rows]) * len(range(size)[cols]) for rows, cols, _ in parts)
        if pairs:
            sb.pace(BLOCK * pairs / size**2, f"keys of rank {owner}")
        if step < world - 1:
            for work in works:
                work.wait()
            moving = arriving
    dist.barrier()  # until the last rank has done its part
    return time.monotonic() - start


def paced_rings():
    paced_ring(lambda *_: [])  # first messages are slow: a ring without work
    with sb.trace() as t:
        with sb.mark("contiguous"):
            contiguous = paced_ring(causal_plan)
        with sb.mark("zigzag"):
            zigzag = paced_ring(zigzag_plan)
    return contiguous, zigzag, t


# %% tags=["nbval-ignore-output"]
*_, (contiguous, dealt, _) = values = sb.run(paced_rings, world_size=4).values
print(f"paced: contiguous {contiguous:.3f} s, zigzag {dealt:.3f} s")
print(f"zigzag / contiguous: predicted {predicted:.3f}, measured {dealt / contiguous:.3f}")
merge([t for *_, t in values], title="paced: a causal ring, contiguous, then in a zigzag")

# %% [markdown]
# On the left rank 0 works a quarter of the time, on the right everybody works until the end.
#
# zhuzilin/ring-flash-attention publishes what its rings reach of an ideal (README: causal, forward and
# backward, heads as in Llama-3.1-8B, 8k tokens on each device). The ideal is the speed of flash
# attention on *one* device with 8k tokens, divided by 8, since a ring of 8 has 8 times as much to
# compute on each. Its kernel skips masked tiles, so our bound for the contiguous ring at P=8 is
# P/(2P-1) = 53.3 %. One row is above it: the ideal is a rate measured for 8k tokens, and a kernel may
# run a little faster on longer sequences, so these percentages are not exact shares.
#
# | 8 devices | contiguous | zigzag | stripe |
# |---|---|---|---|
# | bound by imbalance | 53.3 % | 100 % | 100 % |
# | H800, published | 53.9 % | 90.2 % | 82.9 % |
# | A100, published | 52.5 % | 89.8 % | 82.6 % |
#
# Stripe (arXiv 2311.09431) deals single tokens, like cards: rank r has r, r+P, r+2P... Balanced too,
# and every block is half masked, so it needs a kernel that does not compute masked pairs.
#
# ## Ulysses: heads for sequence
#
# **Ulysses** (arXiv 2309.14509) doesn't touch attention. An all-to-all before it trades positions
# for heads, one after it trades back. In between, each rank runs any kernel on the *whole* sequence
# of H/P heads. Causal work is balanced by itself.

# %%
draw_ulysses()
plt.show()

# %% predict="predicted"
# Forward, with 8 heads and 8 kv heads: bytes that a rank hands to all-to-alls. A fourth part
# of each stays at home.
predicted = 4 * 2 * 8 * (128 // 4) * 16 * 4  # q, k, v and the output: B, H, S/P, D, fp32


# %%
def forward_calls():
    cases = [(way, kv_heads) for way in ("ring", "Ulysses") for kv_heads in (8, 4, 2, 1)]
    return {(way, n): attend(way, kv_heads=n)["forward"] for way, n in cases}


table = sb.run(forward_calls, world_size=4).values[0]
handed = table["Ulysses", 8]["all_to_all"]
sb.predict("bytes handed to all-to-all", predicted, handed[1])
for kv_heads in (8, 4, 2, 1):
    ring_sends = table["ring", kv_heads]["send"][1]
    ulysses_sends = table["Ulysses", kv_heads]["all_to_all"][1] * 3 // 4
    print(
        f"{kv_heads} kv heads: sent forward by ring {ring_sends:>7,}, by Ulysses {ulysses_sends:>7,}"
    )

try:
    sb.run(attend, "Ulysses", heads=6, kv_heads=6, world_size=4, echo=False)
except sb.RankError as error:
    print(error.causes[0])

# %% [markdown]
# - **Heads.** Ulysses ends where P exceeds the heads. Fewer kv heads than ranks have to be copied
#   (else some ranks are dealt none and the all-to-all fails,
#   [LlamaFactory#10794](https://github.com/hiyouga/LlamaFactory/pull/10794)), and the traffic stops falling: 4, 2 and
#   1 kv heads cost the same here. A ring sends exactly the kv heads there are.
# - **Ranks.** Per rank and in units of `B S d` values, a ring sends `2 Hkv (P-1)/P`, which hardly
#   depends on P, Ulysses `(2H + 2Hkv) (P-1)/P²`, which falls. With Hkv = H the two are equal at
#   P = 2, and Ulysses sends half at P = 4.
# - **Overlap.** A ring hides its messages behind the block it computes, if the block is large
#   enough. The all-to-alls of Ulysses are fully exposed: nothing can be computed meanwhile.
#
# When does a ring hide everything? A step of two-byte numbers sends `2 * 2 Hkv c d` bytes for a
# chunk of c = S/P tokens and computes `4 H c² d` FLOPs, half of it under a causal mask in zigzag.
# Without mask and with Hkv = H: c must be at least FLOPs per second over bytes per second.


# %%
def exposed_ms(way, seq, ranks, flops, bandwidth, heads=32, kv_heads=8, dim=128):
    """Forward, causal, 2-byte values: computed milliseconds of messages that nothing hides."""
    chunk = seq / ranks
    if way == "Ulysses":
        kv = max(kv_heads, ranks)  # of powers of two: copied until they divide
        return 2 * (2 * heads + 2 * kv) * chunk * dim * (ranks - 1) / ranks / bandwidth * 1e3
    compute = 2 * heads * chunk**2 * dim / flops
    message = 2 * 2 * kv_heads * chunk * dim / bandwidth
    return (ranks - 1) * max(0.0, message - compute) * 1e3


H100 = 989e12  # bf16 FLOPs a second, NVIDIA's data sheet
LINKS = {"NVLink, 450 GB/s each way": 450e9, "RDMA, 50 GB/s": 50e9}
for name, bandwidth in LINKS.items():
    chunk = H100 / bandwidth
    print(
        f"{name:26} hides a chunk of {chunk:,.0f} tokens, causal with 8 of 32 heads {chunk / 2:,.0f}"
    )

# %%
fig, axes = plot.figure(9, 3.4, 2)
seqs = [2**n for n in range(12, 21)]
for ax, (name, bandwidth) in zip(axes, LINKS.items(), strict=True):
    for way, marker in (("zigzag ring", "o-"), ("Ulysses", "s-")):
        ms = [exposed_ms(way, s, 8, H100, bandwidth) for s in seqs]
        ax.plot(seqs, [x or float("nan") for x in ms], marker, markersize=4, label=way)
    ax.set(xscale="log", yscale="log", xlabel="tokens of the sequence", title=name)
    ax.set_xticks([2**12, 2**14, 2**16, 2**18, 2**20], ["4k", "16k", "64k", "256k", "1M"])
    ax.minorticks_off()
axes[0].set_ylabel("exposed, ms (computed)")
axes[0].legend()
plt.show()

# %% [markdown]
# Computed from data sheets, for 8 ranks and a layer like Llama-3-8B's (32 heads, 8 kv heads, 128),
# without latencies, RDMA as one 400 Gbit/s adapter for each rank: kernels reach less than the peak, which
# moves the ring's end to the left, and
# small messages take longer than their bytes. Where a ring's line ends, its messages are hidden
# completely. Over the slow link Ulysses wins up to 16k tokens, the ring from 32k on. With few kv
# heads on a fast link the ring has little to hide. Both at once, on a mesh: the next section.
#
# xDiT publishes both for a diffusion transformer, where no mask unbalances the ring: Flux.1-dev on
# H100s, compiled, takes 4.30 s on one device; on two 2.68 s with Ulysses and 2.60 s with a ring; on
# four 1.63 s with Ulysses and 1.98 s with a ring
# ([xDiT's page on Flux](https://github.com/xdit-project/xDiT/blob/main/docs/performance/flux.md)).
# 4,096 image tokens at 1024 x 1024 are 1,024 on each rank: by the line above a ring
# on NVLink is not hidden.
#
# ### Both: the inner group trades heads, the outer one is a ring
#
# The order of positions has to be that of the *outer* ring: shard in a zigzag over the outer group,
# then cut each shard contiguously over the inner. Dealing the zigzag over all ranks looks right and
# is a wrong mask, in silence. ([long-context-attention#53](https://github.com/feifeibear/long-context-attention/issues/53)
# asks about it; the answer is that the input has to be reordered for both degrees before attention.)


# %%
def hybrid():
    """2 x 2 ranks, two orders: worst error of the output against one process."""
    rank = dist.get_rank()
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    everything, errors = torch.arange(128), {}
    orders = {
        "the outer ring's": zigzag_shard(everything, 2, rank // 2, 0).chunk(2)[rank % 2],
        "that of all ranks": zigzag_shard(everything, 4, rank, 0),
    }
    for order, held in orders.items():
        q, k, v, _ = qkv(held)
        q, k, v = (heads_for_sequence(x, inner) for x in (q, k, v))  # [B, H/2, S/2, D]
        out = sequence_for_heads(zigzag_ring_attention(q, k, v, outer), inner)
        errors[order] = (out.cpu() - one_process()[0][:, :, held]).abs().max().item()
    return errors


values = sb.run(hybrid, world_size=4).values
for order in values[0]:
    worst = max(errors[order] for errors in values)
    print(f"zigzag in an order like {order:17}  within 1e-5: {worst < 1e-5}")

# %% [markdown]
# ## Packed documents
#
# A training sequence is often several documents in a row, and a token sees only its own. Then a
# zigzag over the whole sequence balances nothing: a token's work depends on its place in its document.
# Deal **each document** in a zigzag. Every rank then has two chunks of each, and the same work. We
# count visible pairs of query and key, and run the last way.


# %%
LENGTHS = (64, 32, 16, 16)  # of the documents; each divides by 2P
STARTS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
sees = torch.cat([torch.arange(n) + 1 for n in LENGTHS])  # keys that each position sees


def dealt_by_document(world, rank):
    """Positions of each document that a rank holds."""
    pairs = zip(STARTS, LENGTHS, strict=True)
    return [start + shard_positions(n, world, rank, zigzag=True) for start, n in pairs]


def packed():
    """Worst error of this rank's output, against each document attended to by itself."""
    q, k, v, _ = qkv(slice(None))
    errors = []
    for start, n, held in zip(STARTS, LENGTHS, dealt_by_document(4, dist.get_rank()), strict=True):
        whole, mine = ([x[:, :, at] for x in (q, k, v)] for at in (slice(start, start + n), held))
        expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        out = zigzag_ring_attention(*mine)  # a kernel for varying lengths does all at once
        errors.append((out - expected[:, :, held - start]).abs().max().item())
    return max(errors)


for name, held in (
    ("contiguous", [shard_positions(128, 4, r) for r in range(4)]),
    ("zigzag over all", [shard_positions(128, 4, r, zigzag=True) for r in range(4)]),
    ("by document", [torch.cat(dealt_by_document(4, r)) for r in range(4)]),
):
    print(f"{name:16} pairs by rank: {[int(sees[at].sum()) for at in held]}")
print("by document, within 1e-5:", max(sb.run(packed, world_size=4).values) < 1e-5)

# %% [markdown]
# Contiguous cuts and one zigzag leave ranks with more and with less; by document all have the same.
# Where documents are short and many, one does not cut them at all and gives each rank whole ones.
# Positions of the rotary embedding begin at 0 in each document: they are `held - start`.
#
# ## The positions of a shard
#
# The model's rotary embedding needs to know where a token stands in the *whole* sequence. A rank
# that counts its own from 0 gets right shapes, right attention within its shard, and wrong
# attention to all others. (A case:
# [Megatron-LM#1612](https://github.com/NVIDIA/Megatron-LM/pull/1612) corrects how multi-axis rotary
# positions are sliced for a rank of the context-parallel group.) `shard_positions` says what a rank
# holds.

# %%
for rank in range(4):
    print(f"rank {rank}: {shard_positions(16, 4, rank).tolist()}", end="")
    print(f"   zigzag {shard_positions(16, 4, rank, zigzag=True).tolist()}")


# %%
def logits_error(kind, positions):
    """Worst error of this rank's logits, where the model is told these positions."""
    tokens, _ = counting_batch(0)
    held = held_positions(64, kind)
    told = {
        "of the shard": held,
        "from 0": torch.arange(16),
        "contiguous": held_positions(64, "ring"),
    }
    with torch.no_grad():
        expected = tiny_lm()(tokens)[:, held]
        model = context_parallel_(tiny_lm().to(sb.device()), kind)
        logits = model(tokens[:, held].to(sb.device()), told[positions].to(sb.device()))
    return (logits.cpu() - expected).abs().max().item()


def all_logits():
    ways = [("ring", "of the shard"), ("ring", "from 0")]
    ways += [("zigzag", "of the shard"), ("zigzag", "contiguous")]
    return {way: logits_error(*way) for way in ways}


values = sb.run(all_logits, world_size=4).values
for way in values[0]:
    good = [rank for rank, errors in enumerate(values) if errors[way] < 1e-4]
    print(f"{way[0]:7} positions {way[1]:13} right on ranks {good}")

# %% [markdown]
# Rank 0 of the ring is right even with wrong positions: if you test only rank 0, or P = 1, you see
# nothing.
# With zigzag data the labels have to be dealt the same way: they are the *next* token of the whole
# sequence, so shift before you shard.
#
# ## The scale of the loss
#
# To the parameters, context parallelism is data parallelism over tokens: each rank's gradient is a
# part of the sum. Which part depends on what the loss divides by. We compare the head's gradient
# with one process's, for targets that all count, and for targets whose first 10 or 20 are a prompt
# that doesn't (-100); each of 4 ranks holds 16 of 64.


# %%
def head_gradient(how, prompt):
    """Gradient of the head, and the loss this rank would report."""
    tokens, targets = counting_batch(0)
    targets[:, :prompt] = -100
    kind = "whole" if how == "one process" else "ring"
    model = context_parallel_(tiny_lm().to(sb.device()), kind)
    if how in ("one process", "sum / count of all"):
        loss = context_parallel_step(model, kind, tokens, targets)
        return model.head.weight.grad.cpu(), loss
    held = held_positions(64, kind)
    logits = model(tokens[:, held].to(sb.device()), held.to(sb.device()))
    loss = F.cross_entropy(logits.flatten(0, 1), targets[:, held].to(sb.device()).flatten())
    loss.backward()
    grad = model.head.weight.grad
    dist.all_reduce(grad)
    return (grad / 4 if how == "own mean, averaged" else grad).cpu(), loss.item()


def all_gradients():
    ways = ("own mean, summed", "own mean, averaged", "sum / count of all")
    found = []
    for prompt in (0, 10, 20):
        expected, _ = head_gradient("one process", prompt)
        for how in ways:
            grad, loss = head_gradient(how, prompt)
            size = (grad.norm() / expected.norm()).item()
            found.append((prompt, how, bool((grad - expected).abs().max() < 1e-5), size, loss))
    return found


for prompt, how, ok, size, loss in sb.run(all_gradients, world_size=4).values[0]:
    print(
        f"prompt {prompt:2}  {how:18}  right: {ok!s:5}  size {size:.2f}  rank 0's loss {loss:.2f}"
    )

# %% [markdown]
# A factor of P hides behind Adam. A mean of means is right until a prompt or padding makes the
# counts differ: 2 % of size at first, a quarter when rank 0 has nothing that counts. Its mean is
# over nothing, so its loss is nan while its gradients are 0, and averaging counts it all the same.
# Divide the sum by the count of all ranks. (Cases: the factor of P, fixed after
# [Megatron-LM#906](https://github.com/NVIDIA/Megatron-LM/issues/906); a wrong scale together with
# labels that were shifted after sharding, [verl#4250](https://github.com/verl-project/verl/pull/4250).)
#
# ### Cut twice
#
# When the data loader cuts, and the model's hook cuts again, each rank trains on S/P² tokens with
# consistent shapes and a falling loss. Count tokens over all ranks, once, in every new set-up:

# %%
tokens, _ = counting_batch(0)
once = [tokens[:, shard_positions(64, 4, r)] for r in range(4)]
twice = [mine[:, shard_positions(16, 4, r)] for r, mine in enumerate(once)]
for name, shards in (("cut once", once), ("cut twice", twice)):
    print(f"{name:9}  tokens on all ranks {sum(s.numel() for s in shards)} of {tokens.numel()}")

# %% [markdown]
# ## Does it train?
#
# The small model, the same batches, AdamW: one process, and four ranks with a quarter of every
# sequence each, by ring, zigzag and Ulysses.


# %%
def train(kind, steps=40, break_it=None):
    if break_it:
        break_it()
    model = context_parallel_(tiny_lm().to(sb.device()), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(context_parallel_step(model, kind, *counting_batch(step)))
        optimizer.step()
    return losses


curves = {"one process": sb.run(train, "whole", world_size=1).values[0]}
for kind in ("ring", "zigzag", "ulysses"):
    curves[f"{kind}, 4 ranks"] = sb.run(train, kind, world_size=4).values[0]
single, *others = curves.values()
print("loss of the first step", round(single[0], 2), "and of the last", round(single[-1], 2))
for name, other in list(curves.items())[1:]:
    worst = max(abs(a - b) for a, b in zip(single, other, strict=True))
    print(f"{name:16} within 1e-3: {worst < 1e-3}")
(ax,) = plot.curves(curves, "step", "loss", "The four curves lie on each other").axes
for line, style in zip(ax.lines[1:], ("-", "--", ":"), strict=True):
    line.set(linestyle=style)
ax.legend()
plt.show()

# %% [markdown]
# ## PyTorch's own
#
# `torch.distributed.tensor.experimental.context_parallel` swaps SDPA for a ring inside a `with`
# block. What is under it, and what libraries build on, is a ring around any kernel that returns
# out and lse. We put our block kernel into it and compare the ring. It names zigzag "load
# balancing", and its keys go round in one of two ways.


# %%
def torchs_ring(rotate, zigzag):
    """out, dq, dk, dv and the calls of torch's ring with our kernels."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    theirs._cp_options.enable_load_balance = zigzag
    theirs._cp_options.rotate_method = getattr(theirs._RotateMethod, rotate)

    def forward_op(q, k, v, is_causal):
        return block_attention(q, k, v, is_causal)

    def backward_op(query, key, value, out, logsumexp, is_causal, grad_out):
        delta = (grad_out * out).sum(-1)
        return block_attention_backward(grad_out, delta, query, key, value, logsumexp, is_causal)

    held = shard_positions(128, dist.get_world_size(), dist.get_rank(), zigzag)
    q, k, v, grad = qkv(held)
    group = dist.group.WORLD
    with calls.record() as forward:
        out, lse = theirs._templated_ring_attention(group, 2, forward_op, q, k, v, is_causal=True)
    with calls.record() as backward:
        grads = theirs._templated_ring_attention_backward(
            group, 2, backward_op, grad, "grad_out", q, k, v, out, lse, is_causal=True
        )
    return [x.cpu() for x in (out, *grads)], calls.summary(forward), calls.summary(backward)


def all_rings():
    ways = (("ALL_GATHER", False), ("ALL_GATHER", True), ("ALL_TO_ALL", True))
    return {way: torchs_ring(*way) for way in ways}


values = sb.run(all_rings, world_size=4).values
for rotate, balanced in values[0]:
    errors = [
        (a - b).abs().max()
        for theirs, ours in zip(values, zigzag if balanced else ring, strict=True)
        for a, b in zip(theirs[rotate, balanced][0], ours["tensors"], strict=True)
    ]
    same = bool(max(errors) < 1e-5)
    name = f"{rotate}, {'zigzag' if balanced else 'contiguous'}"
    print(f"{name}: equal to ours within 1e-5: {same}")
    print("   forward ", values[0][rotate, balanced][1])
    print("   backward", values[0][rotate, balanced][2])
print("ours\n   forward ", ring[0]["forward"])
print("   backward", ring[0]["backward"])

# %% [markdown]
# Values agree. Its default gathers all keys and values at the first step: one call, the same bytes
# on the wire, and every rank holds K and V of the *whole* sequence while attention runs. The
# Llama 3 report (arXiv 2407.21783) made that choice too: with 8 kv heads, K and V are small beside
# the rest. `set_rotate_method("alltoall")` rotates: a rank then holds two blocks.
#
# ## A failure to provoke: stale keys in backward
#
# In backward, the block that a rank has at the moment is not the one it saved. Read K and V from
# `ctx.saved_tensors` instead of from the ring, and everything has the right shape. Each rank is a
# process of its own, so we can break it there.


# %%
def stale_backward():
    """From now on this process's ring uses its saved keys in every step of backward."""
    from shardbook.parallel import ring as module

    backward, formula = module._Ring.backward, module.block_attention_backward

    def broken(ctx, grad):
        _, k, v, *_ = ctx.saved_tensors
        module.block_attention_backward = lambda grad, delta, q, keys, values, lse, causal: formula(
            grad, delta, q, k, v, lse, causal
        )
        try:
            return backward(ctx, grad)
        finally:
            module.block_attention_backward = formula

    module._Ring.backward = staticmethod(broken)


def stale_attention():
    stale_backward()
    return attend("ring")["tensors"]


print("right:", right(sb.run(stale_attention, world_size=4).values))

# %%
stale = sb.run(partial(train, break_it=stale_backward), "ring", world_size=4).values[0]
early = max(abs(a - b) for a, b in zip(single[:10], stale[:10], strict=True))
print("every loss finite:", all(abs(x) < 100 for x in stale))
print("first ten losses within 0.1 of the right ones:", early < 0.1)
print("last loss below 0.5: one process", single[-1] < 0.5, "  stale keys", stale[-1] < 0.5)
plot.curves({"one process": single, "ring with stale keys": stale}, "step", "loss")
plt.show()

# %% [markdown]
# The forward pass is right, nothing raises, nothing is nan, the loss falls like the right one and
# then stops too early. Inference tests pass. huggingface/diffusers had exactly this: its backward
# kernels read K and V from `ctx.saved_tensors` in every step of the ring ([diffusers#14265](https://github.com/huggingface/diffusers/issues/14265), met in
# [Automodel#3157](https://github.com/NVIDIA-NeMo/Automodel/pull/3157)). [Megatron-LM#1464](https://github.com/NVIDIA/Megatron-LM/issues/1464) reports wrong dq, dk, dv under context
# parallelism. The test that finds it is short: out *and* gradients of P ranks against one process,
# on random data, for P > 1.
#
# ## bf16: the error grows with P
#
# Where a kernel returns its block's output in bf16, and the running output is kept in bf16, each
# merge rounds. The whole attention rounds once. We merge P blocks both ways and compare with fp32.

# %% tags=["nbval-ignore-output"]
generator = torch.Generator().manual_seed(7)
q, k, v = (torch.randn(1, 4, n, 32, generator=generator).to(sb.device()) for n in (64, 1024, 1024))
exact, _ = block_attention(q, k, v, causal=False)
print("  P   merged in bf16   in fp32, rounded once   (root mean square error)")
for ranks in (1, 2, 4, 8, 16, 32):
    running = {}
    for dtype in (torch.bfloat16, torch.float32):
        for keys, values in zip(k.chunk(ranks, 2), v.chunk(ranks, 2), strict=True):
            out, lse = block_attention(q, keys, values, causal=False)
            part = out.to(dtype), lse
            running[dtype] = merge_attention(*running[dtype], *part) if dtype in running else part
    errors = [
        (out.bfloat16().float() - exact).square().mean().sqrt().item()
        for out, _ in running.values()
    ]
    print(f"{ranks:3}   {errors[0]:.2e}         {errors[1]:.2e}")

# %% [markdown]
# [ring-flash-attention#42](https://github.com/zhuzilin/ring-flash-attention/issues/42) reports errors that grow
# with the number of ranks although the running output is in fp32, and suspects the 16-bit output of
# each block; its README names that as a limit. So two things have to be in fp32: what the kernel
# returns for a block, and the running output and dk, dv, as in `_Ring`. It costs four bytes per
# value of one shard, and twice the bytes for travelling gradients.
#
# ## On a real cluster
#
# - **Neighbours.** A ring needs each rank to be near its two neighbours only: inside a host NVLink
#   or HCCS, and one hop of RDMA where it crosses. Ulysses is an all-to-all: keep it inside a host,
#   put the ring across hosts.
# - **HCCL and NCCL** run messages on streams of their own: begin them with `batch_isend_irecv`
#   before the kernel, as `exchange` does, and wait after it. A send and a receive that are not
#   batched can deadlock, and a buffer that is being sent must not be written. Both hold for gloo on a
#   CPU as well: two ranks that both call `send` first hang (chapter 23 provokes it), and after
#   `isend(x)` an `x.fill_(-1)` can reach the receiver.
# - **Kernels.** On CUDA take flash attention's own out and lse; on an Ascend NPU
#   `npu_fusion_attention` returns the softmax's maximum and sum, from which lse = max + log(sum).
#   MindSpeed has ring, Ulysses and hybrid context parallelism on these.
# - **Mesh.** The group of context parallelism is a part of data parallelism for gradients: all-reduce
#   (or FSDP's reduce-scatter) runs over both, the loss divides by the tokens of both.
# - **Padding.** Sequences must divide by P, by 2P in a zigzag. Pad, mask the labels, and count them
#   (the scale of the loss above).
#
# | published | figure | source |
# |---|---|---|
# | ring, zigzag, stripe, 8 H800, forward + backward | 53.9, 90.2, 82.9 % of ideal | ring-flash-attention's README |
# | Flux.1-dev, compiled, H100: 1; Ulysses-2, Ring-2; Ulysses-4, Ring-4 | 4.30; 2.68, 2.60; 1.63, 1.98 s | xDiT's page on Flux |
# | Ours, time of zigzag over contiguous, 4 paced ranks | predicted 2.25 blocks of 4 = 0.5625, measured above | this page |
#
# Now write it: [the lab](../labs/24_context_parallel.ipynb). Then
# [chapter 25](25_expert_parallel.ipynb) sends tokens to experts.
