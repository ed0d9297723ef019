"""A tensor is a storage, an offset, sizes and strides. What each layout operation does to them.

Element ``x[i, j]`` lies at ``storage[offset + i * stride[0] + j * stride[1]]``; an operation that
can be said by other sizes and strides is free, any other one copies.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives them to a fresh tensor of this shape.

    (2, 3, 4) -> (12, 4, 1). A size of 0 counts as 1, as in torch, so that strides never collapse.
    """
    strides = []
    step = 1
    for size in reversed(shape):  # the last dimension is the one whose neighbours touch
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def can_view(shape: Sequence[int], strides: Sequence[int], new_shape: Sequence[int]) -> bool:
    """Whether ``x.view(new_shape)`` works without a copy, for x of these sizes and strides.

    No size of new_shape may be -1. The rule (torch.Tensor.view's documentation): dimensions can be
    merged only where stride[i] == stride[i + 1] * size[i + 1]; any dimension can be split.
    """
    numel = math.prod(shape)
    if min(new_shape, default=0) < 0 or math.prod(new_shape) != numel:
        return False
    if numel == 0:
        return True  # no element can be at the wrong place
    runs = []  # [elements, stride of the innermost dimension], outermost first
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue  # its stride is never used
        if runs and runs[-1][1] == size * stride:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    for size in reversed(new_shape):  # each run must be filled by whole new dimensions
        if size == 1:
            continue
        left = runs[-1][0]
        if left % size:
            return False
        runs[-1][0] = left // size
        if runs[-1][0] == 1:
            runs.pop()
    return True


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, S, H*D] -> [B, H, S, D], a view: head h owns channels h*D to (h+1)*D.

    ValueError where the channels do not divide by the heads.
    """
    channels = x.shape[-1]
    if num_heads < 1 or channels % num_heads:
        raise ValueError(f"{channels} channels can't be split over {num_heads} heads evenly")
    x = x.unflatten(-1, (num_heads, channels // num_heads))  # [B, S, H, D]
    return x.transpose(1, 2)  # [B, H, S, D]


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, S, D] -> contiguous [B, S, H*D], the inverse of split_heads."""
    x = x.transpose(1, 2).contiguous()  # [B, S, H, D]; view can't merge H and D before the copy
    return x.flatten(2)  # [B, S, H*D]


def shard(x: Tensor, world_size: int, rank: int, dim: int = 0) -> Tensor:
    """This rank's piece of x along dim, a view, of the sizes torch.chunk gives.

    10 rows over 4 ranks are 3, 3, 3, 1; ranks for which nothing is left get an empty piece, so
    that every rank has one (torch.chunk returns fewer).
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks 0 to {world_size - 1}")
    length = x.shape[dim]
    size = -(-length // world_size)  # rounded up
    start = min(rank * size, length)
    return x.narrow(dim, start, min(size, length - start))


def unshard(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The whole tensor from all its pieces in rank order: a copy, since pieces lie apart."""
    return torch.cat(list(shards), dim=dim)


def patchify(images: Tensor, patch: int) -> Tensor:
    """[B, C, H, W] -> [B, (H/p)*(W/p), p*p*C]: a token for each p x p square, in row order.

    Inside a token: rows, columns, channels last (arXiv 2010.11929 flattens patches to P*P*C).
    ValueError where the patch does not divide height and width.
    """
    batch, channels, height, width = images.shape
    if patch < 1 or height % patch or width % patch:
        raise ValueError(f"an image of {height} x {width} can't be cut into squares of {patch}")
    rows, columns = height // patch, width // patch
    x = images.reshape(batch, channels, rows, patch, columns, patch)  # [B, C, h, p, w, p]
    x = x.permute(0, 2, 4, 3, 5, 1)  # [B, h, w, p, p, C]
    return x.reshape(batch, rows * columns, patch * patch * channels)  # [B, h*w, p*p*C]


def unpatchify(tokens: Tensor, patch: int, channels: int, height: int) -> Tensor:
    """[B, (H/p)*(W/p), p*p*C] -> [B, C, H, W], the inverse of patchify; W follows from the count.

    ValueError where the sizes don't divide.
    """
    batch, count, length = tokens.shape
    if length != patch * patch * channels:
        raise ValueError(f"a token of {length} values is not {patch} x {patch} x {channels}")
    if height < 1 or height % patch or count % (height // patch):
        raise ValueError(f"{count} squares of {patch} don't make an image of height {height}")
    rows = height // patch
    columns = count // rows
    x = tokens.reshape(batch, rows, columns, patch, patch, channels)  # [B, h, w, p, p, C]
    x = x.permute(0, 5, 1, 3, 2, 4)  # [B, C, h, p, w, p]
    return x.reshape(batch, channels, rows * patch, columns * patch)  # [B, C, H, W]


def sliding_windows(x: Tensor, size: int, step: int) -> Tensor:
    """[S, D] -> [W, size, D] on the same memory, W = (S - size) // step + 1.

    Window w starts at row w * step; windows overlap where step < size, so don't write to them.
    ValueError where size > S.
    """
    length, width = x.shape
    if not 1 <= size <= length or step < 1:
        raise ValueError(f"no window of {size} rows every {step} rows fits in {length} rows")
    windows = (length - size) // step + 1
    row, column = x.stride()
    return x.as_strided((windows, size, width), (step * row, row, column))  # [W, size, D]
