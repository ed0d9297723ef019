"""shardbook.basics.tensors against torch on shapes, strides and sizes that hypothesis thinks of."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardbook as sb
from shardbook.basics.tensors import (
    can_view,
    contiguous_strides,
    merge_heads,
    patchify,
    shard,
    sliding_windows,
    split_heads,
    unpatchify,
    unshard,
)
from shardbook.studies import layouts

SIZES = st.sampled_from([0, 1, 1, 2, 2, 3, 4, 6])
few = settings(max_examples=200, deadline=None, derandomize=True)


@st.composite
def strided(draw, min_dims=0, max_dims=4):
    """A tensor as as_strided can make it: permuted, sliced, expanded or with any strides."""
    shape = draw(st.lists(SIZES, min_size=min_dims, max_size=max_dims))
    if draw(st.booleans()):
        strides = [draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12])) for _ in shape]
        return torch.arange(1000).as_strided(shape, strides, draw(st.integers(0, 3)))
    x = torch.arange(math.prod(shape)).view(shape).permute(draw(st.permutations(range(len(shape)))))
    for dim in range(x.dim()):
        change = draw(st.sampled_from(["keep", "keep", "every other", "drop first", "expand"]))
        if change == "every other":
            x = x[(slice(None),) * dim + (slice(None, None, 2),)]
        elif change == "drop first" and x.shape[dim] > 1:
            x = x.narrow(dim, 1, x.shape[dim] - 1)
        elif change == "expand" and x.shape[dim] == 1:
            x = x.expand(*[3 if i == dim else -1 for i in range(x.dim())])
    return x


@st.composite
def reshapings(draw):
    """(tensor, shape to view it as), mostly with the right number of elements."""
    x = draw(strided())
    new, left = [], x.numel()
    while left > 1:
        new.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= new[-1]
    if not x.numel():
        new = [*draw(st.lists(SIZES, max_size=3)), 0]
    if draw(st.integers(0, 9)) == 0:
        new.append(draw(SIZES))  # most often another number of elements
    return x, draw(st.permutations(new))


@given(st.lists(st.integers(0, 9), max_size=6))
@few
def test_contiguous_strides_are_those_of_a_fresh_tensor(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@given(reshapings())
@settings(few, max_examples=500)
def test_can_view_agrees_with_torch(case):
    x, new = case
    try:
        x.view(new)
        works = True
    except RuntimeError:
        works = False
    assert can_view(tuple(x.shape), x.stride(), tuple(new)) is works


def test_can_view_answers_no_to_negative_sizes():
    assert not can_view((2, 3), (3, 1), (-2, -3))


@given(strided(min_dims=3, max_dims=3), st.integers(1, 4))
@few
def test_heads_split_and_merge(x, heads):
    if x.shape[-1] % heads:
        with pytest.raises(ValueError, match="heads"):
            split_heads(x, heads)
        return
    split = split_heads(x, heads)
    assert split.shape == (x.shape[0], heads, x.shape[1], x.shape[2] // heads)
    assert split.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    merged = merge_heads(split)
    assert torch.equal(merged, x)
    assert merged.is_contiguous()


@given(strided(min_dims=1), st.integers(1, 7), st.data())
@few
def test_shards_are_torchs_chunks_and_unshard_undoes_them(x, world_size, data):
    dim = data.draw(st.integers(-x.dim(), x.dim() - 1))
    pieces = [shard(x, world_size, rank, dim) for rank in range(world_size)]
    for piece, chunk in zip(pieces, x.chunk(world_size, dim), strict=False):
        assert torch.equal(piece, chunk)
    for empty in pieces[len(x.chunk(world_size, dim)) :]:
        assert empty.shape[dim] == 0
    assert torch.equal(unshard(pieces, dim), x)


@pytest.mark.parametrize("rank", [-1, 4])
def test_shard_knows_its_ranks(rank):
    with pytest.raises(ValueError, match="not one of the 4 ranks"):
        shard(torch.zeros(8), 4, rank)


@given(
    st.integers(0, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)
)
@few
def test_patches_are_pixel_unshuffle_with_channels_last(batch, channels, rows, columns, patch):
    images = torch.randn(batch, channels, rows * patch, columns * patch)
    tokens = patchify(images, patch)
    if batch:  # pixel_unshuffle takes no empty batch
        expected = torch.nn.functional.pixel_unshuffle(images, patch)  # [B, C*p*p, h, w]
        expected = expected.unflatten(1, (channels, patch * patch)).permute(0, 3, 4, 2, 1)
        assert torch.equal(tokens, expected.flatten(3).flatten(1, 2))
    assert torch.equal(unpatchify(tokens, patch, channels, rows * patch), images)


@pytest.mark.parametrize("height", [0, 6, 10, 16])
def test_unpatchify_refuses_heights_that_cannot_be(height):
    with pytest.raises(ValueError, match="height"):
        unpatchify(torch.zeros(2, 6, 48), 4, 3, height)


@given(strided(min_dims=2, max_dims=2), st.integers(1, 4), st.integers(1, 4))
@few
def test_windows_are_unfold_with_the_window_in_the_middle(x, size, step):
    if size > len(x):
        with pytest.raises(ValueError, match="fits"):
            sliding_windows(x, size, step)
        return
    windows = sliding_windows(x, size, step)
    assert torch.equal(windows, x.unfold(0, size, step).mT)
    assert windows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(("size", "step"), [(0, 1), (2, 0)])
def test_windows_of_nothing_are_refused(size, step):
    with pytest.raises(ValueError, match="window"):
        sliding_windows(torch.zeros(4, 2), size, step)


# What the lesson measures with


def test_a_table_of_operations_is_what_they_do():
    x = torch.arange(24).view(2, 3, 4)
    table = layouts.operations(
        {"x": x, "t": x.mT}, {"x.view(6, 4)": "y.view(2, 3, 4)", "t.reshape(24)": "y.view(2, 4, 3)"}
    )
    assert [row["copies"] for row in table] == [False, True]
    assert [row["given"] for row in table] == ["[2, 3, 4]", "[2, 4, 3]"]
    (row,) = layouts.operations({"x": x}, {"x.split([1, 3], 2)": "torch.cat(y, 2)"})
    assert row["returns"] == "[2, 3, 1], [2, 3, 3]" and not row["copies"]
    (row,) = layouts.operations({"x": x}, {"x.select(1, 2)": None})
    assert row["inverse"] == "none: 16 of 24 values are gone"


@pytest.mark.parametrize(
    ("inverse", "says"),
    [("y.view(2, 4, 3)", "does not undo"), ("y", "does not undo"), (None, "loses no value")],
)
def test_a_wrong_inverse_is_refused(inverse, says):
    with pytest.raises(ValueError, match=says):
        layouts.operations({"x": torch.arange(24).view(2, 3, 4)}, {"x.view(6, 4)": inverse})


def test_marks_are_summed_by_name():
    with sb.trace() as t:
        for name in ("b", "a", "b"):
            with sb.mark(name):
                pass
    found = layouts.marked(t)
    assert list(found) == ["b", "a"] and min(found.values()) > 0
