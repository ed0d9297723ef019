"""How many bytes of tensors this process holds, on any device: the sum over distinct storages."""

import gc
from collections.abc import Iterable

from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind the tensors; views of one storage count once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor holds its shard
        storage = tensor.untyped_storage()
        if storage.nbytes():
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def held_bytes() -> int:
    """Bytes of every tensor that Python can reach in this process, gradients included.

    What only the autograd graph holds (activations saved for backward) is not seen. The difference
    of two readings is what the lines between them left behind.
    """
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    # A gradient lives in C++ and has no Python object until somebody asks for it.
    grads = [t.grad for t in tensors if t.is_leaf and t.requires_grad]
    return storage_bytes([*tensors, *grads])
