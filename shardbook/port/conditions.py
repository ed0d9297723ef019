"""Tests and comparisons: does the code insist on CUDA, or lose a branch without it?"""

import ast

from .detect import variable
from .values import (
    Values,
    dotted,
    is_backend_name,
    is_cuda_text,
    is_device_name,
    is_tensor_type_text,
    join,
    names_npu,
)


def asks_cuda(reader, node: ast.expr) -> ast.AST | None:
    """The part of a test that asks torch.cuda.is_available(), if any."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            for v in quietly(reader, part.func):
                if v.kind == "flag" and v.data == "cuda":
                    return part
                if v.kind == "mod" and v.data == "torch.cuda.is_available":
                    return part
    return None


def quietly(reader, node: ast.expr) -> Values:
    """What an expression is, without reporting anything."""
    reader.quiet += 1
    try:
        return reader.eval(node)
    finally:
        reader.quiet -= 1


def insisted(reader, statement: ast.stmt, test_: ast.expr) -> None:
    """`assert test`."""
    asked = asks_cuda(reader, test_)
    if asked is not None:
        reader.report(statement, "cuda-assert")
        return
    for part in ast.walk(test_):
        if isinstance(part, ast.Attribute) and part.attr == "is_cuda":
            reader.report(statement, "cuda-assert")
            return
    if isinstance(test_, ast.Compare) and compares_cuda(reader, test_):
        reader.report(statement, "cuda-assert")
        return
    reader.eval(test_)


def test(reader, node: ast.expr) -> None:
    """The test of an if, a while, a conditional expression."""
    if names_npu(node) or isinstance(node, ast.Name):  # `if flash_attn_func:` uses nothing
        quietly(reader, node)
        return
    reader.eval(node)


def condition(reader, statement: ast.If) -> None:
    """An if statement as a whole: does it insist, or take everything but the CPU for CUDA?"""
    test_ = statement.test
    if names_npu(test_):
        return
    negated = isinstance(test_, ast.UnaryOp) and isinstance(test_.op, ast.Not)
    stops = any(isinstance(s, ast.Raise) or is_exit(s) for s in statement.body)
    if negated and stops and asks_cuda(reader, test_) is not None:
        reader.report(statement, "cuda-assert")
    if statement.orelse and is_cpu(test_) and mentions_cuda(statement.orelse):
        reader.report(statement, "not-cpu-is-cuda")


def choice(reader, node: ast.IfExp) -> None:
    """`a if device.type == "cpu" else b`: is b for CUDA?"""
    if is_cpu(node.test) and mentions_cuda([node.orelse]):
        reader.report(node, "not-cpu-is-cuda")


def cuda_or_cpu(reader, node: ast.IfExp) -> Values:
    """`"cuda" if torch.cuda.is_available() else "cpu"`: what an NPU takes of it."""
    plain = all(isinstance(x, ast.Constant) for x in (node.body, node.orelse))
    if not plain or not isinstance(node.test, ast.Call) or asks_cuda(reader, node.test) is None:
        return []
    return reader.eval(node.orelse)


def is_cpu(test_: ast.expr) -> bool:
    """`… == "cpu"`."""
    if not isinstance(test_, ast.Compare) or len(test_.ops) != 1:
        return False
    right = test_.comparators[0]
    return (
        isinstance(test_.ops[0], ast.Eq)
        and isinstance(right, ast.Constant)
        and right.value == "cpu"
    )


def mentions_cuda(nodes: list[ast.AST]) -> bool:
    """Whether code uses CUDA by name: `x.cuda()`, `self.rng_cuda`, "cuda:0", "nccl"."""
    for node in nodes:
        for part in ast.walk(node):
            name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
            if "cuda" in str(name).lower().split("_"):
                return True
            text = part.value if isinstance(part, ast.Constant) else None
            if isinstance(text, str) and (is_cuda_text(text) or text == "nccl"):
                return True
    return False


def is_exit(statement: ast.stmt) -> bool:
    """`sys.exit(…)`, `exit(…)`, `quit()`."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return (dotted(statement.value.func) or "").rsplit(".", 1)[-1] in ("exit", "quit", "_exit")
    return False


def compares_cuda(reader, node: ast.Compare) -> bool:
    """Whether a comparison asks if a device is CUDA, or a backend NCCL."""
    sides = [node.left, *node.comparators]
    texts: list[str] = []
    for side in sides:
        if isinstance(side, ast.Constant) and isinstance(side.value, str):
            texts.append(side.value)
        elif isinstance(side, (ast.Tuple, ast.List, ast.Set)):
            elements = [e.value for e in side.elts if isinstance(e, ast.Constant)]
            texts += [e for e in elements if isinstance(e, str)]
        elif isinstance(side, ast.Call):  # == torch.device("cuda")
            texts += [v.data for v in quietly(reader, side) if v.kind == "device"]
    cuda_text = any(is_cuda_text(t) or is_tensor_type_text(t) for t in texts)
    nccl_text = any(t.lower() == "nccl" for t in texts)
    if not cuda_text and not nccl_text:
        return False
    if any(t.startswith("npu") or t == "hccl" for t in texts):
        return False
    for side in sides:
        if isinstance(side, ast.Constant):
            continue
        inner = side
        while isinstance(inner, (ast.Call, ast.Subscript)):
            if isinstance(inner, ast.Call) and dotted(inner.func) == "str" and inner.args:
                inner = inner.args[0]
            else:
                inner = inner.func if isinstance(inner, ast.Call) else inner.value
        name = dotted(inner) or (inner.attr if isinstance(inner, ast.Attribute) else "")
        parts = name.split(".")
        if nccl_text and any(is_backend_name(p) for p in parts):
            return True
        if cuda_text and (
            parts[-1] == "type" or any(is_device_name(p) or p == "split" for p in parts)
        ):
            return True
        if cuda_text and any(v.kind == "device" for v in quietly(reader, inner)):
            return True
    return False


def compare(reader, node: ast.Compare) -> None:
    """A comparison is read."""
    for side in [node.left, *node.comparators]:
        if not isinstance(side, (ast.Constant, ast.Name)) and not is_dtype(side):
            reader.eval(side)
    if compares_cuda(reader, node):
        reader.report(node, "cuda-branch")


def case(reader, subject: ast.expr, pattern: ast.pattern) -> None:
    """`case "cuda"` of a match: the comparison of its subject with the pattern's texts."""
    texts: list[ast.expr] = [part for part in ast.walk(pattern) if isinstance(part, ast.Constant)]
    if compares_cuda(reader, ast.Compare(subject, [ast.In()], [ast.Tuple(texts)])):
        reader.report(pattern, "cuda-branch")


def is_dtype(node: ast.expr) -> bool:
    """`torch.float64` and the like: a comparison with one computes nothing."""
    name = dotted(node) or ""
    return name.rsplit(".", 1)[-1].startswith(("float", "complex", "bfloat", "double", "half"))


def subscript(reader, node: ast.Subscript, base: Values, index: Values) -> Values:
    """`base[index]`."""
    for v in index:
        if v.kind == "str":
            environment = (dotted(node.value) or "").endswith("environ")
            if environment:
                variable(reader, node, v.data)
    out: Values = []
    for v in base:
        if v.kind == "dict" and len(index) == 1 and index[0].kind == "str":
            out += v.data.get(index[0].data, [])
        elif v.kind in ("tensor", "array"):
            out.append(v)
        elif v.kind == "list":
            out += v.data
    return join(out)
