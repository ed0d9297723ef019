"""Chapter 22, primitives and linear layers, on real groups of 1 to 4 ranks."""

import torch
from torch import Tensor, nn

from ...calls import record, summary
from ...devices import device
from ..compare import close, expect, random, refuses, same, widest
from ..groups import cut, each, held, in_groups, only_call, refusal
from ..report import check


def linear(fan_in: int, fan_out: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    """A full layer with random weights that are the same on every rank and in the parent."""
    linear = nn.Linear(fan_in, fan_out, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(random(fan_out, fan_in, seed=seed) / fan_in**0.5)
        if bias:
            linear.bias.copy_(random(fan_out, seed=seed + 1))
    return linear


def on_ranks(size: int) -> str:
    """Where, in words: "on 1 rank", "on 4 ranks"."""
    return f"on {size} rank{'s' * (size > 1)}"


def step(layer: nn.Module, x: Tensor, grad: Tensor, rate: float = 0.02) -> dict:
    """Forward, backward, one SGD step, forward again: shows the gradient of every parameter."""
    where = next(layer.parameters()).device  # the oracle computes on the CPU
    x = x.detach().clone().to(where).requires_grad_(x.is_floating_point())
    with record() as forward:
        y = layer(x)
    with record() as backward:
        y.backward(grad.to(where))
    with torch.no_grad():
        for p in layer.parameters():
            if p.grad is not None:
                p -= rate * p.grad
        after = layer.eval()(x)  # also without gradients, and in evaluation, it is the same layer
    layer.train()
    return {
        "y": y.detach().cpu(),
        "dx": None if x.grad is None else x.grad.cpu(),
        "grads": {
            n: p.grad.cpu().clone() for n, p in layer.named_parameters() if p.grad is not None
        },
        "after": after.cpu(),
        "forward": summary(forward),
        "backward": summary(backward),
    }


# The six pairs

PAIRS = {  # exercise -> (has a dim, collective forward, backward, divides forward)
    "copy_to_group": (False, "", "all_reduce", False),
    "reduce_from_group": (False, "all_reduce", "", False),
    "gather_from_group": (True, "all_gather", "", False),
    "scatter_to_group": (True, "", "all_gather", True),
    "reduce_scatter_to_group": (True, "reduce_scatter", "all_gather", True),
    "all_gather_to_group": (True, "all_gather", "reduce_scatter", False),
}
VARIANTS = [  # shape, dim, how the tensors lie in memory
    ((12, 5, 7), 0, "contiguous"),
    ((5, 12, 7), 1, "contiguous"),
    ((5, 7, 12), -1, "transposed"),
]


def _laid(x: Tensor, memory: str) -> Tensor:
    return x.mT.contiguous().mT if memory == "transposed" else x


def _pair(answer, group, place, size, with_dim) -> dict:
    found = {"variants": []}
    for shape, dim, memory in VARIANTS:
        args = (dim,) if with_dim else ()
        x = _laid(random(*shape, seed=10 + place), memory).to(device()).requires_grad_()
        before = x.detach().clone()
        with record() as forward:
            y = answer(x, *args, group=group)
        grad = _laid(random(*y.shape, seed=50 + place), memory).to(device())
        grad_before = grad.clone()
        with record() as backward:
            (dx,) = torch.autograd.grad(y, x, grad)
        found["variants"].append(
            {
                "y": y.detach().cpu().clone(),  # as it is now, whatever a later call does
                "dx": dx.cpu().clone(),
                "forward": summary(forward),
                "backward": summary(backward),
                "kept": torch.equal(before, x.detach()),
                "grad_kept": torch.equal(grad_before, grad),
            }
        )
    dim = [0] if with_dim else []
    with torch.no_grad():
        found["wide"] = widest()  # where the ranks run, which may not be where the check does
        for name, x in _others(place, found["wide"]).items():
            y = answer(x.to(device()), *dim, group=group)
            found[name] = y.cpu().clone()
            found[f"{name} memory"] = y.untyped_storage().nbytes() / y.nbytes
    return found | _calls(answer, group, place, dim)


def _others(place: int, wide: torch.dtype) -> dict[str, Tensor]:
    """Tensors of other dtypes; the float64 and the int64 ones hold what fp32 would round."""
    ids = torch.arange(60).view(12, 5) + 2**40 + place
    return {
        "bf16": random(12, 5, seed=place, dtype=torch.bfloat16),
        "float64": random(12, 5, seed=place, dtype=wide) / 3,
        "int64": ids,
    }


def _calls(answer, group, place, dim) -> dict:
    """What two calls give on tensors of one shape, and whether the second changed the first."""
    results = []
    for seed in (70, 80):
        x = random(12, 5, seed=seed + place).to(device()).requires_grad_()
        y = answer(x, *dim, group=group)
        (dx,) = torch.autograd.grad(y, x, random(*y.shape, seed=90 + seed + place).to(device()))
        if not results:
            first = y.detach(), dx
            results += [t.clone() for t in first]
    kept = [torch.equal(now, was) for now, was in zip(first, results, strict=True)]
    return {"second": y.detach().cpu().clone(), "calls_kept": kept}


def _uneven(answer, group, place, size, with_dim) -> dict:
    if size in (3, 4):
        x = random(5, 10, seed=place).to(device())
        refuses(answer, x, 1, group=group, what=f"a dimension of 10 {on_ranks(size)}")
    return {}


def _one_way(op: str, tensors: list[Tensor], place: int, dim: int) -> Tensor:
    """What a rank has after a collective: "own" is its slice of its own tensor."""
    size = len(tensors)
    if op == "all_reduce":
        return torch.stack(tensors).sum(0)
    if op == "all_gather":
        return torch.cat(tensors, dim)
    if op == "reduce_scatter":
        return cut(torch.stack(tensors).sum(0), dim, size, place)
    return cut(tensors[place], dim, size, place) if op == "own" else tensors[place]


def _full_bytes(op: str, x: Tensor, size: int) -> int:
    return x.nbytes * (size if op == "all_gather" else 1)


def _check_pair(answer, report, name: str, hints: dict[str, str]) -> None:
    with_dim, forward, backward, divides = PAIRS[name]
    way = forward or ("own" if with_dim else "")
    way_back = backward or ("own" if with_dim else "")
    values: list = []
    with report.property("the right value on 1 to 4 ranks", hint=hints["forward"]):
        values += report.ranks(in_groups, 4, _pair, answer, with_dim)
        for size, place, found in each(values):
            for (shape, dim, memory), v in zip(VARIANTS, found["variants"], strict=True):
                xs = [random(*shape, seed=10 + i) for i in range(size)]
                what = f"the {memory} result {on_ranks(size)}, dim {dim},"
                close(v["y"], _one_way(way, xs, place, dim), what)
    if not values:
        return
    with report.property("the right gradient on 1 to 4 ranks", hint=hints["backward"]):
        for size, place, found in each(values):
            for (_, dim, memory), v in zip(VARIANTS, found["variants"], strict=True):
                grads = [random(*v["y"].shape, seed=50 + i) for i in range(size)]
                what = f"the {memory} gradient {on_ranks(size)}, dim {dim},"
                close(v["dx"], _one_way(way_back, grads, place, dim), what)
    said = f"{forward or 'nothing'} forward, {backward or 'nothing'} backward, once, of the tensor"
    with report.property(said, hint="count the collectives: each way has one, or none."):
        for size, _, found in each(values, 2, 3, 4):
            for (shape, _, _), v in zip(VARIANTS, found["variants"], strict=True):
                x, y, on = torch.empty(shape), v["y"], f"{on_ranks(size)}"
                only_call(v["forward"], forward, _full_bytes(forward, x, size), f"forward {on}")
                only_call(v["backward"], backward, _full_bytes(backward, y, size), f"backward {on}")
    hint = "all_reduce works in place: give it a copy, forward and backward."
    with report.property("leaves its input and the incoming gradient as they were", hint=hint):
        for _, _, found in each(values):
            for v in found["variants"]:
                expect(v["kept"], "the input was changed")
                expect(v["grad_kept"], "the incoming gradient was changed")
    hint = "no gradient asked for is no reason to skip the collective; a cast is not asked for."
    with report.property("keeps bf16, float64 and int64, and works under no_grad", hint=hint):
        for size, place, found in each(values):
            wide = found["wide"]
            others = [_others(i, wide) for i in range(size)]
            exactly = 1e-14 if wide == torch.float64 else 1e-5
            for kind, off in (("bf16", 0.05), ("float64", exactly), ("int64", 0.0)):
                given = [other[kind] for other in others]
                exact = [x.float() for x in given] if kind == "bf16" else given
                want = _one_way(way, exact, place, 0).to(given[0].dtype)
                close(found[kind], want, f"the {kind} result under no_grad {on_ranks(size)}", off)
    hint = (
        "a buffer kept for the next call is overwritten by it: give every call memory of its own."
    )
    with report.property(
        "a second call of the same shape leaves the first result alone", hint=hint
    ):
        for size, place, found in each(values):
            xs = [random(12, 5, seed=80 + i) for i in range(size)]
            close(
                found["second"], _one_way(way, xs, place, 0), f"the second result {on_ranks(size)}"
            )
            for what, kept in zip(("result", "gradient"), found["calls_kept"], strict=True):
                expect(kept, f"a second call {on_ranks(size)} changed the {what} of the first")
    if name == "reduce_scatter_to_group":
        hint = "a slice of the summed whole keeps all of it alive: clone it, or receive only it."
        with report.property("the result is no view of something larger", hint=hint):
            for size, _, found in each(values, 2, 3, 4):
                times = found["float64 memory"]
                said = f"the result {on_ranks(size)} keeps {times:.3g} times its bytes alive"
                expect(times <= 1.5, said, "memory")
    if divides:
        hint = "torch.chunk gives uneven pieces silently; compare the size with the ranks first."
        with report.property("ValueError where the dimension does not divide", hint=hint):
            report.ranks(in_groups, 4, _uneven, answer, True)


@check("copy_to_group")
def copy_to_group(answer, report):
    """f: identity forward, all-reduce backward."""
    _check_pair(
        answer,
        report,
        "copy_to_group",
        {
            "forward": "every rank already has the whole x: forward has nothing to do.",
            "backward": "x is used by every rank, so its gradient is the sum over the ranks of "
            "this group (and autograd does not look inside dist.all_reduce).",
        },
    )


@check("reduce_from_group")
def reduce_from_group(answer, report):
    """g: all-reduce forward, identity backward."""
    _check_pair(
        answer,
        report,
        "reduce_from_group",
        {
            "forward": "forward is the sum over the ranks of this group, not the mean.",
            "backward": "y = x_0 + x_1 + …: dy/dx_r is 1, so the gradient passes as it is; "
            "reducing it once more scales it by the number of ranks.",
        },
    )


@check("gather_from_group")
def gather_from_group(answer, report):
    """All-gather forward, own slice backward."""
    _check_pair(
        answer,
        report,
        "gather_from_group",
        {
            "forward": "the pieces lie along dim, in the order of the ranks in the group.",
            "backward": "what follows is the same on every rank, so each keeps its own slice of "
            "the gradient: dist.get_rank(group) counts the slices; a sum would scale it.",
        },
    )


@check("scatter_to_group")
def scatter_to_group(answer, report):
    """Own slice forward, all-gather backward."""
    _check_pair(
        answer,
        report,
        "scatter_to_group",
        {
            "forward": "rank i of the group keeps slice i along dim.",
            "backward": "the full x's gradient is every rank's slice, side by side along dim.",
        },
    )


@check("reduce_scatter_to_group")
def reduce_scatter_to_group(answer, report):
    """Reduce-scatter forward, all-gather backward."""
    _check_pair(
        answer,
        report,
        "reduce_scatter_to_group",
        {
            "forward": "first the sum over the ranks, then slice i along dim for rank i.",
            "backward": "every slice of the sum came from every rank: all-gather the gradients.",
        },
    )


@check("all_gather_to_group")
def all_gather_to_group(answer, report):
    """All-gather forward, reduce-scatter backward."""
    _check_pair(
        answer,
        report,
        "all_gather_to_group",
        {
            "forward": "the pieces lie along dim, in the order of the ranks in the group.",
            "backward": "each rank does other work with the gathered tensor, so the gradients are "
            "summed over the ranks before a rank takes its slice: reduce-scatter, not a slice.",
        },
    )


# Linear layers

ROWS, WIDE, NARROW = (5, 7), 24, 10  # x is [5, 7, in]


def _sharded_layer(answer, group, place, size, column: bool) -> dict:
    found = {"variants": []}
    for bias in (True, False):
        for whole in (False, True):  # gather_output, or a full input
            full = linear(*((NARROW, WIDE) if column else (WIDE, NARROW)), bias, seed=3)
            full.to(device())
            before = [p.detach().clone() for p in full.parameters()]
            option = {"gather_output": whole} if column else {"input_is_parallel": not whole}
            layer = answer(full, group=group, **option)
            weight = layer.weight
            x = random(*ROWS, full.in_features, seed=5)
            grad = random(*ROWS, full.out_features, seed=6)
            if column and not whole:
                grad = cut(grad, -1, size, place)
            if not column and not whole:
                x = cut(x, -1, size, place)
            result = step(layer, x.contiguous(), grad.contiguous())
            full_kept = all(map(torch.equal, before, full.parameters()))
            layer.zero_grad()
            bias_now = layer.bias
            result |= {
                "weight": weight.detach().cpu(),
                "shapes": (list(weight.shape), None if bias_now is None else list(bias_now.shape)),
                "full_kept": full_kept or size == 1,  # one rank may share the full layer's memory
                "held": held(layer),
            }
            found["variants"].append((bias, whole, result))
    found["half"] = _half_layer(answer, group, place, size, column)
    if size in (3, 4):
        full = linear(*((7, 10) if column else (10, 7))).to(device())
        found["refused"] = refusal(answer, full, group=group, what=f"a size of 10 {on_ranks(size)}")
    return found


def _half_layer(answer, group, place, size, column: bool) -> dict:
    """A bf16 layer built and called."""
    full = linear(*((NARROW, WIDE) if column else (WIDE, NARROW)), seed=3).to(device()).bfloat16()
    x = random(*ROWS, full.in_features, seed=5, dtype=torch.bfloat16)
    layer = answer(full, group=group)
    found = {"dtypes": {p.dtype for p in layer.parameters()}}
    if found["dtypes"] == {torch.bfloat16}:  # else it may not even run
        x = x if column else cut(x, -1, size, place)
        with torch.no_grad():
            found["y"] = layer(x.contiguous().to(device())).cpu()
    return found


def _check_layer(answer, report, column: bool) -> None:
    fan_in, fan_out = (NARROW, WIDE) if column else (WIDE, NARROW)
    dim = 0 if column else 1
    x = random(*ROWS, fan_in, seed=5)
    grad = random(*ROWS, fan_out, seed=6)
    oracle = {bias: step(linear(fan_in, fan_out, bias, seed=3).cpu(), x, grad) for bias in (0, 1)}
    cut_y = "their slice of the last dimension" if column else "the sum"

    def mine(tensor, whole, size, place):
        return tensor if whole else cut(tensor, -1, size, place)

    values: list = []
    hint = f"F.linear with this rank's {'rows' if column else 'columns'} of the weight; " + (
        "the bias is cut as the rows are."
        if column
        else "all-reduce the partial sums, then add the whole bias once."
    )
    with report.property(f"the full layer's output ({cut_y}) on 1 to 4 ranks", hint=hint):
        values += report.ranks(in_groups, 4, _sharded_layer, answer, column)
        for size, place, found in each(values):
            for bias, whole, v in found["variants"]:
                y = oracle[bias]["y"]
                y = mine(y, whole, size, place) if column else y
                close(v["y"], y, f"the output {on_ranks(size)}{'' if bias else ' without bias'}")
    if not values:
        return
    hint = (
        "the input enters every rank's part of the layer: let it in through copy_to_group (f). A "
        "gathered output hands each rank its own slice of the gradient back, undivided."
        if column
        else "the input's gradient is local: the sum's gradient passes g unchanged."
    )
    with report.property("the full layer's input gradient", hint=hint):
        for size, place, found in each(values):
            for bias, whole, v in found["variants"]:
                dx = oracle[bias]["dx"]
                dx = dx if column else mine(dx, whole, size, place)
                close(v["dx"], dx, f"the input gradient {on_ranks(size)}")
    hint = "own_slice of the full gradient; a row-parallel bias has the whole, unscaled gradient."
    with report.property("the full layer's weight and bias gradients, cut", hint=hint):
        for size, place, found in each(values):
            for bias, _, v in found["variants"]:
                full = oracle[bias]["grads"]
                same(sorted(v["grads"]), sorted(full), "the parameters with a gradient")
                weight = cut(full["weight"], dim, size, place)
                close(v["grads"]["weight"], weight, f"weight.grad {on_ranks(size)}", 2e-5)
                if bias:
                    b = cut(full["bias"], 0, size, place) if column else full["bias"]
                    close(v["grads"]["bias"], b, f"bias.grad {on_ranks(size)}", 2e-5)
    hint = "hold the full layer's values: a bias divided by the ranks learns another step than it."
    with report.property("one training step changes it as it changes the full layer", hint=hint):
        for size, place, found in each(values):
            for bias, whole, v in found["variants"]:
                after = oracle[bias]["after"]
                after = mine(after, whole, size, place) if column else after
                close(v["after"], after, f"the output after one step {on_ranks(size)}", 5e-5)
    with report.property(
        "one collective where the contract has one, of the tensor's bytes",
        hint="forward and backward each pay at most one collective per f, g, gather or scatter.",
    ):
        for size, _, found in each(values, 2, 3, 4):
            there, back = f"forward {on_ranks(size)}", f"backward {on_ranks(size)}"
            for _, whole, v in found["variants"]:
                gather = "all_gather" if whole else ""
                if column:
                    only_call(v["forward"], gather, grad.nbytes if whole else 0, there)
                    only_call(v["backward"], "all_reduce", x.nbytes, back)
                else:
                    only_call(v["forward"], "all_reduce", grad.nbytes, there)
                    only_call(v["backward"], gather, x.nbytes if whole else 0, back)
    hint = "clone the slice: a view keeps the full weight's memory, and so does a reference to it."
    with report.property("keeps its shard only, in memory of its own", hint=hint):
        for size, _, found in each(values):
            for bias, _, v in found["variants"]:
                shape = [fan_out // size, fan_in] if column else [fan_out, fan_in // size]
                b = [shape[0]] if bias else None
                same(v["shapes"], (shape, b), "the shapes of weight and bias")
                limit = 4 * (shape[0] * shape[1] + (shape[0] if bias else 0))
                expect(
                    v["held"] <= limit + 64 or size == 1,  # a little bookkeeping
                    f"the layer keeps {v['held']} bytes {on_ranks(size)}, its shard has {limit}",
                )
                expect(v["full_kept"], "training the shard changed the layer it was built from")
    hint = "the shard has the dtype of the layer it is cut from: torch.empty alone makes fp32."
    with report.property("a bf16 layer gives a bf16 shard and a bf16 output", hint=hint):
        full = linear(fan_in, fan_out, seed=3).bfloat16().float()
        want = full(x.bfloat16().float()).detach()
        for size, place, found in each(values):
            half = found["half"]
            same(half["dtypes"], {torch.bfloat16}, f"the dtypes of the shard {on_ranks(size)}")
            y = mine(want, not column, size, place).bfloat16()
            close(half["y"], y, f"the bf16 output {on_ranks(size)}", 0.05)
    hint = "compare the size with the number of ranks of the group when the layer is built."
    with report.property("ValueError where the size does not divide", hint=hint):
        for _, _, found in each(values, 3, 4):
            expect(not found["refused"], found["refused"])


@check("ColumnParallelLinear")
def column_parallel_linear(answer, report):
    """The full layer by output features."""
    _check_layer(answer, report, column=True)


@check("RowParallelLinear")
def row_parallel_linear(answer, report):
    """The full layer by input features."""
    _check_layer(answer, report, column=False)
