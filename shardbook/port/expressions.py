"""Expressions: the possible values of each kind, as far as this file shows them."""

import ast

from . import branches, called, conditions, detect, uses
from .statements import bind
from .tensors import combined
from .values import MOST, UNKNOWN, Value, Values, join


def _constant(reader, node: ast.Constant) -> Values:
    if isinstance(node.value, str):
        if "NCCL_" in node.value:
            detect.written(reader, node)
        return [Value("str", node.value, node)]
    if isinstance(node.value, int) and not isinstance(node.value, bool):
        return [Value("int", None, node)]
    return []


def _name(reader, node: ast.Name) -> Values:
    for scope in reversed(reader.scopes):
        if node.id in scope:
            uses.name_read(reader, node, scope[node.id])
            return scope[node.id]
    return []


def _attribute(reader, node: ast.Attribute) -> Values:
    node.value.prefix = True
    base = reader.eval(node.value)
    out: Values = []
    for v in base:
        if v.kind == "mod":
            out.append(Value("mod", f"{v.data}.{node.attr}", node))
        elif v.kind == "self":
            out += reader.attributes.get(v.data, {}).get(node.attr, [])
    return join(detect.attribute(reader, node, base, out))


def _joined_text(reader, node: ast.JoinedStr) -> Values:
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        else:
            inner = reader.eval(part.value)
            known = [v.data for v in inner if v.kind in ("str", "device")]
            text += known[0] if len(known) == 1 else UNKNOWN
    return [Value("str", text, node)]


def _operation(reader, node: ast.BinOp) -> Values:
    left, right = reader.eval(node.left), reader.eval(node.right)
    if isinstance(node.op, (ast.Add, ast.Mod)):
        for v in left:
            if v.kind == "str":
                return [_built(v, right, node)]
        for v in right:
            if v.kind == "str" and isinstance(node.op, ast.Add):
                return [Value("str", UNKNOWN + v.data, node)]
    kept = [v for v in join(left, right) if v.kind in ("tensor", "array")]
    if kept:
        product = isinstance(node.op, (ast.Mult, ast.Div, ast.MatMult))
        made = [v for v in kept if v.kind == "tensor" and v.data[0] == "complex"]
        if product and any(v.data[1] != "host" for v in made):
            reader.report(node, "complex", f"line {made[0].node.lineno}")
        return combined(kept, node)
    ints = [v for v in left + right if v.kind == "int"]
    if ints and isinstance(node.op, (ast.Mod, ast.Add, ast.Sub, ast.FloorDiv)):
        return [Value("int", None, node)]
    return [Value("int", None, node)] if isinstance(node.op, ast.Mod) else []


def _built(start: Value, more: Values, node: ast.AST) -> Value:
    """The text of ``start + more`` or ``start % more``."""
    text = start.data
    known = [v.data for v in more if v.kind == "str"]
    if "%" in text:
        parts = text.split("%")
        text = parts[0] + "".join(UNKNOWN + p[1:] for p in parts[1:])
    else:
        text += known[0] if len(known) == 1 else UNKNOWN
    return Value("str", text, node)


def _either(reader, node: ast.BoolOp) -> Values:
    found, behind = [], 0
    for part in node.values:
        reader.quiet += behind
        found.append(reader.eval(part))
        reader.quiet -= behind
        if isinstance(node.op, ast.And) and branches.insists_on_cuda(part):
            behind = 1  # in `x.is_cuda and f(x)`, an NPU never comes to f
    return join(*found)


def _comparison(reader, node: ast.Compare) -> Values:
    conditions.compare(reader, node)
    return []


def _dictionary(reader, node: ast.Dict) -> Values:
    entries: dict = {}
    for key, value in zip(node.keys, node.values, strict=True):
        values = reader.eval(value)
        if key is None:
            for v in values:
                entries.update(v.data if v.kind == "dict" else {})
            continue
        reader.eval(key)
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            entries[key.value] = values
            detect.named(reader, key.value, values)
            detect.variable(reader, key, key.value)
    return [Value("dict", entries, node)]


def _sequence(reader, node: ast.List | ast.Tuple | ast.Set) -> Values:
    return [Value("list", tuple(join(*[reader.eval(e) for e in node.elts])), node)]


def _starred(reader, node: ast.Starred) -> Values:
    return reader.eval(node.value)


def _walrus(reader, node: ast.NamedExpr) -> Values:
    values = reader.eval(node.value)
    bind(reader, node.target, values)
    return values


def _subscript(reader, node: ast.Subscript) -> Values:
    base = reader.eval(node.value)
    return conditions.subscript(reader, node, base, reader.eval(node.slice))


def _function(reader, node: ast.Lambda) -> Values:
    reader.scopes.append({a.arg: [] for a in node.args.args})
    reader.eval(node.body)
    reader.scopes.pop()
    return []


def _comprehension(reader, node) -> Values:
    reader.scopes.append({})
    for generator in node.generators:
        values = reader.eval(generator.iter)
        bind(reader, generator.target, [i for v in values if v.kind == "list" for i in v.data])
        for test in generator.ifs:
            reader.eval_test(test)
    if isinstance(node, ast.DictComp):
        reader.eval(node.key)
        out = reader.eval(node.value)
    else:
        out = reader.eval(node.elt)
    reader.scopes.pop()
    return [Value("list", tuple(out[:MOST]), node)]


KINDS = {
    ast.Constant: _constant, ast.Name: _name, ast.Attribute: _attribute, ast.Call: called.call,
    ast.JoinedStr: _joined_text, ast.BinOp: _operation, ast.BoolOp: _either,
    ast.IfExp: branches.if_expression, ast.Compare: _comparison, ast.Dict: _dictionary,
    ast.List: _sequence, ast.Tuple: _sequence, ast.Set: _sequence, ast.Starred: _starred,
    ast.NamedExpr: _walrus, ast.Subscript: _subscript, ast.Lambda: _function,
    ast.ListComp: _comprehension, ast.SetComp: _comprehension, ast.DictComp: _comprehension,
    ast.GeneratorExp: _comprehension,
}  # fmt: skip
