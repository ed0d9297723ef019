"""What the fork server imports once, so that a rank starts with it already loaded."""

import cloudpickle
import torch._dynamo  # the first optimizer of a process imports it: 3 s in every rank otherwise
import torch.distributed
import torch.distributed._functional_collectives
import torch.distributed.nn.functional

from . import calls, device, magic, ranks, worker

calls.install()
__all__ = ["calls", "cloudpickle", "device", "magic", "ranks", "torch", "worker"]
