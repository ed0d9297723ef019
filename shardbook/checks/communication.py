"""Chapter 13: collectives from messages alone. Values, and who sent how much to whom."""

import dataclasses
import fractions
import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import calls
from ..devices import device
from .compare import close, expect, listed, random, same
from .families import kept
from .groups import refusal
from .report import Report, check
from .seen import WORLD, Here, Runs, Seen
from .wrong import hints

MEMBERS = (
    "inside a group dist.get_rank(group) counts from 0, but the peer of send and recv, like src, "
    "is a rank of the world: use group_dst, group_src or group_peer, or dist.get_global_rank"
)
MESSAGES = "use send, recv, isend, irecv or batch_isend_irecv, and no collective"
STRIDES = (
    "send and recv take contiguous tensors: copy what isn't, receive into a fresh contiguous "
    "buffer (empty_like keeps strides), and give the result x's shape and dtype"
)
UNCHANGED = "add into a buffer of your own: the input is the caller's"
WAITS = (
    "every message needs its send and its receive, and a plain send may wait for the receive: "
    "start one of the two with isend or irecv, wait for it after the other, and let each rank take "
    "part in every step"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One input, and the number that some calls take: the source's place, or ranks per node."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = ""
    number: int = 0

    def __str__(self) -> str:
        words = [self.layout, str(self.dtype)[6:], f"x {list(self.shape)}"]
        return " ".join(word for word in words if word)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@check("ring_all_reduce")
def ring_all_reduce(answer, report):
    """Compared with the sum of all inputs; messages counted where every call passes."""
    seen = _run(report, answer, [Case((3, 4)), Case((24,))])
    _value(seen, "sums over any group of 1 to 4 ranks", _sum, MEMBERS)
    _messages(seen)
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
    more = _run(report, answer, [Case(s) for s in [(7,), (2,), (1,), (0, 5), (), (5, 1)]])
    more.holds(
        "takes any number of elements: 7, fewer than ranks, one, none; and 0 dimensions",
        lambda s: (_judge(s, _sum), _few_elements(s)),
        hint="pad x to P pieces of ceil(numel/P), or let pieces be uneven or empty and skip their "
        "messages on both sides",
    )
    kinds = _run(report, answer, _kinds((6, 5)))
    _value(kinds, "takes any strides and dtype", _sum, STRIDES)


@check("ring_reduce_scatter")
def ring_reduce_scatter(answer, report):
    """Compared with the rows of the sum that belong to the rank."""

    def piece(inputs: list[Tensor], s: Seen) -> Tensor:
        return _sum(inputs, s).chunk(s.size)[s.place]

    seen = _run(report, answer, [Case((12, 5)), Case((12,))])
    _value(
        seen,
        "gives member i piece i of the sum, for any group of 1 to 4 ranks",
        piece,
        hint="the piece that a rank ends with is the one it adds last: start with another rank's "
        "piece. " + MEMBERS,
    )
    _messages(seen)
    seen.holds(
        "sends P-1 messages of n rows, all to one neighbour in the ring",
        lambda s: _ring_messages(s, s.case.numel // s.size, (1, -1)),
        hint="a partial sum of one piece travels: receive it, add your part, pass it on",
    )
    kinds = _run(report, answer, [*_kinds((12, 5)), Case((0, 5)), Case((12, 0))])
    _value(kinds, "takes any strides and dtype, and pieces of no row", piece, STRIDES)


@check("ring_all_gather")
def ring_all_gather(answer, report):
    """Compared with the inputs of all ranks, concatenated."""

    def joined(inputs: list[Tensor], s: Seen) -> Tensor:
        return torch.cat(inputs)

    seen = _run(report, answer, [Case((3, 5)), Case((7,))])
    _value(
        seen,
        "joins the rows of any group of 1 to 4 ranks in rank order",
        joined,
        hint="in step s you receive what left the rank before you in step s, its neighbour's piece "
        "s steps back: piece (rank - s - 1) % P. " + MEMBERS,
    )
    _messages(seen)
    seen.holds(
        "sends P-1 messages of n rows, to the next rank only",
        lambda s: _ring_messages(s, s.case.numel, (1,)),
        hint="pass on what arrived in the step before; nothing goes to another rank than the next",
    )
    kinds = _run(report, answer, [*_kinds((6, 5)), Case((0, 5)), Case((1, 2, 3))])
    _value(kinds, "takes any strides and dtype, one row and none", joined, STRIDES)


@check("tree_broadcast")
def tree_broadcast(answer, report):
    """Compared with the source's values; rounds follow from the order of each rank's messages."""

    def from_source(inputs: list[Tensor], s: Seen) -> Tensor:
        return inputs[s.case.number % s.size]

    def own(s: Seen) -> None:
        kept(s)
        expect(s.size == 1 or not s.aliased, f"{s.where} returns x itself", "memory")

    seen = _run(report, answer, [Case((3, 5), number=n) for n in range(4)], _from_source)
    _value(
        seen,
        "brings the values of src, any rank of any group, to all its members",
        from_source,
        hint="src is a rank of the world; count places from the source: (group rank - source's "
        "group rank) % P. " + MEMBERS,
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
            sizes = [_elements(c) for s in members for c in s.sent]
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
    kinds = [*_kinds((6, 5)), Case((0, 5)), Case(())]
    kinds = [dataclasses.replace(case, number=i) for i, case in enumerate(kinds)]
    more = _run(report, answer, kinds, _from_source)
    _value(more, "takes any strides and dtype, no element, 0 dimensions", from_source, STRIDES)


@check("all_to_all")
def all_to_all(answer, report):
    """Compared with what each member meant for this one."""
    seen = _run(report, answer, [Case((20, 30))], _of_chunks)
    place = "chunks[i] goes to member i and result[i] came from member i, your own included. "
    seen.holds(
        "gives member i what each member had for it, at that member's place",
        _exchanged,
        hint=hints(place + MEMBERS, hang=WAITS),
    )
    _messages(seen)
    seen.holds(
        "sends the data once, and one small message of sizes a pair",
        _sent_once,
        hint="first tell the shape in a few integers, then send the values as they are: no padding "
        "to the largest, no detour over other ranks",
    )
    kinds = [Case((4, 6), layout=layout) for layout in ("empty", "mixed", "transposed")]
    kinds += [Case((4, 6), dtype) for dtype in (torch.bfloat16, torch.int64)]
    more = _run(report, answer, kinds, _of_chunks)
    more.holds(
        "takes chunks of no element, of 0 to 3 dimensions, of any strides and dtype",
        _exchanged,
        hint="the message of sizes must tell the number of dimensions as well; receive into "
        "new_empty of that shape; nothing needs to travel for 0 elements",
    )


@check("hierarchical_all_reduce")
def hierarchical_all_reduce(answer, report):
    """Compared with the sum; bytes counted between nodes."""

    def run(*cases: Case) -> Runs:
        """Each case in nodes of 1 to 4 ranks, where those divide the group."""
        nodes = [dataclasses.replace(case, number=n) for case in cases for n in (1, 2, 3, 4)]
        return _run(report, answer, nodes, _in_nodes)

    seen = run(Case((3, 5)))
    _value(
        seen,
        "sums over nodes of 1, 2 and 4 ranks, of any group",
        _sum,
        hint="sum inside the node so that each rank holds a piece, sum the pieces between ranks of "
        "the same place in their nodes, then gather inside the node. " + MEMBERS,
    )
    _messages(seen)
    seen.holds(
        "sends at most 2(N-1)*ceil(ceil(numel/ranks_per_node)/N) elements between nodes",
        _few_between_nodes,
        hint="only the piece a rank holds after the reduce-scatter in its node goes between nodes, "
        "by a ring all-reduce of N ranks; consecutive ranks share a node",
    )
    more = run(*(Case(shape) for shape in [(0, 5), (1,), (3,), ()]), *_kinds((6, 5)))
    _value(
        more,
        "takes no element, one, any strides and dtype",
        _sum,
        hint="pad to a whole number of pieces, at both levels. " + STRIDES,
    )
    more = report.on_groups(_refused, answer, rounds=WORLD, timeout=20)
    more.refused(
        "refuses a number of ranks that nodes don't divide with a ValueError",
        hint="check world % ranks_per_node before anything is sent, so that every rank raises",
    )


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


# Inputs


def _tensor(case: Case, member: int, world: int) -> Tensor:
    """The input of a member, the same shape on every one."""
    *front, last = case.shape or (1,)
    if case.layout == "transposed":
        return _drawn(case.dtype, member, last, *front).mT
    if case.layout == "strided":
        return _drawn(case.dtype, member, *front, 2 * last)[..., ::2]
    if case.layout == "expanded":
        return _drawn(case.dtype, member, *front, 1).expand(case.shape)
    return _drawn(case.dtype, member, *case.shape)


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
        x = _drawn(case.dtype, 10 * member + j, *shape)
        made.append(x.mT.contiguous().mT if case.layout == "transposed" else x)
    return made


def _drawn(dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    x = random(*(shape or (1,)), seed=seed + 1).reshape(shape)
    return (x if dtype.is_floating_point else x * 100).to(dtype).to(device())


def _kinds(shape: tuple[int, int]) -> list[Case]:
    layouts = [Case(shape, layout=layout) for layout in ("transposed", "strided", "expanded")]
    return layouts + [Case(shape, dtype) for dtype in (torch.bfloat16, torch.int64)]


# On a rank


def _plain(answer: Callable, here: Here, case: Case) -> Seen:
    x = _tensor(case, here.place, here.size)
    return here.see(lambda x: answer(x, **here.options), x=x)


def _of_chunks(answer: Callable, here: Here, case: Case) -> Seen:
    chunks = _chunks(case, here.place, here.size)
    return here.see(lambda chunks: answer(chunks, **here.options), chunks=chunks)


def _from_source(answer: Callable, here: Here, case: Case) -> Seen:
    x, src = _tensor(case, here.place, here.size), here.ranks[case.number % here.size]
    return here.see(lambda x: answer(x, src, **here.options), x=x)


def _in_nodes(answer: Callable, here: Here, case: Case) -> Seen | None:
    if here.size % case.number:
        return None
    x = _tensor(case, here.place, here.size)
    return here.see(lambda x: answer(x, case.number, **here.options), x=x)


def _refused(answer: Callable, here: Here) -> Seen:
    x, said = random(6, 5).to(device()), ""
    for nodes in (3, 8):
        said = said or refusal(answer, x, nodes, what=f"4 ranks in nodes of {nodes}")
    return Seen(refused=said)


# What a run must have been like


def _run(report: Report, answer: Callable, cases: list[Case], fn: Callable = _plain) -> Runs:
    return report.on_groups(fn, answer, cases=cases, timeout=20)


def _value(seen: Runs, name: str, expected: Callable, hint: str) -> None:
    """The result is what `expected` makes of the inputs of all members of the group."""
    seen.holds(name, lambda s: _judge(s, expected), hints(hint, hang=WAITS))


def _judge(s: Seen, expected: Callable[[list[Tensor], Seen], Tensor]) -> None:
    inputs = [_tensor(s.case, place, s.size).cpu() for place in range(s.size)]
    # bf16 keeps 8 bits: each of up to three additions of values near 4 rounds by up to 2^-7
    tolerance = 0.05 if s.case.dtype == torch.bfloat16 else 1e-5
    close(s.value, expected(inputs, s), f"for {s.case} the result on {s.where}", tolerance)


def _sum(inputs: list[Tensor], s: Seen) -> Tensor:
    if not inputs[0].dtype.is_floating_point:
        return torch.stack(inputs).sum(0)
    return torch.stack(inputs).float().sum(0).to(inputs[0].dtype)


def _messages(seen: Runs) -> None:
    """What holds for all of them beside the value."""
    seen.keeps_input(UNCHANGED)
    seen.only("uses messages between two ranks only", ("send", "recv"), MESSAGES)


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


def _few_between_nodes(s: Seen) -> None:
    node = {rank: place // s.case.number for place, rank in enumerate(s.ranks)}
    nodes, piece = s.size // s.case.number, math.ceil(s.case.numel / s.case.number)
    most = 2 * (nodes - 1) * math.ceil(piece / nodes)
    out = sum(_elements(c) for c in s.sent if node.get(c.peer) != node[s.rank])
    text = f"{s.where} in nodes of {s.case.number} sends {out} elements to other nodes"
    expect(out <= most, f"{text}, not {most}", "traffic")


def _elements(call: calls.Call) -> int:
    return call.nbytes // call.dtype.itemsize


def _goes_to(s: Seen, steps: tuple[int, ...]) -> None:
    """All its messages go to one rank, the next one (step 1) or the one before (-1)."""
    peers = sorted({c.peer for c in s.sent})
    allowed = [s.ranks[(s.place + step) % s.size] for step in steps]
    fine = not peers or (len(peers) == 1 and peers[0] in allowed)
    text = f"rank {s.rank} of {s.ranks} sends to rank {listed(peers)}" if peers else ""
    expect(fine, f"{text}, the next rank is {allowed[0]}", "traffic")


def _two_rounds(s: Seen) -> None:
    many = f"{s.where} sends {len(s.sent)} messages"
    expect(len(s.sent) <= 2 * (s.size - 1), many, "traffic")
    _goes_to(s, (1,))


def _few_elements(s: Seen) -> None:
    most = 2 * (s.size - 1) * math.ceil(s.case.numel / s.size)
    sent = sum(_elements(c) for c in s.sent)
    text = f"for {s.case} {s.where} sends {sent} elements, more than {most}"
    expect(sent <= most, text, "traffic")


def _ring_messages(s: Seen, elements: int, steps: tuple[int, ...]) -> None:
    sizes, wanted = [_elements(c) for c in s.sent], [elements] * (s.size - 1)
    same(sizes, wanted, f"for {s.case}, the elements of the messages of {s.where}", "traffic")
    _goes_to(s, steps)


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
