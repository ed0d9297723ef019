"""The body of a ``%%ranks`` cell, as a rank runs it."""

import types
from typing import Any

import torch
import torch.distributed as dist

from ..devices import device

GIVEN = {"rank", "world_size", "device", "torch", "dist"}  # names that every cell finds


def _show(value: Any) -> None:
    if value is not None:
        print(repr(value))


def body(code: types.CodeType, names: dict) -> None:
    """Run a cell's code with the names it finds on every rank, and those of the notebook."""
    given = {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "device": device(),
        "torch": torch,
        "dist": dist,
        "_show": _show,
        "__name__": "__main__",
    }
    exec(code, names | given)
