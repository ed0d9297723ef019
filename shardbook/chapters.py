"""Which chapters and exercises there are. It loads neither torch nor any check."""

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
    """The names a chapter's modules check, in order, read without importing them; [] if none."""
    return exercises_in(Path(__file__).parent / "checks", CHAPTERS[chapter])


def exercises_in(folder: Path, name: str) -> list[str]:
    """What ``name.py`` checks or, where it is a folder, what its modules do."""
    modules = [*folder.glob(f"{name}.py"), *sorted(folder.glob(f"{name}/*.py"))]
    return [checked for module in modules for checked in _checked_in(module)]


def chapter_of(module: str) -> int | None:
    """The chapter that a module of checks, by its full name, belongs to."""
    parts = module.split(".")
    return next((n for n, m in CHAPTERS.items() if m in parts[-2:]), None)


def _checked_in(path: Path) -> list[str]:
    """The names in the ``@check("name")`` decorators of a file."""
    return [
        decorator.args[0].value
        for node in ast.parse(path.read_text()).body
        for decorator in getattr(node, "decorator_list", [])
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "check"
    ]
