"""Statements: what each kind of statement tells of the names after it."""

import ast

from . import branches, called, conditions, detect, library
from .values import Value, Values, join


def _import(reader, s: ast.Import) -> None:
    for alias in s.names:
        compiled = detect.imported(reader, s, alias.name, None)
        reader.imports.add(("", alias.name.rpartition(".")[2]))
        top = alias.name.partition(".")[0]
        target, path = (alias.asname, alias.name) if alias.asname else (top, top)
        reader.assign_name(target, [Value("mod", compiled or path, s)])


def _import_from(reader, s: ast.ImportFrom) -> None:
    module = "." * s.level + (s.module or "")
    for alias in s.names:
        compiled = detect.imported(reader, s, module, alias.name)
        known = reader.around.names.get((module.rpartition(".")[2], alias.name))
        reader.imports.add((module.rpartition(".")[2], alias.name))
        path = known.data if known else compiled or f"{module}.{alias.name}"
        reader.assign_name(alias.asname or alias.name, [Value("mod", path, s)])


def _define(reader, s: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """A function: its body is read later, once the module's names are known."""
    for decorator in s.decorator_list:
        _decorate(reader, decorator)
    args = s.args
    positional = args.posonlyargs + args.args
    first = len(positional) - len(args.defaults)
    pairs = list(zip(positional[first:], args.defaults, strict=True))
    pairs += [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d]
    for arg, default in pairs:
        values = reader.eval(default)
        detect.named(reader, arg.arg, values)
        called.given(reader, arg, values)
    reader.assign_name(s.name, [Value("local", s, s)])
    reader.pending.append((s, list(reader.scopes), list(reader.classes)))


def _decorate(reader, node: ast.expr) -> None:
    values = reader.eval(node)
    if not isinstance(node, ast.Call):
        for v in values:
            if v.kind == "mod":
                library.called(reader, node, v.data, [], {})


def _define_class(reader, s: ast.ClassDef) -> None:
    for decorator in s.decorator_list:
        _decorate(reader, decorator)
    for base in [*s.bases, *[k.value for k in s.keywords]]:
        for v in reader.eval(base):
            if v.kind == "mod" and v.data.endswith("Conv3d") and v.data.startswith("torch."):
                library.conv3d(reader, base)
    body = reader.attributes[s] = {}
    reader.classes.append(s)
    reader.scopes.append(body)
    first = len(reader.pending)
    reader.block(s.body)
    reader.scopes.pop()
    mine = reader.pending[first:]
    mine.sort(key=lambda f: f[0].name != "__init__")
    # a method sees the class's attributes through self, not as plain names
    reader.pending[first:] = [(f, scopes[:-1], c) for f, scopes, c in mine]
    reader.classes = reader.classes[:-1]
    reader.assign_name(s.name, [Value("local", s, s)])


def _return(reader, s: ast.Return) -> None:
    if s.value is not None:
        values = reader.eval(s.value)
        if reader.returns:
            reader.returns[-1] = join(reader.returns[-1], values)


def _expression(reader, s: ast.Expr) -> None:
    if not isinstance(s.value, ast.Constant):  # a docstring, or nothing
        reader.eval(s.value)


def _assert(reader, s: ast.Assert) -> None:
    conditions.insisted(reader, s, s.test)


def _assign(reader, s: ast.Assign) -> None:
    values = reader.eval(s.value)
    for target in s.targets:
        bind(reader, target, values, s.value)


def _annotated(reader, s: ast.AnnAssign) -> None:
    if s.value is not None:
        bind(reader, s.target, reader.eval(s.value), s.value)


def _augmented(reader, s: ast.AugAssign) -> None:
    reader.eval(s.target)
    reader.eval(s.value)


def _delete(reader, s: ast.Delete) -> None:
    """Nothing is used."""


def bind(reader, target: ast.expr, values: Values, source: ast.expr | None = None) -> None:
    """`target = values`; `source` is what stands on the right, if it is one expression."""
    if isinstance(target, ast.Name):
        reader.assign_name(target.id, values)
        detect.named(reader, target.id, values, local=True)
        if reader.classes and reader.scopes[-1] is reader.attributes[reader.classes[-1]]:
            detect.variable(reader, target, target.id)  # a class of settings for the environment
    elif isinstance(target, ast.Attribute):
        base = reader.eval(target.value)
        for v in base:
            if v.kind == "self":
                known = reader.attributes[v.data]
                known[target.attr] = join(known.get(target.attr, []), values)
        detect.attribute_set(reader, target, base, values)
    elif isinstance(target, (ast.Tuple, ast.List)):
        parts = source.elts if isinstance(source, (ast.Tuple, ast.List)) else []
        if len(parts) != len(target.elts):
            parts = [None] * len(target.elts)
        for element, part in zip(target.elts, parts, strict=True):
            bind(reader, element, reader.eval(part), part)
    elif isinstance(target, ast.Starred):
        bind(reader, target.value, [])
    elif isinstance(target, ast.Subscript):
        reader.eval(target.value)
        reader.eval(target.slice)
        detect.item_set(reader, target, values)


def _loop(reader, s: ast.For | ast.AsyncFor | ast.While) -> None:
    if isinstance(s, ast.While):
        reader.eval_test(s.test)
    else:
        values = reader.eval(s.iter)
        items = [i for v in values if v.kind == "list" for i in v.data]
        ints = [v for v in values if v.kind == "int"]
        bind(reader, s.target, items or ints)
    reader.branches += 1
    reader.block(s.body)
    reader.block(s.orelse)
    reader.branches -= 1


def _with(reader, s: ast.With | ast.AsyncWith) -> None:
    for item in s.items:
        values = reader.eval(item.context_expr)
        if item.optional_vars is not None:
            bind(reader, item.optional_vars, values)
    reader.block(s.body)


KINDS = {
    ast.Import: _import, ast.ImportFrom: _import_from, ast.FunctionDef: _define,
    ast.AsyncFunctionDef: _define, ast.ClassDef: _define_class, ast.Return: _return,
    ast.Expr: _expression, ast.Assert: _assert, ast.Assign: _assign, ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented, ast.Delete: _delete, ast.For: _loop, ast.AsyncFor: _loop,
    ast.While: _loop, ast.With: _with, ast.AsyncWith: _with, ast.If: branches.if_statement,
    ast.Try: branches.try_statement, ast.Match: branches.match_statement,
}  # fmt: skip
if hasattr(ast, "TryStar"):
    KINDS[ast.TryStar] = branches.try_statement
