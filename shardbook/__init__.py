"""shardbook: run real ranks in a cell, see their trace, check what you wrote."""

from .device import backend, device  # isort: skip  (first: it must come before torch)
from . import lab
from .lab import predict
from .ranks import NotWritten, RankError, Result, run

lab.install()  # in IPython only

__all__ = ["NotWritten", "RankError", "Result", "backend", "device", "predict", "run"]
__version__ = "0.1.0"
