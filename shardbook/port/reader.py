"""Reads one file's statements in order and follows names to what they stand for.

No code runs: imports, aliases, constants, built strings, class attributes and local functions are
followed as far as this file shows. What each use means for an NPU is decided in detect.py.
"""

import ast
from collections.abc import Callable

from . import called, conditions, detect
from .tensors import combined
from .values import MOST, UNKNOWN, Value, Values, is_device_name, join, names_npu, nothing_known

Scope = dict[str, Values]


class Reader:
    """Holds what is known while one file is read; `report(node, rule)` collects the findings."""

    def __init__(self, tree: ast.Module, report: Callable[[ast.AST, str], None]):
        self.tree, self._report = tree, report
        self.scopes: list[Scope] = [{}]
        self.classes: list[ast.ClassDef] = []
        self.attributes: dict[ast.ClassDef, Scope] = {}
        self.done: dict[ast.AST, Values] = {}  # functions read so far -> what they return
        self.pending: list[tuple] = []  # functions to read once the module's names are known
        self.returns: list[Values] = []
        self.quiet = 0  # > 0 where an NPU never comes
        self.guarded = 0  # > 0 inside a try whose failure is caught, or a check for availability
        self.defined_methods = {
            f.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef)
            for f in c.body if isinstance(f, ast.FunctionDef)
        }  # fmt: skip
        self.words = {
            n.attr if isinstance(n, ast.Attribute) else n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Attribute)
            or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        }
        self.optional: set[str] = set()  # libraries imported where a failure is caught
        self.chain: list[ast.AST] = []  # the calls around the expression being read

    def report(self, node: ast.AST | None, rule: str) -> None:
        if node is not None and not self.quiet:
            self._report(node, rule)

    def read(self) -> None:
        self.block(self.tree.body)
        while self.pending:
            function, scopes, classes = self.pending.pop(0)
            if function not in self.done:
                self.function(function, scopes, classes)

    # ---- statements

    def block(self, body: list[ast.stmt]) -> bool:
        """Read statements in order; True where the block always leaves (return, raise, …)."""
        added = 0
        left = False
        for statement in body:
            if self.statement(statement) == "npu left":
                self.quiet += 1
                added += 1
            if isinstance(statement, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
                left = True
        self.quiet -= added
        return left

    def statement(self, s: ast.stmt) -> str | None:
        method = getattr(self, "do_" + type(s).__name__, None)
        if method:
            return method(s)
        for child in ast.iter_child_nodes(s):
            if isinstance(child, ast.expr):
                self.eval(child)
        return None

    def do_Import(self, s: ast.Import) -> None:
        for alias in s.names:
            detect.imported(self, s, alias.name, None)
            top = alias.name.partition(".")[0]
            target, path = (alias.asname, alias.name) if alias.asname else (top, top)
            self.assign_name(target, [Value("mod", path, s)])

    def do_ImportFrom(self, s: ast.ImportFrom) -> None:
        module = "." * s.level + (s.module or "")
        for alias in s.names:
            detect.imported(self, s, module, alias.name)
            path = f"{module}.{alias.name}"
            self.assign_name(alias.asname or alias.name, [Value("mod", path, s)])

    def do_FunctionDef(self, s) -> None:
        for decorator in s.decorator_list:
            self.decorator(decorator)
        self.defaults(s)
        self.assign_name(s.name, [Value("local", s, s)])
        self.pending.append((s, list(self.scopes), list(self.classes)))

    do_AsyncFunctionDef = do_FunctionDef

    def decorator(self, node: ast.expr) -> None:
        values = self.eval(node)
        if not isinstance(node, ast.Call):
            for v in values:
                if v.kind == "mod":
                    called.called(self, node, v.data, [], {}, None)

    def defaults(self, s) -> None:
        args = s.args
        positional = args.posonlyargs + args.args
        pairs = list(
            zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True)
        )
        pairs += [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d]
        for arg, default in pairs:
            detect.named(self, arg.arg, self.eval(default))

    def function(self, f, scopes: list[Scope], classes: list[ast.ClassDef]) -> Values:
        """Read a function's body once, with its defaults for arguments; what it returns."""
        self.done[f] = []
        saved = self.scopes, self.classes, self.quiet, self.guarded, self.chain
        local: Scope = {}
        self.scopes, self.classes, self.chain = [*scopes, local], classes, []
        self.quiet = 1 if names_npu_word(f.name) else 0
        self.guarded = 0
        args = f.args
        everything = args.posonlyargs + args.args + args.kwonlyargs
        for i, arg in enumerate(everything):
            first = i == 0 and classes and arg.arg in ("self", "cls")
            kind = ("self", classes[-1]) if first else ("param", arg.arg)
            local[arg.arg] = [Value(*kind, arg)]
        for extra in (args.vararg, args.kwarg):
            if extra:
                local[extra.arg] = [Value("param", extra.arg, extra)]
        self.returns.append([])
        self.block(f.body)
        found = self.done[f] = self.returns.pop()
        detect.named(self, f.name, found)
        self.scopes, self.classes, self.quiet, self.guarded, self.chain = saved
        return found

    def do_ClassDef(self, s: ast.ClassDef) -> None:
        for decorator in s.decorator_list:
            self.decorator(decorator)
        for base in [*s.bases, *[k.value for k in s.keywords]]:
            self.eval(base)
        self.attributes[s] = {}
        self.classes.append(s)
        body: Scope = self.attributes[s]
        self.scopes.append(body)
        first = len(self.pending)
        self.block(s.body)
        self.scopes.pop()
        mine = self.pending[first:]
        self.pending[first:] = sorted(mine, key=lambda f: f[0].name != "__init__")
        # a method sees the class's attributes through self, not as plain names
        self.pending[first:] = [(f, sc[:-1], c) for f, sc, c in self.pending[first:]]
        self.classes = self.classes[:-1]
        self.assign_name(s.name, [Value("local", s, s)])

    def do_Return(self, s: ast.Return) -> None:
        if s.value is not None:
            values = self.eval(s.value)
            if self.returns:
                self.returns[-1] = join(self.returns[-1], values)

    def do_Expr(self, s: ast.Expr) -> None:
        if not isinstance(s.value, ast.Constant):  # a docstring, or nothing
            self.eval(s.value)

    def do_Assert(self, s: ast.Assert) -> None:
        conditions.insisted(self, s, s.test)

    def do_Assign(self, s: ast.Assign) -> None:
        values = self.eval(s.value)
        for target in s.targets:
            self.assign(target, values, s.value)

    def do_AnnAssign(self, s: ast.AnnAssign) -> None:
        if s.value is not None:
            self.assign(s.target, self.eval(s.value), s.value)

    def do_AugAssign(self, s: ast.AugAssign) -> None:
        self.eval(s.target)
        self.eval(s.value)

    def do_Delete(self, s: ast.Delete) -> None:
        pass

    def assign(self, target: ast.expr, values: Values, source: ast.expr | None = None) -> None:
        if isinstance(target, ast.Name):
            self.assign_name(target.id, values)
            detect.named(self, target.id, values, local=len(self.scopes) > 1 or True)
        elif isinstance(target, ast.Attribute):
            base = self.eval(target.value)
            for v in base:
                if v.kind == "self":
                    known = self.attributes[v.data]
                    known[target.attr] = join(known.get(target.attr, []), values)
            detect.attribute_set(self, target, base, values)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = source.elts if isinstance(source, (ast.Tuple, ast.List)) else []
            for i, element in enumerate(target.elts):
                known = len(parts) == len(target.elts)
                self.assign(
                    element, self.eval(parts[i]) if known else [], parts[i] if known else None
                )
        elif isinstance(target, ast.Starred):
            self.assign(target.value, [])
        elif isinstance(target, ast.Subscript):
            self.eval(target.value)
            self.eval(target.slice)
            detect.item_set(self, target, values)

    def assign_name(self, name: str, values: Values) -> None:
        scope = self.scopes[-1]
        if self.branches and name in scope:
            values = join(values, scope[name])
        scope[name] = values

    branches = 0  # > 0 inside an if, a loop or a try, where an assignment may not happen

    def do_If(self, s: ast.If) -> str | None:
        npu, negated = asks_npu(s.test)
        self.eval_test(s.test)
        conditions.condition(self, s)
        self.branches += 1
        self.quiet += npu and negated
        self.guarded += 1 if asks_available(s.test) else 0
        left = self.block(s.body)
        self.guarded -= 1 if asks_available(s.test) else 0
        self.quiet -= npu and negated
        self.quiet += npu and not negated
        self.block(s.orelse)
        self.quiet -= npu and not negated
        self.branches -= 1
        # after `if npu: return`, an NPU never comes to the rest of the block
        return "npu left" if npu and not negated and left else None

    def loop(self, s) -> None:
        if isinstance(s, ast.While):
            self.eval_test(s.test)
        else:
            values = self.eval(s.iter)
            items = [i for v in values if v.kind == "list" for i in v.data]
            ints = [v for v in values if v.kind == "int"]
            self.assign(s.target, items or ints)
        self.branches += 1
        self.block(s.body)
        self.block(s.orelse)
        self.branches -= 1

    do_For = do_AsyncFor = do_While = loop

    def do_With(self, s) -> None:
        for item in s.items:
            values = self.eval(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, values)
        self.block(s.body)

    do_AsyncWith = do_With

    def do_Try(self, s) -> None:
        caught = any(catches_import(h) for h in s.handlers)
        self.branches += 1
        self.guarded += caught
        self.block(s.body)
        self.guarded -= caught
        for handler in s.handlers:
            self.block(handler.body)
        self.block(s.orelse)
        self.block(s.finalbody)
        self.branches -= 1

    do_TryStar = do_Try

    def do_Match(self, s) -> None:
        self.eval(s.subject)
        npu = False
        self.branches += 1
        for case in s.cases:
            if names_npu(case.pattern):
                npu = True
                self.block(case.body)
            else:
                self.quiet += npu
                self.block(case.body)
                self.quiet -= npu
        self.branches -= 1

    # ---- expressions

    def eval(self, node: ast.expr | None) -> Values:
        """The possible values of an expression; reports what it means on the way."""
        if node is None:
            return []
        method = getattr(self, "see_" + type(node).__name__, None)
        if method:
            return method(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.eval(child)
        return []

    def eval_test(self, node: ast.expr) -> None:
        conditions.test(self, node)

    def see_Constant(self, node: ast.Constant) -> Values:
        if isinstance(node.value, str):
            return [Value("str", node.value, node)]
        if isinstance(node.value, int) and not isinstance(node.value, bool):
            return [Value("int", None, node)]
        return []

    def see_Name(self, node: ast.Name) -> Values:
        for scope in reversed(self.scopes):
            if node.id in scope:
                return scope[node.id]
        return []

    def see_Attribute(self, node: ast.Attribute) -> Values:
        base = self.eval(node.value)
        out: Values = []
        for v in base:
            if v.kind == "mod":
                out.append(Value("mod", f"{v.data}.{node.attr}", node))
            elif v.kind == "self":
                out += self.attributes.get(v.data, {}).get(node.attr, [])
        return join(detect.attribute(self, node, base, out))

    def see_Call(self, node: ast.Call) -> Values:
        return called.call(self, node)

    def see_JoinedStr(self, node: ast.JoinedStr) -> Values:
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
            else:
                inner = self.eval(part.value)
                known = [v.data for v in inner if v.kind in ("str", "device")]
                text += known[0] if len(known) == 1 else UNKNOWN
        return [Value("str", text, node)]

    def see_BinOp(self, node: ast.BinOp) -> Values:
        left, right = self.eval(node.left), self.eval(node.right)
        if isinstance(node.op, (ast.Add, ast.Mod)):
            for v in left:
                if v.kind == "str":
                    return [built(v, right, node)]
            for v in right:
                if v.kind == "str" and isinstance(node.op, ast.Add):
                    return [Value("str", UNKNOWN + v.data, node)]
        kept = [v for v in join(left, right) if v.kind in ("tensor", "array")]
        if kept:
            return combined(kept, node)
        ints = [v for v in left + right if v.kind == "int"]
        if ints and isinstance(node.op, (ast.Mod, ast.Add, ast.Sub, ast.FloorDiv)):
            return [Value("int", None, node)]
        if isinstance(node.op, ast.Mod):
            conditions.modulo(self, node)
            return [Value("int", None, node)]
        return []

    def see_BoolOp(self, node: ast.BoolOp) -> Values:
        return join(*[self.eval(v) for v in node.values])

    def see_IfExp(self, node: ast.IfExp) -> Values:
        npu, negated = asks_npu(node.test)
        self.eval_test(node.test)
        if npu:
            chosen, other = (node.orelse, node.body) if negated else (node.body, node.orelse)
            self.quiet += 1
            self.eval(other)
            self.quiet -= 1
            return self.eval(chosen)
        body, other = self.eval(node.body), self.eval(node.orelse)
        if nothing_known(body) != nothing_known(other) and any(
            v.kind == "device" for v in body + other
        ):
            return join(body, other, [Value("device", UNKNOWN, node)])  # or another one
        return join(body, other)

    def see_Compare(self, node: ast.Compare) -> Values:
        conditions.compare(self, node)
        return []

    def see_Dict(self, node: ast.Dict) -> Values:
        entries: dict = {}
        for key, value in zip(node.keys, node.values, strict=True):
            values = self.eval(value)
            if key is None:
                for v in values:
                    entries.update(v.data if v.kind == "dict" else {})
                continue
            self.eval(key)
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                entries[key.value] = values
                detect.named(self, key.value, values)
                detect.variable(self, key, key.value)
        return [Value("dict", entries, node)]

    def see_List(self, node) -> Values:
        return [Value("list", tuple(join(*[self.eval(e) for e in node.elts])), node)]

    see_Tuple = see_Set = see_List

    def see_Starred(self, node: ast.Starred) -> Values:
        return self.eval(node.value)

    def see_NamedExpr(self, node: ast.NamedExpr) -> Values:
        values = self.eval(node.value)
        self.assign(node.target, values)
        return values

    def see_Subscript(self, node: ast.Subscript) -> Values:
        base = self.eval(node.value)
        index = self.eval(node.slice) if isinstance(node.slice, ast.expr) else []
        return conditions.subscript(self, node, base, index)

    def see_Lambda(self, node: ast.Lambda) -> Values:
        self.scopes.append({a.arg: [] for a in node.args.args})
        self.eval(node.body)
        self.scopes.pop()
        return []

    def comprehension(self, node) -> Values:
        self.scopes.append({})
        for generator in node.generators:
            values = self.eval(generator.iter)
            items = [i for v in values if v.kind == "list" for i in v.data]
            self.assign(generator.target, items)
            for test in generator.ifs:
                self.eval_test(test)
        if isinstance(node, ast.DictComp):
            self.eval(node.key)
            out = self.eval(node.value)
        else:
            out = self.eval(node.elt)
        self.scopes.pop()
        return [Value("list", tuple(out[:MOST]), node)]

    see_ListComp = see_SetComp = see_GeneratorExp = see_DictComp = comprehension

    def results(self, f: ast.AST) -> Values:
        """What a function of this file returns, reading it now if it was not read yet."""
        if f in self.done or not isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self.done.get(f, [])
        for entry in self.pending:
            if entry[0] is f:
                self.pending.remove(entry)
                return self.function(*entry)
        return []


def built(start: Value, more: Values, node: ast.AST) -> Value:
    """The text of ``start + more`` or ``start % more``."""
    text = start.data
    known = [v.data for v in more if v.kind == "str"]
    if "%" in text:
        parts = text.split("%")
        text = parts[0] + "".join(UNKNOWN + p[1:] for p in parts[1:])
    else:
        text += known[0] if len(known) == 1 else UNKNOWN
    return Value("str", text, node)


def names_npu_word(name: str) -> bool:
    """Whether a function's name says that it is for an NPU."""
    return "npu" in name.lower().split("_")


def asks_npu(test: ast.expr) -> tuple[int, bool]:
    """(1, negated) where a test asks whether this is an NPU, else (0, False)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        npu, negated = asks_npu(test.operand)
        return npu, not negated
    if not names_npu(test):
        return 0, False
    negated = isinstance(test, ast.Compare) and isinstance(
        test.ops[0], (ast.NotEq, ast.NotIn, ast.IsNot)
    )
    return 1, negated


def asks_available(test: ast.expr) -> bool:
    """Whether a test asks if a library is there (`is_flash_attn_available()`, `x is not None`)."""
    for part in ast.walk(test):
        name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
        low = str(name).lower()
        if (
            "available" in low or low.startswith(("has_", "have_")) or low.endswith("_installed")
        ) and (low != "is_available"):
            return True
    return False


def catches_import(handler: ast.ExceptHandler) -> bool:
    """Whether an except clause catches a failing import and goes on."""
    names = (
        {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)} if handler.type else set()
    )
    wide = not names or names & {
        "ImportError",
        "ModuleNotFoundError",
        "Exception",
        "BaseException",
        "OSError",
    }
    return bool(wide) and not any(isinstance(s, ast.Raise) for s in handler.body)


__all__ = ["Reader", "asks_npu", "is_device_name"]
