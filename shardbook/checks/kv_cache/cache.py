"""Chapter 32, what is stored: the cache, its sliding window, its bytes and their FLOPs."""

import torch
from torch import Tensor

from ...devices import device
from ..compare import all_close, close, expect, random, refuses, same, unchanged
from ..groups import held, tensors_of
from ..report import check

B, HKV, D = 3, 2, 5


def _new(answer, max_len: int, batch: int = B, dtype: torch.dtype = torch.float32):
    return answer(batch, HKV, max_len, D, dtype, device())


def _room(max_len: int, itemsize: int = 4) -> int:
    """Bytes of keys and values, with room for lengths and for one table of places a row."""
    return 2 * B * HKV * max_len * D * itemsize + 8 * B * (max_len + 2)


def _places(cache) -> set[int]:
    """Where the memory of keys and values lies, whatever kind of object the cache is."""
    tensors = [t for t in tensors_of(cache) if t.is_floating_point() and t.numel()]
    return {t.untyped_storage().data_ptr() for t in tensors}


def _lengths(cache) -> list[int]:
    return torch.as_tensor(cache.length).tolist()


def _leaves_length(cache, change: str, *args) -> None:
    """cache.append or cache.truncate makes a new `length`."""
    earlier, was = cache.length, _lengths(cache)
    said = f"length is {type(earlier).__name__}, expected a tensor"
    expect(isinstance(earlier, Tensor), said, "type")
    getattr(cache, change)(*args)
    now = earlier.tolist()
    said = f"{change} changed `length` in place, what was {was} when it was read is {now} now: "
    expect(now == was, said + "make a new tensor")


@check("KVCache")
def kv_cache(answer, report):
    """Append, lengths, truncation."""
    k, v = (random(B, HKV, 11, D, seed=s).to(device()) for s in (1, 2))
    with report.property(
        "append returns all keys and values so far, in order",
        hint="write behind what is there; return the part that is used, not the whole room",
    ):
        cache = _new(answer, 11)
        at = 0
        for n in (4, 1, 1, 3):
            with unchanged("append", k, v):
                keys, values = cache.append(k[:, :, at : at + n], v[:, :, at : at + n])
            at += n
            close(keys, k[:, :, :at].cpu(), f"the keys after {at} tokens", 0.0)
            close(values, v[:, :, :at].cpu(), f"the values after {at} tokens", 0.0)
            same(_lengths(cache), [at] * B, f"length after {at} tokens")
    with report.property(
        "truncate makes each row as short as it is told, and the next token goes there",
        hint="length is one number a row: after a rejected guess rows differ",
    ):
        cache = _new(answer, 11)
        cache.append(k[:, :, :6], v[:, :, :6])
        lengths = torch.tensor([2, 6, 4], device=device())
        cache.truncate(lengths)
        same(_lengths(cache), [2, 6, 4], "length after truncate")
        keys, values = cache.append(k[:, :, 8:10], v[:, :, 8:10])
        same(_lengths(cache), [4, 8, 6], "length after the next append")
        same(lengths.tolist(), [2, 6, 4], "the tensor that truncate was given, after an append")
        for row, length in enumerate((2, 6, 4)):
            want = torch.cat([k[row, :, :length], k[row, :, 8:10]], dim=1).cpu()
            close(keys[row, :, : length + 2], want, f"the cached k of row {row}", 0.0)
            want = torch.cat([v[row, :, :length], v[row, :, 8:10]], dim=1).cpu()
            close(values[row, :, : length + 2], want, f"the cached v of row {row}", 0.0)
    with report.property(
        "`length` is a new tensor at each change",
        hint="self.length = self.length + …, not +=: whoever has read a length keeps what it was",
    ):
        cache = _new(answer, 11)
        _leaves_length(cache, "append", k[:, :, :6], v[:, :, :6])
        lengths = torch.tensor([2, 6, 4], device=device())
        _leaves_length(cache, "truncate", lengths)
        lengths.zero_()
        kept = _lengths(cache) == [2, 6, 4]
        expect(kept, "truncate kept the tensor of lengths that it was given: make a new one")
    with report.property(
        "it keeps what was appended, also when its caller writes into k and v",
        hint="copy k and v into memory of the cache: the caller may use theirs again",
    ):
        cache, given = _new(answer, 11), [t[:, :, :4].clone() for t in (k, v)]
        cache.append(*given)
        for t in given:
            t.zero_()
        got = cache.append(k[:, :, 4:6], v[:, :, 4:6])
        keys, values = got
        pairs = {"keys": (keys, k[:, :, :6]), "values": (values, v[:, :, :6])}
        all_close(pairs, "a cache whose caller overwrote what it had given", 0.0)
    with report.property(
        "ValueError past max_len, and nothing is lost by it",
        hint="look before you write; exactly max_len tokens fit",
    ):
        cache = _new(answer, 5)
        cache.append(k[:, :, :3], v[:, :, :3])
        refuses(cache.append, k[:, :, 3:6], v[:, :, 3:6], what="6 tokens in a cache of 5")
        same(_lengths(cache), [3] * B, "length after a refused append")
        keys, _ = cache.append(k[:, :, 3:5], v[:, :, 3:5])
        close(keys, k[:, :, :5].cpu(), "the keys after a refused append", 0.0)
        cache.truncate(torch.tensor([2, 5, 4], device=device()))
        refuses(cache.append, k[:, :, :2], v[:, :, :2], what="2 tokens where one row has no room")
        same(_lengths(cache), [2, 5, 4], "length after one row had no room")
    with report.property(
        "it holds room for max_len tokens, once",
        hint="torch.cat at every step keeps old copies alive and copies everything again",
    ):
        for dtype in (torch.float32, torch.bfloat16):
            new_k, new_v = k.to(dtype), v.to(dtype)
            cache, room = _new(answer, 11, dtype=dtype), _room(11, dtype.itemsize)
            for at in range(9):
                cache.append(new_k[:, :, at : at + 1], new_v[:, :, at : at + 1])
                expect(
                    held(cache) <= room,
                    f"the cache holds {held(cache)} bytes in {dtype}, expected at most {room}",
                )
            first = _places(cache)
            cache.append(new_k[:, :, 9:10], new_v[:, :, 9:10])
            expect(bool(first), "the cache holds no tensors")
            expect(
                first == _places(cache), "append moved the whole cache to new memory for one token"
            )
    with report.property(
        "it keeps the dtype it was made with, and no graph",
        hint="a cache of tensors that require grad keeps every step's graph alive",
    ):
        low = answer(B, HKV, 4, D, torch.bfloat16, device())
        keys, _ = low.append(k[:, :, :2].bfloat16(), v[:, :, :2].bfloat16())
        same(keys.dtype, torch.bfloat16, "the dtype")
        cache = _new(answer, 4)
        leaves = [t[:, :, :2].clone().requires_grad_() for t in (k, v)]
        cache.append(*[leaf * 2 for leaf in leaves])
        graphs = any(t.requires_grad for t in tensors_of(cache))
        expect(not graphs, "the cache holds tensors with a graph")


# The sliding window, and the formulas


class _Store:
    """A cache as exercise 1 describes it, written row by row, to hand to the answer."""

    def __init__(self, max_len: int):
        self.max_len = max_len
        self.keys = torch.zeros(B, HKV, max_len, D, device=device())
        self.values = torch.zeros_like(self.keys)
        self.length = torch.zeros(B, dtype=torch.int64, device=device())

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        longest = int(self.length.max()) + k.shape[2]
        if longest > self.max_len:
            raise ValueError(f"{longest} tokens do not fit into a cache of {self.max_len}")
        for row, at in enumerate(self.length.tolist()):
            self.keys[row, :, at : at + k.shape[2]] = k[row]
            self.values[row, :, at : at + k.shape[2]] = v[row]
        self.length = self.length + k.shape[2]
        return self.keys[:, :, :longest], self.values[:, :, :longest]

    def truncate(self, lengths: Tensor | int) -> None:
        lengths = torch.as_tensor(lengths, device=self.length.device).expand_as(self.length)
        if bool((lengths > self.length).any()) or bool((lengths < 0).any()):
            raise ValueError("a row can only become shorter")
        self.length = lengths.to(torch.int64).clone()


@check("sliding_window_append")
def sliding_window_append(answer, report):
    """The last tokens only."""
    k, v = (random(B, HKV, 40, D, seed=s).to(device()) for s in (31, 32))

    def push(cache, start: int, n: int, window: int):
        return answer(cache, k[:, :, start : start + n], v[:, :, start : start + n], window)

    with report.property(
        "the cache holds the last `window` tokens, in order",
        hint="when it is full the oldest tokens make room; order matters to positions",
    ):
        for window, chunks in ((5, [2, 1, 1, 1, 1, 1]), (7, [3, 3, 3, 4]), (4, [1] * 9)):
            cache, at = _Store(window), 0
            for n in chunks:
                keys, values = push(cache, at, n, window)
                at += n
                want = slice(max(0, at - window), at)
                close(keys, k[:, :, want].cpu(), f"keys after {at} tokens, window {window}", 0.0)
                close(values, v[:, :, want].cpu(), f"values after {at}, window {window}", 0.0)
                same(_lengths(cache), [min(at, window)] * B, f"length after {at} tokens")
    with report.property(
        "a chunk longer than the window leaves its own last tokens",
        hint="look at the chunk's length before you write",
    ):
        for before in (0, 2, 5):
            for n in (5, 12):
                cache = _Store(5)
                if before:
                    cache.append(k[:, :, :before], v[:, :, :before])
                # what is stored shows in what one more token leaves
                for at, more in ((before, n), (before + n, 1)):
                    got, end = push(cache, at, more, 5), at + more
                    what = f"after {before} and {n}" + (" and 1" if more == 1 else "")
                    close(got[0], k[:, :, end - 5 : end].cpu(), f"keys {what}", 0.0)
                    close(got[1], v[:, :, end - 5 : end].cpu(), f"values {what}", 0.0)
                    same(_lengths(cache), [5] * B, f"length {what}")
    with report.property(
        "rows of different lengths slide each by itself",
        hint="one row may be full while another has room",
    ):
        cache = _Store(6)
        cache.append(k[:, :, :6], v[:, :, :6])
        cache.truncate(torch.tensor([6, 1, 4], device=device()))
        for end in (13, 14):  # three tokens, then one more
            got = push(cache, 10, 3, 6) if end == 13 else push(cache, 13, 1, 6)
            same(_lengths(cache), [min(6, n + end - 10) for n in (6, 1, 4)], "length")
            for row, length in enumerate((6, 1, 4)):
                for name, have, all_ in (("keys", got[0], k), ("values", got[1], v)):
                    want = torch.cat([all_[row, :, :length], all_[row, :, 10:end]], dim=1)
                    want = want[:, -6:].cpu()
                    close(have[row, :, : want.shape[1]], want, f"the {name} of row {row}", 0.0)
    with report.property(
        "the cache never grows past its window",
        hint="max_len is the window: write in place of the oldest",
    ):
        cache = _Store(5)
        for at in range(0, 30, 3):
            push(cache, at, 3, 5)
            room = _room(5)
            expect(held(cache) <= room, f"it holds {held(cache)} bytes, expected at most {room}")


@check("kv_cache_bytes")
def kv_cache_bytes(answer, report):
    """Memory."""
    with report.property(
        "2 L Hkv D S B times the bytes of a value",
        hint="keys and values, of kv heads (not query heads), of every layer and token",
    ):
        for args in ((3, 2, 5, 7, 11, 2), (32, 8, 128, 4096, 1, 2), (1, 1, 1, 1, 1, 4)):
            want = 2
            for a in args:
                want *= a
            same(answer(*args), want, f"the bytes of {args}")


@check("decode_intensity")
def decode_intensity(answer, report):
    """FLOPs a byte."""
    with report.property(
        "(2 N B + 4 L H D S B) over the bytes of parameters and cache",
        hint="parameters are read once for the whole batch, every sequence's cache once; queries "
        "have H heads, the cache Hkv",
    ):
        for n, layers, heads, kv, d, s, b, w in (
            (7_000, 3, 6, 2, 5, 11, 4, 2),
            (8_000_000_000, 32, 32, 8, 128, 4096, 1, 2),
            (1_000, 1, 4, 4, 8, 1, 64, 4),
        ):
            flops = 2 * n * b + 4 * layers * heads * d * s * b
            want = flops / (n * w + 2 * layers * kv * d * s * b * w)
            got = answer(n, layers, heads, kv, d, s, b, w)
            expect(abs(got - want) <= 1e-9 * want, f"it is {got}, expected {want:.6g}")
