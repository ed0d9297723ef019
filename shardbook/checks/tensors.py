"""Chapter 11: what a layout operation does to sizes, strides and storage."""

import numbers
import random as rand
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..devices import device
from .compare import close, expect, random, refuses, same, unchanged, widest
from .functions import strided
from .report import check
from .wrong import Wrong

SHAPES = [(), (5,), (2, 3, 4), (7, 2), (3, 1, 5), (1, 6), (4, 1), (2, 0, 3), (0,), (3, 4, 0), (1,)]
DTYPE = (
    "nothing is computed here, so bf16, float64, integers and bools pass through as they are: "
    "float32 has no integers beyond 2**24; new tensors take their dtype and device from the input"
)
VIEW = "view fails where the strides can't be merged: reshape copies where it must"
DIFFERENTIABLE = "stay with differentiable torch operations: no .data, detach or numpy"


@check("contiguous_strides")
def contiguous_strides(answer, report):
    """Compared with torch.empty(shape).stride()."""
    with report.property(
        "gives the strides of a fresh tensor of 0 to 3 dimensions",
        hint="the last dimension has stride 1; a step in a dimension skips all right of it",
    ):
        for shape in SHAPES:
            if 0 not in shape:
                _same_strides(answer, shape)
    with report.property(
        "counts a size of 0 as 1, as torch does",
        hint="a plain product makes all strides left of a size of 0 zero; torch takes max(size, 1)",
    ):
        for shape in SHAPES:
            if 0 in shape:
                _same_strides(answer, shape)
    with report.property(
        "agrees with torch on 200 random shapes, lists and torch.Size too",
        hint="shape may be a list, a tuple or a torch.Size; the result is a tuple of ints",
    ):
        rng = rand.Random(11)
        for _ in range(200):
            shape = [rng.choice([0, 1, 2, 3, 5, 7]) for _ in range(rng.randint(1, 5))]
            _same_strides(answer, shape)
            _same_strides(answer, torch.Size(shape))
        strides = answer((2, 3, 4))
        expect(
            all(isinstance(s, numbers.Integral) for s in strides),
            f"the strides of (2, 3, 4) are {strides}, expected ints",
            "type",
        )
    with (
        report.property(
            "works them out from the sizes alone",
            hint="no tensor is needed: multiply the sizes from the right, as ints: floats "
            "keep 53 bits",
        ),
        _Without("stride"),
    ):
        expect(answer((2, 3, 4)) is not None, "it returns nothing", "none")
        last = 2**18 + 5
        large = (7, 2**18 + 1, 2**18 + 3, last)  # 54 bits in the first stride
        first = (2**18 + 1) * (2**18 + 3) * last
        same(list(answer(large)), [first, (2**18 + 3) * last, last, 1], f"the result for {large}")


@check("can_view")
def can_view(answer, report):
    """Compared with what Tensor.view does."""

    def ask(x: Tensor, new: tuple[int, ...]) -> None:
        told = answer(tuple(x.shape), tuple(x.stride()), new)
        text = f"view{new} of sizes {tuple(x.shape)} and strides {tuple(x.stride())}"
        expect(type(told) is bool, f"the answer for {text} is {told!r}, expected True or False")
        works = _views(x, new)
        expect(
            told == works,
            f"{text} {'works' if works else 'fails'} in torch, and the answer says {told}",
        )

    fresh = torch.empty(4, 6, 5)
    with report.property(
        "says yes to every split and merge of a contiguous tensor, and no where the count differs",
        hint="a contiguous tensor takes any new shape with the same number of elements",
    ):
        for new in [(24, 5), (4, 30), (120,), (2, 2, 6, 5), (3, 8, 5), (1, 120, 1), (121,), (4, 6)]:
            ask(fresh, new)
    with report.property(
        "tells what can be merged after permute, transpose and slicing",
        hint="two neighbours merge only where stride[i] == stride[i + 1] * size[i + 1]; "
        "splitting a dimension is always possible",
    ):
        moved = fresh.permute(0, 2, 1)  # [4, 5, 6]
        for new in [(120,), (20, 6), (4, 30), (4, 5, 2, 3), (2, 2, 5, 6), (4, 5, 6)]:
            ask(moved, new)
        last = fresh.permute(2, 0, 1)  # [5, 4, 6]: the first two in reverse, the last two whole
        for new in [(5, 24), (20, 6), (5, 2, 12), (5, 8, 3), (120,)]:
            ask(last, new)
        for new in [(4, 3, 2, 5), (12, 5), (4, 15), (6, 2, 5), (60,)]:
            ask(fresh[:, :3], new)
        for new in [(4, 6, 3), (24, 3), (4, 18), (8, 3, 3)]:
            ask(fresh[..., ::2], new)
    with report.property(
        "does not let a dimension of size 1 stand in the way",
        hint="the stride of a dimension of size 1 is never used: leave such dimensions out first",
    ):
        for strides in [(99, 3, 1), (3, 99, 1), (3, 1, 99)]:
            for sizes, new in [((1, 2, 3), (6,)), ((2, 1, 3), (6,)), ((2, 3, 1), (3, 2, 1))]:
                ask(torch.empty(400).as_strided(sizes, strides), new)
        ask(torch.empty(()), (1, 1))
        ask(torch.empty(1, 1), ())
    with report.property(
        "knows expanded tensors (stride 0) and tensors without elements",
        hint="the same rule holds for stride 0; with no elements any shape of 0 elements will do",
    ):
        row = torch.empty(1, 3)
        for new in [(12,), (2, 2, 3), (4, 3, 1)]:
            ask(row.expand(4, 3), new)
            ask(row.T.expand(3, 4), new)
        ask(torch.empty(1, 1).expand(4, 3), (12,))
        for new in [(0,), (5, 0, 2), (3,), (), (0, 4)]:
            ask(torch.empty(3, 0, 2).permute(2, 0, 1), new)
    with report.property(
        "agrees with torch on 400 random strided tensors",
        hint="go through both shapes from the right: each run of mergeable dimensions must be "
        "filled by whole new ones",
    ):
        for x, new in _strided_cases(400):
            ask(x, new)
    with (
        report.property(
            "decides from the numbers alone",
            hint="don't ask torch: compare strides and sizes",
        ),
        _Without("view", "reshape", "stride", "view_as", "flatten", "is_contiguous"),
    ):
        for strides in ((3, 1), (1, 2)):
            told = answer((2, 3), strides, (6,))
            expect(told is not None, "it returns nothing", "none")


@check("split_heads")
def split_heads(answer, report):
    """Compared with one slice of the channels a head."""
    answer, x = told(answer), random(2, 5, 12)
    it = report.function(answer, lambda x, num_heads: torch.stack(x.chunk(num_heads, -1), 1))
    it.value(
        "gives head h channels h*D to (h+1)*D, as [B, H, S, D]",
        (x, 3),
        hint="cut the last dimension in two (heads first), then swap heads with the sequence; "
        "a view to [B, H, S, D] straight away mixes tokens",
    )
    it.view(
        "copies nothing when the input is contiguous",
        (x, 3),
        hint="use unflatten, then transpose: contiguous(), and reshape after a transpose, copy",
    )
    it.value(
        "takes inputs of any strides, and sizes of 0 and 1",
        *(
            (y, 3)
            for y in [*strided(2, 5, 12), random(2, 1, 12), random(0, 5, 12), random(2, 5, 3)]
        ),
        (x, 1),
        hint="unflatten splits one dimension and works with any strides; -1 in a view can't be "
        "inferred where another size is 0",
    )
    with report.property("keeps the dtype, every value and the device", hint=DTYPE):
        for y in _dtypes(x.to(device())):
            _passes(answer(y, 3), it.oracle(y, 3), "the result")
    it.gradient(
        "passes the gradient back to where each value came from", (x, 3), hint=DIFFERENTIABLE
    )
    it.refuses(
        "refuses channels that don't divide by the heads with a ValueError",
        ((x, 5), "12 channels for 5 heads"),
        hint="raise ValueError with one sentence when x.shape[-1] % num_heads is not 0",
    )


@check("merge_heads")
def merge_heads(answer, report):
    """Compared with the heads laid side by side."""
    answer = told(answer)
    batch, heads, length, width = 2, 3, 5, 4

    def expected(x: Tensor) -> Tensor:
        return torch.cat(x.unbind(dim=1), dim=-1)  # [B, S, H*D]

    x = random(batch, heads, length, width).to(device())
    with (
        report.property(
            "puts the heads of a token side by side, as [B, S, H*D]",
            hint="swap heads and sequence first; a reshape of [B, H, S, D] as it is mixes tokens",
        ),
        unchanged("merge_heads", x),
    ):
        close(answer(x), expected(x), "the result", tolerance=0)
    with report.property(
        "undoes split_heads",
        hint="split_heads went [B, S, H*D] -> [B, S, H, D] -> [B, H, S, D]: go back the same way",
    ):
        tokens = random(batch, length, heads * width, seed=1).to(device())
        split = tokens.unflatten(-1, (heads, width)).transpose(1, 2)
        close(answer(split), tokens, "the result", tolerance=0)
    with report.property(
        "takes inputs of any strides, and sizes of 0 and 1",
        hint="view fails where the strides can't be merged; -1 can't be inferred where a size is 0",
    ):
        for y in _merge_inputs(batch, heads, length, width):
            close(answer(y), expected(y), f"for strides {y.stride()} the result")
    with report.property(
        "gives a contiguous result, also with one head",
        hint="reshape and flatten return a view where they can, and that view may be strided: "
        "ask for contiguous()",
    ):
        for y in [x, *_merge_inputs(batch, heads, length, width)]:
            expect(answer(y).is_contiguous(), f"for strides {y.stride()} it is not contiguous")
    with report.property("keeps the dtype, every value and the device", hint=DTYPE):
        for y in _dtypes(x):
            _passes(answer(y), expected(y), "the result")
    with report.property(
        "passes the gradient back to where each value came from",
        hint=DIFFERENTIABLE,
    ):
        _same_gradient(answer, expected, x)


@check("shard")
def shard(answer, report):
    """Compared with torch.chunk, padded with empty pieces."""
    answer = told(answer)

    def piece(x: Tensor, world_size: int, rank: int, dim: int) -> Tensor:
        pieces = x.chunk(world_size, dim)
        return pieces[rank] if rank < len(pieces) else x.narrow(dim, 0, 0)

    with report.property(
        "cuts 12 rows evenly over 1 to 4 ranks",
        hint="rank r gets rows r*size to (r+1)*size",
    ):
        x = random(12, 5).to(device())
        with unchanged("shard", x):
            for world_size in (1, 2, 3, 4):
                for rank in range(world_size):
                    close(
                        answer(x, world_size, rank),
                        piece(x, world_size, rank, 0),
                        f"the piece of rank {rank} of {world_size}",
                        tolerance=0,
                    )
    with report.property(
        "gives 10 rows over 4 ranks as 3, 3, 3, 1, and empty pieces where nothing is left",
        hint="the piece size is length / world_size rounded up, so the last ranks get less, or an "
        "empty piece with the other dimensions kept; torch.chunk then returns fewer pieces",
    ):
        for length in (10, 9, 5, 3, 2, 1, 0):
            for world_size in (1, 2, 4, 6, 7):
                x = random(length, 3, seed=length).to(device())
                for rank in range(world_size):
                    close(
                        answer(x, world_size, rank),
                        piece(x, world_size, rank, 0),
                        f"the piece of rank {rank} of {world_size} for {length} rows",
                        tolerance=0,
                    )
    with report.property(
        "cuts any dimension, counted from the end too, of a tensor of any strides",
        hint="dim decides which size is cut; narrow and chunk take it",
    ):
        for x in (random(3, 5, 7), random(7, 5, 3).permute(2, 1, 0), random(6, 5, 7)[::2]):
            x = _placed(x)
            for dim in (0, 1, 2, -1, -2):
                for rank in range(4):
                    close(
                        answer(x, 4, rank, dim=dim),
                        piece(x, 4, rank, dim),
                        f"the piece of rank {rank} along dim {dim}",
                        tolerance=0,
                    )
    with report.property("keeps the dtype, every value and the device", hint=DTYPE):
        for x in _dtypes(random(5, 3).to(device())):
            _passes(answer(x, 2, 1), x[3:], "the piece")
            _passes(answer(x, 7, 6), x[:0], "the empty piece")
    with report.property(
        "passes the gradient back to its own rows",
        hint=DIFFERENTIABLE,
    ):
        x = random(10, 5).to(device())
        _same_gradient(lambda x: answer(x, 4, 1), lambda x: x[3:6], x)


@check("unshard")
def unshard(answer, report):
    """Compared with the tensor that was cut by torch.chunk."""
    answer = told(answer)

    def pieces(x: Tensor, world_size: int, dim: int) -> list[Tensor]:
        found = list(x.chunk(world_size, dim))
        return found + [x.narrow(dim, 0, 0)] * (world_size - len(found))

    with report.property(
        "puts even pieces together in rank order",
        hint="torch.cat joins along an existing dimension, torch.stack makes a new one",
    ):
        x = random(12, 5).to(device())
        for world_size in (1, 2, 3, 4):
            parts = pieces(x, world_size, 0)
            kept = list(parts)
            with unchanged("unshard", *parts):
                close(answer(parts), x, f"the tensor from {world_size} pieces", tolerance=0)
            same([id(p) for p in parts], [id(p) for p in kept], "the list of pieces afterwards")
    with report.property(
        "takes uneven and empty pieces",
        hint="10 rows over 4 ranks come as 3, 3, 3, 1, and 2 rows as 1, 1 and two empty pieces",
    ):
        for length in (10, 9, 5, 2, 1, 0):
            for world_size in (2, 4, 7):
                x = random(length, 3, seed=length).to(device())
                what = f"the tensor of {length} rows from {world_size} pieces"
                close(answer(pieces(x, world_size, 0)), x, what, tolerance=0)
    with report.property(
        "joins along any dimension, counted from the end too",
        hint="pass dim on to torch.cat",
    ):
        x = random(3, 5, 7).to(device())
        for dim in (0, 1, 2, -1, -2):
            for world_size in (2, 4):
                parts = [p.mT.contiguous().mT for p in pieces(x, world_size, dim)]
                close(answer(parts, dim=dim), x, f"the tensor joined along dim {dim}", tolerance=0)
    with report.property(
        "keeps the dtype, every value and the device, takes a tuple as well as a list", hint=DTYPE
    ):
        for x in _dtypes(random(5, 3).to(device())):
            _passes(answer(tuple(pieces(x, 2, 0))), x, "the tensor")
    with report.property(
        "passes the gradient back to every piece",
        hint=DIFFERENTIABLE,
    ):
        x = random(10, 5).to(device())
        _same_gradient(lambda x: answer(pieces(x, 4, 1), dim=1), lambda x: x * 1, x)


@check("patchify")
def patchify(answer, report):
    """Compared with squares cut out one by one."""
    answer = told(answer)
    images = random(2, 3, 8, 12).to(device())
    with (
        report.property(
            "gives a token a square, in row order; inside rows, columns, channels last",
            hint="name the six dimensions [B, C, h, p, w, p] after the first reshape, then permute "
            "them to [B, h, w, p, p, C]",
        ),
        unchanged("patchify", images),
    ):
        close(answer(images, 4), _patches(images, 4), "the tokens", tolerance=0)
        close(answer(images, 2), _patches(images, 2), "the tokens", tolerance=0)
    with report.property(
        "takes one pixel, and the whole image, as a patch",
        hint="sizes of 1 are sizes like others: don't squeeze them away",
    ):
        close(answer(images, 1), _patches(images, 1), "the tokens of patch 1", tolerance=0)
        square = images[..., :8].contiguous()
        close(answer(square, 8), _patches(square, 8), "the token of patch 8", tolerance=0)
    with report.property(
        "takes images of any strides (channels last, cropped), one channel, an empty batch",
        hint="view fails on strides it can't split; reshape copies where it must",
    ):
        for y in (
            images.contiguous(memory_format=torch.channels_last),
            images[..., 2:10],
            images.transpose(2, 3),
            images[:, :1],
            images[:0],
        ):
            close(answer(y, 4), _patches(y, 4), f"for strides {y.stride()} the tokens")
    with report.property("keeps the dtype, every value and the device", hint=DTYPE):
        for y in _dtypes(images):
            _passes(answer(y, 4), _patches(y, 4), "the tokens")
    with report.property(
        "passes the gradient back to every pixel",
        hint=DIFFERENTIABLE,
    ):
        _same_gradient(lambda x: answer(x, 4), lambda x: _patches(x, 4), images)
    with report.property(
        "refuses a height or a width that doesn't divide with a ValueError",
        hint="check height % patch and width % patch, both, before reshaping",
    ):
        refuses(answer, images, 3, what="height 8 with patch 3")
        refuses(answer, images[..., :10], 4, what="width 10 with patch 4")
        refuses(answer, images[:, :, :6], 4, what="height 6 with patch 4")


@check("unpatchify")
def unpatchify(answer, report):
    """Compared with the images whose squares were cut out."""
    answer = told(answer)
    images = random(2, 3, 8, 12).to(device())
    with report.property(
        "rebuilds images that are wider than high, and higher than wide",
        hint="rows = height / patch, columns = number of tokens / rows; undo the permutation of "
        "patchify: [B, h, w, p, p, C] to [B, C, h, p, w, p]",
    ):
        for y in (images, images.transpose(2, 3).contiguous()):
            for patch in (4, 2, 1):
                tokens = _patches(y, patch)
                with unchanged("unpatchify", tokens):
                    close(answer(tokens, patch, 3, y.shape[2]), y, f"the image of patch {patch}", 0)
    with report.property(
        "takes one patch, one channel, an empty batch",
        hint="sizes of 0 and 1 are sizes like others: -1 can't be inferred where one is 0",
    ):
        one = images[:, :1, :4, :4]
        close(answer(_patches(one, 4), 4, 1, 4), one, "the image of one patch", tolerance=0)
        close(answer(_patches(images, 4)[:0], 4, 3, 8), images[:0], "the empty batch")
    with report.property(
        "takes tokens of any strides",
        hint="view fails on strides it can't split; reshape copies where it must",
    ):
        tokens = _patches(images, 4)  # [2, 6, 48]
        for y in (
            tokens.permute(2, 0, 1).contiguous().permute(1, 2, 0),
            torch.cat((tokens, tokens), dim=-1)[..., :48],
        ):
            close(answer(y, 4, 3, 8), images, f"for strides {y.stride()} the image", tolerance=0)
    with report.property("keeps the dtype, every value and the device", hint=DTYPE):
        for y in _dtypes(images):
            _passes(answer(_patches(y, 4), 4, 3, 8), y, "the image")
    with report.property(
        "passes the gradient back to every token",
        hint=DIFFERENTIABLE,
    ):
        tokens = _patches(images, 4)
        _same_gradient(lambda x: _patches(answer(x, 4, 3, 8), 4), lambda x: x * 1, tokens)
    with report.property(
        "refuses sizes that don't divide with a ValueError",
        hint="a token must hold patch * patch * channels values, the height must divide by the "
        "patch, the tokens by the rows",
    ):
        tokens = _patches(images, 4)  # [2, 6, 48]
        refuses(answer, tokens, 4, 2, 8, what="48 values a token for 2 channels of patch 4")
        refuses(answer, tokens, 4, 3, 10, what="height 10 with patch 4")
        refuses(answer, tokens, 4, 3, 16, what="6 tokens in 4 rows")


@check("sliding_windows")
def sliding_windows(answer, report):
    """Compared with slices stacked one by one."""
    answer = told(answer)
    x = random(11, 3).to(device())
    with report.property(
        "has floor((S - size) / step) + 1 windows, one when size is S",
        hint="the last window must end inside x; windows are [W, size, D], D last "
        "(unfold's result needs a transpose)",
    ):
        for size, step in [(11, 1), (11, 4), (10, 3), (5, 4), (5, 3), (4, 1), (2, 10)]:
            shape = tuple(answer(x, size, step).shape)
            what = f"the shape for S=11, size {size}, step {step}"
            same(shape, ((11 - size) // step + 1, size, 3), what)
    with (
        report.property(
            "gives window w rows w*step to w*step+size, as [W, size, D]",
            hint="one step in the first dimension skips step rows, one in the second a row",
        ),
        unchanged("sliding_windows", x),
    ):
        for size, step in [(4, 1), (4, 2), (2, 2), (1, 1), (3, 5)]:
            close(answer(x, size, step), _windows(x, size, step), f"size {size} step {step}", 0)
    with report.property(
        "shares memory with x: what is written to x later shows in the windows",
        hint="stack, cat, indexing with a tensor and contiguous() copy; as_strided, unfold don't",
    ):
        base = random(11, 3, seed=1).to(device())
        windows = answer(base, 4, 2)
        base[5, 1] = 100.0
        expect(windows.shape[0] == 4 and windows.dim() == 3, f"shape {tuple(windows.shape)}")
        expect(_shares(windows, base), "the windows lie in new memory")
        expect(float(windows[1, 3, 1]) == 100.0, "a value written to x is not seen in window 1")
    with report.property(
        "takes x of any strides and any place in its storage",
        hint="use x.stride(0) and x.stride(1), not D and 1; a slice of a larger tensor begins in "
        "the middle of its storage (as_strided keeps x's offset unless told otherwise)",
    ):
        big = random(24, 14, seed=2).to(device())
        for y in (big[5:16, 4:7], big[::2, ::5], big.T[3:14, 2:5], big[:, 1:2].expand(24, 3)):
            windows = answer(y, 4, 2)
            close(windows, _windows(y, 4, 2), f"for strides {y.stride()} the windows", tolerance=0)
            expect(_shares(windows, y), f"for strides {y.stride()} the windows lie in new memory")
    with report.property("keeps the dtype, every value and the device", hint=DTYPE):
        for y in _dtypes(x):
            windows = answer(y, 4, 2)
            _passes(windows, _windows(y, 4, 2), "the windows")
            said = f"the windows for {y.dtype} lie in new memory"
            expect(y.is_meta or _shares(windows, y), said, "memory")
    with report.property(
        "adds up the gradients of a row that lies in several windows",
        hint=DIFFERENTIABLE,
    ):
        _same_gradient(lambda y: answer(y, 4, 2), lambda y: _windows(y, 4, 2), x)
    with report.property(
        "refuses a window longer than x with a ValueError",
        hint="raise ValueError when size > x.shape[0]",
    ):
        refuses(answer, x, 12, 1, what="a window of 12 rows over 11 rows")


class _Without(TorchFunctionMode):
    """Inside, calling one of the named torch functions is Wrong: the oracle is not an answer."""

    def __init__(self, *names: str):
        super().__init__()
        self.names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        expect(name not in self.names, f"it asks torch (Tensor.{name}) instead of working it out")
        return func(*args, **(kwargs or {}))


def _same_strides(answer: Callable, shape) -> None:
    fresh = torch.empty(tuple(shape), device="meta")  # of any size, without memory
    same(answer(shape), fresh.stride(), f"the result for {tuple(shape)}")


def _views(x: Tensor, new: tuple[int, ...]) -> bool:
    try:
        x.view(new)
    except RuntimeError:
        return False
    return True


def _strided_cases(count: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Random tensors (any strides, sizes of 0 and 1, expanded, permuted) and shapes to try."""
    rng = rand.Random(12)
    for _ in range(count):
        shape = [rng.choice([0, 1, 2, 2, 3, 4]) for _ in range(rng.randint(0, 4))]
        if rng.random() < 0.5:
            x = torch.empty(shape).permute(rng.sample(range(len(shape)), len(shape)))
        else:
            strides = [rng.choice([0, 1, 2, 3, 4, 6, 8, 12]) for _ in shape]
            x = torch.empty(200).as_strided(shape, strides)
        new, left = [], x.numel()
        while left > 1:
            new.append(rng.choice([d for d in range(1, left + 1) if left % d == 0]))
            left //= new[-1]
        rng.shuffle(new)
        yield x, tuple(new if x.numel() else [*new, 0])


def _shares(result: Tensor, x: Tensor) -> bool:
    return result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def _placed(x: Tensor) -> Tensor:
    """x on the device, with the strides it had (.to keeps those of dense tensors only)."""
    if x.device == device() or not x.numel():
        return x.to(device())
    room = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    storage = torch.empty(room, dtype=x.dtype, device=device())
    return storage.as_strided(x.shape, x.stride()).copy_(x)


def _dtypes(x: Tensor) -> list[Tensor]:
    """x in other dtypes, with values that float32 can't hold, and without memory."""
    whole = (x * 100).to(torch.int64)
    whole = whole + whole.sign() * 2**40
    found = [x.to(torch.bfloat16), whole, x > 0, x.to("meta")]
    if widest() == torch.float64:
        found.append(x.double() * (1 + 2.0**-40))
    return found


def _passes(got: Tensor, expected: Tensor, what: str) -> None:
    """Every value came through as it was, on the device where it was; the dtype is named."""
    what = f"{what} for {expected.dtype}"
    if expected.is_meta:
        where = got.device if isinstance(got, Tensor) else type(got).__name__
        said = f"{what} on the device 'meta' is on {where}, expected 'meta'"
        expect(isinstance(got, Tensor) and got.is_meta, said, "device")
        got, expected = (torch.empty_like(t, device="cpu").zero_() for t in (got, expected))
    close(got, expected, what, tolerance=0)


def told(answer: Callable) -> Callable:
    """The answer, whose torch errors come with the hint that goes with them."""

    def called(*args, **kwargs):
        try:
            return answer(*args, **kwargs)
        except RuntimeError as error:  # NotImplementedError is one
            if str(error).startswith("Cannot copy out of meta tensor"):
                said = "it moves x away from its device; the result belongs where x is"
                raise Wrong(said, "device") from error
            if "view size is not compatible" in str(error):
                error.hint = VIEW
            raise

    return called


def _merge_inputs(batch: int, heads: int, length: int, width: int) -> list[Tensor]:
    x = random(batch, length, 2 * heads, width, seed=3).to(device())  # [B, S, 2H, D]
    return [
        x.transpose(1, 2),
        x.transpose(1, 2)[:, ::2],
        x.transpose(1, 2)[:, :1],  # one head of many: its view as [B, S, D] is strided
        x.permute(3, 2, 1, 0),
        x[:0].transpose(1, 2),
        x[:, :1].transpose(1, 2),
    ]


def _patches(images: Tensor, patch: int) -> Tensor:
    """The tokens one by one, by slicing: slow and plain."""
    height, width = images.shape[2:]
    tokens = [
        images[:, :, i : i + patch, j : j + patch].permute(0, 2, 3, 1).flatten(1)
        for i in range(0, height, patch)
        for j in range(0, width, patch)
    ]
    return torch.stack(tokens, dim=1)


def _windows(x: Tensor, size: int, step: int) -> Tensor:
    return torch.stack([x[i : i + size] for i in range(0, len(x) - size + 1, step)])


def _same_gradient(answer: Callable, expected: Callable, x: Tensor) -> None:
    grads = []
    for fn in (answer, expected):
        leaf = x.detach().clone().requires_grad_()
        out = fn(leaf)
        expect(out.requires_grad, "the result has no gradient")
        (out * random(*out.shape, seed=5).to(device())).sum().backward()
        grads.append(leaf.grad)
    close(grads[0], grads[1], "the gradient")
