"""Answers to chapter 43: mistakes made when a diffusion model is written or ported."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

from shardbook.models import diffusion, dit
from tests.wrong_answers import right, wrong

for _name in ("timestep_embedding", "modulate", "DiTBlock"):
    right(_name)(getattr(dit, _name))
for _name in ("flow_matching_loss", "ddpm_loss", "euler_sample"):
    right(_name)(getattr(diffusion, _name))


# timestep_embedding


@right("timestep_embedding")
def by_powers(t, dim, max_period=10_000):
    half = dim // 2
    powers = torch.arange(half, device=t.device).float() / half
    angles = torch.outer(t.float(), float(max_period) ** -powers)
    out = torch.zeros(len(t), dim, device=t.device)
    out[:, :half], out[:, half : 2 * half] = angles.cos(), angles.sin()
    return out


def _embedding(name, order="cs", shift=0, pad=True, dtype=torch.float32, period=None):
    def answer(t, dim, max_period=10_000):
        half = dim // 2
        i = torch.arange(half, dtype=dtype, device=t.device)
        freqs = torch.exp(-math.log(period or max_period) * i / (half - shift))
        angles = t[:, None].to(dtype) * freqs
        parts = {"c": angles.cos(), "s": angles.sin()}
        out = torch.cat([parts[c] for c in order], dim=-1).float()
        return F.pad(out, (0, dim % 2)) if pad else out

    answer.__name__ = name
    wrong("timestep_embedding", says=SAYS[name])(answer)


SAYS = {
    "sines_first": "cos comes first",
    "divided_by_half_minus_1": "dim // 2",
    "odd_dim_comes_out_even": "odd",
    "in_float64": "float64|fp32",
    "max_period_ignored": "max_period",
}
_embedding("sines_first", order="sc")
_embedding("divided_by_half_minus_1", shift=1)  # diffusers' downscale_freq_shift
_embedding("odd_dim_comes_out_even", pad=False)
_embedding("in_float64", dtype=torch.float64)
_embedding("max_period_ignored", period=10_000)


@wrong("timestep_embedding", says="cos|off by")
def cosines_and_sines_interleaved(t, dim, max_period=10_000):
    out = dit.timestep_embedding(t, dim, max_period)
    half = dim // 2
    pairs = torch.stack([out[:, :half], out[:, half : 2 * half]], dim=-1).flatten(1)
    return F.pad(pairs, (0, dim % 2))


@wrong("timestep_embedding", says="device=t.device")
def frequencies_on_the_default_device(t, dim, max_period=10_000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32) / half)
    angles = t.to(freqs.device).float()[:, None] * freqs
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=1), (0, dim % 2))


@wrong("timestep_embedding", says="dim 2|off by|division")
def divides_by_one_less(t, dim, max_period=10_000):
    """As the transformer's code of some repositories does."""
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=t.device) / (half - 1)
    angles = t.float()[:, None] * torch.exp(-math.log(max_period) * steps)
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=1), (0, dim % 2))


# modulate


@right("modulate")
def with_addcmul(x, shift, scale):
    return torch.addcmul(x + shift.unsqueeze(1), x, scale.unsqueeze(1))


@wrong("modulate", says="scale of 0|1 \\+ scale")
def scale_without_one(x, shift, scale):
    return x * scale[:, None] + shift[:, None]


@wrong("modulate", says="\\(1 \\+ scale\\)")
def arguments_swapped(x, shift, scale):
    return x * (1 + shift[:, None]) + scale[:, None]


@wrong("modulate", says="\\(1 \\+ scale\\)")
def shifted_before_it_is_scaled(x, shift, scale):
    return (x + shift[:, None]) * (1 + scale[:, None])


@wrong("modulate", says="B")
def broadcast_along_tokens(x, shift, scale):
    return x * (1 + scale) + shift


@wrong("modulate", says="same|changed|in place|input")
def in_place(x, shift, scale):
    return x.mul_(1 + scale[:, None]).add_(shift[:, None])


@wrong("modulate", says="\\(1 \\+ scale\\)")
def shift_forgotten(x, shift, scale):
    return x * (1 + scale[:, None])


@wrong("modulate", says="gradient reaches shift")
def condition_detached(x, shift, scale):
    return dit.modulate(x, shift.detach(), scale.detach())


# DiTBlock


class BlockOfFunctions(nn.Module):
    """Another way: parameters in plain layers, everything else in functions."""

    def __init__(self, dim, num_heads, mlp_ratio=4.0):
        super().__init__()
        if dim % num_heads != 0:
            raise ValueError(f"{dim} channels can't be cut into {num_heads} heads")
        self.heads = num_heads
        hidden = int(mlp_ratio * dim)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, hidden), "fc2": nn.Linear(hidden, dim)})
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        for p in self.adaLN_modulation.parameters():
            nn.init.constant_(p, 0.0)

    def forward(self, x, c, rope=None):
        dim = x.shape[-1]
        six = self.adaLN_modulation(c)[:, None].split(dim, dim=-1)
        h = F.layer_norm(x, (dim,), eps=1e-6) * (1 + six[1]) + six[0]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attn["qkv"](h).split(dim, dim=-1)
        )
        if rope is not None:
            q, k = (dit.apply_rope(part, *rope) for part in (q, k))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = torch.addcmul(x, six[2], self.attn["proj"](h))
        h = F.layer_norm(x, (dim,), eps=1e-6) * (1 + six[4]) + six[3]
        h = F.gelu(self.mlp["fc1"](h), approximate="tanh")
        return torch.addcmul(x, six[5], self.mlp["fc2"](h))


right("DiTBlock")(BlockOfFunctions)


@wrong("DiTBlock", says="identity")
class BlockNotZeroed(dit.DiTBlock):
    def __init__(self, dim, num_heads, mlp_ratio=4.0):
        super().__init__(dim, num_heads, mlp_ratio)
        self.adaLN_modulation[1].reset_parameters()


@wrong("DiTBlock", says="identity")
class BlockWithAnOldBias(dit.DiTBlock):
    def __init__(self, dim, num_heads, mlp_ratio=4.0):
        super().__init__(dim, num_heads, mlp_ratio)
        nn.init.constant_(self.adaLN_modulation[1].bias, 1.0)


@wrong("DiTBlock", says="order shift, scale, gate")
class BlockScalesFirst(dit.DiTBlock):
    def forward(self, x, c, rope=None):
        scale_a, shift_a, gate_a, scale_m, shift_m, gate_m = self.adaLN_modulation(c).chunk(6, 1)
        x = x + gate_a[:, None] * self.attn(dit.modulate(self.norm1(x), shift_a, scale_a), rope)
        return x + gate_m[:, None] * self.mlp(dit.modulate(self.norm2(x), shift_m, scale_m))


@wrong("DiTBlock", says="values are those|parameters")
class BlockGatesTheStream(dit.DiTBlock):
    def forward(self, x, c, rope=None):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, 1)
        h = x + gate_a[:, None] * self.attn(dit.modulate(self.norm1(x), shift_a, scale_a), rope)
        # the second branch begins from x, not from what attention made of it
        return h + gate_m[:, None] * self.mlp(dit.modulate(self.norm2(x), shift_m, scale_m))


@wrong("DiTBlock", says="named|norms")
class BlockWithNormParameters(dit.DiTBlock):
    def __init__(self, dim, num_heads, mlp_ratio=4.0):
        super().__init__(dim, num_heads, mlp_ratio)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)


class _ErfMlp(dit.Mlp):
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


@wrong("DiTBlock", says="tanh")
class BlockWithErfGelu(dit.DiTBlock):
    def __init__(self, dim, num_heads, mlp_ratio=4.0):
        super().__init__(dim, num_heads, mlp_ratio)
        self.mlp = _ErfMlp(dim, int(dim * mlp_ratio))


@wrong("DiTBlock", says="rope")
class BlockIgnoresRope(dit.DiTBlock):
    def forward(self, x, c, rope=None):
        return super().forward(x, c, None)


class _HeadByHead(dit.Attention):
    def forward(self, x, rope=None):
        qkv = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        q, k, v = qkv
        if rope is not None:
            q, k = dit.apply_rope(q, *rope), dit.apply_rope(k, *rope)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@wrong("DiTBlock", says="rows of qkv")
class BlockWithQkvByHead(dit.DiTBlock):
    def __init__(self, dim, num_heads, mlp_ratio=4.0):
        super().__init__(dim, num_heads, mlp_ratio)
        self.attn = _HeadByHead(dim, num_heads)


class _ByHand(dit.Attention):
    def forward(self, x, rope=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if rope is not None:
            q, k = dit.apply_rope(q, *rope), dit.apply_rope(k, *rope)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


@wrong("DiTBlock", says="scaled_dot_product_attention")
class BlockWithAttentionByHand(dit.DiTBlock):
    def __init__(self, dim, num_heads, mlp_ratio=4.0):
        super().__init__(dim, num_heads, mlp_ratio)
        self.attn = _ByHand(dim, num_heads)


def _block_that_loses(name, stats=False, stream=False, scale=False, keys=False):
    """A block of right values whose gradient is cut somewhere."""

    def norm(h):
        mean, var = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, unbiased=False)
        mean, var = (mean.detach(), var.detach()) if stats else (mean, var)
        return (h - mean) * torch.rsqrt(var + 1e-6)

    class Block(dit.DiTBlock):
        def forward(self, x, c, rope=None):
            six = self.adaLN_modulation(c).chunk(6, 1)
            turned = rope
            if keys and rope is not None:
                turned = None
                self.attn.forward = lambda h: attend(self.attn, h, rope)
            h = dit.modulate(norm(x), *six[:2])
            h = self.attn(h) if turned is None else self.attn(h, turned)
            x = (x.detach() if stream else x) + six[2][:, None] * h
            h = dit.modulate(norm(x), six[3], six[4].detach() if scale else six[4])
            return x + six[5][:, None] * self.mlp(h)

    def attend(attn, h, rope):
        q, k, v = attn.qkv(h).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = dit.apply_rope(q, *rope), dit.apply_rope(k.detach(), *rope)
        return attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    Block.__name__ = name
    return Block


right("DiTBlock")(_block_that_loses("BlockWithANormOfItsOwn"))
for _name, _where in (("stats", "x"), ("stream", "x"), ("scale", "c"), ("keys", ".* with rope")):
    wrong("DiTBlock", says=f"the gradient of {_where}")(
        _block_that_loses(f"BlockDetaches_{_name}", **{_name: True})
    )


@wrong("DiTBlock", says="a call leaves")
class BlockKeepsItsActivations(dit.DiTBlock):
    def forward(self, x, c, rope=None):
        self.seen = [*getattr(self, "seen", []), x]
        return super().forward(x, c, rope)


@wrong("DiTBlock", says="sizes of 1")
class SqueezesTheCondition(dit.DiTBlock):
    """Right for batches; a sample alone loses its first dimension."""

    def forward(self, x, c, rope=None):
        return super().forward(x, c.squeeze(), rope)


# flow_matching_loss


@right("flow_matching_loss")
def with_lerp(model, x, labels, noise, t):
    at = t[(...,) + (None,) * (x.ndim - 1)]
    error = model(x.lerp(noise, at), t, labels) - (noise - x)
    return error.square().mean()


def _flow(name, says, path=None, target=None, time=lambda t: t, mean=torch.mean, flat=False):
    def answer(model, x, labels, noise, t):
        at = t.view(-1, *[1] * (3 if flat else x.dim() - 1))
        x_t = path(x, noise, at) if path else (1 - at) * x + at * noise
        want = target(x, noise) if target else noise - x
        return mean((model(x_t, time(t), labels) - want) ** 2)

    answer.__name__ = name
    wrong("flow_matching_loss", says=says)(answer)


_flow("time_runs_backwards", "t = 0 is data", path=lambda x, n, t: t * x + (1 - t) * n)
_flow("target_is_data_minus_noise", "noise - x", target=lambda x, n: x - n)
_flow("target_is_the_noise", "noise - x", target=lambda x, n: n)
_flow("t_times_1000", "as it is|1000", time=lambda t: t * 1000)
_flow("sum_of_squares", "the loss", mean=torch.sum)
_flow("images_only", "any rank|shape|size", flat=True)
_flow("same_t_for_all", "one t a", path=lambda x, n, t: (1 - t[:1]) * x + t[:1] * n)


@wrong("flow_matching_loss", says="gradient")
def without_gradient(model, x, labels, noise, t):
    with torch.no_grad():
        return diffusion.flow_matching_loss(model, x, labels, noise, t)


@wrong("flow_matching_loss", says="training mode")
def without_dropout(model, x, labels, noise, t):
    return diffusion.flow_matching_loss(model.eval(), x, labels, noise, t)


# ddpm_loss


@right("ddpm_loss")
def with_separate_factors(model, x, labels, noise, t, alphas_cumprod):
    shape = (len(x),) + (1,) * (x.ndim - 1)
    signal = alphas_cumprod.sqrt()[t].reshape(shape)
    rest = torch.sqrt(1 - alphas_cumprod)[t].reshape(shape)
    return (noise - model(torch.addcmul(signal * x, rest, noise), t, labels)).pow(2).mean()


def _ddpm(name, says, mix=None, target=lambda x, n: n, time=lambda t, a: t, at=lambda t, a: a[t]):
    def answer(model, x, labels, noise, t, alphas_cumprod):
        a = at(t, alphas_cumprod).view(-1, *[1] * (x.dim() - 1))
        x_t = mix(x, noise, a) if mix else a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(model(x_t, time(t, alphas_cumprod), labels), target(x, noise))

    answer.__name__ = name
    wrong("ddpm_loss", says=says)(answer)


_ddpm("no_square_roots", "roots", mix=lambda x, n, a: a * x + (1 - a) * n)
_ddpm("no_root_of_the_noise", "roots", mix=lambda x, n, a: a.sqrt() * x + (1 - a) * n)
_ddpm("target_is_the_data", "target is the noise", target=lambda x, n: x)
_ddpm("t_divided_by_the_steps", "integer|divide|t that the model", time=lambda t, a: t / len(a))
_ddpm("off_by_one", "alphas_cumprod\\[t\\]", at=lambda t, a: a[(t - 1).clamp(min=0)])
_ddpm("alphas_not_looked_up_by_sample", "each sample", at=lambda t, a: a[t[:1]].expand(len(t)))


# euler_sample


@right("euler_sample")
@torch.no_grad()
def two_calls_merged(model, noise, labels, steps, guidance=1.0, null_label=None):
    if guidance != 1 and null_label is None:
        raise ValueError("guidance other than 1 needs a null label")
    times = torch.linspace(1, 0, steps + 1).tolist()
    x = noise.clone()
    for now, then in itertools.pairwise(times):
        t = noise.new_full((len(noise),), now, dtype=torch.float32)
        if guidance == 1:
            v = model(x, t, labels)
        else:
            nobody = torch.full_like(labels, null_label)
            rest, v = model(x.repeat(2, *[1] * (x.dim() - 1)), t.repeat(2),
                            torch.cat([nobody, labels])).chunk(2)  # fmt: skip
            v = torch.lerp(rest, v, guidance)
        x = x + (then - now) * v
    return x


def _euler(name, says, time=lambda i, n: 1 - i / n, sign=-1, mix=None, needs=True, truthy=False,
           dtype=torch.float32):  # fmt: skip
    def answer(model, noise, labels, steps, guidance=1.0, null_label=None):
        if needs and guidance != 1 and null_label is None:
            raise ValueError("guidance needs a null label")
        x = noise
        for i in range(steps):
            t = torch.full((len(x),), time(i, steps), dtype=dtype or x.dtype, device=x.device)
            v = model(x, t, labels)
            guide = null_label if truthy else null_label is not None
            if guidance != 1 and guide:
                rest = model(x, t, torch.full_like(labels, null_label))
                v = mix(rest, v, guidance) if mix else rest + guidance * (v - rest)
            x = x + sign * v / steps
        return x

    answer.__name__ = name
    wrong("euler_sample", says=says)(torch.no_grad()(answer))


_euler("from_data_to_noise", "count down from 1", time=lambda i, n: i / n)
_euler("asks_at_the_end_of_a_step", "begins at its later time", time=lambda i, n: 1 - (i + 1) / n)
_euler(
    "both_ends_are_points",
    r"at t = 1, 0.6667(.|\n)*leave the last out",
    time=lambda i, n: 1 - i / max(n - 1, 1),
)
_euler("a_thousand_times_t", "factor of 1000", time=lambda i, n: 1000 * (1 - i / n))
_euler("adds_the_velocity", "minus the velocity|-1/steps", sign=1)
_euler("two_calls_a_step", "batched|number of model calls")
_euler("guides_from_the_condition", "uncond", mix=lambda r, v, g: v + g * (v - r))
_euler("null_label_0_is_no_label", "label like any other|batched", truthy=True)
_euler("t_in_float64", "fp32|float64", dtype=torch.float64)
_euler("t_in_the_dtype_of_the_noise", "dtype of t for noise in torch.bfloat16", dtype=None)


@wrong("euler_sample", says="gradients are recorded")
def detached_at_the_end_only(*args):
    return keeps_the_graph(*args).detach()


@wrong("euler_sample", says="guidance 0.5")
def no_guidance_below_1(model, noise, labels, steps, guidance=1.0, null_label=None):
    guidance = max(1.0, guidance)
    return diffusion.euler_sample(model, noise, labels, steps, guidance, null_label)


@wrong("euler_sample", says="guidance 2.5.*off by")
@torch.no_grad()
def guides_three_channels_only(model, noise, labels, steps, guidance=1.0, null_label=None):
    """As public DiT code does, whose latents have four channels."""
    if guidance == 1 or null_label is None:
        return diffusion.euler_sample(model, noise, labels, steps, guidance, null_label)
    x, both = noise, torch.cat([labels, torch.full_like(labels, null_label)])
    for i in range(steps):
        t = torch.full((2 * len(x),), 1 - i / steps, device=x.device)
        v, rest = model(torch.cat([x, x]), t, both).chunk(2)
        eps = rest[:, :3] + guidance * (v[:, :3] - rest[:, :3])
        x = x - torch.cat([eps, v[:, 3:]], dim=1) / steps
    return x


@wrong("euler_sample", says="gradient")
def keeps_the_graph(model, noise, labels, steps, guidance=1.0, null_label=None):
    x = noise
    for i in range(steps):
        t = torch.full((len(x),), 1 - i / steps, dtype=torch.float32, device=x.device)
        x = x - diffusion.guided(model, x, t, labels, guidance, null_label) / steps
    return x


@wrong("euler_sample", says="null")
def guides_without_a_null_label(model, noise, labels, steps, guidance=1.0, null_label=None):
    return diffusion.euler_sample(model, noise, labels, steps, guidance, null_label or 0)


@wrong("euler_sample", says="changed|input|same")
@torch.no_grad()
def overwrites_the_noise(model, noise, labels, steps, guidance=1.0, null_label=None):
    noise.copy_(diffusion.euler_sample(model, noise, labels, steps, guidance, null_label))
    return noise
