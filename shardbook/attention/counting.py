"""What moves between device memory and the chip, and how large a tensor becomes: counted, not told.

A CPU has caches nobody controls, so the traffic of an accelerator is counted where it would happen:
a tile that is asked for is loaded, unless it is the one that lies on the chip already.
"""

from collections.abc import Callable

from torch import Tensor

from .._seams import TorchDispatchMode, tree_leaves


class Loaded:
    """A tensor in device memory; indexing loads a tile of it and counts its elements.

    Has what `flash_attention_forward` asks of q, k and v: shape, dtype, device and indexing. The
    tile loaded last stays on the chip: asking for it again costs nothing.
    """

    def __init__(self, x: Tensor):
        self.x, self.shape, self.dtype, self.device = x, x.shape, x.dtype, x.device
        self.elements, self.loads, self.on_chip = 0, 0, None

    def __getitem__(self, index) -> Tensor:
        tile = self.x[index]
        if index != self.on_chip:
            self.on_chip = index
            self.elements += tile.numel()
            self.loads += 1
        return tile


def tile_traffic(attention: Callable, q: Tensor, k: Tensor, v: Tensor, **options) -> int:
    """Elements a tiled attention loads and stores: q, k and v as it asks for them, out once."""
    parts = [Loaded(x) for x in (q, k, v)]
    out = attention(*parts, **options)
    out = out[0] if isinstance(out, tuple) else out
    return sum(p.elements for p in parts) + out.numel()


class _Operators(TorchDispatchMode):
    """Every operation reads its inputs from memory and writes its output there; views are free."""

    def __init__(self):
        super().__init__()
        self.elements, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        given = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in given}
        new = [t for t in made if t.untyped_storage().data_ptr() not in storages]
        if new:
            self.elements += sum(t.numel() for t in given + new)
        self.largest = max([self.largest, *(t.numel() for t in made)])
        return out


def operator_traffic(run: Callable, *args) -> int:
    """Elements read and written if each operation of ``run(*args)`` is a kernel of its own."""
    with _Operators() as counter:
        run(*args)
    return counter.elements


def largest_tensor(run: Callable, *args) -> int:
    """Elements of the largest tensor that ``run(*args)`` makes."""
    with _Operators() as counter:
        run(*args)
    return counter.largest
