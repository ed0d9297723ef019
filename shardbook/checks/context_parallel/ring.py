"""Chapter 24, rings of keys and values."""

import gc
import time

from torch import Tensor

from ..._seams import TorchDispatchMode
from ...devices import device
from ..compare import expect, total
from ..families import OnGroups
from ..report import Report, check
from ..seen import WORLD, Here, Seen
from ..wrong import hints
from .whole import HKV, B, Case, D, H, S, attend, equal, positions, qkv, without_gradients

HANG = (
    "a ring waits where every rank sends before it receives: start the send and the receive "
    "together (batch_isend_irecv), and make the same number of steps on every rank"
)


def _next_only(s: Seen) -> None:
    block = B * HKV * (S // s.size) * D * 4  # bytes of K, and of V
    wanted, found = 2 * (s.size - 1) * block, total(s.forward, "send")[1]
    text = f"{s.where} sent {found} bytes forward, expected 2 (P-1) blocks = {wanted}"
    expect(found == wanted, text, "traffic")
    other = [c.op for c in s.forward + s.backward if c.op not in ("send", "recv")]
    text = f"{s.where} used {other[:1]}: keys travel point to point, rank to rank"
    expect(not other, text, "traffic")
    peers, after = {c.peer for c in s.sent}, s.ranks[(s.place + 1) % s.size]
    text = f"{s.where} sent to global ranks {sorted(peers)}, expected the next one only"
    expect(s.size == 1 or peers == {after}, text, "traffic")
    most = (4 * s.size - 2) * block  # K, V (P-1 times) and their gradients (P times)
    found = total(s.backward, "send")[1]
    text = f"{s.where} sent {found} bytes backward, expected at most {most}"
    expect(found <= most, text, "traffic")


def _ring(report: Report, answer, kind: str, seen: OnGroups, hint: str) -> None:
    """What a ring costs: traffic, and what a rank keeps and holds."""

    def own(s: Seen) -> int:
        part = B * (S // s.size)
        return 2 * HKV * part * D + 2 * H * part * D + 2 * H * part + 64  # k, v, q, out and lse

    name = "K and V are sent P-1 times, to the next rank, and nothing else moves forward"
    seen.holds(name, _next_only, hint)
    seen.at_most(
        "only the rank's own q, k, v, out and lse are saved for backward",
        "saves {} elements for backward",
        lambda s: s.saved,
        own,
        hint="write an autograd.Function: what autograd saves by itself keeps all blocks alive",
    )
    more = report.on_groups(_visitors, answer, kind, rounds=WORLD)
    more.at_most(
        "a rank holds at most two blocks of keys and values beyond its own",
        "holds the keys of {} other ranks at once",
        lambda s: s.held,
        lambda s: 2,  # the block it computes with and the one that arrives
        hint="compute with a block as soon as it is there, and let go of it when the next has come",
    )


class _Visitors(TorchDispatchMode):
    """At every product: of how many other ranks are keys in this process's memory?"""

    def __init__(self, marks: list[float]):
        super().__init__()
        self.marks, self.most = marks, 0  # a mark is a value that one rank's keys alone have

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:  # memory that is used again may still hold a former visitor
            result.zero_()
        if "mm" in func.__name__ or "attention" in func.__name__:
            readings = [self.count()]
            while readings[-1] > 2 and len(readings) < 6:
                time.sleep(0.02)  # a message's thread lets go a moment after the wait for it
                readings.append(self.count())
            self.most = max(self.most, readings[-1])
        return result

    def count(self) -> int:
        tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        here = [t.detach().cpu() for t in tensors if t.is_floating_point()]
        return sum(any(bool((t == mark).any()) for t in here) for mark in self.marks)


def _visitors(answer, here: Here, kind: str) -> Seen:
    """`held`: the most other ranks' keys that a forward pass has in memory at once."""
    rank, world = here.place, here.size
    held = [positions(S, world, r, kind == "zigzag") for r in range(world)]
    whole = qkv()
    marks = [whole[1][0, 0, held[r][0], 0].item() for r in range(world) if r != rank]
    q, k, v = (x[:, :, held[rank]].contiguous().to(device()) for x in whole[:3])
    for x in (q, k, v):
        x.requires_grad_()  # what an answer keeps for backward counts too
    del whole, x
    with _Visitors(marks) as visitors:
        answer(q, k, v)
    return Seen(held=visitors.most)


FLOPS = 1.01 * 4 * B * H * S * S * D  # of attention over the whole sequence

BACK = (
    "send K and V round again in backward: the block in your hands is not the one you saved. Its "
    "gradients travel with it and make one step more, to the rank that owns it"
)


@check("ring_attention")
def ring_attention(answer, report):
    """Keys and values travel."""
    cases = Case("full"), Case("causal")
    seen = report.on_groups(attend, answer, cases=cases)
    full, causal = map(seen.of, cases)
    step = (
        "every step: start sending your block to the next rank and receiving the one before's, "
        "compute with the block you hold, merge, wait. "
    )
    full.holds(
        "out and gradients equal attention over the whole sequence, 1 to 4 ranks",
        equal,
        hint=hints(step + BACK, hang=HANG),
    )
    causal.holds(
        "and with a causal mask",
        equal,
        hint="blocks of earlier ranks are seen whole, your own by its triangle, later ones not at "
        "all; a row that has seen nothing yet has lse -inf",
    )
    without_gradients(report, answer, "full")
    hint = "the last block need not be sent on; kv heads travel as they are, not repeated"
    _ring(report, answer, "full", full, hint)
    causal.at_most(
        "the work is a P-th of the whole: what is masked out is not computed",
        "computes {} FLOPs",
        lambda s: s.flops,
        lambda s: FLOPS * (s.place + 1) / s.size**2,
        hint="rank r of a causal ring needs r+1 of P blocks",
    )


@check("zigzag_ring_attention")
def zigzag_ring_attention(answer, report):
    """Equal causal work."""
    seen = report.on_groups(attend, answer, cases=[Case("zigzag")])
    halves = (
        "from an earlier rank only its early half is seen, by all your queries; from a later rank "
        "both halves are seen, by your late half only; your own by causality. "
    )
    seen.holds(
        "out and gradients equal causal attention over the whole sequence, 1 to 4 ranks",
        equal,
        hint=hints(halves + BACK, hang=HANG),
    )
    without_gradients(report, answer, "zigzag")
    seen.at_most(
        "every rank computes at most (2P+1)/(4P^2) of the full attention",
        "computes {} FLOPs",
        lambda s: s.flops,
        lambda s: FLOPS * (2 * s.size + 1) / (4 * s.size**2),
        hint="of the four pairs of halves from another rank two are empty: don't compute and mask",
    )
    hint = "the zigzag is in who holds what; the ring is the same"
    _ring(report, answer, "zigzag", seen, hint)
