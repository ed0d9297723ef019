"""shardbook: run real ranks in a cell, see their trace, check what you wrote."""

from .device import backend, device  # isort: skip  (first: it must come before torch)
from . import lab, magic
from .lab import predict
from .ranks import NotWritten, RankError, Result, run
from .trace import Trace, mark, pace, show

from . import trace  # isort: skip  (a module that can be called: sb.trace(model))

lab.install()  # in IPython only
magic.install()

__all__ = [
    "NotWritten",
    "RankError",
    "Result",
    "Trace",
    "backend",
    "device",
    "mark",
    "pace",
    "predict",
    "run",
    "show",
    "trace",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    """`sb.port` comes in when it is first asked for: it needs libcst, which takes a while."""
    if name == "port":
        import importlib

        return importlib.import_module(".port", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
