"""shardbook: run real ranks in a cell, see their trace, check what you wrote."""

from .device import backend, device  # isort: skip  (first: it must come before torch)
from .ranks import NotWritten, RankError, Result, run

__all__ = ["NotWritten", "RankError", "Result", "backend", "device", "run"]
__version__ = "0.1.0"
