"""Reads one file's statements in order and follows names to what they stand for.

No code runs: imports, aliases, constants, built strings, class attributes and local functions are
followed as far as this file shows. What a statement or an expression is, is in statements.py and
expressions.py; which branches an NPU takes, in branches.py; what a use means for it, in detect.py.
"""

import ast
from collections.abc import Callable

from . import branches, conditions, detect, expressions, statements
from .uses import Around
from .values import Value, Values, join

Scope = dict[str, Values]
DEEPEST = 40  # functions read inside each other, from a call to what it returns


class Reader:
    """Holds what is known while one file is read; `report(node, rule)` collects the findings."""

    def __init__(self, tree: ast.Module, report: Callable, around: Around | None = None):
        self.tree, self._report = tree, report
        self.around = around or Around()
        self.origin = dict(self.around.origin)  # library -> where it was imported
        self.imports: set[tuple[str, str]] = set()  # (module, name) imported from anywhere
        self.builds: set[str] = set()  # names of CUDA extensions that are built here
        self.choosing = 0  # > 0 inside `a if … else b`
        self.scopes: list[Scope] = [{}]
        self.classes: list[ast.ClassDef] = []
        self.attributes: dict[ast.ClassDef, Scope] = {}
        self.done: dict[ast.AST, Values] = {}  # functions read so far -> what they return
        self.pending: list[tuple] = []  # functions to read once the module's names are known
        self.returns: list[Values] = []
        self.quiet = 0  # > 0 where an NPU never comes
        self.guarded = 0  # > 0 inside a try whose failure is caught, or a check for availability
        self.branches = 0  # > 0 inside an if, a loop or a try, where an assignment may not happen
        self.optional = set(self.around.optional)  # libraries imported where a failure is caught
        self.chain: list[ast.AST] = []  # the calls around the expression being read
        self.ints: dict = {}  # where an integer comes from -> what its uses as a device follow from
        self.wanted: list[tuple] = []  # (parameter, where it is a dtype on the device)
        self.passed: set[ast.arg] = set()  # parameters that are given float64
        self.words = {
            n.attr if isinstance(n, ast.Attribute) else n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Attribute)
            or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        }

    def report(self, node: ast.AST | None, rule: str, cause: str = "") -> None:
        """A finding; `cause` is the place it follows from, if it is no cause of its own."""
        if node is not None and not self.quiet:
            self._report(node, rule, cause)

    def read(self) -> None:
        self.block(self.tree.body)
        while self.pending:
            function, scopes, classes = self.pending.pop(0)
            if function not in self.done:
                self.function(function, scopes, classes)
        for parameter, node in self.wanted:
            if parameter in self.passed:
                self.report(node, "float64")

    def block(self, body: list[ast.stmt]) -> bool:
        """Read statements in order; True where the block always leaves (return, raise, …)."""
        added = 0
        left = False
        for i, statement in enumerate(body):
            other = branches.npu_follows(body, i) or branches.replaced(body, i)
            self.quiet += other
            if self.kept_going(statement) == "npu left":
                self.quiet += 1
                added += 1
            self.quiet -= other
            if isinstance(statement, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
                left = True
        self.quiet -= added
        return left

    def kept_going(self, s: ast.stmt) -> str | None:
        """Read a statement; where the checker itself fails in it, say so and go on after it."""
        lists = self.scopes, self.chain, self.returns
        lengths = [len(x) for x in lists]
        before = self.classes, self.quiet, self.guarded, self.branches
        try:
            return self.statement(s)
        except RecursionError:
            raise
        except Exception:  # ours
            for kept, length in zip(lists, lengths, strict=True):
                del kept[length:]
            self.scopes, self.chain, self.returns = lists
            self.classes, self.quiet, self.guarded, self.branches = before
            self._report(s, "unchecked", "")
            return None

    def statement(self, s: ast.stmt) -> str | None:
        kind = statements.KINDS.get(type(s))
        if kind:
            return kind(self, s)
        for child in ast.iter_child_nodes(s):
            if isinstance(child, ast.expr):
                self.eval(child)
        return None

    def eval(self, node: ast.expr | None) -> Values:
        """The possible values of an expression; reports what it means on the way."""
        if node is None:
            return []
        kind = expressions.KINDS.get(type(node))
        if kind:
            return kind(self, node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.eval(child)
        return []

    def eval_test(self, node: ast.expr) -> None:
        conditions.test(self, node)

    def assign_name(self, name: str, values: Values) -> None:
        scope = self.scopes[-1]
        if self.branches and name in scope:
            values = join(values, scope[name])
        scope[name] = values

    def function(self, f, scopes: list[Scope], classes: list[ast.ClassDef]) -> Values:
        """Read a function's body once, its arguments unknown; what it returns."""
        self.done[f] = []
        saved = self.scopes, self.classes, self.quiet, self.guarded, self.chain
        local: Scope = {}
        self.scopes, self.classes, self.chain = [*scopes, local], classes, []
        self.quiet = 1 if "npu" in f.name.lower().split("_") else 0
        self.guarded = 0
        args = f.args
        for i, arg in enumerate(args.posonlyargs + args.args + args.kwonlyargs):
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

    def results(self, f: ast.AST) -> Values:
        """What a function of this file returns, reading it now if it was not read yet."""
        if f in self.done or not isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self.done.get(f, [])
        if len(self.returns) > DEEPEST:
            return []  # a long chain of calls: read in its turn instead
        for entry in self.pending:
            if entry[0] is f:
                self.pending.remove(entry)
                return self.function(*entry)
        return []
