"""The rewrites that are always safe: the same on CUDA and on the CPU, right on an NPU.

libcst keeps every comment and blank line of the file. A call is rewritten only where its name is
known to be torch's (through any alias) and its arguments mean the same in the new function.
"""

import ast
import difflib
import re

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.metadata import MetadataWrapper, QualifiedNameProvider

SAFE = {  # function -> (its device-independent twin, how many positional arguments it may have)
    "torch.cuda.synchronize": ("synchronize", 1),
    "torch.cuda.device_count": ("device_count", 0),
    "torch.cuda.current_device": ("current_device_index", 0),
    "torch.cuda.set_device": ("set_device_index", 1),
}
NAMES = (*SAFE, "torch.cuda.is_available")
LARGEST = 2_000_000  # characters; libcst takes some kilobytes a line
CHOICE = "({torch}.accelerator.current_accelerator(check_available=True) or {torch}.device({cpu}))"


class _Rewriter(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, torch_name: str | None):
        super().__init__()
        self.torch, self.count = torch_name, 0

    def path(self, node: cst.CSTNode) -> str | None:
        names = self.get_metadata(QualifiedNameProvider, node, None) or ()
        return next(iter(names)).name if len(names) == 1 else None

    def named(self, func: cst.BaseExpression) -> str | None:
        """What torch is called where this function is: `th` in `th.cuda.synchronize`."""
        while isinstance(func, cst.Attribute):
            func = func.value
        own = isinstance(func, cst.Name) and self.path(func) == "torch"
        return func.value if own else self.torch

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        path = self.path(original.func)
        torch = self.named(original.func)
        if torch is None:
            return updated  # torch has no name here, and an import would load it for all
        if path in SAFE:
            name, most = SAFE[path]
            plain = all(not a.star and a.keyword is None for a in original.args)
            named = any(isinstance(a.value, cst.SimpleString) for a in original.args)
            if plain and not named and len(original.args) <= most:
                self.count += 1
                func = cst.parse_expression(f"{torch}.accelerator.{name}")
                return updated.with_changes(func=func)
        if (
            path == "torch.device"
            and len(original.args) == 1
            and self.chooses(original.args[0].value)
        ):
            self.count += 1
            cpu = original.args[0].value.orelse.value  # with its quotes: it may be in an f-string
            return cst.parse_expression(CHOICE.format(torch=torch, cpu=cpu))
        return updated

    def chooses(self, node: cst.BaseExpression) -> bool:
        """`"cuda" if torch.cuda.is_available() else "cpu"`, nothing more."""
        if not isinstance(node, cst.IfExp) or not isinstance(node.test, cst.Call):
            return False
        if self.path(node.test.func) != "torch.cuda.is_available":
            return False
        texts = [
            side.evaluated_value if isinstance(side, cst.SimpleString) else None
            for side in (node.body, node.orelse)
        ]
        return texts == ["cuda", "cpu"]


def _torch_name(module: cst.Module) -> tuple[str | None, bool]:
    """What `import torch` is called at the top of the file; whether it has to be added.

    It may be added where the top of the file imports something of torch already.
    """
    loaded = False
    for statement in module.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        for part in statement.body:
            if isinstance(part, cst.Import):
                for alias in part.names:
                    if alias.evaluated_name == "torch":
                        return alias.evaluated_alias or "torch", False
                    loaded |= alias.evaluated_name.startswith("torch.")
            elif isinstance(part, cst.ImportFrom) and part.module and not part.relative:
                loaded |= cst.Module([]).code_for_node(part.module).split(".")[0] == "torch"
    return ("torch", True) if loaded else (None, False)


def fixed(source: str) -> tuple[str, int]:
    """The source with the safe rewrites made, and how many.

    ValueError, as a sentence, for a source that is no Python 3, that is too large, or that
    libcst would not give back as it was.
    """
    if "cuda" not in source or not any(path.rsplit(".", 1)[1] in source for path in NAMES):
        return source, 0
    if len(source) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} characters: rewrite it by hand")
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise ValueError(f"no Python 3 at line {error.raw_line}: fix its syntax") from None
    except RecursionError:
        raise ValueError("it is nested too deeply: rewrite it by hand") from None
    if module.code != source:
        raise ValueError("it would not be given back as it is: rewrite it by hand")
    name, missing = _torch_name(module)
    rewriter = _Rewriter(name)
    try:
        module = MetadataWrapper(module).visit(rewriter)
    except RecursionError:
        raise ValueError("it is nested too deeply: rewrite it by hand") from None
    if rewriter.count and missing and "torch.accelerator" in module.code:
        context = CodemodContext()
        AddImportsVisitor.add_needed_import(context, "torch")
        module = AddImportsVisitor(context).transform_module(module)
    try:
        ast.parse(module.code)
    except SyntaxError as error:
        raise ValueError(f"rewritten it would be no Python ({error.msg}): do it by hand") from None
    return module.code, rewriter.count


def diff(source: str, file: str) -> str:
    """The safe rewrites of a file as a unified diff, empty where there are none."""
    new, count = fixed(source)
    if not count:
        return ""
    lines = difflib.unified_diff(_lines(source), _lines(new), file, file + " (fixed)")
    ended = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + ended for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as diff and patch know them: a form feed or a lone carriage return ends none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
