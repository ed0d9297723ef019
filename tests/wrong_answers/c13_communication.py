"""Chapter 13: collectives that are wrong in one way each, or cost more than they may."""

import math

import torch
import torch.distributed as dist

from shardbook.basics import collectives
from shardbook.basics.collectives import (
    exchange,
    ring_all_gather,
    ring_reduce_scatter,
    tree_broadcast,
)
from tests.wrong_answers import right, wrong

for name in (
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_all_gather",
    "tree_broadcast",
    "all_to_all",
    "hierarchical_all_reduce",
    "collective_bytes",
):
    right(name, chapter=13)(getattr(collectives, name))


def here(group):
    return dist.get_world_size(group), dist.get_rank(group)


# ring_all_reduce


@right("ring_all_reduce")
def uneven_pieces(x, group=None):
    """Pieces as tensor_split cuts them, plain isend and recv, peers as ranks of the world."""
    world, me = here(group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    after, before = ranks[(me + 1) % world], ranks[(me - 1) % world]
    total = x.clone(memory_format=torch.contiguous_format).view(-1)
    pieces = total.tensor_split(world)
    for step in range(2 * (world - 1)):
        out, into = pieces[(me - step) % world], pieces[(me - step - 1) % world]
        work = dist.isend(out.clone(), after, group) if out.numel() else None
        buffer = torch.empty_like(into)
        if into.numel():
            dist.recv(buffer, before, group)
        into.copy_(buffer + into if step < world - 1 else buffer)
        if work:
            work.wait()
    return total.view(x.shape)


@wrong("ring_all_reduce", says="off by")
def nothing_reduced(x, group=None):
    return x.clone()


@wrong("ring_all_reduce", says="calls all_reduce")
def library_all_reduce(x, group=None):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@wrong("ring_all_reduce", says="elements|pieces")
def whole_tensor_around(x, group=None):
    world, me = here(group)
    total, moving = x.clone(memory_format=torch.contiguous_format), x
    for _ in range(world - 1):
        arrived = torch.empty_like(total)
        exchange(moving, (me + 1) % world, arrived, (me - 1) % world, group)
        total, moving = total + arrived, arrived
    return total


@wrong("ring_all_reduce", says="next rank|messages")
def root_sums(x, group=None):
    world, me = here(group)
    total = x.clone(memory_format=torch.contiguous_format)
    for other in range(1, world):
        if me == 0:
            arrived = torch.empty_like(total)
            exchange(None, 0, arrived, other, group)
            total += arrived
        elif me == other:
            exchange(total, 0, None, 0, group)
    return tree_broadcast(total, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group)


@wrong("ring_all_reduce", says="off by")
def mean_instead(x, group=None):
    return collectives.ring_all_reduce(x, group) / dist.get_world_size(group)


@wrong("ring_all_reduce", says="group")
def world_ranks_as_peers(x, group=None):
    """Right on the whole world, where the numbers agree."""
    world, me = here(group)
    total = x.reshape(-1).clone()
    pieces = total.tensor_split(world)
    for step in range(2 * (world - 1)):
        out, into = pieces[(me - step) % world], pieces[(me - step - 1) % world]
        work = dist.isend(out.clone(), (me + 1) % world, group)
        buffer = torch.empty_like(into)
        dist.recv(buffer, (me - 1) % world, group)
        into.copy_(buffer + into if step < world - 1 else buffer)
        work.wait()
    return total.view(x.shape)


@wrong("ring_all_reduce", says="off by")
def one_step_short(x, group=None):
    world, me = here(group)
    length = -(-x.numel() // world)
    padded = x.new_zeros(world * length)
    padded[: x.numel()] = x.flatten()
    piece = ring_reduce_scatter(padded, group)
    parts = padded.view(world, -1)
    parts[me] = piece
    for step in range(world - 2):
        have, comes = (me - step) % world, (me - step - 1) % world
        exchange(parts[have], (me + 1) % world, parts[comes], (me - 1) % world, group)
    return padded[: x.numel()].view(x.shape)


@wrong("ring_all_reduce", says="was changed")
def into_the_input(x, group=None):
    x.copy_(collectives.ring_all_reduce(x, group))
    return x.clone()


@wrong("ring_all_reduce", says="next rank")
def the_other_way_round(x, group=None):
    world = dist.get_world_size(group)
    return collectives.ring_all_reduce(x, group, list(range(world))[::-1])


@wrong("ring_all_reduce", says="pad|uneven")
def only_what_divides(x, group=None):
    world = dist.get_world_size(group)
    if x.numel() % world:
        raise ValueError("the elements do not divide by the ranks")
    return collectives.ring_all_reduce(x, group)


@wrong("ring_all_reduce", says="contiguous")
def flat_views_only(x, group=None):
    return collectives.ring_all_reduce(x.view(-1), group).view(x.shape)


@wrong("ring_all_reduce", says="dtype")
def sums_in_fp32(x, group=None):
    return collectives.ring_all_reduce(x.float(), group)


# ring_reduce_scatter


@right("ring_reduce_scatter")
def with_send_and_recv(x, group=None):
    """Even members send first, odd ones receive first; a member that is alone has nothing to do."""
    world, me = here(group)
    pieces = [p.contiguous() for p in x.chunk(world)]
    after, before = (me + 1) % world, (me - 1) % world
    moving = pieces[(me - 1) % world].clone()
    for step in range(1, world):
        arrived = torch.empty_like(moving)
        if not arrived.numel():
            continue
        work = dist.irecv(arrived, group=group, group_src=before)
        dist.isend(moving, group=group, group_dst=after).wait()
        work.wait()
        moving = pieces[(me - 1 - step) % world] + arrived
    return moving


@right("ring_reduce_scatter")
def against_the_ring(x, group=None):
    world, me = here(group)
    pieces = x.chunk(world)
    moving = pieces[(me + 1) % world].clone(memory_format=torch.contiguous_format)
    for step in range(1, world):
        arrived = torch.empty_like(moving)
        exchange(moving, (me - 1) % world, arrived, (me + 1) % world, group)
        moving = arrived + pieces[(me + 1 + step) % world]
    return moving


@wrong("ring_reduce_scatter", says="off by")
def own_piece_unsummed(x, group=None):
    world, me = here(group)
    return x.chunk(world)[me].clone()


@wrong("ring_reduce_scatter", says="adds last")
def piece_of_the_next_rank(x, group=None):
    world, me = here(group)
    pieces = x.chunk(world)
    moving = pieces[me].clone(memory_format=torch.contiguous_format)
    for step in range(1, world):
        arrived = torch.empty_like(moving)
        exchange(moving, (me + 1) % world, arrived, (me - 1) % world, group)
        moving = arrived + pieces[(me - step) % world]
    return moving


@wrong("ring_reduce_scatter", says="elements")
def all_reduce_and_cut(x, group=None):
    world, me = here(group)
    return collectives.ring_all_reduce(x, group).chunk(world)[me].clone()


@wrong("ring_reduce_scatter", says="calls reduce_scatter")
def library_reduce_scatter(x, group=None):
    world, _ = here(group)
    piece = torch.empty_like(x[: len(x) // world])
    dist.reduce_scatter_tensor(piece, x.contiguous(), group=group)
    return piece


@wrong("ring_reduce_scatter", says="neighbour")
def straight_to_the_owner(x, group=None):
    world, me = here(group)
    pieces = [p.contiguous() for p in x.chunk(world)]
    total = pieces[me].clone()
    for step in range(1, world):
        arrived = torch.empty_like(total)
        to, source = (me + step) % world, (me - step) % world
        exchange(pieces[to], to, arrived, source, group)
        total += arrived
    return total


@wrong("ring_reduce_scatter", says="was changed")
def sums_inside_x(x, group=None):
    world, me = here(group)
    pieces = x.chunk(world)
    for step in range(1, world):
        arrived = torch.empty_like(pieces[0])
        out = pieces[(me - step) % world]
        exchange(out, (me + 1) % world, arrived, (me - 1) % world, group)
        pieces[(me - step - 1) % world].add_(arrived)
    return pieces[me].clone()


@wrong("ring_reduce_scatter", says="contiguous")
def buffers_like_x(x, group=None):
    world, me = here(group)
    pieces = x.chunk(world)
    moving = pieces[(me - 1) % world].clone()  # keeps a transposed piece's strides
    for step in range(1, world):
        arrived = torch.empty_like(moving)
        exchange(moving.contiguous(), (me + 1) % world, arrived, (me - 1) % world, group)
        moving = arrived + pieces[(me - step - 1) % world]
    return moving


@wrong("ring_reduce_scatter", says="off by")
def mean_of_the_ranks(x, group=None):
    return ring_reduce_scatter(x, group) / dist.get_world_size(group)


# ring_all_gather


@right("ring_all_gather")
def list_of_pieces(x, group=None):
    world, me = here(group)
    pieces = [None] * world
    pieces[me] = x.contiguous()
    for step in range(world - 1):
        into = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        exchange(pieces[(me - step) % world], (me + 1) % world, into, (me - 1) % world, group)
        pieces[(me - step - 1) % world] = into
    return torch.cat(pieces)


@wrong("ring_all_gather", says="off by|rank order")
def own_piece_repeated(x, group=None):
    return torch.cat([x] * dist.get_world_size(group))


@wrong("ring_all_gather", says="rank order")
def own_piece_first(x, group=None):
    world, me = here(group)
    pieces = ring_all_gather(x, group).chunk(world)
    return torch.cat(pieces[me:] + pieces[:me])


@wrong("ring_all_gather", says="calls all_gather")
def library_all_gather(x, group=None):
    world, _ = here(group)
    whole = x.new_empty(world * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


@wrong("ring_all_gather", says="next rank")
def to_everyone(x, group=None):
    world, me = here(group)
    whole = x.new_empty(world, *x.shape)
    whole[me] = x
    for step in range(1, world):
        source = (me - step) % world
        exchange(x, (me + step) % world, whole[source], source, group)
    return whole.flatten(0, 1)


@wrong("ring_all_gather", says="elements of the messages")
def whole_buffer_each_step(x, group=None):
    world, me = here(group)
    whole = x.new_zeros(world, *x.shape)
    whole[me] = x
    for _ in range(world - 1):
        arrived = torch.empty_like(whole)
        exchange(whole, (me + 1) % world, arrived, (me - 1) % world, group)
        arrived[me] = x
        whole = arrived.where(arrived != 0, whole)
    return whole.flatten(0, 1)


@wrong("ring_all_gather", says="shape")
def stacked_pieces(x, group=None):
    return ring_all_gather(x, group).unflatten(0, (dist.get_world_size(group), len(x)))


@wrong("ring_all_gather", says="off by|steps back")
def last_step_missing(x, group=None):
    world, me = here(group)
    whole = x.repeat(world, *[1] * (x.dim() - 1)).unflatten(0, (world, len(x)))
    for step in range(world - 2):
        have, comes = (me - step) % world, (me - step - 1) % world
        exchange(whole[have], (me + 1) % world, whole[comes], (me - 1) % world, group)
    return whole.flatten(0, 1)


@wrong("ring_all_gather", says="off by|steps back")
def sends_its_own_each_step(x, group=None):
    world, me = here(group)
    whole = x.new_zeros(world, *x.shape)
    whole[me] = x
    for step in range(world - 1):
        exchange(x, (me + 1) % world, whole[(me - step - 1) % world], (me - 1) % world, group)
    return whole.flatten(0, 1)


# tree_broadcast


@right("tree_broadcast")
def halving(x, src, group=None):
    """From the top: whoever has it hands the upper half of its range to that half's first."""
    world, me = here(group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    root = ranks.index(src)
    place = (me - root) % world
    result = x.contiguous().clone()
    span = 1 << max(world - 1, 0).bit_length()
    while span > 1:
        half = span // 2
        if place % span == 0 and place + half < world and result.numel():
            dist.send(result, ranks[(place + half + root) % world], group)
        elif place % span == half and result.numel():
            dist.recv(result, ranks[(place - half + root) % world], group)
        span = half
    return result


@wrong("tree_broadcast", says="off by")
def not_sent(x, src, group=None):
    return x.clone()


@wrong("tree_broadcast", says="calls broadcast")
def library_broadcast(x, src, group=None):
    result = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(result, src, group=group)
    return result


@wrong("tree_broadcast", says="rounds")
def star(x, src, group=None):
    world, me = here(group)
    root = dist.get_process_group_ranks(group or dist.group.WORLD).index(src)
    result = x.clone(memory_format=torch.contiguous_format)
    for other in range(world):
        if me == root and other != root:
            exchange(result, other, None, other, group)
        elif me == other != root:
            exchange(None, root, result, root, group)
    return result


@wrong("tree_broadcast", says="rounds")
def chain(x, src, group=None):
    world, me = here(group)
    root = dist.get_process_group_ranks(group or dist.group.WORLD).index(src)
    place = (me - root) % world
    result = x.clone(memory_format=torch.contiguous_format)
    if place:
        exchange(None, 0, result, (me - 1) % world, group)
    if place < world - 1:
        exchange(result, (me + 1) % world, None, 0, group)
    return result


@wrong("tree_broadcast", says="rank of the world")
def src_as_group_rank(x, src, group=None):
    world, me = here(group)
    place = (me - src) % world
    result, have = x.clone(memory_format=torch.contiguous_format), 1
    while have < world:
        if place < have and place + have < world:
            exchange(result, (me + have) % world, None, me, group)
        elif have <= place < 2 * have:
            exchange(None, me, result, (me - have) % world, group)
        have *= 2
    return result


@wrong("tree_broadcast", says="was changed")
def received_into_x(x, src, group=None):
    return x.copy_(tree_broadcast(x, src, group)).clone()


@wrong("tree_broadcast", says="returns x itself")
def source_returns_x(x, src, group=None):
    result = tree_broadcast(x, src, group)
    return x if dist.get_rank() == src else result


@wrong("tree_broadcast", says="messages")
def sent_twice(x, src, group=None):
    return tree_broadcast(tree_broadcast(x, src, group), src, group)


@wrong("tree_broadcast", says="messages")
def in_two_halves(x, src, group=None):
    halves = x.flatten().tensor_split(2)
    return torch.cat([tree_broadcast(h, src, group) for h in halves]).view(x.shape)


@wrong("tree_broadcast", says="any group")
def powers_of_two_only(x, src, group=None):
    world, me = here(group)
    root = dist.get_process_group_ranks(group or dist.group.WORLD).index(src)
    place, have = me ^ root, 1
    result = x.clone(memory_format=torch.contiguous_format)
    while have < world:
        if place < have:
            exchange(result, me ^ have, None, me, group)
        elif place < 2 * have:
            exchange(None, me, result, me ^ have, group)
        have *= 2
    return result


# all_to_all


@right("all_to_all")
def all_at_once(chunks, group=None):
    """All headers in one batch, then all data in one batch; shapes in 3 + 1 numbers."""
    world, me = here(group)
    others = [r for r in range(world) if r != me]
    device = chunks[0].device

    def batch(outs, intos):
        ops = [dist.P2POp(dist.isend, outs[r], group=group, group_peer=r) for r in outs]
        ops += [dist.P2POp(dist.irecv, intos[r], group=group, group_peer=r) for r in intos]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()

    heads = {r: [chunks[r].dim(), *chunks[r].shape] for r in others}
    heads = {r: torch.tensor(h + [0] * (4 - len(h)), device=device) for r, h in heads.items()}
    heard = {r: torch.zeros(4, dtype=torch.int64, device=device) for r in others}
    batch(heads, heard)
    shapes = {r: h.tolist()[1 : 1 + int(h[0])] for r, h in heard.items()}
    result = {r: torch.empty(s, dtype=chunks[0].dtype, device=device) for r, s in shapes.items()}
    batch(
        {r: chunks[r].contiguous() for r in others if chunks[r].numel()},
        {r: t for r, t in result.items() if t.numel()},
    )
    return [chunks[me].clone() if r == me else result[r] for r in range(world)]


@wrong("all_to_all", says="got from|shape")
def own_chunks_back(chunks, group=None):
    return [c.clone() for c in chunks]


@wrong("all_to_all", says="no list")
def one_tensor(chunks, group=None):
    return torch.cat([c.flatten() for c in collectives.all_to_all(chunks, group)])


@wrong("all_to_all", says="place|got from")
def rotated(chunks, group=None):
    result = collectives.all_to_all(chunks, group)
    return result[1:] + result[:1]


@wrong("all_to_all", says="same dtype and size|what rank . got from . has shape")
def as_large_as_mine(chunks, group=None):
    world, me = here(group)
    result = [c.clone() for c in chunks]
    for step in range(1, world):
        to, source = (me + step) % world, (me - step) % world
        size = chunks[source].numel()
        into = chunks[source].new_zeros(20_000)
        exchange(chunks[to].flatten(), to, into, source, group)
        result[source] = into[:size].view(chunks[source].shape)
    return result


@wrong("all_to_all", says="calls all_to_all")
def library_all_to_all(chunks, group=None):
    result = collectives.all_to_all(chunks, group)
    flat = torch.cat([c.flatten() for c in chunks])
    out = flat.new_empty(sum(c.numel() for c in result))
    dist.all_to_all_single(
        out, flat, [c.numel() for c in result], [c.numel() for c in chunks], group=group
    )
    parts = out.split([c.numel() for c in result])
    return [p.view(c.shape) for p, c in zip(parts, result, strict=True)]


@wrong("all_to_all", says="padding|bytes")
def padded_to_the_largest(chunks, group=None):
    world, me = here(group)
    result = list(chunks)
    result[me] = chunks[me].clone()
    for step in range(1, world):
        to, source = (me + step) % world, (me - step) % world
        dim = chunks[to].dim()
        told = torch.tensor([dim, *chunks[to].shape, *[0] * (3 - dim)], device=chunks[to].device)
        heard = torch.empty_like(told)
        exchange(told, to, heard, source, group)
        out, into = chunks[to].new_zeros(20_000), chunks[to].new_zeros(20_000)
        out[: chunks[to].numel()] = chunks[to].flatten()
        exchange(out, to, into, source, group)
        shape = heard.tolist()[1 : 1 + int(heard[0])]
        result[source] = into[: math.prod(shape)].view(shape)
    return result


@wrong("all_to_all", says="messages|detour")
def row_by_row(chunks, group=None):
    world, me = here(group)
    result = list(chunks)
    result[me] = chunks[me].clone()
    for step in range(1, world):
        to, source = (me + step) % world, (me - step) % world
        told = torch.tensor(chunks[to].shape, device=chunks[to].device)
        heard = torch.empty_like(told)
        exchange(told, to, heard, source, group)
        result[source] = chunks[to].new_empty(heard.tolist())
        for i in range(max(len(chunks[to]), len(result[source]))):
            out = chunks[to][i] if i < len(chunks[to]) else None
            into = result[source][i] if i < len(result[source]) else None
            exchange(out, to, into, source, group)
    return result


@wrong("all_to_all", says="0 elements|number of dimensions")
def matrices_only(chunks, group=None):
    world, me = here(group)
    result = list(chunks)
    result[me] = chunks[me].clone()
    for step in range(1, world):
        to, source = (me + step) % world, (me - step) % world
        rows, columns = chunks[to].shape
        told = torch.tensor([rows, columns], device=chunks[to].device)
        heard = torch.empty_like(told)
        exchange(told, to, heard, source, group)
        result[source] = chunks[to].new_empty(heard.tolist())
        exchange(chunks[to], to, result[source], source, group)
    return result


@wrong("all_to_all", says="shape|number of dimensions")
def flattened(chunks, group=None):
    return [c.flatten() for c in collectives.all_to_all(chunks, group)]


@wrong("all_to_all", says="place|got from")
def own_chunk_forgotten(chunks, group=None):
    result = collectives.all_to_all(chunks, group)
    result[dist.get_rank(group)] = torch.zeros_like(chunks[dist.get_rank(group)])
    return result


# hierarchical_all_reduce


@right("hierarchical_all_reduce")
def pair_by_pair(x, ranks_per_node, group=None):
    """No ring: at each level every member sends each other member its piece."""
    world, me = here(group)
    if world % ranks_per_node:
        raise ValueError(f"{ranks_per_node} ranks a node do not divide {world} ranks")
    place, node = me % ranks_per_node, me // ranks_per_node
    mine = [node * ranks_per_node + i for i in range(ranks_per_node)]
    across = list(range(place, world, ranks_per_node))
    pieces = [p.clone() for p in x.flatten().tensor_split(ranks_per_node)]
    scattered(pieces, mine, place, group)
    parts = list(pieces[place].tensor_split(len(across)))
    scattered(parts, across, node, group)
    gathered(parts, across, node, group)
    gathered(pieces, mine, place, group)
    return torch.cat(pieces).view(x.shape)


def scattered(pieces, members, i, group):
    for step in range(1, len(members)):
        to, source = (i + step) % len(members), (i - step) % len(members)
        arrived = torch.empty_like(pieces[i])
        exchange(pieces[to], members[to], arrived, members[source], group)
        pieces[i] += arrived


def gathered(pieces, members, i, group):
    for step in range(1, len(members)):
        to, source = (i + step) % len(members), (i - step) % len(members)
        exchange(pieces[i], members[to], pieces[source], members[source], group)


@wrong("hierarchical_all_reduce", says="off by")
def node_only(x, ranks_per_node, group=None):
    world, me = here(group)
    if world % ranks_per_node:
        raise ValueError(f"{ranks_per_node} ranks a node do not divide {world} ranks")
    first = me - me % ranks_per_node
    return collectives.ring_all_reduce(x, group, list(range(first, first + ranks_per_node)))


@wrong("hierarchical_all_reduce", says="to other nodes")
def flat_ring(x, ranks_per_node, group=None):
    if dist.get_world_size(group) % ranks_per_node:
        raise ValueError(f"{ranks_per_node} ranks a node do not divide the ranks")
    return collectives.ring_all_reduce(x, group)


@wrong("hierarchical_all_reduce", says="to other nodes")
def whole_tensor_between(x, ranks_per_node, group=None):
    world, me = here(group)
    if world % ranks_per_node:
        raise ValueError(f"{ranks_per_node} ranks a node do not divide {world} ranks")
    first = me - me % ranks_per_node
    x = collectives.ring_all_reduce(x, group, list(range(first, first + ranks_per_node)))
    return collectives.ring_all_reduce(
        x, group, list(range(me % ranks_per_node, world, ranks_per_node))
    )


@wrong("hierarchical_all_reduce", says="to other nodes|consecutive")
def nodes_of_every_other_rank(x, ranks_per_node, group=None):
    world, me = here(group)
    if world % ranks_per_node:
        raise ValueError(f"{ranks_per_node} ranks a node do not divide {world} ranks")
    nodes = world // ranks_per_node
    node = list(range(me % nodes, world, nodes))
    first = me - me % nodes
    length = -(-x.numel() // ranks_per_node)
    padded = x.new_zeros(ranks_per_node * length)
    padded[: x.numel()] = x.flatten()
    piece = ring_reduce_scatter(padded, group, node)
    piece = collectives.ring_all_reduce(piece, group, list(range(first, first + nodes)))
    return ring_all_gather(piece, group, node)[: x.numel()].view(x.shape)


@wrong("hierarchical_all_reduce", says="calls all_reduce")
def library_all_reduce_in_nodes(x, ranks_per_node, group=None):
    if dist.get_world_size(group) % ranks_per_node:
        raise ValueError(f"{ranks_per_node} ranks a node do not divide the ranks")
    return library_all_reduce(x, group)


@wrong("hierarchical_all_reduce", says="ValueError")
def rest_ignored(x, ranks_per_node, group=None):
    if dist.get_world_size(group) % ranks_per_node:
        return collectives.ring_all_reduce(x, group)
    return collectives.hierarchical_all_reduce(x, ranks_per_node, group)


@wrong("hierarchical_all_reduce", says="pad")
def pieces_must_divide(x, ranks_per_node, group=None):
    world, me = here(group)
    if world % ranks_per_node:
        raise ValueError(f"{ranks_per_node} ranks a node do not divide {world} ranks")
    node = [me - me % ranks_per_node + i for i in range(ranks_per_node)]
    peers = list(range(me % ranks_per_node, world, ranks_per_node))
    piece = ring_reduce_scatter(x.flatten(), group, node) if x.numel() != 15 else None
    if piece is None:
        return collectives.hierarchical_all_reduce(x, ranks_per_node, group)
    piece = collectives.ring_all_reduce(piece, group, peers)
    return ring_all_gather(piece, group, node).view(x.shape)


@wrong("hierarchical_all_reduce", says="was changed")
def writes_its_input(x, ranks_per_node, group=None):
    return x.copy_(collectives.hierarchical_all_reduce(x, ranks_per_node, group)).clone()


# collective_bytes


@right("collective_bytes")
def by_table(op, nbytes, world_size):
    rounds = {"all_reduce": 2 * (world_size - 1)}.get(op, world_size - 1)
    return rounds * nbytes // world_size


@wrong("collective_bytes", says="expected")
def nothing_sent(op, nbytes, world_size):
    return 0


@wrong("collective_bytes", says="reduce-scatter and an all-gather")
def all_reduce_once(op, nbytes, world_size):
    return (world_size - 1) * nbytes // world_size


@wrong("collective_bytes", says="whole output")
def nbytes_of_a_piece(op, nbytes, world_size):
    if op == "all_gather":
        return (world_size - 1) * nbytes
    return by_table(op, nbytes, world_size)


@wrong("collective_bytes", says="expected")
def of_all_ranks(op, nbytes, world_size):
    return by_table(op, nbytes, world_size) * world_size


@wrong("collective_bytes", says="mean|shared")
def broadcast_from_one(op, nbytes, world_size):
    return nbytes if op == "broadcast" else by_table(op, nbytes, world_size)


@wrong("collective_bytes", says="integers|//")
def by_floats(op, nbytes, world_size):
    share = (world_size - 1) / world_size * (2 if op == "all_reduce" else 1)
    return int(share * nbytes)


@wrong("collective_bytes", says="multiply first|expected")
def divided_first(op, nbytes, world_size):
    return nbytes // world_size * (world_size - 1) * (2 if op == "all_reduce" else 1)


@wrong("collective_bytes", says="own piece")
def own_piece_counted(op, nbytes, world_size):
    return nbytes if op == "all_to_all" else by_table(op, nbytes, world_size)
