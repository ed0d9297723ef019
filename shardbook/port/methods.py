"""Methods of values that are no module: `.cuda()`, `.to(…)`, `.add_argument(…)`."""

import ast
import re

from .detect import device, named, variable
from .library import ray_gpus
from .tensors import tensor_method
from .torch_rules import memory_format
from .values import Value, Values, dotted, is_cuda_text, is_device_name, is_tensor_type_text

MOVERS = {"to", "to_empty", "cuda"}


def method(reader, node: ast.Call, func: ast.Attribute, base: Values, args, keywords) -> Values:
    """A method of something that is no module."""
    name = func.attr
    if name == "cuda":
        own = any(
            v.kind == "self" and any(getattr(m, "name", "") == "cuda" for m in v.data.body)
            for v in base
        )
        if not own:
            reader.report(node, "cuda-method")
        if any(v.kind == "tensor" and v.data == ("f64", "host") for v in base):
            reader.report(node, "float64-move")
        return [Value("tensor", (v.data[0], "device"), node) for v in base if v.kind == "tensor"]
    if name == "format":
        for v in base:
            if v.kind == "str":
                text = "".join("\0" if i else p for i, p in enumerate(split_braces(v.data)))
                return [Value("str", text, v.node)]
    if name in ("startswith", "endswith", "find", "count", "index", "split") and node.args:
        inner = func.value
        cuda_text = any(v.kind == "str" and is_cuda_text(v.data) for v in args[0])
        if cuda_text:
            names = (dotted(strip_calls(inner)) or "").split(".")
            if any(is_device_name(n) or n == "type" for n in names):
                reader.report(node, "cuda-branch")
        return []
    if name in ("add_argument", "option", "add_option") or name.endswith("add_argument"):
        options = [v.data for a in args for v in a if v.kind == "str" and v.data.startswith("-")]
        for option in options:
            named(reader, option, keywords.get("default", []))
        return []
    if name in ("get", "pop", "setdefault", "getenv") and args:
        environment = (dotted(func.value) or "").endswith("environ")
        for v in args[0]:
            if v.kind == "str":
                if environment:
                    variable(reader, node, v.data)
                if len(args) > 1:
                    named(reader, v.data, args[1])
        out = []
        for v in base:
            if v.kind == "dict":
                for key in args[0]:
                    if key.kind == "str":
                        out += v.data.get(key.data, [])
        return out
    if name == "options" and "num_gpus" in keywords:
        ray_gpus(reader, node)
        return []
    if name in ("table",) and any(
        v.kind == "str" and "cuda_" in v.data for v in keywords.get("sort_by", [])
    ):
        reader.report(node, "cuda-profiler")
        return []
    if name == "enable_xformers_memory_efficient_attention":
        reader.report(node, "optional-cuda-library" if reader.guarded else "cuda-library")
        return []
    if name == "compile" and compiles(reader, node, base, keywords):
        reader.report(node, "compile")
        return []
    for k in node.keywords:
        if k.arg == "memory_format":
            memory_format(reader, k.value)
    if name in MOVERS and (args or keywords):
        moved(reader, node, func, args)
    if name == "type" and args:
        for v in args[0]:
            if v.kind == "str" and is_tensor_type_text(v.data):
                reader.report(v.node, "cuda-tensor-type")
    if (
        name == "set_start_method"
        and args
        and any(v.data == "fork" for v in args[0] if v.kind == "str")
    ):
        reader.report(node, "fork")
    if name == "register_buffer" and len(args) > 1:
        for v in args[1]:
            if v.kind == "tensor" and v.data == ("f64", "host"):
                reader.report(node, "float64-move")
    return tensor_method(reader, node, func, base, args, keywords)


def compiles(reader, node: ast.Call, base: Values, keywords: dict) -> bool:
    """Whether `model.compile()` is torch's: other libraries' take an optimizer or a pattern."""
    if node.args or keywords.keys() - {"fullgraph", "dynamic", "mode", "options", "backend"}:
        return False
    engine = {v.data for v in keywords.get("backend", []) if v.kind == "str"}
    own = any(v.kind == "self" and isinstance(node.func.value, ast.Name) for v in base)
    default = "backend" not in keywords or engine & {"inductor", "cudagraphs"}
    return bool(default) and not own and "torch" in reader.scopes[0]


def strip_calls(node: ast.expr) -> ast.expr:
    """`str(x)` and `x.lower()` as `x`."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.args:
            node = node.args[0]
        elif isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return node
    return node


def split_braces(text: str) -> list:
    """The pieces of a format string; every second one is a replaced field."""
    return [piece for piece in re.split(r"(\{[^{}]*\})", text)] if "{" in text else [text]


def moved(reader, node: ast.Call, func: ast.Attribute, args: list[Values]) -> None:
    """`x.to(…)`: the first positional argument may be a device."""
    if node.args and func.attr == "to":
        device(reader, node.args[0], args[0], to=True)
