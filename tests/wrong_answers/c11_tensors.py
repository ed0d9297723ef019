"""Chapter 11: layouts that are wrong in one way each."""

import itertools
import math

import torch
from einops import rearrange

from shardbook.basics import tensors
from tests.wrong_answers import right, wrong

for name in (
    "contiguous_strides",
    "can_view",
    "split_heads",
    "merge_heads",
    "shard",
    "unshard",
    "patchify",
    "unpatchify",
    "sliding_windows",
):
    right(name, chapter=11)(getattr(tensors, name))


# contiguous_strides


@right("contiguous_strides")
def products_of_tails(shape):
    return tuple(math.prod(n or 1 for n in shape[i + 1 :]) for i in range(len(shape)))


@wrong("contiguous_strides", says="stride 1")
def no_strides(shape):
    return tuple(0 for _ in shape)


@wrong("contiguous_strides", says="last dimension has stride 1")
def column_major(shape):
    return tuple(math.prod(shape[:i]) for i in range(len(shape)))


@wrong("contiguous_strides", says="last dimension has stride 1")
def own_size_included(shape):
    return tuple(math.prod(shape[i:]) for i in range(len(shape)))


@wrong("contiguous_strides", says="max")
def zero_collapses(shape):
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@wrong("contiguous_strides", says="return a tuple, not a list")
def as_a_list(shape):
    return list(products_of_tails(shape))


@wrong("contiguous_strides", says="expected")
def in_bytes(shape):
    return tuple(4 * s for s in products_of_tails(shape))


@wrong("contiguous_strides", says="asks torch")
def asks_torch(shape):
    return torch.empty(tuple(shape)).stride()


@wrong("contiguous_strides", says=r"the result for \(\) is \(1,\), expected \(\)")
def a_stride_for_a_scalar(shape):
    return products_of_tails(shape) or (1,)


@wrong("contiguous_strides", says="expected ints")
def as_floats(shape):
    return tuple(map(float, products_of_tails(shape)))


@wrong("contiguous_strides", says="floats keep 53 bits")
def by_division_of_floats(shape):
    strides, left = [], math.prod(n or 1 for n in shape)
    for n in shape:
        left = int(left / (n or 1))
        strides.append(left)
    return tuple(strides)


@wrong("contiguous_strides", says="return missing|is None")
def strides_are_printed(shape):
    print(products_of_tails(shape))


# can_view


@right("can_view")
def by_offsets(shape, strides, new_shape):
    """Lists every element's offset and looks for strides of the new shape that give the same."""
    if math.prod(shape) != math.prod(new_shape) or min(new_shape, default=0) < 0:
        return False
    offsets = [0]
    for size, stride in zip(shape, strides, strict=True):
        offsets = [o + i * stride for o in offsets for i in range(size)]
    if not offsets:
        return True
    step = len(offsets)
    for size in new_shape:
        block, step = step, step // size
        for i, offset in enumerate(offsets):
            at = i % block // step
            if at and offset - offsets[i - step] != offsets[step] - offsets[0]:
                return False
    return True


@wrong("can_view", says="in torch")
def same_count_is_enough(shape, strides, new_shape):
    return math.prod(shape) == math.prod(new_shape)


@wrong("can_view", says="stride|splitting")
def only_contiguous(shape, strides, new_shape):
    fresh = tuple(strides) == products_of_tails(shape)
    return fresh and math.prod(shape) == math.prod(new_shape)


@wrong("can_view", says="size 1")
def trips_over_ones(shape, strides, new_shape):
    return _merging(shape, strides, new_shape, skip_ones=False)


@wrong("can_view", says="expanded|elements")
def no_empty_tensors(shape, strides, new_shape):
    return 0 not in shape and _merging(shape, strides, new_shape)


@wrong("can_view", says="expanded|stride 0")
def no_expanded_tensors(shape, strides, new_shape):
    if any(s == 0 and n > 1 for n, s in zip(shape, strides, strict=True)):
        return tuple(shape) == tuple(new_shape)
    return _merging(shape, strides, new_shape)


@wrong("can_view", says="splitting")
def strides_descend(shape, strides, new_shape):
    descend = all(a >= b for a, b in itertools.pairwise(strides))
    return descend and math.prod(shape) == math.prod(new_shape)


@wrong("can_view", says="in torch")
def does_not_count(shape, strides, new_shape):
    return math.prod(shape) != math.prod(new_shape) or _merging(shape, strides, new_shape)


@wrong("can_view", says="asks torch")
def tries_it(shape, strides, new_shape):
    try:
        torch.empty(1000).as_strided(shape, strides).view(new_shape)
    except RuntimeError:
        return False
    return True


@wrong("can_view", says="asks torch")
def asks_torch_only_where_it_is_hard(shape, strides, new_shape):
    if 0 not in shape and strides == torch.empty(shape).stride():
        return math.prod(shape) == math.prod(new_shape)
    return tries_it(shape, strides, new_shape)


@wrong("can_view", says="True or False")
def says_nothing(shape, strides, new_shape):
    return None


def _merging(shape, strides, new_shape, skip_ones=True):
    if math.prod(shape) != math.prod(new_shape) or min(new_shape, default=0) < 0:
        return False
    if 0 in shape:
        return True
    runs = []
    for n, s in zip(shape, strides, strict=True):
        if n == 1 and skip_ones:
            continue
        if runs and runs[-1][1] == n * s:
            runs[-1] = (runs[-1][0] * n, s)
        else:
            runs.append((n, s))
    ends = {math.prod(n for n, _ in runs[i:]) for i in range(len(runs))}
    new_ends = {math.prod(new_shape[i:]) for i in range(len(new_shape))}
    return ends <= new_ends | {1}


# split_heads


@right("split_heads")
def split_by_einops(x, num_heads):
    if x.shape[-1] % num_heads:
        raise ValueError("the heads do not divide the channels")
    return rearrange(x, "b s (h d) -> b h s d", h=num_heads)


@right("split_heads")
def split_by_stride(x, num_heads):
    b, s, c = x.shape
    if c % num_heads:
        raise ValueError("the heads do not divide the channels")
    i, j, k = x.stride()
    d = c // num_heads
    return x.as_strided((b, num_heads, s, d), (i, d * k, j, k))


@wrong("split_heads", says="shape")
def no_split(x, num_heads):
    return x


@wrong("split_heads", says="mixes tokens")
def straight_view(x, num_heads):
    b, s, c = x.shape
    return x.view(b, num_heads, s, c // num_heads)


@wrong("split_heads", says="heads first")
def width_before_heads(x, num_heads):
    return x.unflatten(-1, (-1, num_heads)).permute(0, 3, 1, 2)


@wrong("split_heads", says="swap heads")
def not_transposed(x, num_heads):
    return x.unflatten(-1, (num_heads, -1))


@wrong("split_heads", says="new memory")
def split_and_copied(x, num_heads):
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2).contiguous()


@wrong("split_heads", says="strides")
def split_by_view_of_all(x, num_heads):
    b, s, c = x.shape
    return x.view(b * s, num_heads, c // num_heads).view(b, s, num_heads, -1).transpose(1, 2)


@wrong("split_heads", says="gradient")
def split_detached(x, num_heads):
    return tensors.split_heads(x.detach(), num_heads)


@wrong("split_heads", says="ValueError")
def rest_dropped(x, num_heads):
    d = x.shape[-1] // num_heads
    return x[..., : d * num_heads].unflatten(-1, (num_heads, d)).transpose(1, 2)


@wrong("split_heads", says="ValueError")
def runtime_error(x, num_heads):
    return x.unflatten(-1, (num_heads, x.shape[-1] // num_heads)).transpose(1, 2)


@wrong("split_heads", says=r"2\*\*24")
def split_in_floats(x, num_heads):
    return split_by_einops(x.float(), num_heads).to(x.dtype)


# merge_heads


@right("merge_heads")
def merge_by_copy(x):
    b, h, s, d = x.shape
    out = x.new_empty(b, s, h * d)
    out.unflatten(-1, (h, d)).copy_(x.transpose(1, 2))
    return out


@right("merge_heads")
def merge_by_cat(x):
    return torch.cat(list(x.unbind(1)), dim=-1).contiguous()


@wrong("merge_heads", says="shape")
def no_merge(x):
    return x


@wrong("merge_heads", says="mixes tokens")
def merged_as_it_is(x):
    b, h, s, d = x.shape
    return x.reshape(b, s, h * d)


@wrong("merge_heads", says="heads")
def heads_innermost(x):
    return x.permute(0, 2, 3, 1).flatten(2).contiguous()


@wrong("merge_heads", says="view fails where the strides")
def view_after_transpose(x):
    b, h, s, d = x.shape
    return x.transpose(1, 2).view(b, s, h * d)


@wrong("merge_heads", says="contiguous")
def reshape_only(x):
    b, h, s, d = x.shape
    return x.transpose(1, 2).reshape(b, s, h * d)


@wrong("merge_heads", says="strides|inferred")
def merged_with_minus_one(x):
    return x.transpose(1, 2).contiguous().view(x.shape[0], x.shape[2], -1)


@wrong("merge_heads", says="gradient")
def merged_data(x):
    return x.data.transpose(1, 2).contiguous().flatten(2)


@wrong("merge_heads", says="heads")
def mean_of_heads(x):
    return x.mean(1).repeat(1, 1, x.shape[1])


@wrong("merge_heads", says=r"2\*\*24")
def merged_in_floats(x):
    return merge_by_copy(x.float()).to(x.dtype)


@wrong("merge_heads", says="belongs where x is")
def merged_on_the_default_device(x):
    b, h, s, d = x.shape
    out = torch.zeros(b, s, h * d, dtype=x.dtype)
    for i in range(h):
        out = torch.cat((out[..., : i * d], x[:, i].to(out.device), out[..., (i + 1) * d :]), -1)
    return out


# shard


@right("shard")
def shard_by_chunk(x, world_size, rank, dim=0):
    pieces = x.chunk(world_size, dim)
    return pieces[rank] if rank < len(pieces) else torch.zeros_like(x.narrow(dim, 0, 0))


@right("shard")
def shard_by_index(x, world_size, rank, dim=0):
    size = (x.shape[dim] + world_size - 1) // world_size
    index = [slice(None)] * x.dim()
    index[dim] = slice(rank * size, (rank + 1) * size)
    return x[tuple(index)]


@wrong("shard", says="shape")
def everything_everywhere(x, world_size, rank, dim=0):
    return x


@wrong("shard", says="rows r\\*size")
def next_ranks_piece(x, world_size, rank, dim=0):
    return shard_by_index(x, world_size, (rank + 1) % world_size, dim)


@wrong("shard", says="rounded up")
def rounded_down(x, world_size, rank, dim=0):
    size = x.shape[dim] // world_size
    return x.narrow(dim, rank * size, size)


@wrong("shard", says="3, 3, 3, 1")
def balanced(x, world_size, rank, dim=0):
    return x.tensor_split(world_size, dim)[rank]


@wrong("shard", says="returns fewer|empty")
def no_empty_piece(x, world_size, rank, dim=0):
    return x.chunk(world_size, dim)[rank]


@wrong("shard", says="dim")
def always_rows(x, world_size, rank, dim=0):
    return shard_by_chunk(x, world_size, rank, 0)


@wrong("shard", says="rows")
def strided(x, world_size, rank, dim=0):
    index = [slice(None)] * x.dim()
    index[dim] = slice(rank, None, world_size)
    return x[tuple(index)]


@wrong("shard", says="3, 3, 3, 1")
def padded(x, world_size, rank, dim=0):
    size = -(-x.shape[dim] // world_size)
    missing = size * world_size - x.shape[dim]
    tail = [n if i != dim % x.dim() else missing for i, n in enumerate(x.shape)]
    return torch.cat((x, x.new_zeros(tail)), dim).narrow(dim, rank * size, size)


@wrong("shard", says="empty piece for|dtype and device")
def empty_pieces_are_floats(x, world_size, rank, dim=0):
    pieces = x.chunk(world_size, dim)
    rest = list(x.shape)
    rest[dim] = 0
    return pieces[rank] if rank < len(pieces) else torch.zeros(rest)


# unshard


@right("unshard")
def unshard_by_unbind(shards, dim=0):
    return torch.stack([row for s in shards for row in s.unbind(dim)] or [shards[0].sum(dim)], dim)[
        (slice(None),) * (dim % shards[0].dim()) + (slice(0, sum(s.shape[dim] for s in shards)),)
    ]


@right("unshard")
def unshard_by_cat(shards, dim=0):
    return torch.concatenate(tuple(shards), dim)


@wrong("unshard", says="stack")
def stacked(shards, dim=0):
    return torch.stack(list(shards), dim)


@wrong("unshard", says="expected|torch.cat")
def first_piece(shards, dim=0):
    return shards[0]


@wrong("unshard", says="off by")
def reversed_ranks(shards, dim=0):
    return torch.cat(list(shards)[::-1], dim)


@wrong("unshard", says="uneven|3, 3, 3, 1")
def even_only(shards, dim=0):
    return torch.stack(list(shards), dim % shards[0].dim()).flatten(
        dim % shards[0].dim(), dim % shards[0].dim() + 1
    )


@wrong("unshard", says="dim")
def rows_only(shards, dim=0):
    return torch.cat(list(shards))


@wrong("unshard", says="off by")
def interleaved(shards, dim=0):
    whole = torch.cat(list(shards), dim)
    order = torch.arange(whole.shape[dim]).view(len(shards), -1).T.flatten()
    return whole.index_select(dim, order.to(whole.device))


@wrong("unshard", says="float32")
def into_floats(shards, dim=0):
    return torch.cat([s.float() for s in shards], dim)


@wrong("unshard", says="gradient")
def by_buffer(shards, dim=0):
    return torch.cat([s.detach() for s in shards], dim)


@wrong("unshard", says=r"2\*\*24")
def through_floats(shards, dim=0):
    return torch.cat([s.float() for s in shards], dim).to(shards[0].dtype)


# patchify


@right("patchify")
def patchify_by_einops(images, patch):
    if images.shape[2] % patch or images.shape[3] % patch:
        raise ValueError("the patch does not divide the image")
    return rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)


@right("patchify")
def patchify_by_unfold(images, patch):
    b, c, h, w = images.shape
    if h % patch or w % patch:
        raise ValueError("the patch does not divide the image")
    x = images.unfold(2, patch, patch).unfold(3, patch, patch)  # [B, C, h, w, p, p]
    x = x.permute(0, 2, 3, 4, 5, 1)
    return x.reshape(b, (h // patch) * (w // patch), patch * patch * c)


@wrong("patchify", says="shape")
def no_patches(images, patch):
    return images.flatten(1)


@wrong("patchify", says="permute")
def cut_without_permute(images, patch):
    b, c, h, w = images.shape
    return images.reshape(b, (h // patch) * (w // patch), patch * patch * c)


@wrong("patchify", says="p, p, C")
def channels_first(images, patch):
    return rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=patch, q=patch)


@wrong("patchify", says="row order|permute")
def column_order(images, patch):
    return rearrange(images, "b c (h p) (w q) -> b (w h) (p q c)", p=patch, q=patch)


@wrong("patchify", says="rows, columns|permute")
def transposed_inside(images, patch):
    return rearrange(images, "b c (h p) (w q) -> b (h w) (q p c)", p=patch, q=patch)


@wrong("patchify", says="\\[B, C, h, p, w, p\\]")
def grid_for_patch(images, patch):
    return rearrange(images, "b c (p h) (q w) -> b (h w) (p q c)", p=patch, q=patch)


@wrong("patchify", says="reshape copies")
def viewed_images(images, patch):
    b, c, h, w = images.shape
    x = images.view(b, c, h // patch, patch, w // patch, patch)
    x = x.view(b, -1, w * patch // patch).view(b, c, h // patch, patch, w // patch, patch)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(b, (h // patch) * (w // patch), patch * patch * c)


@wrong("patchify", says="ValueError")
def cropped(images, patch):
    h, w = (n - n % patch for n in images.shape[2:])
    return tensors.patchify(images[:, :, :h, :w], patch)


@wrong("patchify", says="ValueError")
def height_only(images, patch):
    if images.shape[2] % patch:
        raise ValueError("the patch does not divide the height")
    return cropped(images, patch)


@wrong("patchify", says=r"2\*\*24")
def patchify_by_unfold_in_floats(images, patch):
    """F.unfold knows floating-point images only."""
    _, c, h, w = images.shape
    if h % patch or w % patch:
        raise ValueError("the patch does not divide the image")
    x = torch.nn.functional.unfold(images.float(), patch, stride=patch)  # [B, C*p*p, L]
    tokens = x.unflatten(1, (c, patch * patch)).permute(0, 3, 2, 1).flatten(2)
    return tokens.to(images.dtype)


@wrong("patchify", says="shape|differ|off by")
def as_many_columns_as_rows(images, patch):
    b, c, h, _ = images.shape
    rows = h // patch
    x = images[..., : rows * patch].reshape(b, c, rows, patch, rows, patch)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(b, rows * rows, patch * patch * c)


# unpatchify


@right("unpatchify")
def unpatchify_by_einops(tokens, patch, channels, height):
    rows = height // patch
    if tokens.shape[2] != patch * patch * channels or height % patch or tokens.shape[1] % rows:
        raise ValueError("the sizes don't divide")
    return rearrange(
        tokens, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=patch, q=patch, c=channels
    )


@right("unpatchify")
def unpatchify_by_slices(tokens, patch, channels, height):
    _, count, length = tokens.shape
    rows = height // patch
    if length != patch * patch * channels or height % patch or count % rows:
        raise ValueError("the sizes don't divide")
    squares = [t.unflatten(1, (patch, patch, channels)) for t in tokens.unbind(1)]
    columns = count // rows
    strips = [torch.cat(squares[i : i + columns], dim=2) for i in range(0, count, columns)]
    return torch.cat(strips, dim=1).permute(0, 3, 1, 2)


@wrong("unpatchify", says="shape")
def no_images(tokens, patch, channels, height):
    return tokens


@wrong("unpatchify", says="undo")
def plain_reshape(tokens, patch, channels, height):
    return tokens.reshape(len(tokens), channels, height, -1) if len(tokens) else tokens


@wrong("unpatchify", says="rows = height")
def square_images(tokens, patch, channels, height):
    side = math.isqrt(tokens.shape[1])
    x = tokens[:, : side * side]
    return rearrange(x, "b (h w) (p q c) -> b c (h p) (w q)", h=side, p=patch, q=patch, c=channels)


@wrong("unpatchify", says="undo|permutation")
def channels_came_first(tokens, patch, channels, height):
    rows = height // patch
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=patch, q=patch)


@wrong("unpatchify", says="permutation|rows")
def columns_came_first(tokens, patch, channels, height):
    rows = height // patch
    return rearrange(
        tokens, "b (w h) (p q c) -> b c (h p) (w q)", h=rows, p=patch, q=patch, c=channels
    )


@wrong("unpatchify", says="permutation")
def inside_transposed(tokens, patch, channels, height):
    rows = height // patch
    return rearrange(
        tokens, "b (h w) (q p c) -> b c (h p) (w q)", h=rows, p=patch, q=patch, c=channels
    )


@wrong("unpatchify", says="ValueError")
def sizes_unchecked(tokens, patch, channels, height):
    rows = height // patch
    columns = tokens.shape[1] // rows
    x = tokens[:, : rows * columns, : patch * patch * channels]
    return tensors.unpatchify(x, patch, channels, rows * patch)


@wrong("unpatchify", says="ValueError")
def plain_error(tokens, patch, channels, height):
    b, n, _ = tokens.shape
    rows = height // patch
    x = tokens.reshape(b, rows, n // rows, patch, patch, channels)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(b, channels, height, n // rows * patch)


@wrong("unpatchify", says=r"2\*\*24")
def unpatchify_by_fold_in_floats(tokens, patch, channels, height):
    """F.fold knows floating-point tokens only."""
    b, n, length = tokens.shape
    rows = height // patch
    if length != patch * patch * channels or height % patch or n % rows:
        raise ValueError("the sizes don't divide")
    if not b:
        return tokens.new_empty(0, channels, height, n // rows * patch)
    x = tokens.float().unflatten(2, (-1, channels)).permute(0, 3, 2, 1).flatten(1, 2)
    size = (height, n // rows * patch)
    return torch.nn.functional.fold(x, size, patch, stride=patch).to(tokens.dtype)


# sliding_windows


@right("sliding_windows")
def windows_by_unfold(x, size, step):
    if size > len(x):
        raise ValueError(f"a window of {size} does not fit in {len(x)} rows")
    return x.unfold(0, size, step).transpose(1, 2)


@wrong("sliding_windows", says="new memory")
def stacked_windows(x, size, step):
    if size > len(x):
        raise ValueError(f"a window of {size} does not fit in {len(x)} rows")
    return torch.stack([x[i : i + size] for i in range(0, len(x) - size + 1, step)])


@wrong("sliding_windows", says="transpose")
def window_last(x, size, step):
    return x.unfold(0, size, step)


@wrong("sliding_windows", says="skips step rows")
def step_of_one(x, size, step):
    w = (len(x) - size) // step + 1
    return x.as_strided((w, size, x.shape[1]), (x.stride(0), *x.stride()))


@wrong("sliding_windows", says="strides")
def assumes_contiguous(x, size, step):
    if size > len(x):
        raise ValueError(f"a window of {size} does not fit in {len(x)} rows")
    w, d = (len(x) - size) // step + 1, x.shape[1]
    return x.as_strided((w, size, d), (step * d, d, 1))


@wrong("sliding_windows", says="offset")
def forgets_the_offset(x, size, step):
    if size > len(x):
        raise ValueError(f"a window of {size} does not fit in {len(x)} rows")
    w, (row, col) = (len(x) - size) // step + 1, x.stride()
    return x.as_strided((w, size, x.shape[1]), (step * row, row, col), 0)


@wrong("sliding_windows", says="last window")
def one_short(x, size, step):
    w = max((len(x) - size + step - 1) // step, 1)
    return tensors.sliding_windows(x, size, step)[:w]


@wrong("sliding_windows", says="window")
def whole_steps(x, size, step):
    w = len(x) // step
    return x.as_strided((w, size, x.shape[1]), (step * x.stride(0), *x.stride()))


@wrong("sliding_windows", says="ValueError")
def silently_empty(x, size, step):
    if size > len(x):
        return x.new_empty(0, size, x.shape[1])
    return windows_by_unfold(x, size, step)


@wrong("sliding_windows", says="gradient")
def windows_of_detached(x, size, step):
    return tensors.sliding_windows(x.detach(), size, step)


@wrong("sliding_windows", says=r"2\*\*24|new memory")
def windows_in_floats(x, size, step):
    return windows_by_unfold(x.float(), size, step).to(x.dtype)
