"""Tensors and modules as plain data: shapes, dtypes, shards and parameters."""

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from .. import _seams

MOST = 64
"""Tensors noted of one list of arguments."""

PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}


def describe(value: Any) -> Any:
    """(shape, dtype) of every tensor, nesting kept, None for what is no tensor."""
    kind = type(value)
    if kind is Tensor:
        return (shape(value), value.dtype)
    if kind in PLAIN:
        return None
    if isinstance(value, Tensor):
        placements = getattr(value, "placements", None)  # a DTensor
        if placements is None:
            return (shape(value), value.dtype)
        local = _seams.local_part(value).shape
        return (value.shape, value.dtype, local, " ".join(map(str, placements)))
    if isinstance(value, (list, tuple)):
        return [d for v in value[:MOST] if (d := describe(v)) is not None] or None
    if isinstance(value, dict):
        named = itertools.islice(value.items(), MOST)
        return {str(k): d for k, v in named if (d := describe(v)) is not None} or None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return describe(vars(value)) if hasattr(value, "__dict__") else None
    return None


def shape(x: Tensor) -> tuple:
    """The shape; a nested tensor, as TransformerEncoder makes of a padding mask, has none."""
    try:
        return x.shape
    except RuntimeError:
        return (x.size(0), *["ragged"] * (x.dim() - 2), x.size(-1))


def module_info(name: str, module: nn.Module) -> dict:
    """Name, type and own parameters; of a DTensor the full shape and this rank's."""
    parameters = {}
    for own, p in module.named_parameters(recurse=False, remove_duplicate=False):
        if type(p) is nn.UninitializedParameter:
            continue
        shape = local = tuple(p.shape)
        placed = ""
        if type(p) is not nn.Parameter and hasattr(p, "placements"):
            local, placed = tuple(_seams.local_part(p).shape), " ".join(map(str, p.placements))
        parameters[own] = {"id": id(p), "shape": shape, "dtype": p.dtype}
        parameters[own] |= {"local_shape": local, "placements": placed}
    kind = "linear" if "in_features" in vars(module) else ""
    kind = "convolution" if "in_channels" in vars(module) else kind
    return {"name": name, "type": type(module).__name__, "kind": kind, "parameters": parameters}
