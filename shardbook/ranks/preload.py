"""What the fork server imports once, so that a rank starts with it already loaded."""

import gc

import cloudpickle
import torch
import torch.distributed
import torch.distributed.nn.functional

from .. import _seams, calls, devices, ranks, tracing, words
from . import cell, worker

_seams.import_ahead()
calls.install()
words.hidden("")  # where packages lie is looked up here, not in every rank
gc.collect()
gc.freeze()  # what is loaded here stays: a rank's garbage collector need not walk it again
__all__ = [
    "calls",
    "cell",
    "cloudpickle",
    "devices",
    "ranks",
    "torch",
    "tracing",
    "words",
    "worker",
]
