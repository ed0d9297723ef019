"""Chapter 22, linear layers by output or by input features, on groups of 1 to 4 ranks."""

import functools

import torch
from torch import Tensor, nn

from ...devices import device
from ..compare import close, expect, random, same
from ..families import one_call
from ..groups import cut, held, refusal
from ..report import check
from ..seen import Here, Seen

ALONE = Here(None, (0,), 0)  # where the oracle, the full layer, is trained


def linear(fan_in: int, fan_out: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    """A full layer with random weights that are the same on every rank and in the parent."""
    linear = nn.Linear(fan_in, fan_out, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(random(fan_out, fan_in, seed=seed) / fan_in**0.5)
        if bias:
            linear.bias.copy_(random(fan_out, seed=seed + 1))
    return linear


def step(here: Here, layer: nn.Module, x: Tensor, grad: Tensor, rate: float = 0.02) -> Seen:
    """Forward, backward, one SGD step, and forward again, which is more["after"]."""
    where = next(layer.parameters()).device  # the oracle computes on the CPU
    x = x.detach().clone().to(where)
    seen = here.see(layer, grad.to(where), module=layer, x=x)
    with torch.no_grad():
        for p in layer.parameters():
            if p.grad is not None:
                p -= rate * p.grad
        after = layer.eval()(x)  # also without gradients, and in evaluation, it is the same layer
    layer.train()
    seen.more["after"] = after.cpu()
    return seen


ROWS, WIDE, NARROW = (5, 7), 24, 10  # x is [5, 7, in]
PLAIN = [(bias, whole) for bias in (True, False) for whole in (False, True)]  # see _options
HALF, UNEVEN = "bf16", "a size that does not divide"


def _full(column: bool, bias: bool = True) -> nn.Linear:
    return linear(*((NARROW, WIDE) if column else (WIDE, NARROW)), bias, seed=3)


def _options(column: bool, whole: bool) -> dict[str, bool]:
    """Whether the output is gathered, or the input is whole."""
    return {"gather_output": whole} if column else {"input_is_parallel": not whole}


def _sharded_layer(answer, here: Here, case, column: bool) -> Seen | None:
    if case == UNEVEN:
        full = linear(*((7, 10) if column else (10, 7))).to(device())
        what = f"a size of 10 on {here.size} ranks"
        refused = here.size > 2 and refusal(answer, full, what=what, **here.options)
        return Seen(refused=refused or "")
    if case == HALF:
        return _half_layer(answer, here, column)
    bias, whole = case
    full = _full(column, bias).to(device())
    before = [p.detach().clone() for p in full.parameters()]
    layer = answer(full, **_options(column, whole), **here.options)
    x, grad = (random(*ROWS, n, seed=s) for n, s in ((full.in_features, 5), (full.out_features, 6)))
    if column and not whole:
        grad = here.part(grad, -1)
    if not column and not whole:
        x = here.part(x, -1)
    seen = step(here, layer, x.contiguous(), grad.contiguous())
    seen.more |= {
        "shapes": tuple(None if p is None else list(p.shape) for p in (layer.weight, layer.bias)),
        "full kept": all(map(torch.equal, before, full.parameters())),
    }
    layer.zero_grad()
    seen.held = held(layer)
    return seen


def _half_layer(answer, here: Here, column: bool) -> Seen:
    """A bf16 layer, built and called."""
    full = _full(column).to(device()).bfloat16()
    x = random(*ROWS, full.in_features, seed=5, dtype=torch.bfloat16).to(device())
    layer = answer(full, **here.options)
    seen = Seen(more={"dtypes": {p.dtype for p in layer.parameters()}})
    if seen.more["dtypes"] == {torch.bfloat16}:  # else it may not even run
        with torch.no_grad():
            seen.value = layer(x if column else here.part(x, -1).contiguous()).cpu()
    return seen


@functools.cache
def _oracle(column: bool, bias: bool) -> Seen:
    fan_in, fan_out = (NARROW, WIDE) if column else (WIDE, NARROW)
    grad = random(*ROWS, fan_out, seed=6)
    return step(ALONE, _full(column, bias), random(*ROWS, fan_in, seed=5), grad)


def _mine(s: Seen, x: Tensor, whole: bool) -> Tensor:
    return x if whole else cut(x, -1, s.size, s.place)


def _check_layer(answer, report, column: bool) -> None:
    fan_in, fan_out = (NARROW, WIDE) if column else (WIDE, NARROW)
    nbytes = {"x": 4 * 35 * fan_in, "y": 4 * 35 * fan_out}

    def full(s: Seen) -> Seen:
        return _oracle(column, s.case[0])

    def output(s: Seen) -> None:
        bias = "" if s.case[0] else " without bias"
        y = _mine(s, full(s).value, not column or s.case[1])
        close(s.value, y, f"the output on {s.where}{bias}")

    def input_gradient(s: Seen) -> None:
        dx = _mine(s, full(s).grads["x"], column or s.case[1])
        close(s.grads["x"], dx, f"the input gradient on {s.where}")

    def gradients(s: Seen) -> None:
        want = {n: g for n, g in full(s).grads.items() if n != "x"}
        got = {n: g for n, g in s.grads.items() if n != "x" and g is not None}
        same(sorted(got), sorted(want), "the parameters with a gradient")
        for name, g in want.items():
            if name == "weight" or column:
                g = cut(g, 0 if column else 1, s.size, s.place)
            close(got[name], g, f"{name}.grad on {s.where}", 2e-5)

    def stepped(s: Seen) -> None:
        after = _mine(s, full(s).more["after"], not column or s.case[1])
        close(s.more["after"], after, f"the output after one step on {s.where}", 5e-5)

    def traffic(s: Seen) -> None:
        gather = "all_gather" if s.case[1] else ""
        ways = (
            [(gather, "y"), ("all_reduce", "x")] if column else [("all_reduce", "y"), (gather, "x")]
        )
        for way, log, (op, of) in zip(
            ("forward", "backward"), (s.forward, s.backward), ways, strict=True
        ):
            if s.size > 1:
                one_call(log, op, nbytes[of], f"{way} on {s.where}")

    def memory(s: Seen) -> None:
        shape = [fan_out // s.size, fan_in] if column else [fan_out, fan_in // s.size]
        bias = [shape[0]] if s.case[0] else None
        same(s.more["shapes"], (shape, bias), "the shapes of weight and bias")
        limit = 4 * (shape[0] * shape[1] + (shape[0] if bias else 0))
        said = f"the layer keeps {s.held} bytes on {s.where}, its shard has {limit}"
        alone = s.size == 1  # one rank may share the full layer's memory
        expect(s.held <= limit + 64 or alone, said, "memory")  # a little bookkeeping
        said = "training the shard changed the layer it was built from"
        expect(s.more["full kept"] or alone, said, "kept")

    def half(s: Seen) -> None:
        same(s.more["dtypes"], {torch.bfloat16}, f"the dtypes of the shard on {s.where}")
        layer = _full(column).bfloat16().float()
        y = layer(random(*ROWS, fan_in, seed=5).bfloat16().float()).detach()
        want = _mine(s, y, not column).bfloat16()
        close(s.value, want, f"the bf16 output on {s.where}", 0.05)

    seen = report.on_groups(_sharded_layer, answer, column, cases=[*PLAIN, HALF, UNEVEN])
    plain = seen.of(*PLAIN)
    cut_y = "their slice of the last dimension" if column else "the sum"
    plain.holds(
        f"the full layer's output ({cut_y}) on 1 to 4 ranks",
        output,
        hint=f"F.linear with this rank's {'rows' if column else 'columns'} of the weight; "
        + (
            "the bias is cut as the rows are."
            if column
            else "all-reduce the partial sums, then add the whole bias once."
        ),
    )
    plain.holds(
        "the full layer's input gradient",
        input_gradient,
        hint="the input enters every rank's part of the layer: let it in through copy_to_group "
        "(f). A gathered output hands each rank its own slice of the gradient back, undivided."
        if column
        else "the input's gradient is local: the sum's gradient passes g unchanged.",
    )
    plain.holds(
        "the full layer's weight and bias gradients, cut",
        gradients,
        hint="own_slice of the full gradient; a row-parallel bias has the whole, unscaled "
        "gradient.",
    )
    plain.holds(
        "one training step changes it as it changes the full layer",
        stepped,
        hint="hold the full layer's values: a bias divided by the ranks learns another step than "
        "it.",
    )
    plain.holds(
        "one collective where the contract has one, of the tensor's bytes",
        traffic,
        hint="forward and backward each pay at most one collective per f, g, gather or scatter.",
    )
    plain.holds(
        "keeps its shard only, in memory of its own",
        memory,
        hint="clone the slice: a view keeps the full weight's memory, and so does a reference to "
        "it.",
    )
    seen.of(HALF).holds(
        "a bf16 layer gives a bf16 shard and a bf16 output",
        half,
        hint="the shard has the dtype of the layer it is cut from: torch.empty alone makes fp32.",
    )
    seen.of(UNEVEN).refused(
        "ValueError where the size does not divide",
        hint="compare the size with the number of ranks of the group when the layer is built.",
    )


@check("ColumnParallelLinear")
def column_parallel_linear(answer, report):
    """The full layer by output features."""
    _check_layer(answer, report, column=True)


@check("RowParallelLinear")
def row_parallel_linear(answer, report):
    """The full layer by input features."""
    _check_layer(answer, report, column=False)
