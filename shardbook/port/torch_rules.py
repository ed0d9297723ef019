"""Functions of torch that an NPU has no kernel, no backend or no loader for."""

import ast

from .values import Values, dotted

OPTIMIZERS = {"Adam", "AdamW", "SGD", "Adagrad"}


def elsewhere(reader, node: ast.AST, path: str, keywords: dict[str, Values]) -> None:
    """A function of torch is called (or used as a decorator)."""
    last = path.rsplit(".", 1)[-1]
    where = node.func if isinstance(node, ast.Call) else node
    if path == "torch.load" and isinstance(node, ast.Call):
        spread = any(k.arg is None for k in node.keywords) and not keywords
        if "map_location" not in keywords and len(node.args) < 2 and not spread:
            reader.report(node, "load-device")
    elif path in ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
        reader.report(where, "data-parallel")
    elif path.startswith("torch.optim.") and last in OPTIMIZERS:
        given = [k for k in getattr(node, "keywords", []) if k.arg == "fused"]
        if any(not isinstance(k.value, ast.Constant) or k.value.value for k in given):
            reader.report(given[0].value, "fused-optimizer")
    elif path.startswith("torch.nn.attention.flex_attention."):
        reader.report(where, "flex-attention")
    elif path in ("torch.jit.script", "torch.jit.script_method", "torch.jit.script_if_tracing"):
        reader.report(where, "jit-script")
    for k in getattr(node, "keywords", []):
        if k.arg == "memory_format":
            memory_format(reader, k.value)


def memory_format(reader, node: ast.expr) -> None:
    """`memory_format=torch.channels_last`."""
    if (dotted(node) or "").endswith((".channels_last", ".channels_last_3d")):
        reader.report(node, "channels-last")
