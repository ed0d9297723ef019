"""Chapter 13, rings: pieces go round."""

import math

import torch
from torch import Tensor

from ..compare import expect, listed, same
from ..report import check
from ..seen import Seen
from .case import (
    STRIDES,
    Case,
    cheap,
    elements,
    equals,
    judge,
    run,
    steps,
    strides_and_dtypes,
    summed,
)

SUM = (
    "in P-1 steps pass a piece on, add what arrives to yours, and pass that on: then every rank "
    "has one piece of the sum; P-1 more steps pass the finished pieces round"
)


@check("ring_all_reduce")
def ring_all_reduce(answer, report):
    """Compared with the sum of all inputs; messages counted where every call passes."""
    seen = run(report, answer, [Case((3, 4)), Case((24,))])
    equals(seen, "sums over any group of 1 to 4 ranks", summed, steps(SUM))
    cheap(seen)
    seen.holds(
        "sends at most 2(P-1) messages a rank, each to the next rank",
        _two_rounds,
        hint="a ring knows one receiver: the next rank, after the last one the first; P-1 steps of "
        "reduce-scatter, P-1 steps of all-gather",
    )
    seen.holds(
        "sends at most 2(P-1)*ceil(numel/P) elements",
        _few_elements,
        hint="cut x into P pieces and send one piece a step, never the whole tensor",
    )
    more = run(report, answer, [Case(s) for s in [(7,), (2,), (1,), (0, 5), (), (5, 1)]])
    more.holds(
        "takes any number of elements: 7, fewer than ranks, one, none; and 0 dimensions",
        lambda s: (judge(s, summed), _few_elements(s)),
        hint="pad x to P pieces of ceil(numel/P), or let pieces be uneven or empty and skip their "
        "messages on both sides",
    )
    kinds = run(report, answer, strides_and_dtypes((6, 5)))
    equals(kinds, "takes any strides and dtype", summed, STRIDES)


@check("ring_reduce_scatter")
def ring_reduce_scatter(answer, report):
    """Compared with the rows of the sum that belong to the rank."""

    def piece(inputs: list[Tensor], s: Seen) -> Tensor:
        return summed(inputs, s).chunk(s.size)[s.place]

    seen = run(report, answer, [Case((12, 5)), Case((12,))])
    equals(
        seen,
        "gives member i piece i of the sum, for any group of 1 to 4 ranks",
        piece,
        steps(
            "the piece that a rank ends with is the one it adds last: start with another "
            "rank's piece"
        ),
    )
    cheap(seen)
    seen.holds(
        "sends P-1 messages of n rows, all to one neighbour in the ring",
        lambda s: _ring_messages(s, s.case.numel // s.size, (1, -1)),
        hint="a partial sum of one piece travels: receive it, add your part, pass it on",
    )
    kinds = run(report, answer, [*strides_and_dtypes((12, 5)), Case((0, 5)), Case((12, 0))])
    equals(kinds, "takes any strides and dtype, and pieces of no row", piece, STRIDES)


@check("ring_all_gather")
def ring_all_gather(answer, report):
    """Compared with the inputs of all ranks, concatenated."""

    def joined(inputs: list[Tensor], s: Seen) -> Tensor:
        return torch.cat(inputs)

    seen = run(report, answer, [Case((3, 5)), Case((7,))])
    equals(
        seen,
        "joins the rows of any group of 1 to 4 ranks in rank order",
        joined,
        steps(
            "in step s you receive what left the rank before you in step s, its neighbour's "
            "piece s steps back: piece (rank - s - 1) % P"
        ),
    )
    cheap(seen)
    seen.holds(
        "sends P-1 messages of n rows, to the next rank only",
        lambda s: _ring_messages(s, s.case.numel, (1,)),
        hint="pass on what arrived in the step before; nothing goes to another rank than the next",
    )
    kinds = run(report, answer, [*strides_and_dtypes((6, 5)), Case((0, 5)), Case((1, 2, 3))])
    equals(kinds, "takes any strides and dtype, one row and none", joined, STRIDES)


def _goes_to(s: Seen, ways: tuple[int, ...]) -> None:
    """All its messages go to one rank, the next one (step 1) or the one before (-1)."""
    peers = sorted({c.peer for c in s.sent})
    allowed = [s.ranks[(s.place + step) % s.size] for step in ways]
    fine = not peers or (len(peers) == 1 and peers[0] in allowed)
    text = f"rank {s.rank} of {s.ranks} sends to rank {listed(peers)}" if peers else ""
    expect(fine, f"{text}, the next rank is {allowed[0]}", "traffic")


def _two_rounds(s: Seen) -> None:
    many = f"{s.where} sends {len(s.sent)} messages"
    expect(len(s.sent) <= 2 * (s.size - 1), many, "traffic")
    _goes_to(s, (1,))


def _few_elements(s: Seen) -> None:
    most = 2 * (s.size - 1) * math.ceil(s.case.numel / s.size)
    sent = sum(elements(c) for c in s.sent)
    text = f"for {s.case} {s.where} sends {sent} elements, more than {most}"
    expect(sent <= most, text, "traffic")


def _ring_messages(s: Seen, each: int, ways: tuple[int, ...]) -> None:
    sizes, wanted = [elements(c) for c in s.sent], [each] * (s.size - 1)
    same(sizes, wanted, f"for {s.case}, the elements of the messages of {s.where}", "traffic")
    _goes_to(s, ways)
