"""Chapter 43: diffusion, judged by the formulas in float64 and by what the model is asked."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._seams import TorchDispatchMode, tree_leaves
from ..devices import device
from .compare import close, expect, random, refuses, same, unchanged
from .groups import held
from .report import check
from .tensors import told
from .wrong import Wrong


class _Dtypes(TorchDispatchMode):
    """Notes the dtypes of all tensors that operations make."""

    def __init__(self):
        super().__init__()
        self.seen: set = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {t.dtype for t in tree_leaves(out) if isinstance(t, Tensor)}
        return out


class _Attention(TorchFunctionMode):
    """Counts calls of scaled_dot_product_attention, by whatever name it was imported."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def narrow(run: Callable[[], Any], what: str) -> Any:
    """Run it and expect no float64 and no complex tensor on the way; its result."""
    with _Dtypes() as dtypes:
        out = run()
    wide = dtypes.seen & {torch.float64, torch.complex64, torch.complex128}
    expect(not wide, f"{what} makes {', '.join(map(str, wide))}, which an NPU refuses")
    return out


@check("timestep_embedding")
def timestep_embedding(answer, report):
    """Sinusoids of the time."""

    def exact(t: Tensor, dim: int, period: float) -> Tensor:
        half = dim // 2
        freqs = torch.exp(-math.log(period) * torch.arange(half, dtype=torch.float64) / half)
        angles = t.double()[:, None] * freqs
        out = torch.cat([angles.cos(), angles.sin()], dim=1)
        return F.pad(out, (0, dim % 2)).float()

    t = torch.tensor([0.0, 0.25, 1.0, 7.5, 40.0])
    with report.property(
        "cosines, then sines, of t times max_period^(-i / half)",
        hint="i counts 0 to dim // 2 - 1 and is divided by dim // 2; cos comes first in DiT",
    ):
        for dim in (8, 6, 256):
            close(answer(t.to(device()), dim), exact(t, dim, 10_000), f"dim {dim}", 2e-5)
        close(answer(t[:1].to(device()), 2), exact(t[:1], 2, 10_000), "dim 2 of one sample", 2e-5)
        close(answer(t.to(device()), 10, 100), exact(t, 10, 100), "a max_period of 100", 2e-5)
    with report.property("an odd dim ends in 0", hint="pad with one zero"):
        for dim in (7, 9):
            close(answer(t.to(device()), dim), exact(t, dim, 10_000), f"dim {dim}", 2e-5)
    with report.property(
        "fp32 throughout, also for integer steps; no float64",
        hint="torch.arange(..., dtype=torch.float32): float64 does not exist on an NPU",
    ):
        steps = torch.tensor([0, 3, 999])
        got = narrow(lambda: answer(steps.to(device()), 8), "timestep_embedding")
        same(got.dtype, torch.float32, "the dtype for integer steps")
        # angles reach 999 radians, where fp32 keeps 6e-5
        close(got, exact(steps, 8, 10_000), "integer steps", 3e-4)
    with report.property(
        "the result lies on the device of t",
        hint="torch.arange(…, device=t.device): what is made without a device lies on the CPU",
    ):
        got = told(answer)(t.to("meta"), 8)
        same((got.device.type, list(got.shape)), ("meta", [5, 8]), "device and shape for t on meta")


@check("modulate")
def modulate(answer, report):
    """Scale and shift by the condition."""
    x, shift, scale = random(3, 5, 4, seed=1), random(3, 4, seed=2), random(3, 4, seed=3)
    want = x * (1 + scale.view(3, 1, 4)) + shift.view(3, 1, 4)
    with report.property(
        "x (1 + scale) + shift, the same for all tokens of a sample",
        hint="a scale of 0 leaves x as it is; [B, D] needs a place for the tokens",
    ):
        inputs = [t.to(device()) for t in (x, shift, scale)]
        with unchanged("modulate", *inputs):
            got = answer(*inputs)
        close(got, want, "the result")
    with report.property(
        "samples keep their own condition, also where B equals S",
        hint="broadcasting [B, D] against [B, S, D] lines up B with S",
    ):
        x = random(4, 4, 6, seed=4)
        shift, scale = random(4, 6, seed=5), random(4, 6, seed=6)
        got = answer(*[t.to(device()) for t in (x, shift, scale)])
        close(got, x * (1 + scale[:, None]) + shift[:, None], "the result for B = S")
    with report.property(
        "x, shift and scale get their gradients",
        hint="the condition is learned: nothing may leave the graph",
    ):
        leaves = [t.to(device()).requires_grad_() for t in (x, shift, scale)]
        weight = random(4, 4, 6, seed=7)
        out = (answer(*leaves) * weight.to(device())).sum()
        expect(out.requires_grad, "the result has no graph")
        got = torch.autograd.grad(out, leaves, allow_unused=True)
        wanted = weight * (1 + scale[:, None]), weight.sum(1), (weight * x).sum(1)
        for name, g, want in zip(("x", "shift", "scale"), got, wanted, strict=True):
            expect(g is not None, f"no gradient reaches {name}")
            close(g, want, f"the gradient of {name}")


# ---- DiTBlock

NAMES = {
    "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias",
    "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias",
    "adaLN_modulation.1.weight", "adaLN_modulation.1.bias",
}  # fmt: skip


def fill(module: nn.Module, scale: float = 0.3) -> nn.Module:
    """Random parameters, by name, so that two modules of one layout get the same ones."""
    with torch.no_grad():
        for name, p in sorted(module.named_parameters()):
            p.copy_(random(*p.shape, seed=sum(map(ord, name))) * scale)
    return module


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (2i, 2i+1), channel by channel."""
    out = torch.empty_like(x)
    for i in range(0, x.shape[-1], 2):
        a, b = x[..., i], x[..., i + 1]
        out[..., i] = a * cos[:, i] - b * sin[:, i]
        out[..., i + 1] = b * cos[:, i + 1] + a * sin[:, i + 1]
    return out


def block_by_formula(
    block: nn.Module, x: Tensor, c: Tensor, heads: int, rope: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The block in float64 on the host, from its parameters, in plain steps; with its graph."""
    p = {n: t.cpu().double() for n, t in block.named_parameters()}
    x, c = x.cpu().double(), c.cpu().double()

    def norm(h):
        mean = h.mean(-1, keepdim=True)
        return (h - mean) / ((h - mean).pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def linear(h, name):
        return h @ p[name + ".weight"].T + p[name + ".bias"]

    six = linear(c * torch.sigmoid(c), "adaLN_modulation.1").view(len(c), 6, 1, -1)
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = six.unbind(1)
    h = linear(norm(x) * (1 + scale_a) + shift_a, "attn.qkv")
    q, k, v = h.chunk(3, -1)
    q, k, v = (t.view(*t.shape[:2], heads, -1).transpose(1, 2) for t in (q, k, v))
    if rope is not None:
        q, k = (turn(t, *[r.double() for r in rope]) for t in (q, k))
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    x = x + gate_a * linear((weights @ v).transpose(1, 2).flatten(2), "attn.proj")
    h = linear(norm(x) * (1 + scale_m) + shift_m, "mlp.fc1")
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return (x + gate_m * linear(h, "mlp.fc2")).float()


@check("DiTBlock")
def dit_block(answer, report):
    """adaLN-Zero."""
    where = device()
    x, c = random(2, 7, 12, seed=1), random(2, 12, seed=2)
    with report.property(
        "parameters are named and shaped as in facebookresearch/DiT",
        hint="attn.qkv, attn.proj, mlp.fc1, mlp.fc2 and adaLN_modulation = SiLU, Linear; the norms "
        "have no parameters",
    ):
        block = answer(12, 3, 2.5)
        shapes = {n: tuple(p.shape) for n, p in block.named_parameters()}
        same(set(shapes), NAMES, "the set of parameter names")
        same(shapes["attn.qkv.weight"], (36, 12), "the shape of attn.qkv.weight")
        same(shapes["mlp.fc1.weight"], (30, 12), "the shape of mlp.fc1.weight (mlp_ratio 2.5)")
        same(shapes["adaLN_modulation.1.weight"], (72, 12), "adaLN_modulation.1.weight")
        same(tuple(answer(12, 3).mlp.fc1.weight.shape), (48, 12), "mlp.fc1.weight by default")
    with report.property(
        "a new block is the identity",
        hint="zero the weight AND the bias of the modulation: then both gates are 0",
    ):
        block = answer(12, 3).to(where)
        close(block(x.to(where), c.to(where)), x, "the output of a new block", 0.0)
    with report.property(
        "values are those of the formula: modulation, attention, gate; modulation, mlp, gate",
        hint="six chunks in the order shift, scale, gate (attention), shift, scale, gate (mlp); "
        "rows of qkv are q, k, v, each by head; eps is 1e-6 and the gelu is the tanh one",
    ):
        for heads, ratio in ((3, 2.5), (2, 4.0), (1, 1.0)):
            block = fill(answer(12, heads, ratio)).to(where)
            before = held(block)
            got = block(x.to(where), c.to(where))
            close(got, block_by_formula(block, x, c, heads), f"the output with {heads} heads", 3e-5)
            kept = held(block) - before
            expect(kept <= 0, f"a call leaves {kept} bytes in the block, which every step adds to")
    with report.property(
        "another length, one token and one sample are inputs like others",
        hint="keep nothing of a call for the next one, and don't squeeze sizes of 1 away",
    ):
        for shape in ((1, 5, 12), (3, 1, 12), (1, 1, 12)):
            one, condition = random(*shape, seed=5), random(shape[0], 12, seed=6)
            got = block(one.to(where), condition.to(where))
            what = f"the output for x of shape {list(shape)}"
            close(got, block_by_formula(block, one, condition, 1), what, 3e-5)
    angle = random(7, 2, seed=3).repeat_interleave(2, dim=1)
    with report.property(
        "rope turns queries and keys, not values",
        hint="apply the tables after the split into heads, before attention",
    ):
        rope = angle.cos(), angle.sin()
        block = fill(answer(12, 3)).to(where)
        got = block(x.to(where), c.to(where), rope=tuple(r.to(where) for r in rope))
        close(got, block_by_formula(block, x, c, 3, rope), "the output with rope", 3e-5)
    with report.property(
        "every parameter, x and c get a gradient", hint="nothing may leave the graph"
    ):
        weight = random(2, 7, 12, seed=4)
        for rope in (None, (angle.cos(), angle.sin())):
            block = fill(answer(12, 3)).to(where)
            leaves = {"x": x.to(where).requires_grad_(), "c": c.to(where).requires_grad_()}
            leaves |= dict(block.named_parameters())
            given = leaves["x"], leaves["c"]
            out = block(*given, rope=rope and tuple(r.to(where) for r in rope))
            exact = block_by_formula(block, *given, 3, rope)
            both = (out * weight.to(where)).sum(), (exact * weight).sum()
            got, wanted = (
                torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
                for total in both
            )
            where_to = "with rope" if rope else "without rope"
            none = [n for n, g in zip(leaves, got, strict=True) if g is None or not g.any()]
            expect(not none, f"no gradient reaches {none} {where_to}")
            for name, g, want in zip(leaves, got, wanted, strict=True):
                close(g, want.cpu(), f"the gradient of {name} {where_to}", 1e-4)
    with report.property(
        "attention goes through F.scaled_dot_product_attention",
        hint="then every device takes its own fused kernel, and chapter 44 can spread it",
    ):
        with _Attention() as watch:
            fill(answer(12, 3)).to(where)(x.to(where), c.to(where))
        expect(watch.calls == 1, f"it was called {watch.calls} times")
    with report.property("ValueError where the heads do not divide", hint="when it is built"):
        refuses(answer, 10, 3, what="3 heads in a width of 10")


# ---- losses and sampling


class _Asked(nn.Module):
    """A model that remembers what it was asked and answers something of its own."""

    def __init__(self):
        super().__init__()
        self.asked: list = []
        self.recorded = False  # whether a call would have recorded a graph
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, t, labels):
        self.recorded |= torch.is_grad_enabled()
        self.asked.append((x.detach().cpu().clone(), t.detach().cpu().clone(), labels.cpu()))
        shape = [-1] + [1] * (x.dim() - 1)
        return self.weight * torch.sin(x) + 0.1 * t.float().view(shape) + 0.01 * labels.view(shape)


def _case(shape, seed=0):
    x, noise = random(*shape, seed=seed + 1), random(*shape, seed=seed + 2)
    labels = (random(shape[0], seed=seed + 3) * 10).long().abs()
    return x, noise, labels


SHAPES = [(5, 3, 4, 2), (4, 6), (3, 2, 5, 4, 2)]


def _loss(answer, x, labels, noise, t, *more):
    model = _Asked().to(device())
    inputs = [v.to(device()) for v in (x, noise)]
    with unchanged("the loss", *inputs):
        got = answer(
            model, inputs[0], labels.to(device()), inputs[1], t.to(device()),
            *[m.to(device()) for m in more],
        )  # fmt: skip
    return model, got


def _judge_loss(model, got, x_t, target, t, labels, what: str) -> None:
    same(len(model.asked), 1, f"the number of times the model was called ({what})")
    expect(model.training, "the loss takes the model out of training mode, in which it was")
    asked, asked_t, asked_labels = model.asked[0]
    close(asked, x_t, f"x_t ({what})")
    close(asked_t.float(), t.float(), f"the t that the model was given ({what})")
    close(asked_labels, labels, f"the labels that the model was given ({what})", 0.0)
    shape = [-1] + [1] * (x_t.dim() - 1)
    answer = 0.7 * torch.sin(x_t) + 0.1 * t.float().view(shape) + 0.01 * labels.view(shape)
    same(tuple(got.shape), (), f"the shape of the loss ({what})")
    close(got, F.mse_loss(answer, target), f"the loss ({what})")
    expect(got.requires_grad, "the loss has no graph, so no gradient reaches the model")
    got.backward()
    expect(model.weight.grad is not None, "no gradient reaches the model")
    want = (2 * (answer - target) * torch.sin(x_t)).mean()
    close(model.weight.grad, want, f"the model's gradient ({what})")


@check("flow_matching_loss")
def flow_matching_loss(answer, report):
    """Velocity of the straight path."""
    with report.property(
        "x_t = (1 - t) x + t noise, and the target is noise - x",
        hint="t = 0 is data and t = 1 noise; other code runs the other way. One t a "
        "sample, for any rank of x; t goes to the model as it is",
    ):
        for shape in SHAPES:
            x, noise, labels = _case(shape)
            t = torch.sigmoid(random(shape[0], seed=9))
            at = t.view(-1, *[1] * (len(shape) - 1))
            model, got = _loss(answer, x, labels, noise, t)
            _judge_loss(model, got, (1 - at) * x + at * noise, noise - x, t, labels, f"{shape}")
    with report.property(
        "the model is called once, with t between 0 and 1",
        hint="a factor of 1000 belongs into the model's embedding",
    ):
        x, noise, labels = _case((6, 3))
        t = torch.linspace(0, 1, 6)
        model, _ = _loss(answer, x, labels, noise, t)
        close(model.asked[0][1].float(), t, "the t that the model was given")
        same(len(model.asked), 1, "the number of calls")


@check("ddpm_loss")
def ddpm_loss(answer, report):
    """The noise."""
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)
    with report.property(
        "x_t = sqrt(a_t) x + sqrt(1 - a_t) noise, and the target is the noise",
        hint="a_t is alphas_cumprod[t], one for each sample; roots of both factors",
    ):
        for shape in SHAPES:
            x, noise, labels = _case(shape, 20)
            t = torch.tensor([0, 49, 7, 23, 31])[: shape[0]]
            a = alphas[t].view(-1, *[1] * (len(shape) - 1))
            model, got = _loss(answer, x, labels, noise, t, alphas)
            x_t = a.sqrt() * x + (1 - a).sqrt() * noise
            _judge_loss(model, got, x_t, noise, t, labels, f"{shape}")
    with report.property(
        "the model gets the integer step", hint="do not divide t by the number of steps"
    ):
        x, noise, labels = _case((3, 4))
        model, _ = _loss(answer, x, labels, noise, torch.tensor([1, 20, 49]), alphas)
        same(model.asked[0][1].tolist(), [1, 20, 49], "the steps that the model was given")


def _euler(noise, labels, steps, guidance, null):
    x = noise.double()
    shape = [-1] + [1] * (noise.dim() - 1)

    def model(x, t, labels):
        return 0.7 * torch.sin(x) + 0.1 * t + 0.01 * labels.view(shape)

    for i in range(steps):
        t = 1 - i / steps
        v = model(x, t, labels)
        if guidance != 1:
            rest = model(x, t, torch.full_like(labels, null))
            v = rest + guidance * (v - rest)
        x = x - v / steps
    return x.float()


def _judge_times(model: _Asked, steps: int) -> None:
    """The times at which the model was asked, before what they lead to."""
    same(len(model.asked), steps, f"the number of model calls for {steps} steps")
    times = [float(t.flatten()[0]) for _, t, _ in model.asked]
    want = [1 - i / steps for i in range(steps)]
    if max(abs(a - b) for a, b in zip(times, want, strict=True)) < 1e-6:
        return
    known = {
        "linspace(1, 0, steps) has both ends: take steps + 1 points and leave the last out": [
            1 - i / max(steps - 1, 1) for i in range(steps)
        ],
        "a step begins at its later time: ask at t, then move from t to t - 1/steps": [
            1 - (i + 1) / steps for i in range(steps)
        ],
        "t = 1 is noise here: count down from 1": [i / steps for i in range(steps)],
        "t is unscaled: a factor of 1000 belongs into the model": [1000 * t for t in want],
    }
    hint = next(
        (h for h, ts in known.items() if torch.allclose(*map(torch.tensor, (times, ts)))), ""
    )
    asked, wanted = (", ".join(f"{t:.4g}" for t in ts) for ts in (times, want))
    raise Wrong(
        f"in {steps} steps the model was asked at t = {asked}, expected {wanted}", hint=hint
    )


@check("euler_sample")
def euler_sample(answer, report):
    """From noise to data."""
    _, noise, labels = _case((5, 6, 2), 40)
    where = device()
    with report.property(
        "equal steps from t=1 to t=0 along minus the velocity",
        hint="the model is asked at 1, 1 - 1/steps, …, 1/steps; x moves by -1/steps times v",
    ):
        for steps in (4, 7, 1):
            model = _Asked().to(where)
            given = noise.to(where)
            with unchanged("euler_sample", given):
                got = answer(model, given, labels.to(where), steps)
            _judge_times(model, steps)
            close(got, _euler(noise, labels, steps, 1.0, 0), f"the sample after {steps} steps")
    with report.property(
        "t is one fp32 number a sample", hint="a tensor [B], not a Python float, not float64"
    ):
        for dtype in (torch.float32, torch.bfloat16):
            model = _Asked().to(where)
            answer(model, noise.to(where, dtype), labels.to(where), 2)
            same(tuple(model.asked[0][1].shape), (5,), f"the shape of t for noise in {dtype}")
            same(model.asked[0][1].dtype, torch.float32, f"the dtype of t for noise in {dtype}")
    with report.property(
        "guidance: uncond + g (cond - uncond), from one batched call a step",
        hint="stack both halves along the batch; null_label 0 is a label like any other",
    ):
        for g, null in ((2.5, 10), (2.5, 0), (0.5, 10), (0.0, 10)):
            model = _Asked().to(where)
            got = answer(model, noise.to(where), labels.to(where), 5, g, null)
            same(len(model.asked), 5, "the number of model calls for 5 guided steps")
            what = f"the sample, guidance {g}, null label {null}"
            close(got, _euler(noise, labels, 5, g, null), what)
    with report.property(
        "no gradient is recorded", hint="torch.no_grad: a graph over all steps fills the memory"
    ):
        model = _Asked().to(where)
        got = answer(model, noise.to(where), labels.to(where), 3)
        expect(not got.requires_grad, "the sample requires grad")
        expect(not model.recorded, "the model was called while gradients are recorded")
    with report.property(
        "ValueError for guidance without a null label", hint="only guidance 1 needs none"
    ):
        model = _Asked().to(where)
        refuses(
            answer, model, noise.to(where), labels.to(where), 3, 2.0, what="guidance 2, no label"
        )
