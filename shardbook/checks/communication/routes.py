"""Chapter 13, other routes: a tree, everyone to everyone, two levels, and their bytes."""

import dataclasses
import fractions
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...devices import device
from ..compare import close, expect, random, same
from ..families import OnGroups, kept
from ..groups import refusal
from ..report import check
from ..seen import WORLD, Here, Seen
from .case import (
    MESSAGES,
    STRIDES,
    Case,
    cheap,
    drawn,
    elements,
    equals,
    run,
    steps,
    strides_and_dtypes,
    summed,
    tensor,
)


@check("tree_broadcast")
def tree_broadcast(answer, report):
    """Compared with the source's values; rounds follow from the order of each rank's messages."""

    def from_source(inputs: list[Tensor], s: Seen) -> Tensor:
        return inputs[s.case.number % s.size]

    def own(s: Seen) -> None:
        kept(s)
        expect(s.size == 1 or not s.aliased, f"{s.where} returns x itself", "memory")

    seen = run(report, answer, [Case((3, 5), number=n) for n in range(4)], _from_source)
    equals(
        seen,
        "brings the values of src, any rank of any group, to all its members",
        from_source,
        steps(
            "count places from the source: (rank - source's rank) % P, both counted in the group; "
            "src itself is a rank of the world"
        ),
    )
    seen.holds(
        "returns a new tensor and leaves x as it was on every rank",
        own,
        hint="receive into a buffer of your own, and copy on the source too",
    )
    seen.only("uses messages between two ranks only", ("send", "recv"), MESSAGES)
    with report.property(
        "sends P-1 messages in all, each with the whole of x",
        hint="every rank but the source receives once, from a rank that has it already",
    ):
        for members in seen.groups():
            sizes = [elements(c) for s in members for c in s.sent]
            wanted = [members[0].case.numel] * (len(members) - 1)
            same(sizes, wanted, f"the elements of the messages in {members[0].ranks}", "traffic")
    with report.property(
        "takes ceil(log2 P) rounds",
        hint="in each round everyone who has the values sends them to one rank that has not: 1, 2, "
        "4 … ranks have them",
    ):
        for members in seen.groups():
            rounds, most = _rounds(members), (len(members) - 1).bit_length()
            many = f"it takes {rounds} rounds for {len(members)} ranks, not {most}"
            expect(rounds <= most, many, "traffic")
    kinds = [*strides_and_dtypes((6, 5)), Case((0, 5)), Case(())]
    kinds = [dataclasses.replace(case, number=i) for i, case in enumerate(kinds)]
    more = run(report, answer, kinds, _from_source)
    equals(more, "takes any strides and dtype, no element, 0 dimensions", from_source, STRIDES)


def _from_source(answer: Callable, here: Here, case: Case) -> Seen:
    x, src = tensor(case, here.place, here.size), here.ranks[case.number % here.size]
    return here.see(lambda x: answer(x, src, **here.options), x=x)


def _rounds(members: list[Seen]) -> int:
    """Rounds that the messages need when a rank takes part in one message a round."""
    busy = dict.fromkeys(members[0].ranks, 0)  # the last round a rank took part in
    todo = {s.rank: list(s.forward) for s in members}
    travelling: dict[tuple, list[int]] = {}
    moved = True
    while moved:
        moved = False
        for r in todo:
            while todo[r]:
                call = todo[r][0]
                if call.op == "send":
                    busy[r] += 1
                    travelling.setdefault((r, call.peer), []).append(busy[r])
                elif travelling.get((call.peer, r)):
                    busy[r] = max(busy[r] + 1, travelling[call.peer, r].pop(0))
                else:
                    break
                todo[r].pop(0)
                moved = True
    expect(not any(todo.values()), "a rank receives a message that no rank has sent")
    return max(busy.values())


@check("all_to_all")
def all_to_all(answer, report):
    """Compared with what each member meant for this one."""
    seen = run(report, answer, [Case((20, 30))], _of_chunks)
    place = "chunks[i] goes to member i and result[i] came from member i, your own included"
    seen.holds(
        "gives member i what each member had for it, at that member's place",
        _exchanged,
        hint=steps(place),
    )
    cheap(seen)
    seen.holds(
        "sends the data once, and one small message of sizes a pair",
        _sent_once,
        hint="first tell the shape in a few integers, then send the values as they are: no padding "
        "to the largest, no detour over other ranks",
    )
    kinds = [Case((4, 6), layout=layout) for layout in ("empty", "mixed", "transposed")]
    kinds += [Case((4, 6), dtype) for dtype in (torch.bfloat16, torch.int64)]
    more = run(report, answer, kinds, _of_chunks)
    more.holds(
        "takes chunks of no element, of 0 to 3 dimensions, of any strides and dtype",
        _exchanged,
        hint="the message of sizes must tell the number of dimensions as well; receive into "
        "new_empty of that shape; nothing needs to travel for 0 elements",
    )


def _chunks(case: Case, member: int, world: int) -> list[Tensor]:
    """Chunk j of a member, all different; the shape only the sender knows."""
    rows, columns = case.shape
    made = []
    for j in range(world):
        shape: tuple[int, ...] = (rows * (1 + member) + j, columns + member)
        if case.layout == "empty":
            shape = [(rows, 2), (0, columns), (rows, 0), (0,)][(member + 2 * j) % 4]
        elif case.layout == "mixed":
            shape = [(), (rows,), (2, rows), (2, 3, columns)][(member + 2 * j) % 4]
        x = drawn(case.dtype, 10 * member + j, *shape)
        made.append(x.mT.contiguous().mT if case.layout == "transposed" else x)
    return made


def _of_chunks(answer: Callable, here: Here, case: Case) -> Seen:
    chunks = _chunks(case, here.place, here.size)
    return here.see(lambda chunks: answer(chunks, **here.options), chunks=chunks)


def _exchanged(s: Seen) -> None:
    what = f"the result of {s.where}"
    expect(isinstance(s.value, list), f"{what} is no list of tensors", "type")
    same(len(s.value), s.size, f"the number of tensors in {what}")
    for j, rank in enumerate(s.ranks):
        wanted = _chunks(s.case, j, s.size)[s.place].cpu()
        close(s.value[j], wanted, f"what rank {s.rank} got from {rank}", 0)


def _sent_once(s: Seen) -> None:
    for rank, chunk in zip(s.ranks, _chunks(s.case, s.place, s.size), strict=True):
        sizes = [c.nbytes for c in s.sent if c.peer == rank]
        text = f"{s.where} sends {len(sizes)} messages, {sum(sizes)} bytes to rank {rank}"
        fits = len(sizes) <= 2 and sum(sizes) <= chunk.nbytes + 1024
        expect(fits or rank == s.rank, f"{text}, for {chunk.nbytes}", "traffic")
    to = {c.peer for c in s.sent}
    expect(to <= set(s.ranks) - {s.rank}, f"{s.where} sends to {sorted(to)}", "traffic")


@check("hierarchical_all_reduce")
def hierarchical_all_reduce(answer, report):
    """Compared with the sum; bytes counted between nodes."""

    def of_nodes(*cases: Case) -> OnGroups:
        """Each case in nodes of 1 to 4 ranks, where those divide the group."""
        nodes = [dataclasses.replace(case, number=n) for case in cases for n in (1, 2, 3, 4)]
        return run(report, answer, nodes, _in_nodes)

    seen = of_nodes(Case((3, 5)))
    equals(
        seen,
        "sums over nodes of 1, 2 and 4 ranks, of any group",
        summed,
        steps(
            "sum inside the node so that each rank holds a piece, sum the pieces between ranks of "
            "the same place in their nodes, then gather inside the node"
        ),
    )
    cheap(seen)
    seen.holds(
        "sends at most 2(N-1)*ceil(ceil(numel/ranks_per_node)/N) elements between nodes",
        _few_between_nodes,
        hint="only the piece a rank holds after the reduce-scatter in its node goes between nodes, "
        "by a ring all-reduce of N ranks; consecutive ranks share a node",
    )
    more = of_nodes(
        *(Case(shape) for shape in [(0, 5), (1,), (3,), ()]), *strides_and_dtypes((6, 5))
    )
    equals(
        more,
        "takes no element, one, any strides and dtype",
        summed,
        hint="pad to a whole number of pieces, at both levels. " + STRIDES,
    )
    more = report.on_groups(_refused, answer, rounds=WORLD)
    more.refused(
        "refuses a number of ranks that nodes don't divide with a ValueError",
        hint="check world % ranks_per_node before anything is sent, so that every rank raises",
    )


def _in_nodes(answer: Callable, here: Here, case: Case) -> Seen | None:
    if here.size % case.number:
        return None
    x = tensor(case, here.place, here.size)
    return here.see(lambda x: answer(x, case.number, **here.options), x=x)


def _refused(answer: Callable, here: Here) -> Seen:
    x, said = random(6, 5).to(device()), ""
    for nodes in (3, 8):
        said = said or refusal(answer, x, nodes, what=f"4 ranks in nodes of {nodes}")
    return Seen(refused=said)


def _few_between_nodes(s: Seen) -> None:
    node = {rank: place // s.case.number for place, rank in enumerate(s.ranks)}
    nodes, piece = s.size // s.case.number, math.ceil(s.case.numel / s.case.number)
    most = 2 * (nodes - 1) * math.ceil(piece / nodes)
    out = sum(elements(c) for c in s.sent if node.get(c.peer) != node[s.rank])
    text = f"{s.where} in nodes of {s.case.number} sends {out} elements to other nodes"
    expect(out <= most, f"{text}, not {most}", "traffic")


@check("collective_bytes")
def collective_bytes(answer, report):
    """Compared with exact fractions of the closed forms."""
    shares = {
        "all_gather": lambda p: fractions.Fraction(p - 1, p),
        "reduce_scatter": lambda p: fractions.Fraction(p - 1, p),
        "all_to_all": lambda p: fractions.Fraction(p - 1, p),
        "broadcast": lambda p: fractions.Fraction(p - 1, p),
        "all_reduce": lambda p: fractions.Fraction(2 * (p - 1), p),
    }

    def ask(op: str, nbytes: int, world: int) -> None:
        what = f"{op} of {nbytes} bytes on {world} ranks"
        told = answer(op, nbytes, world)
        expect(type(told) is int, f"{what} gives {told!r}, expected an int")
        same(told, int(shares[op](world) * nbytes), what)

    hints = {
        "all_gather": "nbytes is the whole output: a rank passes on P-1 of its P pieces",
        "reduce_scatter": "nbytes is the whole input: a rank sends P-1 of its P pieces",
        "all_to_all": "nbytes is one rank's whole input: all but its own piece leaves",
        "broadcast": "P-1 ranks must receive nbytes; shared by P ranks that is the mean",
        "all_reduce": "a reduce-scatter and an all-gather, each of the full tensor",
    }
    for op, hint in hints.items():
        with report.property(f"{op} on 2, 3, 4 and 8 ranks", hint=hint):
            for world in (2, 3, 4, 8):
                ask(op, 24_000, world)
    with report.property("nothing is sent by one rank alone, or of 0 bytes", hint="P-1 is 0"):
        for op in shares:
            ask(op, 1000, 1)
            ask(op, 0, 4)
    with report.property(
        "rounds down, exactly also for large numbers",
        hint="stay with integers: multiply first, then divide with //",
    ):
        for op in shares:
            for nbytes in (1, 7, 1_000_003, 3 * 10**17 + 1, 2**62 + 3):
                for world in (3, 7, 4096):
                    ask(op, nbytes, world)
