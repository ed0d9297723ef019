"""Chapter 22, sequence parallel: a block whose norm and residual see S/P tokens."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import calls
from ...devices import device
from ..compare import close, expect, random, same
from ..groups import cut, held, refusal
from ..report import check
from ..seen import Here, Seen
from .layers import ALONE, linear, step

SEQ, WIDTH, HIDDEN = 24, 10, 36  # x is [5, 24 / ranks, 10]


def _sequence_layers(kind: str) -> tuple[nn.Module, nn.Linear, nn.Linear]:
    bias = kind == "LayerNorm"
    norm = nn.LayerNorm(WIDTH) if bias else nn.RMSNorm(WIDTH, eps=1e-5)
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            p.copy_(1 - i + random(WIDTH, seed=60 + i) / 3)
    up, down = linear(WIDTH, HIDDEN, bias, seed=62), linear(HIDDEN, WIDTH, bias, seed=64)
    return norm, up, down


class _FullBlock(nn.Module):
    def __init__(self, norm, mlp_up, mlp_down):
        super().__init__()
        self.norm, self.mlp_up, self.mlp_down = norm, mlp_up, mlp_down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp_down(F.gelu(self.mlp_up(self.norm(x))))


KINDS, UNEVEN = ("LayerNorm", "RMSNorm"), "a hidden size that does not divide"
CUT = {"mlp_up.weight": 0, "mlp_up.bias": 0, "mlp_down.weight": 1}


def _given() -> tuple[Tensor, Tensor]:
    return random(5, SEQ, WIDTH, seed=66), random(5, SEQ, WIDTH, seed=67)


def _sequence(answer, here: Here, kind: str) -> Seen:
    if kind == UNEVEN:
        layers = (nn.LayerNorm(WIDTH), linear(WIDTH, 10), linear(10, WIDTH))
        layers = [layer.to(device()) for layer in layers]
        what = f"10 on {here.size} ranks"
        refused = here.size > 2 and refusal(answer, *layers, what=what, **here.options)
        return Seen(refused=refused or "")
    layers = [layer.to(device()) for layer in _sequence_layers(kind)]
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    block = answer(*layers, **here.options)
    x, grad = (here.part(t, 1) for t in _given())
    seen = step(here, block, x, grad, rate=0.0)
    seen.grads = {n: g for n, g in seen.grads.items() if g is not None}
    block(x).backward(grad)  # accumulates, as micro-batches do
    twice = {n: p.grad.cpu() for n, p in block.named_parameters() if n in seen.grads}
    seen.more["twice"] = {n: g - seen.grads[n] for n, g in twice.items()}
    with torch.no_grad():
        for p in block.parameters():
            p -= 0.1
    after = [p.detach() for layer in layers for p in layer.parameters()]
    block.zero_grad()
    seen.held, seen.more["kept"] = held(block), all(map(torch.equal, before, after))
    with torch.no_grad():
        layers = [layer.bfloat16().to(device()) for layer in _sequence_layers(kind)]
        seen.more["bf16"] = answer(*layers, **here.options)(x.bfloat16()).cpu()
    return seen


@functools.cache
def _oracle(kind: str) -> Seen:
    return step(ALONE, _FullBlock(*_sequence_layers(kind)), *_given(), rate=0.0)


def _output(s: Seen, got: Tensor, what: str, tolerance: float = 1e-5) -> None:
    y = cut(_oracle(s.case).value, 1, s.size, s.place)
    close(got, y, f"the output {what}with {s.case} on {s.where}", tolerance)


def _low(s: Seen) -> None:
    got = s.more["bf16"]
    same(got.dtype, torch.bfloat16, f"the output's dtype with {s.case} on {s.where}")
    # tokens, products and P addends are rounded to 8 bits each
    _output(s, got.float(), "in bf16 ", 0.05)


def _input_gradient(s: Seen) -> None:
    dx = cut(_oracle(s.case).grads["x"], 1, s.size, s.place)
    close(s.grads.get("x"), dx, f"the input gradient with {s.case} on {s.where}", 2e-5)


def _gradients(s: Seen, sliced: bool) -> None:
    """Of the parameters that are cut, or of those that are whole on every rank."""
    for name, g in _full_gradients(s).items():
        if (name in CUT) == sliced:
            got = s.grads.get(name)
            expect(got is not None, f"{name} has no gradient on {s.where}")
            close(got, g, f"{name}.grad on {s.where}", 2e-5)


def _second_pass(s: Seen) -> None:
    for name, g in _full_gradients(s).items():
        close(s.more["twice"].get(name), g, f"what the second pass adds to {name}.grad", 4e-5)


def _full_gradients(s: Seen) -> dict[str, Tensor]:
    """The full block's, cut as this rank's parameters are."""
    full = {n: g for n, g in _oracle(s.case).grads.items() if n != "x"}
    return {n: cut(g, CUT[n], s.size, s.place) if n in CUT else g for n, g in full.items()}


def _traffic(s: Seen) -> None:
    if s.size == 1:
        return
    forward, backward = calls.summary(s.forward), calls.summary(s.backward)
    pair = {op: (1, _given()[0].nbytes) for op in ("all_gather", "reduce_scatter")}
    count, nbytes = backward.pop("all_reduce", (0, 0))
    expect(forward == pair, f"forward makes {forward}, expected {pair}", "traffic")
    expect(backward == pair, f"backward makes {backward}, expected {pair}", "traffic")
    limit = 3 if s.case == "LayerNorm" else 1  # norm.weight, norm.bias, mlp_down.bias
    said = f"backward sums {nbytes} bytes in {count} calls, expected {4 * WIDTH * limit}"
    expect(count <= limit and nbytes <= 4 * WIDTH * limit, said, "traffic")


def _memory(s: Seen) -> None:
    vectors = HIDDEN // s.size + 3 * WIDTH if s.case == "LayerNorm" else WIDTH
    limit, alone = 4 * (2 * WIDTH * HIDDEN // s.size + vectors), s.size == 1
    said = f"the block keeps {s.held} bytes on {s.where}, its shard has {limit}"
    expect(s.held <= limit + 64 or alone, said, "memory")
    said = "training the block changed the layers it was built from"
    expect(s.more["kept"] or alone, said, "kept")


@check("SequenceParallelBlock")
def sequence_parallel_block(answer, report):
    """Norm and residual on S/P tokens, the MLP on hidden/P."""
    every = report.on_groups(_sequence, answer, cases=[*KINDS, UNEVEN])
    seen = every.of(*KINDS)
    seen.holds(
        "the full block's output for this rank's tokens",
        lambda s: _output(s, s.value, ""),
        hint="norm this rank's tokens, all-gather the sequence (dim 1), up and gelu, down, then "
        "reduce-scatter the partial sums along dim 1; the bias and x are added after it, once.",
    )
    seen.holds(
        "the same output under no_grad",
        lambda s: _output(s, s.more["after"], "under no_grad "),
        hint="without gradients, and in evaluation, the block computes the same.",
    )
    seen.holds("and in bf16", _low, hint="layers and tokens of bf16 give bf16.")
    seen.holds(
        "the full block's input gradient for this rank's tokens",
        _input_gradient,
        hint="backward mirrors forward: the all-gather's gradient is reduce-scattered, and back.",
    )
    seen.holds(
        "the full block's gradients of mlp_up and mlp_down.weight",
        lambda s: _gradients(s, sliced=True),
        hint="every rank sees all tokens in the MLP: these gradients are whole without a sum.",
    )
    seen.holds(
        "gradients of norm and mlp_down.bias summed over the group",
        lambda s: _gradients(s, sliced=False),
        hint="norm and mlp_down.bias act on this rank's tokens only, so each rank has a part of "
        "their gradient: sum it over the group (sum, not mean), of every backward pass, once.",
    )
    seen.holds(
        "a second backward pass adds the same gradients again",
        _second_pass,
        hint="sum each backward pass's gradient, not what .grad has accumulated: a hook after "
        "accumulation sums the first pass again.",
    )
    seen.holds(
        "all_gather and reduce_scatter of [B, S, D] each way, beside sums of D values",
        _traffic,
        hint="an all-gather and a reduce-scatter each way: an all_reduce of [B, S, D] moves the "
        "same bytes but leaves the norm's tokens whole on every rank.",
    )
    seen.holds(
        "keeps its shard only, in memory of its own",
        _memory,
        hint="clone the slices; only the norm and mlp_down.bias are whole on every rank.",
    )
    every.of(UNEVEN).refused(
        "ValueError where the hidden size does not divide",
        hint="compare the hidden size with the number of ranks when the block is built.",
    )
