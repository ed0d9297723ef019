"""What travels between the notebook and its ranks: functions by value, tensors by storage."""

import io
import traceback
import types
from collections import ChainMap
from typing import ClassVar

import cloudpickle
import torch


def _code_with_its_file(code: types.CodeType) -> tuple:
    make, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if a == "<dynamic-code>" else a for a in args)


def _tensor(x: torch.Tensor) -> tuple:
    view = (x.dtype, x.storage_offset(), tuple(x.shape), x.stride(), x.requires_grad)
    return _tensor_of, (x.untyped_storage(), *view, vars(x))


def _tensor_of(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple,
    stride: tuple,
    requires_grad: bool,
    attributes: dict,
) -> torch.Tensor:
    x = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    vars(x).update(attributes)
    return x.requires_grad_() if requires_grad else x


def _storage(storage: torch.UntypedStorage) -> tuple:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _storage_of, (data.cpu().numpy().tobytes(), str(storage.device))


def _storage_of(data: bytes, device: str) -> torch.UntypedStorage:
    if not data:
        return torch.UntypedStorage(0, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device).untyped_storage()


def _plain(x: object) -> bool:
    """A tensor that is what its storage, shape and strides say."""
    return (
        type(x) is torch.Tensor
        and x.layout is torch.strided
        and x.device.type != "meta"
        and not (x.is_quantized or x.is_conj() or x.is_neg())
    )


class _Pickler(cloudpickle.Pickler):
    # cloudpickle forgets where code comes from; the messages need its file and line. torch's own
    # reduction knows no float8 and no uint16, and writes a storage once for each of its views.
    dispatch_table: ClassVar = ChainMap(
        {types.CodeType: _code_with_its_file}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: object) -> object:
        if _plain(obj):
            return _tensor(obj)
        if type(obj) is torch.UntypedStorage and obj.device.type != "meta":
            return _storage(obj)
        return super().reducer_override(obj)


def dumps(value: object) -> bytes:
    """Pickle by value what cells and the main file define, by reference what modules define."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def cannot_send(value: object, error: BaseException) -> str:
    """Why a return value that can't be pickled is refused, and what to return instead."""
    reason = f"{type(error).__name__}: {_text(error)}".splitlines()[0]
    return (
        f"returned {_kind(value)}, which can't be sent back ({reason}); "
        "return tensors, numbers or lists"
    )


def _kind(value) -> str:
    name = type(value).__qualname__
    if isinstance(value, (list, tuple)) and value:
        return f"a {name} of {', '.join(dict.fromkeys(type(v).__qualname__ for v in value))}"
    if isinstance(value, dict) and value:
        kinds = ", ".join(dict.fromkeys(type(v).__qualname__ for v in value.values()))
        return f"a dict with values of type {kinds}"
    return f"an object of type {name}"


def failure(error: BaseException) -> bytes:
    """("error", the exception, links): for it and what it was raised from, (type, text, frames)."""
    links, link = [], error
    while link is not None and len(links) < 4:
        trace = traceback.extract_tb(link.__traceback__)
        frames = [(f.filename, f.lineno or 0, f.name) for f in trace]
        links.append((type(link).__name__, _text(link), frames))
        link = link.__cause__
    for candidate in (error, RuntimeError(f"{links[0][0]}: {links[0][1]}")):
        try:
            str(candidate)  # it is shown, so it must have a text
            payload = dumps(("error", candidate, links))
            cloudpickle.loads(payload)  # some exceptions pickle, but don't come back
            return payload
        except BaseException:  # an exception's own methods may raise anything
            continue
    raise AssertionError("a RuntimeError can always be pickled")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(its text can't be shown)"
