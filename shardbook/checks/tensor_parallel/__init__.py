"""Chapter 22: what tensor- and sequence-parallel layers must do."""

from .layers import (
    all_gather_to_group,
    column_parallel_linear,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    row_parallel_linear,
    scatter_to_group,
)
from .model import (
    parallel_attention,
    sequence_parallel_block,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

__all__ = [
    "all_gather_to_group",
    "column_parallel_linear",
    "copy_to_group",
    "gather_from_group",
    "parallel_attention",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "row_parallel_linear",
    "scatter_to_group",
    "sequence_parallel_block",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]
