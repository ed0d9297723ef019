"""The top-level statements of a notebook, and which of them a name needs."""

import __future__

import ast
import dataclasses
import linecache
import re

from ..notebook import names

UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)  # what parsing raises


@dataclasses.dataclass
class Statement:
    """A statement, or a whole cell that is no Python: then `node` is None and `error` says why."""

    title: str  # of the file or the cell
    line: int
    node: ast.stmt | None
    reads: set[str]
    binds: set[str]
    error: Exception | None = None

    @property
    def where(self) -> str:
        """ "cell 3, line 2"."""
        return f"{self.title}, line {self.line}"


def statements(parts: list[tuple[str, str]]) -> list[Statement]:
    """The statements of all parts, in order; magics are left out."""
    return [statement for title, text in parts for statement in _of_part(title, text)]


def _of_part(title: str, text: str) -> list[Statement]:
    first = text.lstrip().split("\n", 1)
    if first[0].startswith(("%%time", "%%capture")):  # these run the cell as it is
        text = "\n" + (first[1] if len(first) > 1 else "")
    elif first[0].startswith("%%"):
        return []
    try:
        tree = ast.parse(text)
    except UNREADABLE:
        from IPython.core.inputtransformer2 import TransformerManager

        try:  # magics and shell commands become calls, and calls alone define nothing
            text = TransformerManager().transform_cell(text)
            tree = ast.parse(text)
        except UNREADABLE as error:
            return [_no_python(title, text, error)]
    remember(title, text)
    return [_statement(title, text, node) for node in tree.body]


def remember(title: str, source: str) -> None:
    """inspect.getsource and tracebacks find the text even if the file is gone or is a cell."""
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)


def _no_python(title: str, text: str, error: Exception) -> Statement:
    meant = re.findall(r"^(?:async +)?(?:def|class) +(\w+)|^(\w+) *=[^=]", text, re.MULTILINE)
    line = getattr(error, "lineno", None) or 1
    return Statement(title, line, None, set(), {a or b for a, b in meant}, error)


def _statement(title: str, text: str, node: ast.stmt) -> Statement:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    if first < node.lineno:
        source = "\n".join(text.split("\n")[first - 1 : node.end_lineno])
    else:
        source = ast.get_source_segment(text, node) or ""
    try:
        reads, binds = names.reads(source), names.binds(source)
    except UNREADABLE as error:  # of the kind that only the compiler finds
        return Statement(title, first, node, set(), {getattr(node, "name", "")}, error)
    if isinstance(node, ast.Delete):  # tidying up after a demo makes nothing
        binds = set()
    if isinstance(node, ast.For):  # its own variable is no name of another statement
        loops = [n.target for n in ast.walk(node) if isinstance(n, ast.For)]
        own = {n.id for target in loops for n in ast.walk(target) if isinstance(n, ast.Name)}
        reads -= own - names.reads(ast.unparse(node.iter))
    return Statement(title, first, node, reads, binds)


def closure(found: list[Statement], name: str) -> tuple[list[int], set[str]]:
    """Which statements define `name` and what those use, and all names used; star imports always.

    A call alone defines nothing: what is only shown or tried is not among them.
    """
    chosen: set[int] = set()
    wanted, seen = [name], {name}
    while wanted:
        target = wanted.pop()
        for i, statement in enumerate(found):
            if i not in chosen and {target, "*"} & statement.binds:
                chosen.add(i)
                new = statement.reads - seen
                seen |= new
                wanted += new
    return sorted(chosen), seen


def futures(found: list[Statement]) -> int:
    """Compiler flags of the ``from __future__ import`` statements: they hold in all cells."""
    flags = 0
    for statement in found:
        if isinstance(statement.node, ast.ImportFrom) and statement.node.module == "__future__":
            for alias in statement.node.names:
                flags |= getattr(getattr(__future__, alias.name, None), "compiler_flag", 0)
    return flags
