"""Chapter 21, gradients and parameters in shards as well."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ... import calls
from ..._seams import storage_bytes
from ...devices import device
from ...memory import held_bytes
from ..compare import close, expect, random, refuses, same, total
from ..groups import held, last_ranks
from ..report import check
from .gradients import SIZES, on_cpu

LAYERS = ((10, 13), (13, 9), (9, 14), (14, 7))
_probes: list[tuple[str, int, list[int]]] = []  # (pass, layer, layers whose full weights exist)
_seen: list[tuple[int, int, StorageWeakRef]] = []  # (layer, numel of the layer, its storage)


def _note(phase: str, layer: int, weight: Tensor) -> None:
    storage = StorageWeakRef(weight.untyped_storage())
    if not any(i == layer and r == storage for i, _, r in _seen):
        _seen.append((layer, 0, storage))
    _probes.append((phase, layer, _alive()))


def _settled() -> list[int]:
    """`_alive()` once it is empty, or after half a second.

    A backend's own thread may hold a collective's tensors a moment longer than the call.
    """
    deadline = time.monotonic() + 0.5
    while _alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    return _alive()


def _alive() -> list[int]:
    """Layers that have a full weight in memory, whoever holds it: Python, autograd, a buffer."""
    alive = set()
    for layer, _, ref in _seen:
        if storage_bytes(ref):
            alive.add(layer)
    return sorted(alive)


class _Scale(torch.autograd.Function):
    """Multiplies by the mean of the weight; saves the weight and looks at memory both ways."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        _note("forward", layer, weight)
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x * weight.mean()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        _note("backward", ctx.layer, weight)
        return (
            grad * weight.mean(),
            torch.full_like(weight, (grad * x).sum() / weight.numel()),
            None,
        )


class _Layer(nn.Module):
    def __init__(self, layer: int):
        super().__init__()
        self.layer = layer
        n_in, n_out = LAYERS[layer]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(layer)
            self.linear = nn.Linear(n_in, n_out)
        self.gain = nn.Parameter(1 + 0.1 * random(n_out, seed=layer + 5))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        x = torch.tanh(self.linear(x) * self.gain)
        return _Scale.apply(x, self.linear.weight, self.layer) + shift + x


def _numel(layer: int) -> int:
    return LAYERS[layer][0] * LAYERS[layer][1] + 2 * LAYERS[layer][1]


def _sharded_batch(size: int, step: int) -> tuple[Tensor, Tensor]:
    return random(5 * size, LAYERS[0][0], seed=step), random(5 * size, LAYERS[-1][1], seed=step + 9)


def _run_layers(layers, x, y):
    out = x
    for layer in layers:
        out = layer(out, shift=0.25)
    return out, (out - y).square().mean()


def _sharded_alone(size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The oracle: outputs, input gradients and gradient norms; the first step has two backwards."""
    layers = [_Layer(i) for i in range(len(LAYERS))]
    params = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.2)
    found = []
    for step in range(3):
        for half in range(2 if step == 0 else 1):
            x, y = _sharded_batch(size, 2 * step + half)
            x.requires_grad_()
            out, loss = _run_layers(layers, x, y)
            loss.backward()
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        found.append((out.detach(), x.grad, norm))
        optimizer.step()
        optimizer.zero_grad()
    _seen.clear(), _probes.clear()
    return found


def _sharded(answer, group=None, rank=None, size=4):
    rank = dist.get_rank() if rank is None else rank
    options = {} if group is None else {"group": group}
    before = held_bytes() if group is None else 0
    layers = [answer(_Layer(i).to(device()), **options) for i in range(len(LAYERS))]
    full: dict[str, int] = {"construction": held_bytes() - before} if group is None else {}
    kept = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    params = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.2)
    steps = []
    for step in range(3):
        _seen.clear(), _probes.clear()
        with calls.record() as log:
            for half in range(2 if step == 0 else 1):
                batch = _sharded_batch(size, 2 * step + half)
                x, y = (t.chunk(size)[rank].to(device()) for t in batch)
                x.requires_grad_(step < 2)  # the last step begins without gradient, as tokens do
                out, loss = _run_layers(layers, x, y)
                between = _settled()
                loss.backward()
        after = _settled()
        squares = sum(float(p.grad.square().sum()) for p in params if p.grad is not None)
        x_grad = None if x.grad is None else x.grad.cpu()
        steps.append((out.detach().cpu(), x_grad, squares, log, list(_probes), between, after))
        del out, loss, x, y, x_grad, batch
        optimizer.step()
        optimizer.zero_grad()
        if group is None:
            full[f"step {step}"] = held_bytes() - before - held(steps)
    with torch.no_grad():
        _seen.clear(), _probes.clear()
        inferred = _run_layers(layers, *(t.to(device()) for t in _sharded_batch(1, 7)))[0].cpu()
        after = _settled()
    if group is None:
        full["inference"] = held_bytes() - before - held(steps) - inferred.nbytes
    return full, kept, steps, inferred, after


def _sharded_in_groups(answer):
    return [(n, _sharded(answer, g, r, size=n)) for n, g, r in last_ranks()]


def _judge_training(results: list, size: int) -> None:
    oracle = _sharded_alone(size)
    where = f"on {size} rank{'s' * (size > 1)}"
    for step, (out, x_grad, norm) in enumerate(oracle):
        for rank, (_, _, steps, _, _) in enumerate(results):
            mine, grad, *_ = steps[step]
            close(mine, out.chunk(size)[rank], f"the output in step {step} {where}")
            if grad is not None:  # a mean over 1/size of the rows: size times larger
                expected = size * x_grad.chunk(size)[rank]
                close(grad, expected, f"the gradient of the input in step {step} {where}")
        squares = sum(r[2][step][2] for r in results)
        close(torch.tensor(squares).sqrt(), norm, f"the norm of all shards' gradients {where}")


@check("FullySharded")
def fully_sharded(answer, report):
    """Values, training, shards, what is in memory when, calls and bytes, groups."""
    numels = [_numel(i) for i in range(len(LAYERS))]
    shards = [-(-n // 4) for n in numels]
    state = {}

    def sharded():
        if "values" not in state:
            state["values"] = report.ranks(_sharded, 4, answer)
        return state["values"]

    with report.property(
        "trains as the whole module does on the whole batch",
        hint="gather the shards in rank order and cut the padding off; the gradient of a shard is "
        "the mean over the ranks, not the sum; a second backward adds to it",
    ):
        _judge_training(sharded(), 4)
    with report.property(
        "a rank keeps ceil(numel / 4) of each module's parameters, and no full copy",
        hint="flatten the parameters, pad to a multiple of the ranks, register this rank's part as "
        "the only parameter, and drop the originals from the module",
    ):
        for full, kept, *_ in sharded():
            for layer, (n, most) in enumerate(zip(kept, shards, strict=True)):
                expect(n <= most, f"layer {layer} keeps {n} parameters, expected at most {most}")
            most = 4 * sum(shards)
            expect(
                full["construction"] <= 1.1 * most,
                f"a rank holds {full['construction']} bytes after construction, its shards have "
                f"{most}",
            )
        for layer, numel in enumerate(numels):
            held = sum(kept[layer] for _, kept, *_ in sharded())
            expect(held >= numel, f"all ranks together keep {held} of layer {layer}'s {numel}")
    with report.property(
        "full parameters exist only while their module computes",
        hint="after forward nothing may hold the gathered tensor: not an attribute, and not "
        "autograd, which saves weights for backward (pack them away with saved_tensors_hooks, or "
        "free the storage and fill it again before backward); let go again after the module's "
        "backward, not at the end",
    ):
        for full, _, steps, _, inferred in sharded():
            for *_, log, probes, between, after in steps:
                del log
                for phase, layer, alive in probes:
                    expect(
                        len(alive) <= 2,
                        f"while layer {layer} ran its {phase}, layers {alive} had full weights",
                    )
                expect(not between, f"after forward, layers {between} still had full weights")
                expect(not after, f"after backward, layers {after} still had full weights")
            expect(not inferred, f"after inference, layers {inferred} still had full weights")
            for when, grown in full.items():
                expect(
                    grown <= 1.1 * 4 * sum(shards),
                    f"a rank holds {grown} bytes after {when}, its shards have {4 * sum(shards)}: "
                    "a copy of full parameters or gradients stays",
                )
    with report.property(
        "2 all-gathers and 1 reduce-scatter per step and module",
        hint="forward gathers, backward gathers again and reduce-scatters the flat gradient; "
        "nothing else travels",
    ):
        for *_, steps, _, _ in sharded():
            for step, (_, _, _, log, *_) in enumerate(steps):
                runs = 2 if step == 0 else 1
                full = 4 * 4 * sum(shards)  # 4 bytes, 4 parts
                for op, times in (("all_gather", 2), ("reduce_scatter", 1)):
                    count, moved = total(log, op)
                    expected = runs * times * len(LAYERS)
                    expect(count == expected, f"{count} {op} calls, expected {expected}")
                    expect(
                        moved == runs * times * full,
                        f"{op} moved {moved} bytes, expected {runs * times * full}",
                    )
                other = sorted({c.op for c in log} - {"all_gather", "reduce_scatter"})
                expect(not other, f"{', '.join(other)} was called too")
    with report.property(
        "computes without gradients too",
        hint="under torch.no_grad() forward gathers once and lets go, there is no backward",
    ):
        layers = [_Layer(i) for i in range(len(LAYERS))]
        params = [p for layer in layers for p in layer.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.2)
        for step in range(3):
            for half in range(2 if step == 0 else 1):
                _run_layers(layers, *_sharded_batch(4, 2 * step + half))[1].backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            expected = _run_layers(layers, *_sharded_batch(1, 7))[0]
        _seen.clear(), _probes.clear()
        for *_, inferred, _ in sharded():
            close(inferred, expected, "the output without gradients")
    with report.property(
        "groups of 1 to 4 ranks work on their own",
        hint="rank and world size are those of the group: dist.get_rank(group)",
    ):
        found = report.ranks(_sharded_in_groups, 4, answer)
        for size in SIZES:
            _judge_training([r for rank in found for n, r in rank if n == size], size)


# clip_grad_norm_sharded_


def _shards(rank: int, size: int, kind: str) -> list[nn.Parameter]:
    """This rank's parameters: uneven, one empty, one without gradient; "bare": none on rank 0."""
    shapes = [(5 + rank,), (0,) if rank % 2 else (3, 4), (7, 2), (2,)]
    params = [nn.Parameter(random(*s, seed=i).to(device())) for i, s in enumerate(shapes)]
    for i, p in enumerate(params[:3]):
        if kind != "bare" or rank:
            p.grad = (0.3 + rank) * random(*p.shape, seed=60 + 10 * rank + i).to(device())
    return params


def _clipped(answer, kind: str, max_norm: float, group=None, rank=None, size=4):
    rank = dist.get_rank() if rank is None else rank
    params = _shards(rank, size, kind)
    before = on_cpu({str(i): p for i, p in enumerate(params)})
    options = {} if group is None else {"group": group}
    with calls.record() as log:
        norm = answer(iter(params), max_norm, **options)
    grads = [None if p.grad is None else p.grad.cpu() for p in params]
    return float(norm), grads, before, on_cpu({str(i): p for i, p in enumerate(params)}), log


def _clipped_in_groups(answer):
    return [(n, _clipped(answer, "all", 0.7, g, r, n)) for n, g, r in last_ranks()]


HALVES = (  # what squares end or stand still at: (dtype, gradient, parameters of one element)
    (torch.float16, 300.0, 8),  # 300^2 is beyond 65504
    (torch.bfloat16, 1.0, 400),  # 256 + 1 is 256
)


def _clipped_halves(answer) -> list[tuple[float, Tensor]]:
    """Of each dtype the norm and the first gradient after clipping to 5."""
    found = []
    for dtype, value, count in HALVES:
        params = [nn.Parameter(torch.ones(1, dtype=dtype, device=device())) for _ in range(count)]
        for p in params:
            p.grad = torch.full_like(p, value)
        found.append((float(answer(params, 5.0)), params[0].grad.cpu()))
    return found


def _judge_clipping(results: list, kind: str, max_norm: float, size: int) -> None:
    full = [p for rank in range(size) for p in _shards(rank, size, kind)]
    expected = float(nn.utils.clip_grad_norm_(full, max_norm))
    for rank, (norm, grads, before, after, _) in enumerate(results):
        where = f"on rank {rank} of {size}"
        close(torch.tensor(norm), torch.tensor(expected), f"the norm {where}")
        for i, grad in enumerate(grads):
            wanted = full[4 * rank + i].grad
            if wanted is None:
                expect(grad is None, f"a parameter without gradient got one {where}")
            else:
                close(grad, wanted.cpu(), f"gradient {i} {where} with max_norm {max_norm}")
            close(after[str(i)], before[str(i)], f"parameter {i} {where}", 0.0)


@check("clip_grad_norm_sharded_")
def clip_grad_norm_sharded_(answer, report):
    """The norm, the scaling, bytes, ranks without gradients, groups."""
    values = None
    with report.property(
        "clips to the norm of the full gradient, the same on every rank",
        hint="add up the squares over this rank's gradients and over the ranks, then take the "
        "root; every shard is on one rank only, so nothing is averaged",
    ):
        values = report.ranks(_clipped, 4, answer, "all", 0.7)
        _judge_clipping(values, "all", 0.7, 4)
    with report.property(
        "leaves gradients below max_norm as they are",
        hint="the factor is max_norm / norm, but never more than 1",
    ):
        _judge_clipping(report.ranks(_clipped, 4, answer, "all", 1e4), "all", 1e4, 4)
    with report.property(
        "sends a few numbers, not the gradients",
        hint="one all-reduce of the sum of squares is enough",
    ):
        for *_, log in values or report.ranks(_clipped, 4, answer, "all", 0.7):
            moved = sum(c.nbytes for c in log)
            expect(len(log) > 0, "the ranks never communicated")
            expect(
                len(log) <= 2 and moved <= 64,
                f"{len(log)} collective calls with {moved} bytes, expected one of a few bytes",
            )
    with report.property(
        "a rank without gradients takes part",
        hint="it contributes 0, and calls the same collective as the others",
    ):
        _judge_clipping(report.ranks(_clipped, 4, answer, "bare", 0.7), "bare", 0.7, 4)
    with report.property(
        "adds the squares of 16-bit gradients in float32",
        hint="g.float().square().sum(): a square beyond 65504 is inf in fp16, and a sum in bf16 "
        "stands still at 256 times what is added",
    ):
        for found in report.ranks(_clipped_halves, 2, answer):
            for (dtype, value, count), (norm, grad) in zip(HALVES, found, strict=True):
                expected = value * (2 * count) ** 0.5
                what = f"of {2 * count} gradients of {value:g} in {dtype}"
                close(torch.tensor(norm), torch.tensor(expected), f"the norm {what}", 1e-2)
                wanted = torch.tensor([value * 5 / expected], dtype=dtype)
                close(grad, wanted, f"a clipped gradient {what}", 1e-2)
    with report.property(
        "groups of 1 to 4 ranks clip on their own",
        hint="pass group= to the all-reduce",
    ):
        found = report.ranks(_clipped_in_groups, 4, answer)
        for size in SIZES:
            _judge_clipping([r for rank in found for n, r in rank if n == size], "all", 0.7, size)


# training_memory


@check("training_memory")
def training_memory(answer, report):
    """The paper's figures, rounding, and what cannot be."""
    with report.property(
        "gives the 120, 31.4, 16.6 and 1.9 GB of the ZeRO paper (7.5 B parameters, 64 ranks)",
        hint="2 bytes a parameter, 2 a gradient, 12 for the optimizer; stage 1 divides the "
        "optimizer's, 2 the gradients as well, 3 the parameters as well",
    ):
        for stage, gigabytes in enumerate((120.0, 31.4, 16.6, 1.9)):
            found = answer(7_500_000_000, 64, stage)
            keys = ["grads", "optimizer", "params"]
            same(sorted(found), keys, f"the sorted keys at stage {stage}")
            sum_gb = round(sum(found.values()) / 1e9, 1)
            same(sum_gb, gigabytes, f"the sum in GB at stage {stage}")
    with report.property(
        "each part is cut at its stage, and shards are rounded up to whole elements",
        hint="a shard has ceil(num_params / world_size) elements; multiply by the bytes afterwards",
    ):
        for n, world in ((10, 4), (7, 3), (5, 1), (3, 8), (107_008, 6)):
            shard = (n + world - 1) // world
            for stage in range(4):
                found = answer(n, world, stage)
                wanted = {
                    "params": 2 * (n if stage < 3 else shard),
                    "grads": 2 * (n if stage < 2 else shard),
                    "optimizer": 12 * (n if stage < 1 else shard),
                }
                for key, value in wanted.items():
                    what = f"{key} of {n} parameters on {world} ranks at stage {stage}"
                    same(found[key], value, what)
                    expect(isinstance(found[key], int), f"{what} is no int")
    with report.property(
        "refuses a stage or a world that does not exist",
        hint="raise ValueError for stages other than 0 to 3 and for fewer than one rank",
    ):
        refuses(answer, 10, 4, 4, what="stage 4")
        refuses(answer, 10, 4, -1, what="stage -1")
        refuses(answer, 10, 0, 1, what="world size 0")
