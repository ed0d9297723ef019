"""What the checks of attention on ranks share: the whole sequence, and parts of it on ranks."""

import dataclasses
import functools
import gc
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor

from ...devices import device
from ..compare import close, expect, random
from ..families import agrees, kept
from ..report import Report
from ..seen import Here, Seen

SIZES = (1, 2, 3, 4)  # group sizes
B, H, HKV, S, D = 2, 12, 6, 48, 5  # 48 positions divide by twice each group size


def qkv(kv_heads: int = HKV, heads: int = H, seq: int = S, dim: int = D) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [random(B, n, seq, dim, seed=i + 1) for i, n in enumerate(counts)]


def whole(causal: bool, kv_heads: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over all positions."""
    gqa = q.shape[1] != kv_heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)


@functools.cache
def _everything(causal: bool, kv_heads: int) -> dict[str, Tensor]:
    """The output and the gradients of attention over all positions."""
    q, k, v, grad = (x.double().requires_grad_() for x in qkv(kv_heads))
    out = whole(causal, kv_heads, q, k, v)
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))
    return dict(zip(("out", "dq", "dk", "dv"), (x.float() for x in found), strict=True))


def positions(seq: int, world: int, rank: int, zigzag: bool = False) -> Tensor:
    """The positions that a rank holds, in its order."""
    everything = torch.arange(seq)
    if not zigzag:
        return everything.view(world, -1)[rank]
    chunks = everything.view(2 * world, -1)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])


# On ranks


def _as_projected(x: Tensor) -> Tensor:
    """x as a model has it: [B, S, H, D] in memory, since heads are split off the last dimension."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _kwargs(kind: str) -> dict[str, bool]:
    return {} if kind == "zigzag" else {"causal": kind == "causal"}


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention of a kind: "full", "causal", or "zigzag" (causal, of zigzag shards)."""

    kind: str
    kv_heads: int = HKV

    def __str__(self) -> str:
        return f"{self.kind} attention of {self.kv_heads} kv heads"


def attend(answer, here: Here, case: Case) -> Seen:
    """On a rank: forward and backward on its part of the sequence."""
    keep = positions(S, here.size, here.place, case.kind == "zigzag")
    q, k, v, grad = (_as_projected(x[:, :, keep].to(device())) for x in qkv(case.kv_heads))
    options = {"group": here.group} | _kwargs(case.kind)
    return here.see(lambda q, k, v: answer(q, k, v, **options), grad, True, q=q, k=k, v=v)


def equal(s: Seen) -> None:
    """out and gradients are those of the whole sequence, and the input stays as it was."""
    keep = positions(S, s.size, s.place, s.case.kind == "zigzag")
    whole = _everything(s.case.kind != "full", s.case.kv_heads)
    agrees(s, {name: want[:, :, keep] for name, want in whole.items()})
    kept(s)


PLAIN = [  # dtype, kv heads, head dimension: all heads their own keys, one for all, bf16
    (torch.float32, H, 8),
    (torch.float32, 1, 3),
    (torch.bfloat16, HKV, D),
]


def _plainly(answer, here: Here, kind: str) -> Seen:
    """Outputs of the cases of PLAIN without gradients; `held` is how many q still live."""
    keep, outs, given = positions(S, here.size, here.place, kind == "zigzag"), [], []
    for dtype, kv_heads, dim in PLAIN:
        q, k, v, _ = qkv(kv_heads, dim=dim)
        q, k, v = (_as_projected(x[:, :, keep].to(device(), dtype)) for x in (q, k, v))
        given.append(weakref.ref(q))
        with torch.no_grad():
            outs.append(answer(q, k, v, group=here.group, **_kwargs(kind)).cpu())
        del q, k, v
    gc.collect()
    return Seen(outs, held=sum(ref() is not None for ref in given))


def without_gradients(report: Report, answer, kind: str) -> None:
    """Evaluation gives the same, in other shapes and dtypes, and keeps nothing."""
    wholes = []
    for dtype, kv_heads, dim in PLAIN:
        q, k, v = (x.to(dtype).double() for x in qkv(kv_heads, dim=dim)[:3])
        wholes.append(whole(kind != "full", kv_heads, q, k, v).to(dtype))

    def judge(s: Seen) -> None:
        keep = positions(S, s.size, s.place, kind == "zigzag")
        for (dtype, kv_heads, dim), out, whole in zip(PLAIN, s.value, wholes, strict=True):
            kinds = f"{str(dtype).removeprefix('torch.')}, {kv_heads} kv heads of {dim}"
            rough = 0.1 if dtype == torch.bfloat16 else 1e-5  # some sum in bf16
            close(out, whole[:, :, keep], f"out without gradients, {kinds}, on {s.where}", rough)
        alive = f"still holds the q of {s.held} of {len(PLAIN)} calls"
        expect(s.held <= 1, f"{s.where} {alive}: memory that grows with every call", "memory")

    more = report.on_groups(_plainly, answer, kind)
    more.holds(
        "the same without gradients, for any kv heads and head dimension, and in bf16",
        judge,
        hint="scores are divided by the square root of q.shape[-1]; evaluation takes the same way "
        "as training; out has q's dtype",
    )
