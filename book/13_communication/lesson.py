# %% [markdown]
# # 13 · Communication: every collective from send and receive
#
# After this chapter you can
# - say what all-reduce, all-gather, reduce-scatter, broadcast and all-to-all do, and build each of
#   them from messages between two ranks,
# - predict the bytes and the time of each from two numbers of the network,
# - read a ring, a tree and a deadlock in a trace, and place a parallel strategy on the right link.
#
# Time: 60 minutes to read, 2 to 3 hours for the lab.

# %%
import shardbook as sb

import inspect
import math
import os
import socket
import subprocess
import sys
import tempfile
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist

from shardbook import calls, plot
from shardbook.basics.collectives import (
    all_to_all,
    collective_bytes,
    hierarchical_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
)
from shardbook.pictures.collectives import draw_operations
from shardbook.studies import links
from shardbook.studies.collectives import OPERATIONS, before_and_after
from shardbook.tracing import merge

# %% [markdown]
# ## Two calls
#
# A *rank* is one process with one device. `sb.run` starts some, joins them to a *world* and runs a
# function on each: the same function everywhere, with another answer to "who am I?". Everything in
# this chapter is made of two calls: `send` to a rank, `recv` from a rank.


# %%
def hello():
    rank = dist.get_rank()
    x = torch.tensor([10.0 * rank], device=sb.device())
    if rank == 0:
        dist.send(x + 5, 1)
    else:
        dist.recv(x, 0)  # overwrites x
    return x.item()


print("values by rank:", sb.run(hello, world_size=2).values)

# %% [markdown]
# The calls are torch.distributed's. Who carries them out is the *backend*:
#
# | library | for | links it uses | collectives, or the algorithms its documents name |
# |---|---|---|---|
# | MPI | CPUs, the standard these names come from | all, by implementation | all, since 1994 |
# | Gloo | CPUs, in every PyTorch build | TCP, also inside a host | all but a real reduce-scatter (see below) |
# | NCCL | NVIDIA GPUs | NVLink, PCIe, InfiniBand/RoCE, TCP as a fallback | ring, tree, in-network |
# | HCCL | Ascend NPUs | HCCS, PCIe, RoCE | ring, mesh, halving-doubling and more ([HCCL documentation](https://www.hiascend.com/document/detail/en/canncommercial/800/hcclug/hcclug/hcclug_000006.html)) |
#
# Your code names none of them: `sb.backend()` asks torch which one belongs to the device.
#
# ## The first mistake everyone makes
#
# Two ranks swap a value. Both send, then both receive. What happens?


# %%
def swap(first_send):
    rank = dist.get_rank()
    mine = torch.full((4,), float(rank), device=sb.device())
    theirs = torch.empty_like(mine)
    if first_send:
        dist.send(mine, 1 - rank)  # waits until the other side receives
        dist.recv(theirs, 1 - rank)
    else:
        work = dist.isend(mine, 1 - rank)  # starts, and comes back at once
        dist.recv(theirs, 1 - rank)
        work.wait()
    return theirs[0].item()


try:
    sb.run(swap, True, world_size=2, timeout=20)
except sb.RankError as error:
    print(error)
    print("hung:", error.hung)

# %% [markdown]
# Each waits for the other to receive. Four floats are enough here: how much a backend buffers is not
# part of any contract. Read the message: who waits in which call, for whom, in which line. With
# NCCL such a program may pass while messages are small, and hang when they are large or on a first
# connection. This very program hangs in [nccl#479](https://github.com/NVIDIA/nccl/issues/479); sends
# completed without their receive in [pytorch#138074](https://github.com/pytorch/pytorch/issues/138074)
# (below 64 MB) and [nccl#544](https://github.com/NVIDIA/nccl/issues/544) (two of 512 KB); two ranks
# connect at their first exchange, and a send is allowed to block until its receive is called
# ([nccl#783](https://github.com/NVIDIA/nccl/issues/783)). A hang there prints nothing until a timeout.
#
# The remedy is to start the send and go on (`isend`), or to hand send and receive over together
# (`batch_isend_irecv`), which is what all code below does.

# %%
print("with isend:", sb.run(swap, False, world_size=2).values)

# %% [markdown]
# ## The operations by name
#
# A *collective* is a call that every rank of a group makes, in the same order. Here are all of them, and
# the message between two ranks, run on four: each rank has data in a colour of its own, cut into pieces 0
# to 3, and the right half shows where they are afterwards. Stripes are sums (or, for `reduce` here,
# maxima) of what several ranks had.

# %%
seen = sb.run(before_and_after, world_size=4).values
draw_operations([f"{o.name}: dist.{o.call}" for o in OPERATIONS], seen)
plt.show()

# %% [markdown]
# **Predict** before you read on: which operation undoes all-gather, or is its backward? And all-to-all?

# %%
print(
    f"{'operation':15} {'torch.distributed':30} {'bytes handed, by rank':22} undone by, or backward"
)
for number, operation in enumerate(OPERATIONS):
    handed = " ".join(f"{found[number][2]:3}" for found in seen)
    print(f"{operation.name:15} {operation.call:30} {handed:22} {operation.inverse}")

# %% [markdown]
# A square is 16 bytes. Bytes handed are the whole tensor of the call; what a rank then *sends* depends
# on the algorithm, which is the rest of this chapter. After `reduce` only rank 0's result means
# anything. In a barrier nothing moves: nobody goes on before all have come.
#
# (`all_gather_single` and `reduce_scatter_single` are `all_gather_into_tensor` and
# `reduce_scatter_tensor` in torch before 2.13.) Below you meet broadcast, all-reduce, all-gather,
# reduce-scatter and all-to-all again, built from sends.
#
# ## How do four ranks add up a gradient?
#
# Each holds a tensor, all need the sum: *all-reduce*, the heart of data parallel training. The
# obvious way: everybody sends to rank 0, it adds and sends back. We count what goes in and out of
# each rank.


# %%
def star_all_reduce(x):
    rank, world = dist.get_rank(), dist.get_world_size()
    total, arrived = x.clone(), torch.empty_like(x)
    if rank == 0:
        for other in range(1, world):
            dist.recv(arrived, other)
            total += arrived
        for other in range(1, world):
            dist.send(total, other)
    else:
        dist.send(x, 0)
        dist.recv(total, 0)
    return total


def drawn(numel):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(numel, generator=generator).to(sb.device())


def traffic(algorithm, numel):
    """[messages sent, bytes sent, bytes received] of this rank, and whether the sum is right."""
    x = drawn(numel)
    with calls.record() as log:
        total = algorithm(x)
    dist.all_reduce(x)  # the library's, to compare with
    sums = calls.summary(log)
    right = torch.allclose(total, x, atol=1e-5)
    return [*sums["send"], sums["recv"][1], right]


counted = {}
for name, algorithm in {"star": star_all_reduce, "ring": ring_all_reduce}.items():
    counted[name] = sb.run(traffic, algorithm, 24_000, world_size=4).values
    for rank, (messages, sent, received, right) in enumerate(counted[name]):
        print(
            f"{name}  rank {rank}: {messages} messages, {sent:7,} bytes out, {received:7,} in,"
            f" right: {right}"
        )

# %%
plot.bars(
    {
        name: {f"rank {r}": sum(row[1:3]) / 1000 for r, row in enumerate(rows)}
        for name, rows in counted.items()
    },
    "kB in and out",
    "All-reduce of 96 kB on 4 ranks",
)
plt.show()

# %% [markdown]
# Both move 576,000 bytes in all. But all of the star's pass through rank 0, and with more ranks its
# centre sends and receives P-1 tensors, while in the ring every rank sends 2(P-1)/P of one: less
# than two, however many ranks there are.
#
# ## The ring
#
# Ranks stand in a circle and send to the next one only. The tensor is cut into P pieces. In the
# first P-1 steps (*reduce-scatter*) partial sums travel: each rank adds its part to the piece that
# arrives and passes it on. Then each rank owns one finished piece, and P-1 more steps
# (*all-gather*) pass the finished pieces around. The numbers count how many ranks' values are in a
# piece.


# %%
def ring_states(world):
    """After each step: how many ranks' values each rank's copy of each piece holds."""
    held = [[1] * world for _ in range(world)]
    states = [[row[:] for row in held]]
    for step in range(2 * (world - 1)):
        sent = [held[r][(r - step - 1) % world] for r in range(world)]  # piece r-1 leaves first
        for r in range(world):
            piece = (r - step - 2) % world
            arrived = sent[(r - 1) % world]
            held[r][piece] = arrived + 1 if step < world - 1 else arrived
        states.append([row[:] for row in held])
    return states


states = ring_states(4)
fig, axes = plot.figure(12, 2.3, columns=len(states))
for step, (ax, state) in enumerate(zip(axes, states, strict=True)):
    ax.imshow(state, cmap="Blues", vmin=0, vmax=6)
    for r in range(4):
        for p in range(4):
            ax.text(p, r, state[r][p], ha="center", va="center")
    kind = "start" if step == 0 else "reduce-scatter" if step < 4 else "all-gather"
    ax.set_title(f"{step}: {kind}" if step else kind, fontsize=9)
    ax.set_xticks(range(4), [f"p{p}" for p in range(4)], fontsize=8)
    ax.set_yticks(range(4), [f"rank {r}" for r in range(4)] if step == 0 else [""] * 4, fontsize=8)
plt.show()

# %% [markdown]
# Follow piece 1: rank 2 sends it first, it gathers values at ranks 3, 0 and ends complete at rank
# 1, its owner. After three steps the diagonal is done. That is reduce-scatter, a collective in its
# own right: ZeRO (chapter 21) and sequence parallel (chapter 22) stop here.
#
# Now the real thing. Four ranks, 4 MB each: first the star, then the ring. Click a slice to see
# its bytes and peer; arrows go from a send to the receive that took it.


# %% tags=["nbval-ignore-output"]
def star_then_ring():
    x = drawn(1_000_000)
    ring_all_reduce(x[:1000]), star_all_reduce(x[:1000])  # a pair's first message connects it
    dist.barrier()
    with sb.trace() as t:
        with sb.mark("star"):
            star_all_reduce(x)
        dist.barrier()
        with sb.mark("ring"):
            ring_all_reduce(x)
    return t


merge(sb.run(star_then_ring, world_size=4).values, "star, then ring")

# %% [markdown]
# In the star, ranks 1 to 3 mostly wait for rank 0. In the ring, all of them send and receive at
# once, six times a quarter of the size.
#
# ## The tree
#
# For a *broadcast* of something small, steps matter more than bytes. After a round of a tree
# everyone who has the value passes it on: 1, 2, 4, 8 ranks have it. A chain needs P-1 rounds, and
# so does a star: its centre can only do one send at a time.


# %%
def rounds_until_all(world, receivers):
    """Rank -> round in which it gets the value; receivers(have) lists who gets it next."""
    got, number = {0: 0}, 0
    while len(got) < world:
        number += 1
        for r in receivers(len(got)):
            if r < world:
                got[r] = number
    return [got[r] for r in range(world)]


world = 8
ways = {
    "star, chain": rounds_until_all(world, lambda have: [have]),
    "tree": rounds_until_all(world, lambda have: range(have, 2 * have)),
}
fig, axes = plot.figure(9, 1.7, columns=2)
for ax, (name, got) in zip(axes, ways.items(), strict=True):
    ax.imshow([got], cmap="Blues_r", vmin=-1, vmax=9)
    for r, number in enumerate(got):
        ax.text(r, 0, number, ha="center", va="center", color="white" if number < 4 else "black")
    ax.set_title(f"{name}: the round in which each rank has it", fontsize=10)
    ax.set_xticks(range(world), [f"rank {r}" for r in range(world)], fontsize=7)
    ax.set_yticks([])
plt.show()
for world in (4, 8, 64, 1024):
    print(f"{world:5} ranks: chain {world - 1:5} rounds, tree {math.ceil(math.log2(world)):3}")


# %% tags=["nbval-ignore-output"]
def broadcast_on_the_tree():
    x = drawn(500_000)
    tree_broadcast(x[:1000], 0)
    dist.barrier()
    with sb.trace() as t, sb.mark("tree_broadcast"):
        tree_broadcast(x, 0)
    return t


merge(sb.run(broadcast_on_the_tree, world_size=4).values, "tree_broadcast")

# %% [markdown]
# Two generations of arrows on four ranks: 0 to 1, then 0 and 1 to 2 and 3.
#
# ## Two numbers for a network
#
# A message of n bytes takes about `alpha + n / beta`: alpha is the latency, beta the bandwidth. We
# measure it: rank 0 sends, rank 1 sends back, half the time is one message.


# %%
print(inspect.getsource(links.ping_pong))
exact = [4**k for k in range(3, 13)]
alpha, beta = links.fit(exact, [5e-6 + n / 50e9 for n in exact])
print(f"the fit finds alpha = {alpha * 1e6:.3f} us and beta = {beta / 1e9:.3f} GB/s put into it")

# %% tags=["nbval-ignore-output"]
sizes = [4**k for k in range(3, 13)]
seconds = sb.run(links.ping_pong, sizes, world_size=2).values[0]
alpha, beta = links.fit(sizes, seconds)
fig, (ax,) = plot.figure(6, 3)
ax.loglog(sizes, [s * 1e6 for s in seconds], "o", label="measured here")
ax.loglog(sizes, [(alpha + n / beta) * 1e6 for n in sizes], label="alpha + n / beta")
ax.set(xlabel="bytes", ylabel="microseconds per message")
ax.legend()
plt.show()
print(f"alpha {alpha * 1e6:.0f} us, beta {beta / 1e9:.2f} GB/s")

# %% [markdown]
# Left of the bend the size does not matter, only the number of messages. Right of it only bytes
# count. From these two numbers follows the time of any algorithm, with S the bytes of the tensor:
#
# - ring all-reduce: `2(P-1) (alpha + S / (P beta))`
# - tree all-reduce (sum up the tree, broadcast down): `2 ceil(log2 P) (alpha + S / beta)`
#
# The formulas are adapted from Thakur, Rabenseifner and Gropp, *Optimization of Collective
# Communication Operations in MPICH* (2005), without the time for the additions. They suppose that
# every rank has a core and a link of its own. The four ranks here share this machine's cores and its
# memory. How far off are the formulas, for our ring, for the star (rank 0 receives P - 1 tensors and sends
# as many, `2(P-1) (alpha + S / beta)`), and for torch's own?


# %% tags=["nbval-ignore-output"]
def measured(sizes):
    algorithms = ring_all_reduce, star_all_reduce, dist.all_reduce
    return [[links.seconds_of(run, size, runs=3) for size in sizes] for run in algorithms]


sizes = [4**k for k in range(5, 12)]
names = ("ring", "star", "dist.all_reduce")
found = dict(zip(names, sb.run(measured, sizes, world_size=4).values[0], strict=True))
predicted = {
    "ring": [2 * 3 * (alpha + n / (4 * beta)) for n in sizes],
    "star": [2 * 3 * (alpha + n / beta) for n in sizes],
}
fig, (ax,) = plot.figure(8, 3.2)
for colour, (name, seconds) in zip(plot.COLOURS, found.items(), strict=False):
    ax.loglog(sizes, [s * 1e6 for s in seconds], "o-", color=colour, label=f"{name}, measured")
    if name in predicted:
        ax.loglog(sizes, [s * 1e6 for s in predicted[name]], "--", color=colour, label="predicted")
ax.set(xlabel="bytes", ylabel="microseconds", title="All-reduce of four ranks")
ax.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()
for name, seconds in predicted.items():
    ends = [found[name][i] / seconds[i] for i in (0, -1)]
    print(f"{name}: {ends[0]:.1f} times the prediction at 1 KB, {ends[1]:.1f} times at 4 MB")
print(
    f"at 4 MB star / ring: {found['star'][-1] / found['ring'][-1]:.1f}, predicted 4.0 for large sizes"
)

# %% [markdown]
# The prediction says that the star takes four times as long as the ring, because rank 0's link carries
# `6 S` and each of the ring's `1.5 S`. Where ranks share two cores and one memory, as in the stored output,
# no rank has a link of its own: what counts is the bytes of all ranks together, and these are `6 S` for both.
# The ring's advantage is gone; that it comes out behind the star is most likely the price of its six rounds,
# in each of which every rank waits until its neighbour has had a turn on a core. We have not measured it with
# a core and a link for each rank, for which the formulas are meant.
#
# ### The benchmark that everyone quotes
#
# nccl-tests (and hccl_test, its like for NPUs) prints two rates. *Algorithm bandwidth* is S over the time.
# *Bus bandwidth* multiplies it by the share of S that a rank's link has to carry, `2(P-1)/P` for
# all-reduce, `(P-1)/P` for all-gather and reduce-scatter, 1 for broadcast
# ([what is the busBW](https://forums.developer.nvidia.com/t/what-is-the-busbw-in-nccl-tests/256858)), so that
# it can be held against the link's data sheet. `links.bandwidths` does it in a few lines:

# %% tags=["nbval-ignore-output"]
sizes = [4_096, 65_536, 4_194_304]
rates = sb.run(links.bandwidths, list(links.MOVED), sizes, world_size=4).values[0]
print(f"{'GB/s, algorithm / bus':22}" + "".join(f"{n:>18,} B" for n in sizes))
for op, found in rates.items():
    print(f"{op:22}" + "".join(f"{a / 1e9:12.3f} / {b / 1e9:.3f}" for a, b in found))
    assert found[-1][1] > found[0][1], "large messages use the link better"

# %% [markdown]
# The next picture is computed, not measured: 64 ranks, alpha = 5 us, beta = 50 GB/s, about one 400 Gbit/s
# port each.


# %%
def ring_seconds(nbytes, world, alpha, beta):
    return 2 * (world - 1) * (alpha + nbytes / (world * beta))


def tree_seconds(nbytes, world, alpha, beta):
    return 2 * math.ceil(math.log2(world)) * (alpha + nbytes / beta)


sizes = [4**k for k in range(3, 15)]
fig, (ax,) = plot.figure(6, 3)
for name, seconds in {"ring": ring_seconds, "tree": tree_seconds}.items():
    ax.loglog(sizes, [seconds(n, 64, 5e-6, 50e9) * 1e6 for n in sizes], label=name)
ax.set(xlabel="bytes", ylabel="microseconds (simulated)", title="All-reduce on 64 ranks, computed")
ax.legend()
plt.show()
for world in (8, 64, 512):
    even = next(
        n
        for n in range(1, 10**9, 5000)
        if ring_seconds(n, world, 5e-6, 50e9) < tree_seconds(n, world, 5e-6, 50e9)
    )
    print(f"{world:4} ranks: the ring is faster from about {even / 1e6:.2f} MB on")

# %% [markdown]
# So libraries carry several algorithms and choose by size and world. NCCL adds double binary trees,
# which keep the logarithm and the full bandwidth ([NCCL
# 2.4](https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/)); HCCL
# chooses between ring, recursive halving-doubling, NHR, pipeline and others by topology, size and
# number of servers, and `HCCL_ALGO` forces one ([its
# page](https://www.hiascend.com/document/detail/zh/canncommercial/900/maintenref/envvar/envref_07_0079.html)).
#
# ## Do the bytes hold?
#
# The least that ranks must send, as a mean over ranks and without reduction in the network, is a
# closed form of S, the bytes of the full tensor. (A mean: in a broadcast the ranks that only
# receive send nothing.) All-reduce is twice everything else, because it is two of them. Measured on
# our own collectives, on 4 ranks, 96,000 bytes:


# %%
def bytes_sent():
    x = drawn(24_000)
    jobs = {
        "all_reduce": lambda: ring_all_reduce(x),
        "all_gather": lambda: ring_all_gather(x[:6000]),
        "reduce_scatter": lambda: ring_reduce_scatter(x),
        "all_to_all": lambda: all_to_all(list(x.chunk(4))),
        "broadcast": lambda: tree_broadcast(x, 0),
    }
    sent = {}
    for op, job in jobs.items():
        with calls.record() as log:
            job()
        sent[op] = sum(c.nbytes for c in log if c.op == "send" and c.dtype == x.dtype)
    return sent


by_rank = sb.run(bytes_sent, world_size=4).values
for op in by_rank[0]:
    sent = [row[op] for row in by_rank]
    mean, closed = sum(sent) // 4, collective_bytes(op, 96_000, 4)
    print(f"{op:15} by rank {sent!s:30} mean {mean:7,}  closed form {closed:7,}  {mean == closed}")

# %% [markdown]
# (all_to_all counts data only; its messages of sizes add 72 bytes a pair.)
#
# A backend need not reach the optimum. Gloo's reduce-scatter is an all-reduce of which each rank
# keeps a piece ([pytorch#118911](https://github.com/pytorch/pytorch/issues/118911)), twice the
# bytes. Checks in this book count the calls you make, not what a backend makes of them.
#
# ## Nodes: not all links are equal
#
# Ranks in one node share a fast link, nodes a slow one. A flat ring crosses between nodes with the
# whole 2(P-1)/P S, and one ring does so on one port of a node (libraries run several rings).
# *Hierarchical*: reduce-scatter inside the node, then every rank all-reduces its own piece with the
# ranks of the same place in other nodes, all ports at once, then all-gather inside.


# %%
def between_nodes(algorithm, ranks_per_node):
    x = drawn(24_000)
    node = dist.get_rank() // ranks_per_node
    with calls.record() as log:
        algorithm(x)
    return sum(c.nbytes for c in log if c.op == "send" and c.peer // ranks_per_node != node)


def hierarchical(x):
    return hierarchical_all_reduce(x, 2)


for name, algorithm in {"flat ring": ring_all_reduce, "hierarchical": hierarchical}.items():
    sent = sb.run(between_nodes, algorithm, 2, world_size=4).values
    print(f"{name:13} bytes to the other node by rank: {sent}")

# %% [markdown]
# Two nodes of two ranks: the busiest port carries a third of what it did.
#
# ## What is the link?
#
# | link | joins | bandwidth | how a byte gets over |
# |---|---|---|---|
# | shared memory | processes of a host | that of the memory | written by one core, read by another |
# | PCIe 5.0 x16 | device and host, devices of a host | 63 GB/s each way (32 GT/s x 16 lanes, PCI-SIG) | DMA engines |
# | NVLink 4, NVSwitch | GPUs of a node | 900 GB/s per GPU, both directions together (H100 data sheet) | loads, stores and DMA between device memories |
# | HCCS, Unified Bus | NPUs of a node or supernode | 392 GB/s each way per Ascend 910C of a CloudMatrix384, under 1 µs to any other ([arXiv 2506.12708](https://arxiv.org/abs/2506.12708), as [described](https://www.besthub.dev/articles/inside-huawei-s-cloudmatrix384-how-a-384-npu-ai-supernode-achieves-sub-microsecond-latency-2e19b4f44110)) | DMA between device memories |
# | TCP | hosts | that of the port, if the CPU keeps up | socket, kernel, copies on both sides |
# | RDMA: InfiniBand, RoCE | hosts | 50 GB/s per port (NDR, 400 Gbit/s) | the network card reads and writes memory itself |
#
# What makes RDMA fast is three things, and each is something that TCP does not do:
# - **CPU offload**: the card runs the transport protocol: packets, acknowledgements,
#   retransmissions. The CPU posts a request and polls for its completion.
# - **Kernel bypass**: that request goes from user space straight to the card's queue, without a
#   system call or an interrupt, which takes the kernel's microseconds out of alpha.
# - **Zero copy**: the card reads the registered buffer itself and writes into the receiver's, with
#   no copy through socket buffers. With GPUDirect RDMA, and between NPUs with RoCE on the card,
#   that buffer is the device's own memory, so host memory is never touched.
#
# ## Which strategy on which link?
#
# Psi parameters; b, s, h batch, sequence and hidden size; h_kv the width of all K heads (h, unless
# several query heads share one); k experts a token; t, N, P group sizes. *tokens* are those of a rank
# before routing. Volumes are elements sent by a rank.
#
# | strategy | collective | volume | how latency shows | placement |
# |---|---|---|---|---|
# | tensor (22) | all-reduce, 2 forward and 2 backward per layer | 2(t-1)/t b s h each | fully: the next matmul waits for it | inside a node |
# | sequence (22) | all-gather and reduce-scatter instead | the same in all | fully | inside a node, with tensor |
# | context, ring (24) | send/recv of K and V | 2(P-1) b (s/P) h_kv forward | hidden behind attention if blocks are large | inside, or between nodes |
# | context, Ulysses (24) | all-to-all, 4 forward | (P-1)/P^2 b s h each | fully | inside a node |
# | expert (25) | all-to-all, 2 forward | about 2 k tokens h (P-1)/P | fully, and the slowest rank decides | inside, or few nodes |
# | pipeline (23) | send/recv | b s h per micro-batch and boundary, each way | in the bubble | between nodes |
# | data (21) | all-reduce of gradients | 2(N-1)/N Psi per step | hidden behind backward | between nodes |
# | optimizer, ZeRO (21) | reduce-scatter, all-gather | 2(N-1)/N Psi; 3(N-1)/N Psi fully sharded | hidden by prefetching the next layer | between nodes |
#
# Rule: what is large *and* can't be hidden goes on the fast link. Tensor parallelism pays in every
# layer, data parallelism once a step. Llama 3 orders its dimensions [TP, CP, PP, DP] from the
# innermost to the outermost for this reason ([arXiv
# 2407.21783](https://arxiv.org/abs/2407.21783)).
#
# The orders of magnitude, computed for one step of a model of 70 billion parameters (80 layers, h = 8192, 8
# of 64 heads for K and V) on 512 cards as t = 8, 4 stages, N = 16, with 16 micro-batches of 8,192 tokens in
# bf16. The lines for context and expert parallelism say what 8 ranks of it would send instead of tensor
# parallelism's. The last column is one 400 Gbit/s port per rank, as if each rank of the group sat on a host of
# its own; a group that fills hosts crosses between them on all of their ports.

# %%
h, tokens, layers, micro, t, stages, N = 8192, 8192, 80 // 4, 16, 8, 4, 16
mine = 70e9 / (t * stages)  # parameters of a rank before ZeRO
activation = tokens * h * 2  # bytes of one micro-batch's [b, s, h]
times = layers * micro
rows = {
    "tensor": (4 * times * 2 * (t - 1) / t * activation, 4 * times),
    "context, ring": (3 * times * 2 * (t - 1) * tokens / t * (h // 8) * 2, 3 * times * 2 * (t - 1)),
    "context, Ulysses": (8 * times * (t - 1) / t**2 * activation, 8 * times),
    "expert, k = 8": (4 * times * 8 * (t - 1) / t * activation / t, 4 * times),
    "pipeline": (2 * micro * activation, 2 * micro),
    "data": (2 * (N - 1) / N * mine * 2, 1),
    "ZeRO-3": (3 * (N - 1) / N * mine * 2, 3 * layers),
}
print("one step                GB sent per rank    calls   at 450 GB/s    at 50 GB/s")
for name, (sent, number) in rows.items():
    print(f"{name:22}{sent / 1e9:14.1f} {number:12,}{sent / 450e9:12.2f} s{sent / 50e9:12.2f} s")
assert rows["tensor"][0] > 10 * rows["data"][0] > rows["pipeline"][0]

# %% [markdown]
# (Backward counts once more for tensor and expert parallelism, and twice for the ring, whose gradients
# travel too. ZeRO-3 is shown for one gather per step; gathered again for each micro-batch it is 16 times as
# much.) Tensor parallelism sends tens of times what data parallelism does, in a thousand calls that
# nothing hides: it gets the fast link. Pipeline and data parallelism can afford the slow one.
#
# One number more. Step-Video's activation is 932.5 MB in bf16 (chapter 11), three all-reduces
# a block under tensor parallelism, 48 blocks, 8 ranks. (Three, because its block has self-attention,
# cross-attention to the text and an MLP; the block of chapter 44 has no cross-attention and two.) At
# the full rate of NVLink 4 (450 GB/s each way) and of one NDR port (50 GB/s):

# %%
sent = collective_bytes("all_reduce", 36 * 34 * 62 * 6144 * 2, 8)
print(f"{sent / 1e9:.2f} GB sent by a rank for each all-reduce")
for name, rate in {"450 GB/s": 450e9, " 50 GB/s": 50e9}.items():
    print(f"{name}: {3 * 48 * sent / rate:5.2f} s for one pass through 48 blocks")

# %% [markdown]
# ## The same code on two hosts
#
# `sb.run` starts ranks from a cell. On a cluster `torchrun` starts them, one agent a host, and the
# agents find each other at a *rendezvous*. The function stays the same: under torchrun `sb.run`
# runs it in place. Below, two agents on this machine play two hosts of two ranks each; on a real
# pair of hosts each runs one of the two commands, with the first host's name for `localhost`.


# %%
def sum_over_hosts():
    """hierarchical_all_reduce, with the ranks of a host as node."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    x = torch.arange(3.0, device=sb.device()) + dist.get_rank()
    return hierarchical_all_reduce(x, per_node).tolist()


print("from a cell:", sb.run(sum_over_hosts, world_size=4).values[0])

# %%
program = f"""
import os
import shardbook as sb
import torch
import torch.distributed as dist
from shardbook.basics.collectives import hierarchical_all_reduce

{inspect.getsource(sum_over_hosts)}
result = sb.run(sum_over_hosts, world_size=4)
host, rank = os.environ["GROUP_RANK"], dist.get_rank()
line = f"host {{host}} rank {{rank}} of {{dist.get_world_size()}}: {{result.values[rank]}}"
os.write(1, line.encode() + b"\\n")  # in one piece: the ranks of a host share its output
dist.destroy_process_group()
"""


def two_hosts(path):
    """The lines that two torchrun agents print for the program at path."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=lesson13"]
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    quiet["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    agents = [
        subprocess.Popen(
            [*command, path],
            env=os.environ | quiet,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        finished = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks; no effect on one that has ended
    if any(agent.returncode for agent in agents):
        raise RuntimeError("an agent failed:\n" + "\n".join(err[-1500:] for _, err in finished))
    return sorted(line for out, _ in finished for line in out.splitlines())


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "two_hosts.py")
    with open(path, "w") as file:
        file.write(program)
    lines = two_hosts(path)
for rank in range(4):
    print(next(line.split(" ", 2)[2] for line in lines if f" rank {rank} " in line))
print("hosts:", sorted({line.split()[1] for line in lines}))

# %% [markdown]
# Which agent becomes host 0 is decided at the rendezvous, so the lines are printed by rank.
#
# ## On a real cluster
#
# **Measure before you believe a table.** nccl-tests and hccl_test report *algorithm* and *bus*
# bandwidth: the bus figure is the first times 2(n-1)/n for an all-reduce, so that it can be
# compared with the link ([nccl-tests,
# PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)). It is this
# chapter's closed form.
#
# **NPU and HCCL.** Between the NPUs of a server HCCL picks the algorithm by topology and you can't
# change it (`level0` takes only `NA`); between servers `HCCL_ALGO` can (`level1`), and between super
# nodes (`level2`). A rank that stays away shows after
# `HCCL_EXEC_TIMEOUT`, a connection that fails after `HCCL_CONNECT_TIMEOUT`. Reductions take int8
# to int64, fp16, bf16 and fp32, so cast fp64 before a sum, and cast bools to int to count
# them. They are sum, product, min and max; torch_npu makes AVG of a sum and a division.
# `recv` needs a source: as with NCCL there is no "from any rank".
#
# **CUDA and NCCL.** `NCCL_DEBUG=INFO` prints the rings and trees that were chosen, and whether
# GPUDirect RDMA is used (`GDRDMA` in the lines of a channel). Point-to-point calls run on a
# stream: a `send` returns before the data has left. The send/send program above may pass while
# messages are small; where it hangs, it appears as two kernels that never end, or as a first
# connection that is never made.
#
# **Many hosts.** Set the interface (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`,
# `HCCL_SOCKET_IFNAME`) where hosts have several; most "hangs at start" are the wrong one or a
# closed port. Number ranks so that neighbours share a node: torchrun does, and
# `hierarchical_all_reduce` and every placement above rely on it.
#
# Next: the [lab](../labs/13_communication.ipynb), in which you write the seven functions that this
# lesson imported. Then [chapter 21](21_data_parallel.ipynb) averages gradients with them.
