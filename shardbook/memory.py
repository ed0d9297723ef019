"""How many bytes of tensors this process holds, on any device: the sum over distinct storages."""

import gc
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from . import _seams


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind the tensors; views of one storage count once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        if hasattr(tensor, "placements"):  # a DTensor holds its shard
            tensor = _seams.local_part(tensor)
        if tensor.layout is not torch.strided:  # a sparse one has no storage of its own
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.device.type != "meta":  # as those of torch.export are
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def held_bytes() -> int:
    """Bytes of every tensor that Python can reach in this process, gradients included.

    What only the autograd graph holds (activations saved for backward) is not seen. The difference
    of two readings is what the lines between them left behind.

    The thread of a collective may hold its tensors a moment longer than the call that waited for
    it: in a rank the reading is repeated until it stands still for 50 ms.
    """
    readings = [_held()]
    while dist.is_initialized() and len(readings) < 100:
        if len(readings) >= 5 and len(set(readings[-5:])) == 1:
            break
        time.sleep(0.0125)
        readings.append(_held())
    return readings[-1]


def _held() -> int:
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    # A gradient lives in C++ and has no Python object until somebody asks for it.
    grads = [t.grad for t in tensors if t.is_leaf and t.requires_grad]
    return storage_bytes([*tensors, *grads])
