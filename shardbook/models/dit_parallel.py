"""A diffusion transformer over several ranks: by heads (tensor parallel) or by tokens (Ulysses)."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..parallel.tensor import copy_to_group, gather_from_group, reduce_from_group
from ..parallel.ulysses import ulysses_attention
from .dit import modulate
from .rope3d import apply_rope

Group = dist.ProcessGroup | None
Tables = tuple[Tensor, Tensor]


def _cut(linear: nn.Linear, parts: int, dim: int, world: int, rank: int) -> nn.Linear:
    """This rank's shard of a layer whose weight has `parts` equal blocks along dim, cut apart."""
    weight = linear.weight.detach()
    pieces = [p.chunk(world, dim)[rank] for p in weight.chunk(parts, dim)]
    shard = nn.Linear(1, 1, bias=linear.bias is not None, device="meta")
    shard.weight = nn.Parameter(torch.cat(pieces, dim).clone())
    shard.out_features, shard.in_features = shard.weight.shape
    if linear.bias is not None:
        bias = linear.bias.detach()
        if dim == 0:
            bias = torch.cat([b.chunk(world)[rank] for b in bias.chunk(parts)])
        shard.bias = nn.Parameter(bias.clone())
    return shard


class _Attention(nn.Module):
    """This rank's heads; proj's bias is whole and added once, after the sum."""

    def __init__(self, attn: nn.Module, group: Group):
        super().__init__()
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.num_heads = group, attn.num_heads // world
        self.qkv = _cut(attn.qkv, 3, 0, world, rank)  # q, k and v each by head
        self.proj = _cut(attn.proj, 1, 1, world, rank)

    def forward(self, x: Tensor, rope: Tables | None = None) -> Tensor:
        qkv = self.qkv(copy_to_group(x, self.group)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H/P, S, D/H]
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # [B, S, D/P]
        return reduce_from_group(F.linear(out, self.proj.weight), self.group) + self.proj.bias


class _Mlp(nn.Module):
    """This rank's hidden channels; fc2's bias is whole and added once, after the sum."""

    def __init__(self, mlp: nn.Module, group: Group):
        super().__init__()
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group = group
        self.fc1 = _cut(mlp.fc1, 1, 0, world, rank)
        self.fc2 = _cut(mlp.fc2, 1, 1, world, rank)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(copy_to_group(x, self.group)), approximate="tanh")  # [B, S, F/P]
        return reduce_from_group(F.linear(h, self.fc2.weight), self.group) + self.fc2.bias


class TensorParallelDiTBlock(nn.Module):
    """A DiTBlock whose heads and hidden channels are cut over the ranks.

    Built from the full block (the same on every rank), with its names and its own storage. Two
    all-reduces of B S D forward. The modulation depends on [B, D] only, so adaLN is kept whole,
    as are the biases of proj and fc2; their gradients are the full ones on every rank.
    ValueError where heads or hidden channels do not divide by the ranks.
    """

    def __init__(self, block: nn.Module, group: Group = None):
        super().__init__()
        world = dist.get_world_size(group)
        for what, size in (("heads", block.attn.num_heads), ("mlp", block.mlp.fc1.out_features)):
            if size % world:
                raise ValueError(f"{what} of {size} do not divide by {world} ranks")
        self.norm1, self.norm2 = copy.deepcopy(block.norm1), copy.deepcopy(block.norm2)
        self.adaLN_modulation = copy.deepcopy(block.adaLN_modulation)
        self.attn, self.mlp = _Attention(block.attn, group), _Mlp(block.mlp, group)

    def forward(self, x: Tensor, c: Tensor, rope: Tables | None = None) -> Tensor:
        modulation = self.adaLN_modulation(c).chunk(6, dim=1)  # six times [B, D]
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation
        h = self.attn(modulate(self.norm1(x), shift_attn, scale_attn), rope)
        x = x + gate_attn[:, None] * h
        h = self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x + gate_mlp[:, None] * h


class attending(TorchFunctionMode):
    """Inside it, scaled_dot_product_attention(q, k, v) is attend(q, k, v, group=group)."""

    def __init__(self, attend: Callable[..., Tensor], group: Group):
        super().__init__()
        self.attend, self.group = attend, group

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            # here the mode itself is off: what attend computes with the same function is its own
            return self.attend(*args, group=self.group, **kwargs)
        return func(*args, **kwargs)


def ulysses_dit_forward(
    model: nn.Module, x: Tensor, t: Tensor, labels: Tensor, group: Group = None
) -> Tensor:
    """model(x, t, labels) with the tokens cut over the ranks between embedding and output.

    model has `blocks`, called as block(tokens, c, rope=...), and `final_layer`. A rank keeps S/P
    tokens and the rotary tables of their positions; attention takes four all-to-alls a block.
    Every rank returns the full output; the ranks' parameter gradients sum to the full ones. The
    model is left as it was. ValueError where tokens or heads do not divide.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)

    def enter(module, args, kwargs):  # before each block
        tokens, *rest = args
        if module is model.blocks[0]:
            if tokens.shape[1] % world:
                raise ValueError(f"{tokens.shape[1]} tokens do not divide by {world} ranks")
            # backward leaves the others' tokens at zero, so that ranks sum to the whole
            tokens = tokens.chunk(world, dim=1)[rank]  # [B, S/P, D]
        if kwargs.get("rope") is not None:  # the positions of our tokens, not the first ones
            kwargs = kwargs | {"rope": tuple(r.chunk(world)[rank] for r in kwargs["rope"])}
        return (tokens, *rest), kwargs

    def leave(module, args, output):  # after the final layer
        return gather_from_group(output, 1, group)  # [B, S, …]; backward keeps our own tokens

    hooks = [b.register_forward_pre_hook(enter, with_kwargs=True) for b in model.blocks]
    hooks.append(model.final_layer.register_forward_hook(leave))
    try:
        with attending(ulysses_attention, group):
            return model(x, t, labels)
    finally:
        for hook in hooks:
            hook.remove()
