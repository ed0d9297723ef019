"""Chapter 22, attention: heads over ranks."""

import functools

import torch
from torch import Tensor, nn

from ...devices import device
from ..compare import close, expect, random, same
from ..families import one_call
from ..groups import held, refusal
from ..report import check
from ..seen import Here, Seen
from ..wrong import Hint, hints
from .layers import ALONE, linear, step

ATTENTION_IN = 11  # the model's width differs from heads x head size
TOKENS = (5, 7)  # [B, S]


def _head(heads: int, kv_heads: int) -> int:
    return 4 if heads == kv_heads else 6  # the size of a head is for qkv to say


def _attention_layers(heads: int, kv_heads: int) -> tuple[nn.Linear, nn.Linear]:
    """No bias with equal numbers of heads (Llama), qkv's alone with 2 kv heads (Qwen2), or both."""
    head = _head(heads, kv_heads)
    qkv = linear(ATTENTION_IN, (heads + 2 * kv_heads) * head, heads != kv_heads, seed=20)
    return qkv, linear(heads * head, ATTENTION_IN, kv_heads in (1, 4), seed=22)


class _FullAttention(nn.Module):
    """The oracle: softmax(q k / sqrt(d)) v written out, each kv head repeated for its queries."""

    def __init__(self, qkv, out, heads, kv_heads):
        super().__init__()
        self.qkv, self.out, self.heads, self.kv_heads = qkv, out, heads, kv_heads

    def forward(self, x: Tensor) -> Tensor:
        h, kv = self.heads, self.kv_heads
        head = _head(h, kv)
        by_head = self.qkv(x).unflatten(-1, (-1, head))  # [B, S, H+2Hkv, d]
        q, k, v = by_head[..., :h, :], by_head[..., h : h + kv, :], by_head[..., h + kv :, :]
        k, v = (t.repeat_interleave(h // kv, dim=2) for t in (k, v))  # [B, S, H, d]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / head**0.5
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


SPLIT, SHARED, ODD = [(12, 12), (12, 4)], [(12, 2), (12, 1)], [(10, 10)]  # heads, kv heads
# An answer may make groups of the ranks that share a kv head, on those ranks alone. torch waits
# for ever where they made unequal numbers of groups before: a rank that makes none comes last.
ROUNDS = ([[0, 1, 2, 3]], [[1, 3], [0, 2]], [[0, 2, 3], [1]])
NBYTES = 4 * TOKENS[0] * TOKENS[1] * ATTENTION_IN


def _works(size: int, shape: tuple[int, int]) -> bool:
    heads, kv_heads = shape
    return not heads % size and not (kv_heads % size and size % kv_heads)


def _given() -> tuple[Tensor, Tensor]:
    return random(*TOKENS, ATTENTION_IN, seed=24), random(*TOKENS, ATTENTION_IN, seed=25)


def _attention(answer, here: Here, shape: tuple[int, int]) -> Seen:
    qkv, out = (layer.to(device()) for layer in _attention_layers(*shape))
    if not _works(here.size, shape):
        what = f"{shape[0]} heads with {shape[1]} kv heads on {here.size} ranks"
        return Seen(refused=refusal(answer, qkv, out, *shape, what=what, **here.options))
    layer = answer(qkv, out, *shape, **here.options)
    x, grad = _given()
    seen = step(here, layer, x, grad)
    layer.zero_grad()
    with torch.no_grad():
        low = answer(qkv.bfloat16(), out.bfloat16(), *shape, **here.options)
        seen.more["bf16"] = low(x.bfloat16().to(device())).cpu()
    seen.held = held(layer)
    return seen


@functools.cache
def _oracle(shape: tuple[int, int]) -> Seen:
    return step(ALONE, _FullAttention(*_attention_layers(*shape), *shape), *_given())


def _where(s: Seen) -> str:
    return f"with {s.case[1]} kv head{'s' * (s.case[1] > 1)} on {s.where}"


def _equal(s: Seen) -> None:
    want = _oracle(s.case)
    close(s.value, want.value, f"the output {_where(s)}")
    close(s.grads["x"], want.grads["x"], f"the input gradient {_where(s)}", 2e-5)


def _stepped(s: Seen) -> None:
    after = _oracle(s.case).more["after"]
    close(s.more["after"], after, f"the output after one step {_where(s)}", 5e-5)


def _low(s: Seen) -> None:
    got = s.more["bf16"]
    same(got.dtype, torch.bfloat16, f"the output's dtype {_where(s)}")
    # weights, sums over heads and P addends are rounded to 8 bits each
    close(got.float(), _oracle(s.case).value, f"the output in bf16 {_where(s)}", 0.05)


def _traffic(s: Seen) -> None:
    if s.size == 1:
        return
    one_call(s.forward, "all_reduce", NBYTES, f"forward {_where(s)}")
    if s.case[1] >= s.size:
        one_call(s.backward, "all_reduce", NBYTES, f"backward {_where(s)}")
        return
    count, nbytes = len(s.backward), sum(c.nbytes for c in s.backward)
    extra = s.size * 4 * 2 * _head(*s.case) * (ATTENTION_IN + 1)  # every rank's k and v rows
    expect(
        1 <= count <= 5 and nbytes <= NBYTES + extra,
        f"backward {_where(s)} makes {count} collectives of {nbytes} bytes; expected one of "
        f"{NBYTES} and the shared kv heads' {extra}, in it or in at most four more",
        "traffic",
    )


def _memory(s: Seen) -> None:
    heads, kv_heads = s.case
    mine = heads // s.size + 2 * max(1, kv_heads // s.size)  # heads of q, k and v
    floats = mine * (ATTENTION_IN + 1) + heads // s.size * ATTENTION_IN
    limit = 4 * (_head(heads, kv_heads) * floats + ATTENTION_IN)  # with the whole bias of out
    said = f"the layer keeps {s.held} bytes {_where(s)}, its heads have {limit}"
    slack = 256  # small tensors of bookkeeping
    expect(s.held <= limit + slack or s.size == 1, said, "memory")


@check("ParallelAttention")
def parallel_attention(answer, report):
    """Heads over ranks, kv heads replicated where there are fewer of them than ranks."""
    every = report.on_groups(_attention, answer, cases=SPLIT + SHARED + ODD, rounds=ROUNDS)

    def holds(shapes: list, name: str, judge, hint: Hint) -> None:
        part = every.of(*shapes)
        part.holds(name, lambda s: judge(s) if _works(s.size, s.case) else None, hint)

    holds(
        SPLIT,
        "full attention's output and input gradient, heads and kv heads split",
        _equal,
        "qkv holds q, then k, then v: cut the three apart, each by whole heads; then f, this "
        "rank's heads, its columns of out, g, and the bias once. Either layer may have none, and "
        "the size of a head is that of its part of qkv.",
    )
    holds(
        SHARED,
        "the same where ranks share a kv head",
        _equal,
        hints(
            "with fewer kv heads than ranks a whole kv head goes to each of the ranks that need "
            "it.",
            raised="Either layer may have none of its bias; with fewer kv heads than ranks a whole "
            "kv head goes to each of the ranks that need it.",
        ),
    )
    holds(
        SPLIT,
        "one training step changes it as it changes the full layer",
        _stepped,
        "a gradient of q, k, v or out is lost, scaled, or does not reach the parameters.",
    )
    holds(
        SHARED,
        "the same where ranks share a kv head, copies in step",
        _stepped,
        "every rank that holds a copy of a kv head sees the gradient of its own queries only: sum "
        "it over those ranks, and over no others.",
    )
    holds(
        SPLIT + SHARED,
        "keeps bf16, without gradients",
        _low,
        "no factor in fp32: layers of bf16 take and give bf16.",
    )
    holds(
        SPLIT + SHARED,
        "one all_reduce forward and one backward, beside the sum for shared kv heads",
        _traffic,
        "one g forward, one f backward; the gradients of the copies of a kv head travel in f's "
        "all-reduce or in collectives of their own.",
    )
    holds(
        SPLIT + SHARED,
        "keeps its heads only, in memory of its own",
        _memory,
        "clone the rows and columns of this rank's heads; keep no reference to the full layers.",
    )
    every.refused(
        "ValueError where heads can be neither split nor copied",
        hint="heads must divide by the ranks; kv heads by the ranks, or the ranks by the kv heads.",
    )
