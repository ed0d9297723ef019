# %% [markdown]
# # 13 · Communication: the lab
#
# You build six collectives from messages between two ranks, and the formula of their cost. Every
# check runs your function on real ranks, in groups of 1 to 4, and looks at each message: to whom,
# how large, how many. 2 to 3 hours.

# %%
import shardbook as sb

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook import calls
from shardbook.checks import communication as check
from shardbook.basics.collectives import MAX_DIMS, exchange
from shardbook.tracing import expected_calls, merge

# %% [markdown]
# ## What you are given
#
# `exchange(out, to, into, source, group)` sends `out` to one member and receives `into` from
# another at the same time, so that a ring can't deadlock. It sends and receives nothing for None
# and for tensors without elements. You may use it or call `dist.isend`, `dist.irecv` and
# `dist.batch_isend_irecv` yourself, but no collective.
#
# **Two ways to count.** A *group* is a set of ranks, say (1, 3). Inside it, rank 3 is member 1:
# `dist.get_rank(group)` says 1 and `dist.get_world_size(group)` says 2. `exchange` counts members.
# `dist.send(x, 3)` and the `src` of a broadcast count ranks of the world (`dist.send(x,
# group_dst=1, group=group)` counts members). Code that mixes them works on the whole world, where
# the numbers agree, and fails in the first group. `group=None` is the whole world.


# %%
def greet():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return "not a member"
    member, size = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.tensor([100.0 + dist.get_rank()], device=sb.device())
    theirs = torch.empty_like(mine)
    exchange(mine, 1 - member, theirs, 1 - member, group)
    return f"member {member} of {size} received {theirs.item():.0f}"


for rank, text in enumerate(sb.run(greet, world_size=4).values):
    print(f"rank {rank}: {text}")

# %% [markdown]
# ## Exercise 1: reduce-scatter on a ring
#
# Every rank holds `[P*n, ...]`. Member i shall end with piece i of the sum, `[n, ...]`, in P-1
# messages of n rows.
#
# The last argument, `ring`, is for exercise 6: the members that take part, in ring order. By
# default all of them. The checks don't use it.
#
# <details><summary>Hint 1</summary>
#
# Follow one piece. It starts at some rank with that rank's values, moves to the next rank P-1
# times, and each time the receiver adds its own values. Where must it start to end at its owner?
# </details>
# <details><summary>Hint 2</summary>
#
# A piece that makes P-1 steps and ends at rank i starts at rank i + 1. So the first thing that
# rank r sends is its part of piece r - 1.
# </details>
# <details><summary>Hint 3</summary>
#
# In step s (from 1) the piece r - s - 1 arrives at rank r. Receive into a fresh contiguous buffer,
# never into x.
# </details>

# %% exercise="shardbook.basics.collectives.ring_reduce_scatter"

# %%
check.ring_reduce_scatter(ring_reduce_scatter)

# %% [markdown]
# ## Exercise 2: all-gather on a ring
#
# Every rank holds `[n, ...]`. All shall have `[P*n, ...]`, in rank order, in P-1 messages of n
# rows, to the next rank only.
#
# <details><summary>Hint 1</summary>
#
# In the first step send your own piece. In each later one send what arrived in the step before.
# </details>
# <details><summary>Hint 2</summary>
#
# Make the result first, as `[P, n, ...]`. Send from it and receive into it: `whole[(me - step) %
# P]` leaves, `whole[(me - step - 1) % P]` comes.
# </details>

# %% exercise="shardbook.basics.collectives.ring_all_gather"

# %%
check.ring_all_gather(ring_all_gather)

# %% [markdown]
# **Compare two traces.** The messages that the contract asks for, written down, and those you sent.
# `t.diff(expected)` names the first call that differs, or says that none does.


# %%
def messages(rank, world=4, nbytes=2 * 3 * 4):
    """P-1 times 2 rows of 3 floats to the next rank, and as much from the rank before."""
    return (world - 1) * [
        ("send", nbytes, (rank + 1) % world),
        ("recv", nbytes, (rank - 1) % world),
    ]


def compare(gather):
    expected = expected_calls({rank: messages(rank) for rank in range(4)})
    run = sb.run(lambda: gather(torch.ones(2, 3, device=sb.device())), world_size=4, trace=True)
    return run.trace.diff(expected, order="group")  # whether sends or receives come first is yours


print(compare(ring_all_gather))

# %% [markdown]
# This function gathers the right rows in as many messages, and is no ring. Where do they part?


# %% tags=["nbval-ignore-output"]
def gather_directly(x):
    rank, whole = dist.get_rank(), [x.clone() for _ in range(4)]
    for step in range(1, 4):
        exchange(x, (rank + step) % 4, whole[rank - step], (rank - step) % 4)
    return torch.cat(whole)


compare(gather_directly)

# %% [markdown]
# ## Exercise 3: all-reduce
#
# The sum of x over all ranks, for any shape. You have both halves already. What is left is a
# number of elements that P does not divide.
#
# Predict before you write: x has 10,001 floats of 4 bytes, on 4 ranks. How many bytes may a rank
# send?
#
# <details><summary>Hint 1</summary>
#
# Copy x into a flat tensor of P * ceil(numel / P) zeros. Zeros don't change a sum.
# </details>
# <details><summary>Hint 2</summary>
#
# Reduce-scatter, then all-gather what you got; cut the padding off and give it x's shape.
# </details>

# %% exercise="shardbook.basics.collectives.ring_all_reduce"

# %%
check.ring_all_reduce(ring_all_reduce)

# %% predict="predicted"
predicted = 2 * 3 * 2501 * 4  # two phases, 3 messages each, a quarter rounded up, 4 bytes


def bytes_of_all_reduce():
    x = torch.zeros(10_001, device=sb.device())
    with calls.record() as log:
        ring_all_reduce(x)
    return calls.summary(log)["send"][1]


sb.predict(
    "bytes sent by each rank", predicted, sb.run(bytes_of_all_reduce, world_size=4).values[0]
)

# %% [markdown]
# **Read it.** Your ring in a trace, on 1 MB. Click a send: to whom, how many bytes? Count the
# messages of a rank. Where does reduce-scatter end and all-gather begin?


# %% tags=["nbval-ignore-output"]
def traced_ring():
    x = torch.ones(250_000, device=sb.device())
    ring_all_reduce(x[:100])  # a pair's first message connects it
    dist.barrier()
    with sb.trace() as t, sb.mark("ring_all_reduce"):
        ring_all_reduce(x)
    return t


merge(sb.run(traced_ring, world_size=4).values, "ring_all_reduce")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Every rank sends six messages of 250,000 bytes to the next rank: three until it owns one finished
# quarter, which ends reduce-scatter, and three more that pass finished quarters on.
# </details>
#
# **Provoke it.** Rank 2 finds a NaN and returns early; the others go on to the all-reduce. On a
# cluster this is a job that stands still until a timeout. Read who waits for whom: which rank
# would you look at first?


# %% tags=["nbval-ignore-output"]
def one_leaves():
    x = torch.ones(8, device=sb.device())
    if dist.get_rank() == 2:
        return None
    return ring_all_reduce(x)


try:
    sb.run(one_leaves, world_size=4, timeout=20)
except sb.NotWritten:
    raise
except sb.RankError as error:
    print(error)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Rank 2: it has returned. Rank 3 waits for what rank 2 never sends, rank 1 for a receiver, rank 0 for
# them. Follow who waits for whom to a rank that waits for nobody.
# </details>
#
# ## Exercise 4: broadcast down a tree
#
# All ranks call it with an x of the same shape, `src` holds the values. Each returns a new tensor
# with them and leaves its x alone. ceil(log2 P) rounds, P-1 messages in all. Mind that `src` is a
# rank of the world.
#
# <details><summary>Hint 1</summary>
#
# Renumber, so that the source is at place 0: `place = (me - root) % P`, where root is the source's
# number in the group (`dist.get_group_rank`).
# </details>
# <details><summary>Hint 2</summary>
#
# Let places 0 to have-1 have the values. In a round place p sends to place p + have, if there is
# such a place. Then `have` doubles.
# </details>
# <details><summary>Hint 3</summary>
#
# Turn a place back into a member before you send: `(place + root) % P`.
# </details>

# %% exercise="shardbook.basics.collectives.tree_broadcast"

# %%
check.tree_broadcast(tree_broadcast)

# %% [markdown]
# On 4 ranks: how many messages does the source send, and how many are sent in all?

# %% predict="by_source in_all"
by_source = 2  # 1, 2, 4 ranks have it: two rounds, and the source sends in each
in_all = 3  # everyone but the source receives once


def sends():
    x = torch.zeros(100, device=sb.device())
    with calls.record() as log:
        tree_broadcast(x, 0)
    return len([c for c in log if c.op == "send"])


by_rank = sb.run(sends, world_size=4).values
sb.predict("messages of the source", by_source, by_rank[0])
sb.predict("messages in all", in_all, sum(by_rank))

# %% [markdown]
# ## Exercise 5: all-to-all
#
# `chunks[i]` goes to member i, `result[i]` came from member i. Chunks differ in size, may be
# empty, may have 0 to 8 dimensions (`MAX_DIMS`), and the receiver does not know: tell it in one
# small message of integers, then send the values once. Mixture-of-experts layers (chapter 25)
# route their tokens so.
#
# <details><summary>Hint 1</summary>
#
# P-1 steps: in step s send to member me + s and receive from member me - s. Nobody is idle and no
# two senders meet at one receiver.
# </details>
# <details><summary>Hint 2</summary>
#
# Make the message of sizes as long as it can become, so that the receiver's buffer always fits:
# the number of dimensions, then the sizes, then zeros.
# </details>
# <details><summary>Hint 3</summary>
#
# Your own chunk does not travel, but belongs into the result.
# </details>

# %% exercise="shardbook.basics.collectives.all_to_all"

# %%
check.all_to_all(all_to_all)

# %% [markdown]
# ## Exercise 6: two levels
#
# Ranks of a node share a fast link, nodes a slow one. Sum over all ranks so that between N nodes
# each rank sends at most 2(N-1) * ceil(ceil(numel / ranks_per_node) / N) elements. Consecutive
# ranks share a node.
#
# <details><summary>Hint 1</summary>
#
# Three collectives: reduce-scatter inside the node, all-reduce between ranks of the same place in
# every node, all-gather inside the node.
# </details>
# <details><summary>Hint 2</summary>
#
# All three run on rings of some members. Give your ring functions the list: `[2, 3]` for the node
# of rank 2, `[0, 2]` for place 0 of both nodes.
# </details>
# <details><summary>Hint 3</summary>
#
# `dist.new_group` would work as well, but it is itself a meeting of all ranks of the world, and
# costs far more than the messages.
# </details>

# %% exercise="shardbook.basics.collectives.hierarchical_all_reduce"

# %%
check.hierarchical_all_reduce(hierarchical_all_reduce)

# %% predict="flat two_levels"
# 8,000 floats on 2 nodes of 2: bytes from the busiest rank to the other node
flat = 2 * 3 * 2000 * 4
two_levels = 2 * 1 * 2000 * 4


def most_between_nodes():
    x = torch.zeros(8000, device=sb.device())
    most = []
    for algorithm in (ring_all_reduce, lambda x: hierarchical_all_reduce(x, 2)):
        with calls.record() as log:
            algorithm(x)
        node = dist.get_rank() // 2
        most.append(sum(c.nbytes for c in log if c.op == "send" and c.peer // 2 != node))
    return most


by_rank = sb.run(most_between_nodes, world_size=4).values
sb.predict("flat ring", flat, max(row[0] for row in by_rank), "bytes")
sb.predict("two levels", two_levels, max(row[1] for row in by_rank), "bytes")

# %% [markdown]
# ## Exercise 7: the closed forms
#
# The bytes that one rank sends in the best algorithm, as a mean over ranks, rounded down. `nbytes`
# is always the full tensor: the output of an all-gather, the input of a reduce-scatter, one rank's
# input of an all-to-all. Later chapters predict with it.
#
# <details><summary>Hint 1</summary>
#
# Look at your exercises 1 to 5: P-1 messages of what part of the full tensor?
# </details>
# <details><summary>Hint 2</summary>
#
# Integers only: 2**62 bytes don't fit a float exactly. Multiply before you divide.
# </details>

# %% exercise="shardbook.basics.collectives.collective_bytes"

# %%
check.collective_bytes(collective_bytes)

# %%
for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
    by_world = [collective_bytes(op, 1_000_000, world) for world in (1, 2, 4, 8, 64)]
    print(f"{op:15}", *(f"{n:>10,}" for n in by_world))

# %% [markdown]
# Columns: 1, 2, 4, 8 and 64 ranks, 1 MB. Past eight ranks the bytes hardly grow any more:
# bandwidth is not what limits a large ring. What is?
#
# <details><summary>Answer</summary>
#
# Latency: 2(P-1) messages one after the other, 126 on 64 ranks, however small each is.
# </details>
#
# ## On a real cluster
#
# The checks run as they are with NCCL and HCCL: they count the calls you make. Timings differ: on
# a device `exchange` queues its transfers on a stream, so measure with a synchronisation at the
# end, never per message.
#
# Then replace your ring by the library's and compare, on 8 devices of a node and 256 MB:
# `dist.all_reduce` should reach a bus bandwidth near the link's. If your ring does not, look at
# the trace: one ring uses one link in one direction. Libraries run several rings at once, cut
# messages into smaller pieces so that receiving, adding and sending overlap, and add inside the
# kernel that receives.
