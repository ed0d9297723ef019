"""The collectives, built from messages between two ranks, and what each of them costs.

Ranks are counted inside the group here: member i of the group sends to member i + 1. The group's
members may be any ranks of the world, so their numbers are never used as peers.
"""

import torch
import torch.distributed as dist
from torch import Tensor

MAX_DIMS = 8  # of the tensors that all_to_all can announce


def exchange(out: Tensor | None, to: int, into: Tensor | None, source: int, group=None) -> None:
    """Send `out` to one member of the group while receiving `into` from another.

    Both start before either is waited for, so a ring of exchanges can't deadlock. None and tensors
    without elements are skipped, on the other side as well.
    """
    ops = []
    if out is not None and out.numel():
        ops.append(dist.P2POp(dist.isend, out.contiguous(), group=group, group_peer=to))
    if into is not None and into.numel():
        ops.append(dist.P2POp(dist.irecv, into, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()


def ring_reduce_scatter(x: Tensor, group=None, ring: list[int] | None = None) -> Tensor:
    """[P*n, ...] -> this rank's piece [n, ...] of the sum, in P-1 messages of n rows.

    Each piece travels once around the ring, from the rank after its owner, and every rank adds its
    own part (Patarasuk and Yuan, 2009). `ring` are the members that take part, all by default.
    """
    ring = ring or list(range(dist.get_world_size(group)))
    size, me = len(ring), ring.index(dist.get_rank(group))
    if x.shape[0] % size:
        raise ValueError(f"{x.shape[0]} rows can't be scattered over {size} ranks evenly")
    pieces = x.chunk(size)  # each [n, ...]
    after, before = ring[(me + 1) % size], ring[(me - 1) % size]
    # Begin with the piece that has the longest way to go: the one of the rank before.
    partial = pieces[(me - 1) % size].clone(memory_format=torch.contiguous_format)
    for step in range(1, size):
        arrived = torch.empty_like(partial)
        exchange(partial, after, arrived, before, group)
        partial = arrived.add_(pieces[(me - step - 1) % size])  # the last piece is my own
    return partial


def ring_all_gather(x: Tensor, group=None, ring: list[int] | None = None) -> Tensor:
    """[n, ...] -> [P*n, ...] in rank order, in P-1 messages of n rows.

    Each step passes on what arrived in the step before. `ring` as in ring_reduce_scatter.
    """
    ring = ring or list(range(dist.get_world_size(group)))
    size, me = len(ring), ring.index(dist.get_rank(group))
    after, before = ring[(me + 1) % size], ring[(me - 1) % size]
    whole = x.new_empty(size, *x.shape)  # [P, n, ...]
    whole[me] = x
    for step in range(size - 1):
        have, comes = (me - step) % size, (me - step - 1) % size
        exchange(whole[have], after, whole[comes], before, group)
    return whole.flatten(0, 1)  # [P*n, ...]


def ring_all_reduce(x: Tensor, group=None, ring: list[int] | None = None) -> Tensor:
    """The sum of x over the ranks: a reduce-scatter, then an all-gather of the summed pieces.

    2(P-1) messages, each to the next rank, 2(P-1)*ceil(numel/P) elements in all; any numel.
    """
    size = len(ring) if ring else dist.get_world_size(group)
    length = -(-x.numel() // size)  # of a piece, rounded up
    padded = x.new_zeros(size * length)
    padded[: x.numel()] = x.flatten()
    piece = ring_reduce_scatter(padded, group, ring)  # [length]
    summed = ring_all_gather(piece, group, ring)  # [size * length]
    return summed[: x.numel()].view(x.shape)


def tree_broadcast(x: Tensor, src: int, group=None) -> Tensor:
    """A new tensor with the values that x has on src, a global rank. x is alike everywhere.

    ceil(log2 P) rounds: those who have it double in each. P-1 messages in all.
    """
    world, me = dist.get_world_size(group), dist.get_rank(group)
    root = dist.get_group_rank(group or dist.group.WORLD, src)
    place = (me - root) % world  # 0 for the source
    result = x.clone(memory_format=torch.contiguous_format)
    have = 1  # places 0 to have-1 hold the values
    while have < world:
        if place < have and place + have < world:
            exchange(result, (me + have) % world, None, me, group)
        elif have <= place < 2 * have:
            exchange(None, me, result, (me - have) % world, group)
        have *= 2
    return result


def all_to_all(chunks: list[Tensor], group=None) -> list[Tensor]:
    """chunks[i] goes to member i; what member i sent comes back at place i. Sizes may differ.

    A small message tells each receiver the shape, a second one carries the data.
    """
    world, me = dist.get_world_size(group), dist.get_rank(group)
    if len(chunks) != world or any(c.dim() > MAX_DIMS for c in chunks):
        raise ValueError(f"expected {world} tensors of at most {MAX_DIMS} dimensions, one a rank")
    received = list(chunks)
    received[me] = chunks[me].clone()
    for step in range(1, world):  # in step s everyone sends s places up and receives from s down
        to, source = (me + step) % world, (me - step) % world
        told = torch.full((MAX_DIMS + 1,), chunks[to].dim(), device=chunks[to].device)
        told[1 : 1 + chunks[to].dim()] = told.new_tensor(chunks[to].shape)
        heard = torch.empty_like(told)
        exchange(told, to, heard, source, group)
        dims, *sizes = heard.tolist()
        received[source] = chunks[me].new_empty(sizes[:dims])
        exchange(chunks[to], to, received[source], source, group)
    return received


def hierarchical_all_reduce(x: Tensor, ranks_per_node: int, group=None) -> Tensor:
    """The sum over all ranks, with little traffic between nodes of `ranks_per_node` ranks each.

    Reduce-scatter inside the node, all-reduce each piece between the nodes, all-gather inside: N
    nodes move 2(N-1)*ceil(ceil(numel/ranks_per_node)/N) elements a rank between them. Consecutive
    ranks share a node. ValueError where the ranks can't be divided into such nodes.
    """
    world, me = dist.get_world_size(group), dist.get_rank(group)
    if ranks_per_node < 1 or world % ranks_per_node:
        raise ValueError(f"{world} ranks can't be divided into nodes of {ranks_per_node}")
    first = me - me % ranks_per_node
    node = list(range(first, first + ranks_per_node))  # my neighbours
    peers = list(range(me % ranks_per_node, world, ranks_per_node))  # my place in every node
    length = -(-x.numel() // ranks_per_node)
    padded = x.new_zeros(ranks_per_node * length)
    padded[: x.numel()] = x.flatten()
    piece = ring_reduce_scatter(padded, group, node)  # [length], summed in the node
    piece = ring_all_reduce(piece, group, peers)  # [length], summed over all nodes
    summed = ring_all_gather(piece, group, node)  # [ranks_per_node * length]
    return summed[: x.numel()].view(x.shape)


def collective_bytes(op: str, nbytes: int, world_size: int) -> int:
    """Bytes one rank sends in the bandwidth-optimal algorithm (mean over ranks), rounded down.

    nbytes is the size of the full tensor: all_gather's output, reduce_scatter's input, one rank's
    input of all_to_all. All but all_reduce move (P-1)/P of it; an all-reduce does that twice.
    """
    once = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
    if op not in ("all_reduce", *once) or world_size < 1:
        raise ValueError(f"no cost known of {op!r} on {world_size} ranks")
    return (1 if op in once else 2) * (world_size - 1) * nbytes // world_size
