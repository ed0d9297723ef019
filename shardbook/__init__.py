"""shardbook: run real ranks in a cell, see their trace, check what you wrote.

Each name below is loaded when it is first used, so `import shardbook` costs nothing.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING

# torch would load torch_npu by itself and fail where CANN is absent; `devices` loads it and keeps
# the reason. It may be imported after torch, so torch is told here.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

__version__ = "0.1.0"

_HOMES = {
    "NotWritten": "ranks.result",
    "RankError": "ranks.result",
    "Result": "ranks.result",
    "Trace": "tracing.merge",
    "backend": "devices",
    "device": "devices",
    "mark": "tracing.record",
    "match": "tracing.match",
    "pace": "tracing.record",
    "predict": "notebook.lab",
    "run": "ranks",
    "show": "tracing.shown",
    "trace": "tracing.record",
}
_ROOMS = {"plot": "pictures.plot", "port": "port"}  # modules by the name that people type
__all__ = [
    "NotWritten",
    "RankError",
    "Result",
    "Trace",
    "backend",
    "device",
    "mark",
    "match",
    "pace",
    "plot",
    "port",
    "predict",
    "run",
    "show",
    "trace",
]

if TYPE_CHECKING:
    from . import port
    from .devices import backend, device
    from .notebook.lab import predict
    from .pictures import plot
    from .ranks import NotWritten, RankError, Result, run
    from .tracing import Trace, mark, pace, show, trace
    from .tracing.match import match


def __getattr__(name: str):
    if name in _HOMES:
        found = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _ROOMS:
        found = importlib.import_module(f".{_ROOMS[name]}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "IPython" in sys.modules:
    from .notebook import install

    install()
