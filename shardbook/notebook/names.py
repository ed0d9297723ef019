"""Which names Python code reads and binds, by Python's own symbol tables: locals are neither."""

import ast
import symtable
from collections.abc import Iterator


def reads(source: str) -> set[str]:
    """Names of the surrounding module that the code reads, also inside what it defines."""
    found = {
        symbol.get_name()
        for table in _tables(symtable.symtable(source, "<names>", "exec"))
        for symbol in table.get_symbols()
        if _looks_outside(table, symbol)
    }
    changed = (n.target for n in ast.walk(ast.parse(source)) if isinstance(n, ast.AugAssign))
    return found | {target.id for target in changed if isinstance(target, ast.Name)} & binds(source)


def binds(source: str) -> set[str]:
    """Names that running the code defines or changes: x = …, x.y = …, x[0] = …, def x, import x."""
    module = symtable.symtable(source, "<names>", "exec")
    found = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()}
    for table in _tables(module):
        found |= {
            s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()
        }
    return found | set(_changed(ast.parse(source)))


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _looks_outside(table: symtable.SymbolTable, symbol: symtable.Symbol) -> bool:
    if symbol.is_declared_global():
        return True
    # The body of a class reads the module's name until it has bound its own.
    own = symbol.is_local() and table.get_type() not in ("module", "class")
    return symbol.is_referenced() and not own and not symbol.is_free()


def _changed(tree: ast.AST) -> Iterator[str]:
    """The x of x.y = … and x[0] = …, outside of functions and classes; "*" of a star import."""
    left = [tree]  # no recursion: a sum of a thousand terms is a thousand deep
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield "*"
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if stored and isinstance(node, (ast.Attribute, ast.Subscript)):
            while isinstance(node, (ast.Attribute, ast.Subscript)):
                node = node.value
            if isinstance(node, ast.Name):
                yield node.id
