"""Chapter 13: collectives from messages alone. Values, and who sent how much to whom.

Every answer runs on groups of 1 to 4 of 4 ranks. The groups are picked so that a member's number in
the group differs from its number in the world; peers and roots that mix the two up go wrong.
"""

import dataclasses
import fractions
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import calls
from ..devices import device
from .compare import close, expect, random, refuses, same
from .report import Report, check

GROUPS = [(2,), (1, 3), (0, 2, 3), (0, 1, 2, 3)]
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


@dataclasses.dataclass
class Member:
    """What one member of a group returned and did."""

    value: Any
    changed: bool  # its input
    aliased: bool  # the result lies in the input's memory
    log: list[calls.Call]

    def sent(self) -> list[calls.Call]:
        return [c for c in self.log if c.op == "send"]


Runs = dict[tuple[tuple[int, ...], Case], list[Member]]


@check("ring_all_reduce")
def ring_all_reduce(answer, report):
    """Compared with the sum of all inputs; messages counted where every call passes."""
    with report.property("sums over any group of 1 to 4 ranks", hint=MEMBERS):
        runs = _run(report, answer, [Case((3, 4)), Case((24,))])
        _sums(runs)
    with report.property("leaves its input as it was", hint=UNCHANGED):
        _unchanged(runs)
    with report.property("uses messages between two ranks only", hint=MESSAGES):
        _only_messages(runs)
    with report.property(
        "sends at most 2(P-1) messages a rank, each to the next rank",
        hint="a ring knows one receiver: the next rank, after the last one the first; P-1 steps of "
        "reduce-scatter, P-1 steps of all-gather",
    ):
        for ranks, _, i, member in _each(runs):
            sent, most = member.sent(), 2 * (len(ranks) - 1)
            expect(len(sent) <= most, f"rank {ranks[i]} of {ranks} sends {len(sent)} messages")
            _goes_to(sent, ranks, i, (1,))
    with report.property(
        "sends at most 2(P-1)*ceil(numel/P) elements",
        hint="cut x into P pieces and send one piece a step, never the whole tensor",
    ):
        _few_elements(runs)
    with report.property(
        "takes any number of elements: 7, fewer than ranks, one, none; and 0 dimensions",
        hint="pad x to P pieces of ceil(numel/P), or let pieces be uneven or empty and skip their "
        "messages on both sides",
    ):
        shapes = [(7,), (2,), (1,), (0, 5), (), (5, 1)]
        runs = _run(report, answer, [Case(shape) for shape in shapes])
        _sums(runs)
        _few_elements(runs)
    with report.property("takes any strides and dtype", hint=STRIDES):
        _sums(_run(report, answer, _kinds((6, 5))))


@check("ring_reduce_scatter")
def ring_reduce_scatter(answer, report):
    """Compared with the rows of the sum that belong to the rank."""

    def pieces(case: Case, inputs: list[Tensor]) -> list[Tensor]:
        return list(_sum(inputs).chunk(len(inputs)))

    with report.property(
        "gives member i piece i of the sum, for any group of 1 to 4 ranks",
        hint="the piece that a rank ends with is the one it adds last: start with another rank's "
        "piece. " + MEMBERS,
    ):
        runs = _run(report, answer, [Case((12, 5)), Case((12,))])
        _compare(runs, pieces)
    with report.property("leaves its input as it was", hint=UNCHANGED):
        _unchanged(runs)
    with report.property("uses messages between two ranks only", hint=MESSAGES):
        _only_messages(runs)
    with report.property(
        "sends P-1 messages of n rows, all to one neighbour in the ring",
        hint="a partial sum of one piece travels: receive it, add your part, pass it on",
    ):
        _ring_messages(runs, lambda case, world: _numel(case) // world, (1, -1))
    with report.property("takes any strides and dtype, and pieces of no row", hint=STRIDES):
        _compare(_run(report, answer, [*_kinds((12, 5)), Case((0, 5)), Case((12, 0))]), pieces)


@check("ring_all_gather")
def ring_all_gather(answer, report):
    """Compared with the inputs of all ranks, concatenated."""

    def joined(case: Case, inputs: list[Tensor]) -> list[Tensor]:
        return [torch.cat(inputs)] * len(inputs)

    with report.property(
        "joins the rows of any group of 1 to 4 ranks in rank order",
        hint="in step s you receive what left the rank before you in step s, its neighbour's piece "
        "s steps back: piece (rank - s - 1) % P. " + MEMBERS,
    ):
        runs = _run(report, answer, [Case((3, 5)), Case((7,))])
        _compare(runs, joined)
    with report.property("leaves its input as it was", hint=UNCHANGED):
        _unchanged(runs)
    with report.property("uses messages between two ranks only", hint=MESSAGES):
        _only_messages(runs)
    with report.property(
        "sends P-1 messages of n rows, to the next rank only",
        hint="pass on what arrived in the step before; nothing goes to another rank than the next",
    ):
        _ring_messages(runs, lambda case, world: _numel(case), (1,))
    with report.property("takes any strides and dtype, one row and none", hint=STRIDES):
        _compare(_run(report, answer, [*_kinds((6, 5)), Case((0, 5)), Case((1, 2, 3))]), joined)


@check("tree_broadcast")
def tree_broadcast(answer, report):
    """Compared with the source's values; rounds follow from the order of each rank's messages."""

    def from_source(case: Case, inputs: list[Tensor]) -> list[Tensor]:
        return [inputs[case.number % len(inputs)]] * len(inputs)

    cases = [Case((3, 5), number=place) for place in range(4)]
    with report.property(
        "brings the values of src, any rank of any group, to all its members",
        hint="src is a rank of the world; count places from the source: (group rank - source's "
        "group rank) % P. " + MEMBERS,
    ):
        runs = _run(report, answer, cases, call=_from_source)
        _compare(runs, from_source)
    with report.property(
        "returns a new tensor and leaves x as it was on every rank",
        hint="receive into a buffer of your own, and copy on the source too",
    ):
        _unchanged(runs)
        for ranks, _, i, member in _each(runs):
            expect(len(ranks) == 1 or not member.aliased, f"rank {ranks[i]} returns x itself")
    with report.property("uses messages between two ranks only", hint=MESSAGES):
        _only_messages(runs)
    with report.property(
        "sends P-1 messages in all, each with the whole of x",
        hint="every rank but the source receives once, from a rank that has it already",
    ):
        for (ranks, case), members in runs.items():
            sizes = [_elements(c) for m in members for c in m.sent()]
            wanted = [_numel(case)] * (len(ranks) - 1)
            same(sizes, wanted, f"the elements of the messages in {ranks}")
    with report.property(
        "takes ceil(log2 P) rounds",
        hint="in each round everyone who has the values sends them to one rank that has not: 1, 2, "
        "4 … ranks have them",
    ):
        for (ranks, _), members in runs.items():
            rounds, most = _rounds(ranks, members), (len(ranks) - 1).bit_length()
            expect(rounds <= most, f"it takes {rounds} rounds for {len(ranks)} ranks, not {most}")
    with report.property("takes any strides and dtype, no element, 0 dimensions", hint=STRIDES):
        kinds = [*_kinds((6, 5)), Case((0, 5)), Case(())]
        more = [dataclasses.replace(case, number=i) for i, case in enumerate(kinds)]
        _compare(_run(report, answer, more, call=_from_source), from_source)


@check("all_to_all")
def all_to_all(answer, report):
    """Compared with what each member meant for this one."""
    with report.property(
        "gives member i what each member had for it, at that member's place",
        hint="chunks[i] goes to member i and result[i] came from member i, your own included. "
        + MEMBERS,
    ):
        runs = _run(report, answer, [Case((20, 30))], make=_chunks)
        _exchanged(runs)
    with report.property("leaves its input as it was", hint=UNCHANGED):
        _unchanged(runs)
    with report.property("uses messages between two ranks only", hint=MESSAGES):
        _only_messages(runs)
    with report.property(
        "sends the data once, and one small message of sizes a pair",
        hint="first tell the shape in a few integers, then send the values as they are: no padding "
        "to the largest, no detour over other ranks",
    ):
        for ranks, case, i, member in _each(runs):
            chunks = _chunks(case, i, len(ranks))
            for j, rank in enumerate(ranks):
                if i == j:
                    continue
                sent = [c.nbytes for c in member.sent() if c.peer == rank]
                text = f"rank {ranks[i]} sends {len(sent)} messages, {sum(sent)} bytes to {rank}"
                limit = chunks[j].nbytes + 1024
                expect(len(sent) <= 2 and sum(sent) <= limit, f"{text}, for {chunks[j].nbytes}")
            to = {c.peer for c in member.sent()}
            expect(to <= set(ranks) - {ranks[i]}, f"rank {ranks[i]} sends to {sorted(to)}")
    with report.property(
        "takes chunks of no element, of 0 to 3 dimensions, of any strides and dtype",
        hint="the message of sizes must tell the number of dimensions as well; receive into "
        "new_empty of that shape; nothing needs to travel for 0 elements",
    ):
        kinds = [Case((4, 6), layout=layout) for layout in ("empty", "mixed", "transposed")]
        kinds += [Case((4, 6), dtype) for dtype in (torch.bfloat16, torch.int64)]
        _exchanged(_run(report, answer, kinds, make=_chunks))


@check("hierarchical_all_reduce")
def hierarchical_all_reduce(answer, report):
    """Compared with the sum; bytes counted between nodes."""
    layouts = {2: (1, 2), 3: (1, 3), 4: (1, 2, 4), 1: (1,)}

    def cases(shape: tuple, **more) -> Callable[[int], list[Case]]:
        return lambda world: [Case(shape, number=n, **more) for n in layouts[world]]

    with report.property(
        "sums over nodes of 1, 2 and 4 ranks, of any group",
        hint="sum inside the node so that each rank holds a piece, sum the pieces between ranks of "
        "the same place in their nodes, then gather inside the node. " + MEMBERS,
    ):
        runs = _run(report, answer, [cases((3, 5))], call=_in_nodes)
        _sums(runs)
    with report.property("leaves its input as it was", hint=UNCHANGED):
        _unchanged(runs)
    with report.property("uses messages between two ranks only", hint=MESSAGES):
        _only_messages(runs)
    with report.property(
        "sends at most 2(N-1)*ceil(ceil(numel/ranks_per_node)/N) elements between nodes",
        hint="only the piece a rank holds after the reduce-scatter in its node goes between nodes, "
        "by a ring all-reduce of N ranks; consecutive ranks share a node",
    ):
        for ranks, case, i, member in _each(runs):
            node = {r: j // case.number for j, r in enumerate(ranks)}
            nodes = len(ranks) // case.number
            piece = -(-_numel(case) // case.number)
            most = 2 * (nodes - 1) * -(-piece // nodes)
            out = [c for c in member.sent() if node.get(c.peer) != node[ranks[i]]]
            sent = sum(_elements(c) for c in out)
            text = f"rank {ranks[i]} of {ranks} in nodes of {case.number} sends {sent} elements"
            expect(sent <= most, f"{text} to other nodes, not {most}")
    with report.property(
        "takes no element, one, any strides and dtype",
        hint="pad to a whole number of pieces, at both levels. " + STRIDES,
    ):
        more = [cases((0, 5)), cases((1,)), cases((3,)), cases(())]
        more += [cases(c.shape, dtype=c.dtype, layout=c.layout) for c in _kinds((6, 5))]
        _sums(_run(report, answer, more, call=_in_nodes))
    with report.property(
        "refuses a number of ranks that nodes don't divide with a ValueError",
        hint="check world % ranks_per_node before anything is sent, so that every rank raises",
    ):
        report.ranks(_refused, 4, answer)


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


# Running an answer on groups


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


def _plain(answer: Callable, x: Any, case: Case, ranks: tuple, **group) -> Any:
    return answer(x, **group)


def _from_source(answer: Callable, x: Any, case: Case, ranks: tuple, **group) -> Any:
    return answer(x, ranks[case.number % len(ranks)], **group)


def _in_nodes(answer: Callable, x: Any, case: Case, ranks: tuple, **group) -> Any:
    return answer(x, case.number, **group)


def _run(
    report: Report,
    answer: Callable,
    cases: list,
    call: Callable = _plain,
    make: Callable = _tensor,
) -> Runs:
    """Every case on every group; a case may be a function of the group's size that gives cases."""
    plan = []
    for ranks in GROUPS:
        for case in cases:
            plan += [(ranks, c) for c in (case(len(ranks)) if callable(case) else [case])]
    report.timeout = min(report.timeout, 15)
    values = report.ranks(_members, 4, answer, plan, call, make)
    return {run: [values[r][k] for r in run[0]] for k, run in enumerate(plan)}


def _members(answer: Callable, plan: list, call: Callable, make: Callable) -> dict[int, Member]:
    """On one rank: what came of the runs it took part in, by number in the plan."""
    world, me = dist.get_world_size(), dist.get_rank()
    groups = {r: dist.new_group(r) for r in dict.fromkeys(r for r, _ in plan) if len(r) < world}
    found = {}
    for k, (ranks, case) in enumerate(plan):
        if me not in ranks:
            continue
        x = make(case, ranks.index(me), len(ranks))
        tensors = list(x) if isinstance(x, list) else [x]
        before = [t.clone() for t in tensors]
        group = {"group": groups[ranks]} if ranks in groups else {}
        with calls.record() as log:
            value = call(answer, x, case, ranks, **group)
        kept = not isinstance(x, list) or [id(t) for t in x] == [id(t) for t in tensors]
        kept = kept and all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        at = {t.untyped_storage().data_ptr() for t in tensors}
        aliased = isinstance(value, Tensor) and value.untyped_storage().data_ptr() in at
        found[k] = Member(_cpu(value), not kept, aliased, log)
    return found


def _cpu(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cpu(v) for v in value]
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _refused(answer: Callable) -> None:
    x = random(6, 5).to(device())
    refuses(answer, x, 3, what="4 ranks in nodes of 3")
    refuses(answer, x, 8, what="4 ranks in nodes of 8")


# What a run must have been like


def _each(runs: Runs) -> Iterator[tuple[tuple[int, ...], Case, int, Member]]:
    for (ranks, case), members in runs.items():
        for i, member in enumerate(members):
            yield ranks, case, i, member


def _sum(inputs: list[Tensor]) -> Tensor:
    if not inputs[0].dtype.is_floating_point:
        return torch.stack(inputs).sum(0)
    return torch.stack(inputs).float().sum(0).to(inputs[0].dtype)


def _compare(runs: Runs, expected: Callable[[Case, list[Tensor]], list[Tensor]]) -> None:
    for (ranks, case), members in runs.items():
        inputs = [_tensor(case, i, len(ranks)).cpu() for i in range(len(ranks))]
        # bf16 keeps 8 bits: each of up to three additions of values near 4 rounds by up to 2^-7
        tolerance = 0.05 if case.dtype == torch.bfloat16 else 1e-5
        for i, wanted in enumerate(expected(case, inputs)):
            what = f"for {case} on ranks {ranks} the result of rank {ranks[i]}"
            close(members[i].value, wanted, what, tolerance)


def _sums(runs: Runs) -> None:
    _compare(runs, lambda case, inputs: [_sum(inputs)] * len(inputs))


def _exchanged(runs: Runs) -> None:
    for ranks, case, i, member in _each(runs):
        what = f"the result of rank {ranks[i]} of {ranks}"
        expect(isinstance(member.value, list), f"{what} is no list of tensors")
        same(len(member.value), len(ranks), f"the number of tensors in {what}")
        for j in range(len(ranks)):
            wanted = _chunks(case, j, len(ranks))[i].cpu()
            close(member.value[j], wanted, f"what rank {ranks[i]} got from {ranks[j]}", 0)


def _unchanged(runs: Runs) -> None:
    for ranks, case, i, member in _each(runs):
        expect(not member.changed, f"{case} on rank {ranks[i]} of {ranks} was changed")


def _only_messages(runs: Runs) -> None:
    for ranks, _, i, member in _each(runs):
        for call in member.log:
            expect(call.op in ("send", "recv"), f"rank {ranks[i]} calls {call.op}")


def _numel(case: Case) -> int:
    return torch.Size(case.shape).numel()


def _elements(call: calls.Call) -> int:
    return call.nbytes // call.dtype.itemsize


def _goes_to(sent: list[calls.Call], ranks: tuple[int, ...], i: int, steps: tuple) -> None:
    """All messages of member i go to one rank, the next one (step 1) or the one before (-1)."""
    peers = {c.peer for c in sent}
    allowed = [{ranks[(i + step) % len(ranks)]} for step in steps]
    to = " and ".join(str(p) for p in sorted(peers))
    text = f"rank {ranks[i]} of {ranks} sends to rank {to}, the next rank is {allowed[0]}"
    expect(not peers or peers in allowed, text.replace("{", "").replace("}", ""))


def _few_elements(runs: Runs) -> None:
    for ranks, case, i, member in _each(runs):
        world = len(ranks)
        most = 2 * (world - 1) * -(-_numel(case) // world)
        sent = sum(_elements(c) for c in member.sent())
        text = f"for {case} rank {ranks[i]} of {ranks} sends {sent} elements"
        expect(sent <= most, f"{text}, more than {most}")


def _ring_messages(runs: Runs, elements: Callable[[Case, int], int], steps: tuple) -> None:
    for ranks, case, i, member in _each(runs):
        sizes = [_elements(c) for c in member.sent()]
        wanted = [elements(case, len(ranks))] * (len(ranks) - 1)
        same(
            sizes, wanted, f"for {case}, the elements of the messages of rank {ranks[i]} of {ranks}"
        )
        _goes_to(member.sent(), ranks, i, steps)


def _rounds(ranks: tuple[int, ...], members: list[Member]) -> int:
    """Rounds that the messages need when a rank takes part in one message a round."""
    busy = dict.fromkeys(ranks, 0)  # the last round a rank took part in
    todo = {r: list(m.log) for r, m in zip(ranks, members, strict=True)}
    travelling: dict[tuple, list[int]] = {}
    moved = True
    while moved:
        moved = False
        for r in ranks:
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
