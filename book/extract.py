"""A reference's source as the solution shows it, and the same with its bodies blanked for the lab.

Read with ast from the file, without importing it: no torch, no device, always the text on disk.
"""

import ast
import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class SourceError(ValueError):
    """The book's source can't be built; the message says which part and why."""


@dataclasses.dataclass
class Reference:
    """One exercise: `source` is the solution, `removed` the lines a lab must not show."""

    dotted: str
    source: str
    blanked: str
    removed: list[list[str]]  # by blanked function, stripped lines of its body

    @property
    def name(self) -> str:
        return self.dotted.rsplit(".", 1)[1]


def reference(dotted: str, blank: list[str], number: int) -> Reference:
    """Extract ``shardbook.parallel.tensor.ColumnParallelLinear`` and blank the named functions.

    blank holds names of functions, methods ("forward", "Class.forward") or classes; empty means
    the whole function, or every method of a class.
    """
    module, name = dotted.rsplit(".", 1)
    path = ROOT / (module.replace(".", "/") + ".py")
    if not path.exists():
        raise SourceError(f"{dotted}: there is no {path.relative_to(ROOT)}")
    text = path.read_text()
    found = [n for n in ast.parse(text).body if getattr(n, "name", None) == name]
    if not found:
        raise SourceError(f"{dotted}: {path.relative_to(ROOT)} defines no {name}")
    node = found[-1]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = text.splitlines()
    functions = _functions(node)
    chosen = [f for f in functions if not blank or _wanted(f, blank, name)]
    removed = [_body(f, lines) for _, f in chosen]
    message = f"exercise {number}: {name} is not written yet"
    blanked = list(lines)
    for _, function in reversed(chosen):  # from the end, so that line numbers above stay true
        _blank(function, blanked, message, node.end_lineno)
    shift = len(blanked) - len(lines)
    return Reference(
        dotted,
        "\n".join(lines[first - 1 : node.end_lineno]),
        "\n".join(blanked[first - 1 : node.end_lineno + shift]).rstrip(),
        removed,
    )


def _functions(node: ast.AST) -> list[tuple[str, ast.FunctionDef]]:
    """(qualified name, function) in source order; functions inside functions are not counted."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [(node.name, node)]
    found = []
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found += [(f"{node.name}.{name}", f) for name, f in _functions(child)]
    return found


def _wanted(function: tuple[str, ast.FunctionDef], blank: list[str], exercise: str) -> bool:
    qualified = function[0]
    parts = qualified.split(".")
    return any(b in parts or qualified.endswith("." + b) or qualified == b for b in blank)


def _statements(function: ast.FunctionDef) -> list[ast.stmt]:
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(
        getattr(first.value, "value", None), str
    )
    return function.body[1:] if documented else function.body


def _body(function: ast.FunctionDef, lines: list[str]) -> list[str]:
    body = _statements(function)
    if not body:
        return []
    text = lines[body[0].lineno - 1 : body[-1].end_lineno]
    if body[0].lineno == function.lineno:  # def f(x): return x
        text[0] = text[0][body[0].col_offset :]
    stripped = [line.split("  #")[0].strip() for line in text]
    return [line for line in stripped if len(line) > 3 and not line.startswith("#")]


def _blank(function: ast.FunctionDef, lines: list[str], message: str, limit: int) -> None:
    body = _statements(function)
    indent = " " * (function.col_offset + 4)
    stub = [f"{indent}# TODO", f'{indent}raise NotImplementedError("{message}")']
    end = function.end_lineno
    while end < limit and lines[end].strip().startswith("#"):  # a comment that trails the body
        if len(lines[end]) - len(lines[end].lstrip()) < len(indent):
            break
        end += 1
    if not body:  # a docstring alone
        start = function.body[0].end_lineno
    elif body[0] is not function.body[0]:
        start = function.body[0].end_lineno  # behind the docstring, comments included
    elif body[0].lineno == function.lineno:
        head = lines[function.lineno - 1][: body[0].col_offset].rstrip()
        lines[function.lineno - 1] = head
        start = function.lineno
    else:
        start = body[0].lineno - 1
        while lines[start - 1].strip().startswith("#") or not lines[start - 1].strip():
            start -= 1
    lines[start:end] = stub


def check_blank(references: list[Reference], blank: list[str], cell: str) -> None:
    """Every name of blank= is a function of the cell's references, else a SourceError."""
    for name in blank:
        if not any(_has(r, name) for r in references):
            raise SourceError(f'{cell}: blank="{name}" is in none of its references')
    if not any(r.removed for r in references):
        raise SourceError(f"{cell}: nothing was blanked")


def _has(ref: Reference, name: str) -> bool:
    node = ast.parse(ref.source).body[0]
    return any(_wanted(f, [name], ref.name) for f in _functions(node))
