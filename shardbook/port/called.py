"""Calls: who is called, with what, and what comes back."""

import ast

from . import library
from .detect import device, named, used, variable
from .library import AUTOCAST
from .methods import method
from .tensors import dtype_of
from .values import Value, Values, is_device_name, join

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def call(reader, node: ast.Call) -> Values:
    """A call: what it means, and what it returns."""
    func = node.func
    reader.chain.append(func)
    mark_prefixes(func)
    base: Values = []
    if isinstance(func, ast.Attribute):
        func.value.prefix = True
        base = reader.eval(func.value)
        targets = [Value("mod", f"{v.data}.{func.attr}", func) for v in base if v.kind == "mod"]
        for v in base:
            if v.kind == "self":
                methods = (f for f in v.data.body if isinstance(f, FUNCTIONS))
                targets += [Value("local", f, f) for f in methods if f.name == func.attr]
                targets += reader.attributes.get(v.data, {}).get(func.attr, [])
    else:
        targets = reader.eval(func)
    reader.chain.pop()

    args = [reader.eval(a) for a in node.args]
    keywords: dict[str, Values] = {}
    for k in node.keywords:
        values = reader.eval(k.value)
        if k.arg is None:
            for v in values:
                if v.kind == "dict":
                    keywords.update(v.data)
        else:
            keywords[k.arg] = values
    paths = {t.data for t in targets if t.kind == "mod"}
    own_rule = paths & (AUTOCAST.keys() | {"torch.Generator"})  # they report CUDA themselves
    for name, values in keywords.items():
        if own_rule:
            continue
        where = next((k.value for k in node.keywords if k.arg == name), node)
        if name == "device_ids":
            continue
        if name in ("cuda", "use_cuda") and getattr(where, "value", None) is True:
            reader.report(where, "cuda-device")
        elif is_device_name(name) or name == "device_type":
            device(reader, where, values)
        elif name == "device_id":
            if not any(p.endswith("init_process_group") for p in paths):
                device(reader, where, values)
        else:
            named(reader, name, values)
        variable(reader, node, name)

    out: Values = []
    either = len({p.partition(".")[0] for p in paths}) > 1  # AdamW8bit or AdamW: not this library's
    reader.guarded += either
    reader.choosing += either
    for t in targets:
        if t.kind == "mod":
            out += library.called(reader, node, t.data, args, keywords)
        elif t.kind == "local":
            out += local_call(reader, node, t.data, args, keywords)
    reader.guarded -= either
    reader.choosing -= either
    if isinstance(func, ast.Attribute):
        if not any(v.kind == "mod" for v in base):
            out += method(reader, node, func, base, args, keywords)
    elif isinstance(func, ast.Name) and not targets:
        out += builtin(reader, node, func.id, args, keywords)
    return join(out)


def mark_prefixes(func: ast.expr) -> None:
    """Mark `torch.cuda` in `torch.cuda.f(…)` as no use of its own."""
    inner = func
    while isinstance(inner, ast.Attribute):
        if isinstance(inner.value, ast.Attribute):
            inner.value.prefix = True
        inner = inner.value


def local_call(reader, node: ast.Call, f, args: list[Values], keywords: dict) -> Values:
    """A call of a function or class of this file."""
    if isinstance(f, ast.ClassDef):
        init = next(
            (m for m in f.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None
        )
        takes = init.args.args[1:] if init else []
        out = [Value("self", f, node)]
    else:
        takes = f.args.posonlyargs + f.args.args
        if takes and takes[0].arg in ("self", "cls"):
            takes = takes[1:]
        init, out = f, reader.results(f)
    for arg, value in zip(takes, args, strict=False):
        named(reader, arg.arg, value)
        given(reader, arg, value)
    for arg in [*takes, *init.args.kwonlyargs] if init and keywords else ():
        given(reader, arg, keywords.get(arg.arg, []))
    return out


def given(reader, arg: ast.arg, values: Values) -> None:
    """A parameter is given these values: is float64 among them?"""
    if not reader.quiet and dtype_of(values) == "f64":
        reader.passed.add(arg)


def builtin(reader, node: ast.Call, name: str, args: list[Values], keywords: dict) -> Values:
    """A call of a name that this file does not define."""
    if name == "getattr" and len(args) >= 2:
        texts = [v.data for v in args[1] if v.kind == "str"]
        paths = [v.data for v in args[0] if v.kind == "mod"]
        if texts and paths:
            path = f"{paths[0]}.{texts[0]}"
            used(reader, node, path)
            return [Value("mod", path, node)]
    if name == "__import__" and args:
        return [Value("mod", v.data, node) for v in args[0] if v.kind == "str"]
    if name in ("int", "len", "ord"):
        return [Value("int", None, node)]
    if name == "range":
        return [Value("list", (Value("int", None, node),), node)]
    if name == "str" and args:
        return [v for v in args[0] if v.kind == "str"] + [
            Value("str", v.data, node) for v in args[0] if v.kind == "device" and v.data != "?"
        ]
    if name == "dict":
        return [Value("dict", keywords, node)]
    if name == "print":
        return []
    return []
