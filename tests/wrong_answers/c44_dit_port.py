"""Answers to chapter 44: mistakes engineers make when they port and cut a DiT, and right ones."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardbook.models import diffusion, rope3d
from shardbook.models.dit_parallel import TensorParallelDiTBlock, ulysses_dit_forward
from shardbook.parallel.tensor import gather_from_group
from shardbook.parallel.ulysses import ulysses_attention
from tests.wrong_answers import right, wrong

right("rope_3d")(rope3d.rope_3d)
right("apply_rope")(rope3d.apply_rope)
right("TensorParallelDiTBlock")(TensorParallelDiTBlock)
right("ulysses_dit_forward")(ulysses_dit_forward)
right("video_dpo_loss")(diffusion.video_dpo_loss)


# rope_3d


def _refuse(head_dim, split):
    if sum(split) != head_dim or any(n % 2 for n in split):
        raise ValueError(f"a split of {split} does not fit a head of {head_dim}")


def _angles(positions, split, base=10_000.0, exponent=lambda i, n: 2 * i / n):
    columns = []
    for axis, channels in enumerate(split):
        for i in range(channels // 2):
            columns.append(positions[:, axis].float() * base ** -exponent(i, channels))
    return torch.stack(columns, dim=1)


def _both(angles):
    wide = angles.repeat_interleave(2, dim=1)
    return wide.cos(), wide.sin()


@right("rope_3d")
def column_by_column(positions, head_dim, split):
    _refuse(head_dim, split)
    return _both(_angles(positions, split))


@wrong("rope_3d", says="off by|differs|cos")
def halves_instead_of_pairs(positions, head_dim, split):
    _refuse(head_dim, split)
    angles = _angles(positions, split)
    wide = torch.cat([angles, angles], dim=1)
    return wide.cos(), wide.sin()


@wrong("rope_3d", says="off by|differs|cos")
def frequencies_of_the_whole_head(positions, head_dim, split):
    _refuse(head_dim, split)
    return _both(_angles(positions, split, exponent=lambda i, n: 2 * i / head_dim))


@wrong("rope_3d", says="off by|differs|cos")
def columns_before_rows(positions, head_dim, split):
    _refuse(head_dim, split)
    return _both(_angles(positions[:, [0, 2, 1]], split))


@wrong("rope_3d", says="count from 0|off by|differs")
def counts_from_zero(positions, head_dim, split):
    _refuse(head_dim, split)
    return _both(_angles(positions - positions.min(dim=0).values, split))


@wrong("rope_3d", says="float64|double|narrow|fp32")
def in_float64(positions, head_dim, split):
    _refuse(head_dim, split)
    pair = torch.arange(1, dtype=torch.float64, device=positions.device)
    return _both(_angles(positions + pair.to(torch.int64), split))


@wrong("rope_3d", says="complex|fp32")
def by_polar(positions, head_dim, split):
    _refuse(head_dim, split)
    angles = _angles(positions, split)
    turn = torch.polar(torch.ones_like(angles), angles)
    return turn.real.repeat_interleave(2, 1), turn.imag.repeat_interleave(2, 1)


@wrong("rope_3d", says="accepted|ValueError")
def any_split(positions, head_dim, split):
    return _both(_angles(positions, [n // 2 * 2 for n in split]))


_tables: dict = {}


@wrong("rope_3d", says="as many other positions")
def tables_kept_by_length(positions, head_dim, split):
    key = (len(positions), head_dim, split, positions.dtype, positions.device)
    if key not in _tables:
        _tables[key] = column_by_column(positions, head_dim, split)
    return _tables[key]


@wrong("rope_3d", says="positions' device")
def tables_on_the_default_device(positions, head_dim, split):
    _refuse(head_dim, split)
    where = torch.tensor(0.0).device
    columns = []
    for axis, channels in enumerate(split):
        for i in range(channels // 2):
            angle = positions[:, axis].float() * 10_000.0 ** (-2 * i / channels)
            columns.append(angle.to(where))
    return _both(torch.stack(columns, dim=1))


# apply_rope


@right("apply_rope")
def by_pairs(x, cos, sin):
    pairs = x.float().unflatten(-1, (-1, 2))  # [B, H, S, D/2, 2]
    c, s = cos[..., 0::2], sin[..., 0::2]
    a, b = pairs.unbind(-1)
    return torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(-2).to(x.dtype)


@wrong("apply_rope", says="off by|differs|turned")
def turns_back(x, cos, sin):
    return by_pairs(x, cos, -sin)


@wrong("apply_rope", says="off by|differs|turned")
def pairs_the_halves(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


@wrong("apply_rope", says="off by|differs|turned")
def swaps_without_a_sign(x, cos, sin):
    turned = x.float().unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x.float() * cos + turned * sin).to(x.dtype)


@wrong("apply_rope", says="complex|narrow")
def by_complex_numbers(x, cos, sin):
    turn = torch.complex(cos[..., 0::2].contiguous(), sin[..., 0::2].contiguous())
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


@wrong("apply_rope", says="rounded more than once")
def in_the_dtype_of_x(x, cos, sin):
    c, s = (t.to(x.dtype)[..., 0::2] for t in (cos, sin))
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(-2)


@wrong("apply_rope", says="dtype")
def forgets_the_dtype(x, cos, sin):
    return by_pairs(x.float(), cos, sin)


@wrong("apply_rope", says="changed|off by|in place|modif|inputs")
def in_place(x, cos, sin):
    x.copy_(by_pairs(x, cos, sin))
    return x


@wrong("apply_rope", says="gradient.*no graph")
@torch.no_grad()
def not_differentiable(x, cos, sin):
    return by_pairs(x, cos, sin)


# TensorParallelDiTBlock


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


@right("TensorParallelDiTBlock")
class ByHand(nn.Module):
    """One class; the shards are cut by rows and columns."""

    bias_times = 1

    def __init__(self, block, group=None):
        super().__init__()
        self.group, self.world, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        if block.attn.num_heads % self.world or block.mlp.fc1.out_features % self.world:
            raise ValueError("heads or hidden channels do not divide by the ranks")
        self.heads = block.attn.num_heads // self.world
        with torch.no_grad():
            new = copy.deepcopy(block)
            for name in ("attn.qkv", "mlp.fc1"):
                self.rows(new.get_submodule(name), self.qkv_rows if "qkv" in name else self.own)
            for name in ("attn.proj", "mlp.fc2"):
                layer = new.get_submodule(name)
                layer.weight = nn.Parameter(self.own(layer.weight.T).T.clone())
        for name, child in new.named_children():
            self.add_module(name, child)

    def own(self, t):
        return t.chunk(self.world)[self.rank]

    def qkv_rows(self, t):
        return torch.cat([self.own(part) for part in t.chunk(3)])

    def rows(self, layer, cut):
        layer.weight = nn.Parameter(cut(layer.weight).clone())
        layer.bias = nn.Parameter(cut(layer.bias).clone())

    def enter(self, x):
        return _Copy.apply(x, self.group)

    def leave(self, x, layer):
        return _Sum.apply(x @ layer.weight.T, self.group) + layer.bias

    def turn(self, q, rope):
        return by_pairs(q, *rope) if rope is not None else q

    def attend(self, h, rope):
        qkv = self.attn.qkv(self.enter(h)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        out = F.scaled_dot_product_attention(self.turn(q, rope), self.turn(k, rope), v)
        return self.leave(out.transpose(1, 2).flatten(2), self.attn.proj)

    def feed(self, h):
        h = F.gelu(self.mlp.fc1(self.enter(h)), approximate="tanh")
        return self.leave(h, self.mlp.fc2)

    def forward(self, x, c, rope=None):
        s1, k1, g1, s2, k2, g2 = (m[:, None] for m in self.adaLN_modulation(c).chunk(6, 1))
        x = x + g1 * self.attend(self.norm1(x) * (1 + k1) + s1, rope)
        return x + g2 * self.feed(self.norm2(x) * (1 + k2) + s2)


@right("TensorParallelDiTBlock")
class InOneFlatBuffer(ByHand):
    """All shards are views of one buffer, as optimizers of flat parameters want it."""

    def __init__(self, block, group=None):
        super().__init__(block, group)
        flat, at = torch.cat([p.detach().flatten() for p in self.parameters()]), 0
        for p in self.parameters():
            p.data = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()


@wrong("TensorParallelDiTBlock", says="shares memory")
class RemembersTheBlock(ByHand):
    def __init__(self, block, group=None):
        super().__init__(block, group)
        self.full = [block]  # not registered, so no parameter of ours


@wrong("TensorParallelDiTBlock", says="holds")
class HoldsTheFullMatrix(ByHand):
    def __init__(self, block, group=None):
        super().__init__(block, group)
        self.register_buffer("whole", block.attn.qkv.weight.detach().clone(), persistent=False)


@wrong("TensorParallelDiTBlock", says="raised TypeError")
class AlwaysWithRope(ByHand):
    def turn(self, q, rope):
        return by_pairs(q, *rope)


@wrong("TensorParallelDiTBlock", says="second call")
class TheFirstConditionForEver(ByHand):
    def forward(self, x, c, rope=None):
        self.c = getattr(self, "c", c)
        return super().forward(x, self.c, rope)


@wrong("TensorParallelDiTBlock", says="off by|qkv|differs")
class CutsTheFusedMatrix(ByHand):
    def qkv_rows(self, t):
        return self.own(t)


@wrong("TensorParallelDiTBlock", says="off by|bias|differs")
class BiasOnEveryRank(ByHand):
    def leave(self, x, layer):
        return _Sum.apply(layer(x), self.group)


@wrong("TensorParallelDiTBlock", says="part of the full block's parameter.*attn.proj.bias")
class BiasDividedWhenBuilt(BiasOnEveryRank):
    """The right output and gradients, but the bias learns P times too fast."""

    def __init__(self, block, group=None):
        super().__init__(block, group)
        with torch.no_grad():
            self.attn.proj.bias /= self.world
            self.mlp.fc2.bias /= self.world


@wrong("TensorParallelDiTBlock", says="gradient")
class NoGradientSum(ByHand):
    def enter(self, x):
        return x


@wrong("TensorParallelDiTBlock", says="gradient")
class SumsBeforeTheModulation(ByHand):
    def forward(self, x, c, rope=None):
        c = self.enter(c)
        s1, k1, g1, s2, k2, g2 = (m[:, None] for m in self.adaLN_modulation(c).chunk(6, 1))
        x = x + g1 * self.attend(self.norm1(x) * (1 + k1) + s1, rope)
        return x + g2 * self.feed(self.norm2(x) * (1 + k2) + s2)

    def attend(self, h, rope):
        qkv = self.attn.qkv(h).unflatten(-1, (3, self.heads, -1))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        out = F.scaled_dot_product_attention(self.turn(q, rope), self.turn(k, rope), v)
        return self.leave(out.transpose(1, 2).flatten(2), self.attn.proj)


@wrong("TensorParallelDiTBlock", says="parameter|names|shard|holds|gradient|shape")
class Replicated(nn.Module):
    def __init__(self, block, group=None):
        super().__init__()
        if block.attn.num_heads % dist.get_world_size(group):
            raise ValueError("heads do not divide")
        for name, child in copy.deepcopy(block).named_children():
            self.add_module(name, child)
        self.whole = [copy.deepcopy(block)]

    def forward(self, x, c, rope=None):
        return type(self.whole[0]).forward(self, x, c, rope=rope)


@wrong("TensorParallelDiTBlock", says="memory|holds|shares")
class KeepsTheWholeAlive(ByHand):
    def rows(self, layer, cut):
        layer.weight, layer.bias = nn.Parameter(cut(layer.weight)), nn.Parameter(cut(layer.bias))

    qkv_rows = ByHand.qkv_rows


@wrong("TensorParallelDiTBlock", says="all.?reduce|used|bytes")
class GathersTheRows(ByHand):
    def leave(self, x, layer):
        parts = x @ layer.weight.T
        out = [torch.empty_like(parts) for _ in range(self.world)]
        dist.all_gather(out, parts.detach().contiguous(), group=self.group)
        out[self.rank] = parts
        return sum(out) + layer.bias


@wrong("TensorParallelDiTBlock", says="accepted|ValueError|raised|hidden")
class AnyHeads(ByHand):
    def __init__(self, block, group=None):
        hidden = block.mlp.fc1.out_features
        block.mlp.fc1.out_features = hidden - hidden % dist.get_world_size(group)
        super().__init__(block, group)
        block.mlp.fc1.out_features = hidden


# ulysses_dit_forward


class _Attend(torch.overrides.TorchFunctionMode):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                return self.attend(*args)
        return func(*args, **(kwargs or {}))


def _forward(model, x, t, labels, group, attend=None, cut_rope=True, gather=True, clean=True,
             only_without_errors=False, refuse=True):  # fmt: skip
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    attend = attend or (lambda q, k, v: ulysses_attention(q, k, v, group=group))

    def cut(y, dim):
        if refuse and y.shape[dim] % world:
            raise ValueError(f"{y.shape[dim]} tokens do not divide by {world} ranks")
        return y.tensor_split(world, dim)[rank]

    def first(module, args, kwargs):
        return (cut(args[0], 1), *args[1:]), kwargs

    def tables(module, args, kwargs):
        rope = kwargs.get("rope")
        if rope is not None:
            length = args[0].shape[1]
            parts = [cut(r, 0) if cut_rope else r[:length] for r in rope]
            kwargs = kwargs | {"rope": tuple(parts)}
        return args, kwargs

    hooks = [model.blocks[0].register_forward_pre_hook(first, with_kwargs=True)]
    hooks += [b.register_forward_pre_hook(tables, with_kwargs=True) for b in model.blocks]
    if gather:
        hooks.append(
            model.final_layer.register_forward_hook(
                lambda m, a, out: gather_from_group(out, 1, group)
            )
        )
    try:
        with _Attend(attend):
            out = model(x, t, labels)
    except Exception:
        if clean and not only_without_errors:
            for hook in hooks:
                hook.remove()
        raise
    if clean:
        for hook in hooks:
            hook.remove()
    return out


@right("ulysses_dit_forward")
def by_two_hooks(model, x, t, labels, group=None):
    return _forward(model, x, t, labels, group)


@wrong("ulysses_dit_forward", says="gradient|all.to.all")
def computes_the_whole(model, x, t, labels, group=None):
    return model(x, t, labels)


@wrong("ulysses_dit_forward", says="off by|differs")
def attends_to_own_tokens(model, x, t, labels, group=None):
    return _forward(model, x, t, labels, group, attend=F.scaled_dot_product_attention)


@wrong("ulysses_dit_forward", says="positions|off by|rank")
def first_positions_everywhere(model, x, t, labels, group=None):
    return _forward(model, x, t, labels, group, cut_rope=False)


@wrong("ulysses_dit_forward", says="shape|output")
def own_tokens_only(model, x, t, labels, group=None):
    return _forward(model, x, t, labels, group, gather=False)


@wrong("ulysses_dit_forward", says="left|hook")
def leaves_its_hooks(model, x, t, labels, group=None):
    return _forward(model, x, t, labels, group, clean=False)


@wrong("ulysses_dit_forward", says="all.to.all|moved|calls")
def gathers_keys_and_values(model, x, t, labels, group=None):
    from shardbook.parallel.tensor import all_gather_to_group

    def attend(q, k, v):
        k, v = (all_gather_to_group(y, 2, group) for y in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    return _forward(model, x, t, labels, group, attend=attend)


@wrong("ulysses_dit_forward", says="gradient")
def gradient_of_all_ranks(model, x, t, labels, group=None):
    out = _forward(model, x, t, labels, group)
    return out.detach() + (out - out.detach()) * dist.get_world_size(group)


@wrong("ulysses_dit_forward", says="left on the model after the second block raised")
def leaves_its_hooks_when_the_model_raises(model, x, t, labels, group=None):
    return _forward(model, x, t, labels, group, only_without_errors=True)


@wrong("ulysses_dit_forward", says="something is left")
def leaves_the_model_in_eval_mode(model, x, t, labels, group=None):
    return _forward(model.eval(), x, t, labels, group)


@wrong("ulysses_dit_forward", says="something is left")
def remembers_its_inputs(model, x, t, labels, group=None):
    model.last_inputs = x, t, labels
    return _forward(model, x, t, labels, group)


@wrong("ulysses_dit_forward", says="gradient of x")
def inputs_without_gradient(model, x, t, labels, group=None):
    return _forward(model, x.detach(), t.detach(), labels, group)


@wrong("ulysses_dit_forward", says="10 tokens on 4 ranks raised no ValueError")
def cuts_what_does_not_divide(model, x, t, labels, group=None):
    """The collectives end the process: all-to-all of unequal parts."""
    return _forward(model, x, t, labels, group, refuse=False)


# video_dpo_loss


@right("video_dpo_loss")
def by_softplus(model_win, model_lose, ref_win, ref_lose, beta):
    return F.softplus(beta * ((model_win - ref_win) - (model_lose - ref_lose))).mean()


@wrong("video_dpo_loss", says="off by|differs|loss")
def as_if_likelihoods(model_win, model_lose, ref_win, ref_lose, beta):
    return by_softplus(model_lose, model_win, ref_lose, ref_win, beta)


@wrong("video_dpo_loss", says="off by|differs|loss")
def half_of_beta(model_win, model_lose, ref_win, ref_lose, beta):
    return by_softplus(model_win, model_lose, ref_win, ref_lose, beta / 2)


@wrong("video_dpo_loss", says="off by|differs|loss")
def without_the_reference(model_win, model_lose, ref_win, ref_lose, beta):
    return F.softplus(beta * (model_win - model_lose)).mean()


@wrong("video_dpo_loss", says="off by|differs|loss|shape")
def sums(model_win, model_lose, ref_win, ref_lose, beta):
    return by_softplus(model_win, model_lose, ref_win, ref_lose, beta) * len(model_win)


@wrong("video_dpo_loss", says="off by|differs|loss|mean")
def mean_before_the_sigmoid(model_win, model_lose, ref_win, ref_lose, beta):
    return by_softplus(model_win.mean(), model_lose.mean(), ref_win.mean(), ref_lose.mean(), beta)


@wrong("video_dpo_loss", says="inf|nan|overflow|off by")
def log_of_sigmoid(model_win, model_lose, ref_win, ref_lose, beta):
    advantage = (model_win - ref_win) - (model_lose - ref_lose)
    return -torch.sigmoid(-beta * advantage).log().mean()


@wrong("video_dpo_loss", says="gradient|point")
def detached_winner(model_win, model_lose, ref_win, ref_lose, beta):
    return by_softplus(model_win.detach() + 0 * model_win, model_lose, ref_win, ref_lose, beta)
