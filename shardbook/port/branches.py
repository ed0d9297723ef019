"""Which branches an NPU takes: if, else, match, try, and `a if test else b`.

A branch that an NPU never comes to is read quietly: what it holds is another device's business.
"""

import ast

from . import conditions
from .values import UNKNOWN, Value, Values, dotted, is_cuda_text, join, names_npu, nothing_known


def if_statement(reader, s: ast.If) -> str | None:
    """`if`: reads both branches; "npu left" where an NPU never comes to what follows."""
    npu, negated = asks_npu(s.test)
    elsewhere = not npu and names_cuda(s.test) and chain_asks_npu(s.orelse)
    available = asks_available(s.test)
    reader.quiet += elsewhere
    reader.eval_test(s.test)
    conditions.condition(reader, s)
    reader.branches += 1
    reader.quiet += npu and negated
    reader.guarded += available
    left = reader.block(s.body)
    reader.guarded -= available
    reader.quiet -= npu and negated
    reader.quiet -= elsewhere
    reader.quiet += npu and not negated
    reader.block(s.orelse)
    reader.quiet -= npu and not negated
    reader.branches -= 1
    # after `if npu: return`, an NPU never comes to the rest of the block
    return "npu left" if npu and not negated and left else None


def try_statement(reader, s: ast.Try) -> None:
    """`try`: where a failing import is caught, a library is optional."""
    caught = any(catches_import(h) for h in s.handlers)
    reader.branches += 1
    reader.guarded += caught
    reader.block(s.body)
    reader.guarded -= caught
    npu = any(isinstance(x, (ast.Import, ast.ImportFrom)) and "torch_npu" in imports(x)
              for x in s.body)  # fmt: skip
    for handler in s.handlers:
        reader.quiet += npu and caught  # where torch_npu is there, an NPU never comes here
        reader.block(handler.body)
        reader.quiet -= npu and caught
    reader.block(s.orelse)
    reader.block(s.finalbody)
    reader.branches -= 1


def match_statement(reader, s: ast.Match) -> None:
    """`match`: with a case for an NPU, the other cases are not its own."""
    reader.eval(s.subject)
    has_npu = any(names_npu(case.pattern) for case in s.cases)
    passed = False
    reader.branches += 1
    for case in s.cases:
        mine = names_npu(case.pattern)
        passed |= mine
        if not has_npu and names_cuda(case.pattern):
            conditions.case(reader, s.subject, case.pattern)
        other = not mine and (passed or (has_npu and names_cuda(case.pattern)))
        reader.quiet += other
        reader.block(case.body)
        reader.quiet -= other
    reader.branches -= 1


def if_expression(reader, node: ast.IfExp) -> Values:
    """`body if test else other`."""
    npu, negated = asks_npu(node.test)
    if not npu and names_cuda(node.test) and chain_asks_npu(node.orelse):
        reader.quiet += 1
        reader.eval_test(node.test)
        reader.eval(node.body)
        reader.quiet -= 1
        return reader.eval(node.orelse)
    reader.eval_test(node.test)
    conditions.choice(reader, node)
    if npu:
        chosen, other = (node.orelse, node.body) if negated else (node.body, node.orelse)
        reader.quiet += 1
        reader.eval(other)
        reader.quiet -= 1
        return reader.eval(chosen)
    reader.choosing += 1
    chosen = conditions.cuda_or_cpu(reader, node)
    if chosen:  # it takes the CPU: slow and silent, but nothing breaks
        reader.choosing -= 1
        return chosen
    body, other = reader.eval(node.body), reader.eval(node.orelse)
    reader.choosing -= 1
    if conditions.is_cpu(node.test):  # float64 if device.type == "cpu": not on an NPU
        body = [v for v in body if v.kind != "mod" or not v.data.endswith(("float64", "double"))]
    if nothing_known(body) != nothing_known(other) and any(
        v.kind == "device" for v in body + other
    ):
        return join(body, other, [Value("device", UNKNOWN, node)])  # or another one
    return join(body, other)


def imports(s: ast.Import | ast.ImportFrom) -> set[str]:
    """The libraries that an import statement loads."""
    names = [s.module or ""] if isinstance(s, ast.ImportFrom) else [a.name for a in s.names]
    return {name.partition(".")[0] for name in names}


def replaced(body: list[ast.stmt], index: int) -> bool:
    """Whether `device = "cuda"` is a default that the next `if` replaces for any accelerator."""
    first, after = body[index], body[index + 1] if index + 1 < len(body) else None
    if not isinstance(first, ast.Assign) or not isinstance(after, ast.If):
        return False
    target = first.targets[0]
    if not isinstance(target, ast.Name) or not isinstance(first.value, (ast.Constant, ast.Call)):
        return False
    asks = asks_npu(after.test) == (1, False) or "torch.accelerator" in ast.unparse(after.test)
    gives = (t for s in after.body if isinstance(s, ast.Assign) for t in s.targets)
    return asks and any(isinstance(t, ast.Name) and t.id == target.id for t in gives)


def npu_follows(body: list[ast.stmt], index: int) -> bool:
    """Whether `if cuda: …` at this place of a block is followed at once by an if for an NPU."""
    first = body[index]
    if not isinstance(first, ast.If) or asks_npu(first.test)[0] or not names_cuda(first.test):
        return False
    for statement in body[index + 1 :]:
        if not isinstance(statement, ast.If):
            return False
        npu, negated = asks_npu(statement.test)
        if npu and not negated:
            return True
    return False


def chain_asks_npu(rest: list[ast.stmt] | ast.expr) -> bool:
    """Whether one of the following `elif`s, or `else … if …`s, is for an NPU."""
    if isinstance(rest, list):
        rest = rest[0] if len(rest) == 1 else ast.Pass()
    while isinstance(rest, (ast.If, ast.IfExp)):
        npu, negated = asks_npu(rest.test)
        if npu and not negated:
            return True
        after = rest.orelse
        rest = after if isinstance(after, ast.expr) else after[0] if len(after) == 1 else ast.Pass()
    return False


def names_cuda(node: ast.AST) -> bool:
    """Whether an expression or a pattern asks about CUDA by name."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in ("cuda", "is_cuda"):
            return True
        text = part.value if isinstance(part, ast.Constant) else None
        if isinstance(text, str) and (is_cuda_text(text) or text == "nccl"):
            return True
    return False


def insists_on_cuda(test: ast.expr) -> bool:
    """Whether a test is true for CUDA alone: `x.is_cuda`, `is_cuda()`, `device == "cuda"`."""
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.Eq) and names_cuda(test) and not names_npu(test)
    inner = test.func if isinstance(test, ast.Call) and not test.args else test
    name = dotted(inner) or ""
    return name.endswith("cuda.is_available") or name.rsplit(".", 1)[-1] in ("is_cuda", "has_cuda")


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
    """Whether a test asks if a library is there (`is_flash_attn_available()`, `has_apex`)."""
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
    wide = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "OSError"}
    caught = not names or names & wide
    return bool(caught) and not any(isinstance(s, ast.Raise) for s in handler.body)
