"""What the fork server imports once, so that a rank starts with it already loaded."""

import gc

import cloudpickle
import torch._dynamo  # the first optimizer of a process imports it: 3 s in every rank otherwise
import torch.distributed
import torch.distributed._functional_collectives
import torch.distributed.nn.functional

from .. import calls, devices, ranks, tracing
from . import cell, worker

calls.install()
gc.collect()
gc.freeze()  # what is loaded here stays: a rank's garbage collector need not walk it again
__all__ = ["calls", "cell", "cloudpickle", "devices", "ranks", "torch", "tracing", "worker"]
