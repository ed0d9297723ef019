"""Chapter 24, heads for sequence."""

import math

from ...devices import device
from ..compare import expect, total
from ..groups import refusal
from ..report import check
from ..seen import WORLD, Here, Seen
from .whole import B, Case, D, H, S, attend, equal, qkv, without_gradients


@check("ulysses_attention")
def ulysses_attention(answer, report):
    """Heads for sequence."""
    every = [Case("full", H), Case("causal", H), *(Case("causal", n) for n in (1, 2, 6))]
    seen = report.on_groups(attend, answer, cases=every)
    full, shared = seen.of(every[0]), seen.of(*every[2:])
    seen.of(*every[:2]).holds(
        "out and gradients equal attention over the whole sequence, 1 to 4 ranks",
        equal,
        hint="after the all-to-all a rank holds ALL positions, in rank order, of H/P heads; the "
        "backward of an all-to-all is the all-to-all the other way",
    )
    shared.holds(
        "kv heads that do not divide by the ranks are replicated until they do",
        equal,
        hint="copies stand next to their original, and their gradients are summed",
    )
    without_gradients(report, answer, "full")
    shared.holds(
        "kv heads travel as often as they must, not as often as there are query heads",
        _few_kv_heads,
        hint="the smallest multiple of the kv heads that divides by the ranks: lcm(Hkv, P) heads; "
        "attention itself groups the query heads that share one",
    )
    full.holds(
        "at most four all-to-alls each way, of one shard each, and nothing else",
        _four_all_to_alls,
        hint="q, k, v in, the output back; their gradients take the same ways",
    )
    more = report.on_groups(_refused, answer, rounds=WORLD)
    more.refused(
        "ValueError where the heads do not divide by the ranks",
        hint="12 heads fit on 2, 3 and 4 ranks, 10 heads do not fit on 4",
    )


def _few_kv_heads(s: Seen) -> None:
    heads = 2 * H + 2 * math.lcm(s.case.kv_heads, s.size)  # q and out, k and v
    most, (_, found) = B * heads * (S // s.size) * D * 4, total(s.forward, "all_to_all")
    text = f"{s.where} handed {found} bytes of {s.case.kv_heads} kv heads to all-to-alls"
    expect(found <= most, f"{text}, expected at most {most}", "traffic")


def _four_all_to_alls(s: Seen) -> None:
    most = 4 * B * H * (S // s.size) * D * 4
    for way, log in (("forward", s.forward), ("backward", s.backward)):
        where = f"{way} on {s.where}"
        count, nbytes = total(log, "all_to_all")
        other = [c.op for c in log if c.op != "all_to_all"]
        expect(not other, f"{where} used {other[:1]}", "traffic")
        expect(count <= 4, f"{where} made {count} all-to-alls, expected at most 4", "traffic")
        text = f"{where} handed {nbytes} bytes to all-to-alls, expected {most}"
        expect(nbytes <= most, text, "traffic")
        expect(count > 0 or s.size == 1, f"{where} never communicated", "traffic")


def _refused(answer, here: Here) -> Seen:
    q, k, v, _ = (x.to(device()) for x in qkv(10, 10, 12))
    return Seen(refused=refusal(answer, q, k, v, what="10 heads on 4 ranks"))
