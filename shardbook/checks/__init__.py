"""The properties an answer must have: one module a chapter.

``from shardbook.checks import tensors as check; check.split_heads(split_heads)``
"""

CHAPTERS = {
    11: "tensors",
    12: "tracing",
    13: "communication",
    21: "data_parallel",
    22: "tensor_parallel",
    23: "pipeline_parallel",
    24: "context_parallel",
    25: "expert_parallel",
    31: "flash_attention",
    32: "kv_cache",
    43: "diffusion",
    44: "dit_port",
}
