"""Chapter 21: data parallel and ZeRO."""

from .gradients import average_gradients_, bucketed_data_parallel
from .optimizer import zero_adamw
from .sharded import clip_grad_norm_sharded_, fully_sharded, training_memory

__all__ = [
    "average_gradients_",
    "bucketed_data_parallel",
    "clip_grad_norm_sharded_",
    "fully_sharded",
    "training_memory",
    "zero_adamw",
]
