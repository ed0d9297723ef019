"""The properties an answer must have: one module a chapter, or a folder of several.

``from shardbook.checks import tensors as check; check.split_heads(split_heads)``
"""
