"""The properties an answer must have: one module a chapter.

``from shardbook.checks import tensors as check; check.split_heads(split_heads)``
"""

import ast
from pathlib import Path

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


def exercises(chapter: int) -> list[str]:
    """The names a chapter's module checks, in order, read without importing it; [] if none."""
    return exercises_in(Path(__file__).parent / f"{CHAPTERS[chapter]}.py")


def exercises_in(path: Path) -> list[str]:
    """The names in the ``@check("name")`` decorators of a file; [] if there is no file."""
    if not path.exists():
        return []
    return [
        decorator.args[0].value
        for node in ast.parse(path.read_text()).body
        for decorator in getattr(node, "decorator_list", [])
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "check"
    ]
