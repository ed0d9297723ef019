"""What the fork server imports once, so that a rank starts with it already loaded."""

import cloudpickle
import torch.distributed
import torch.distributed._functional_collectives
import torch.distributed.nn.functional

from . import calls, device, ranks, worker

calls.install()
__all__ = ["calls", "cloudpickle", "device", "ranks", "torch", "worker"]
