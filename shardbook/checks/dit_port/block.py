"""Chapter 44, the block over ranks: by heads and hidden channels."""

import functools
import math

import torch
from torch import Tensor, nn

from ...devices import device
from ..compare import close, expect, random, same
from ..diffusion import block_by_formula, fill
from ..groups import held, refusal, tensors_of
from ..report import check
from ..seen import WORLD, Here, Seen

X, C = (2, 12, 24), (2, 24)


def _block(heads: int = 12, hidden: float = 2.0) -> nn.Module:
    from ...models.dit import DiTBlock  # chapter 43's, whose formula is checked there

    return fill(DiTBlock(24, heads, hidden))


def rope(tokens: int, channels: int) -> tuple[Tensor, Tensor]:
    """Tables of any angles."""
    angle = random(tokens, channels // 2, seed=3).repeat_interleave(2, dim=1)
    return angle.cos(), angle.sin()


def _tensor_parallel(answer, here: Here) -> Seen:
    full = _block().to(device())
    block = answer(full, **here.options)
    own = {n: p.detach().cpu() for n, p in block.named_parameters()}
    theirs = {p.untyped_storage().data_ptr(): n for n, p in full.named_parameters()}
    kept = {t.untyped_storage().data_ptr() for t in tensors_of(block)}
    shared, nbytes = [n for at, n in theirs.items() if at in kept], held(block)
    x, c = random(*X, seed=1).to(device()), random(*C, seed=2).to(device())
    tables = tuple(r.to(device()) for r in rope(X[1], 2))
    pull = random(*X, seed=4).to(device())
    seen = here.see(lambda x, c: block(x, c, rope=tables), pull, module=block, x=x, c=c)
    seen.held, seen.more = nbytes, {"own": own, "shared": shared}
    with torch.no_grad():
        again = block(x.detach().flip(1), random(*C, seed=6).to(device()))
    seen.more["again"] = again.cpu()
    return seen


def _refused(answer, here: Here) -> Seen:
    few = refusal(answer, _block(heads=6).to(device()), what="6 heads on 4 ranks")
    odd = _block(hidden=1.25).to(device())
    return Seen(refused=few or refusal(answer, odd, what="30 hidden channels on 4 ranks"))


def _cut(name: str, g: Tensor, s: Seen) -> Tensor:
    """This rank's part of a full parameter or gradient."""
    if name.startswith("attn.qkv"):
        return torch.cat([part.chunk(s.size)[s.place] for part in g.chunk(3)])
    if name.startswith("mlp.fc1"):
        return g.chunk(s.size)[s.place]
    if name in ("attn.proj.weight", "mlp.fc2.weight"):
        return g.chunk(s.size, dim=1)[s.place]
    return g


@functools.cache
def _full() -> tuple[nn.Module, dict[str, Tensor], Tensor, Tensor]:
    """The full block, all its gradients, and the outputs of the two calls."""
    full = _block()
    x, c = random(*X, seed=1).requires_grad_(), random(*C, seed=2).requires_grad_()
    (full(x, c, rope=rope(X[1], 2)) * random(*X, seed=4)).sum().backward()
    first = block_by_formula(full, x.detach(), c.detach(), 12, rope(X[1], 2))
    second = block_by_formula(full, x.detach().flip(1), random(*C, seed=6), 12)
    grads = {"x": x.grad, "c": c.grad} | {n: p.grad for n, p in full.named_parameters()}
    return full, grads, first, second


def _output(s: Seen) -> None:
    _, _, first, second = _full()
    close(s.value, first, f"the output on {s.where}", 3e-5)
    what = "the output of a second call, with another c and without rope,"
    close(s.more["again"], second, f"{what} on {s.where}", 3e-5)


def _whole_gradients(s: Seen) -> None:
    want = _full()[1]
    for name in ("x", "c", "adaLN_modulation.1.weight", "attn.proj.bias", "mlp.fc2.bias"):
        got = s.grads.get(name)
        expect(got is not None, f"{name} has no gradient on {s.where}")
        # sums over tokens of values of tens, in another order on every device
        rough = 1e-4 if name in ("x", "c") else 5e-4
        close(got, want[name], f"the gradient of {name} on {s.where}", rough)


def _shards(s: Seen) -> None:
    full = dict(_full()[0].named_parameters())
    same(set(s.more["own"]), set(full), f"the parameter names on {s.where}")
    for name, p in full.items():
        close(s.more["own"][name], _cut(name, p.detach(), s), f"{name} on {s.where}", 0.0)


def _gradients(s: Seen) -> None:
    for name, g in _full()[1].items():
        close(s.grads.get(name), _cut(name, g, s), f"the gradient of {name} on {s.where}", 5e-4)


def _memory(s: Seen) -> None:
    want = 4 * sum(_cut(n, p, s).numel() for n, p in _full()[0].named_parameters())
    shared = s.more["shared"]
    said = f"{s.where} shares memory with {shared[:1]} of the full block"
    expect(not shared, said, "memory")
    said = f"{s.where} holds {s.held} bytes, expected at most {want}"
    expect(s.held <= want, said, "memory")


def _traffic(s: Seen) -> None:
    for way, log in (("forward", s.forward), ("backward", s.backward)):
        other = [c.op for c in log if c.op != "all_reduce"]
        expect(not other, f"{s.where}, {way}: used {other[:1]}", "traffic")
        if s.size > 1:
            what = f"{s.where}, {way}: the number of all-reduces and their bytes"
            same((len(log), sum(c.nbytes for c in log)), (2, 8 * math.prod(X)), what, "traffic")


@check("TensorParallelDiTBlock")
def tensor_parallel_dit_block(answer, report):
    """By heads and hidden channels."""
    seen = report.on_groups(_tensor_parallel, answer)
    seen.holds(
        "the output equals the full block's on 1 to 4 ranks",
        _output,
        hint="a fused qkv is three matrices: cut q, k and v apart, each by head. Sum proj and fc2 "
        "over ranks BEFORE the gate, and add their bias once, after the sum",
    )
    seen.holds(
        "gradients of x and c, and of what is whole (adaLN, biases of proj and fc2), are full",
        _whole_gradients,
        hint="x enters qkv and fc1 on every rank: its gradient must be summed there (f), right "
        "after the modulation, so that the modulation's gradient is full as well",
    )
    seen.holds(
        "every shard is that part of the full block's parameter, unscaled",
        _shards,
        hint="the same names as the full block; a bias that is added once is held whole: divided "
        "by the ranks it would learn another step than the block's",
    )
    seen.holds(
        "every shard's gradient is that shard of the full gradient",
        _gradients,
        hint="the same names as the full block; weights are cut, not copied",
    )
    seen.holds(
        "a rank holds its shards only, in memory of their own",
        _memory,
        hint="a slice of the full weight keeps the whole weight alive: clone it; keep no reference "
        "to the full block and no full copies",
    )
    seen.holds(
        "two all-reduces of B S D forward, two backward, nothing else",
        _traffic,
        hint="one after proj, one after fc2; backward one before each of qkv and fc1",
    )
    report.on_groups(_refused, answer, rounds=WORLD).refused(
        "ValueError where heads or hidden channels do not divide", hint="say so when it is built"
    )
