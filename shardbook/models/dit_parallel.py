"""A diffusion transformer over several ranks: by heads (tensor parallel) or by tokens (Ulysses)."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..parallel.group import Group
from ..parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_group,
    share_of,
    take_rows,
)
from ..parallel.ulysses import ulysses_attention
from .dit import DiTBlock


class TensorParallelDiTBlock(DiTBlock):
    """A DiTBlock whose heads and hidden channels are cut over the ranks.

    Built from the full block (the same on every rank), with its names and its own storage. Two
    all-reduces of B S D forward. The modulation depends on [B, D] only, so adaLN is kept whole,
    as are the biases of proj and fc2; their gradients are the full ones on every rank.
    ValueError where heads or hidden channels do not divide by the ranks.
    """

    def __init__(self, block: nn.Module, group: Group = None):
        nn.Module.__init__(self)  # DiTBlock's would make layers; forward is what we want of it
        for name, child in copy.deepcopy(block).named_children():
            self.add_module(name, child)
        world, attn, mlp = dist.get_world_size(group), self.attn, self.mlp
        attn.num_heads = share_of(attn.num_heads, world, "the number of heads")
        rows = torch.arange(attn.qkv.out_features)  # q, k and v, each by head
        by_rank = rows.view(3, world, -1).transpose(0, 1).flatten()  # a rank's q, k and v together
        attn.qkv = ColumnParallelLinear(take_rows(attn.qkv, by_rank), group)
        attn.proj = RowParallelLinear(attn.proj, group)
        mlp.fc1 = ColumnParallelLinear(mlp.fc1, group)
        mlp.fc2 = RowParallelLinear(mlp.fc2, group)


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
