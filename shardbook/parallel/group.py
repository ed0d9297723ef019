"""What a collective runs over."""

import torch.distributed as dist

Group = dist.ProcessGroup | None  # None is all ranks
