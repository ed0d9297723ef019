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
from ..compare import close, expect, random, total
from ..groups import held, last_ranks
from ..report import check
from .gradients import SIZES

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
