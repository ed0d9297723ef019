"""Rewrites of calls that name CUDA where torch has a name for any accelerator.

From torch 2.7 on they keep what the calls do on CUDA and give an NPU its own. For an older torch
what torch.accelerator lacks becomes torch.npu, which is for the NPU alone: without torch_npu that
name is missing, on CUDA too. libcst keeps every comment and blank line of the file. A call is
rewritten only where its name is known to be torch's (through any alias) and its arguments mean the
same in the new function.
"""

import ast
import difflib
import re
from pathlib import Path

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.metadata import MetadataWrapper, QualifiedNameProvider

from .whole import CHOOSES, Units

PINS = ("requirements*.txt", "setup.py", "setup.cfg", "pyproject.toml", "environment.y*ml")
PIN = re.compile(r"""(?:^|[\s"'])torch\s*(?:==|~=|>=|<=|=)\s*v?(\d+)\.(\d+)""", re.MULTILINE)

Version = tuple[int, int]
SAFE = {  # function -> (its twin, how many positional arguments it may have, torch that has it)
    "torch.cuda.synchronize": ("synchronize", 1, (2, 6)),
    "torch.cuda.device_count": ("device_count", 0, (2, 6)),
    "torch.cuda.current_device": ("current_device_index", 0, (2, 7)),
    "torch.cuda.set_device": ("set_device_index", 1, (2, 7)),
}
NAMES = (*SAFE, "torch.cuda.is_available")
LARGEST = 2_000_000  # characters; libcst takes some kilobytes a line
CHOICE = "({torch}.accelerator.current_accelerator(check_available=True) or {torch}.device({cpu}))"
CHOICE_SINCE = (2, 7)  # check_available
OLD_CHOICE = "{torch}.device({npu} if {torch}.npu.is_available() else {cpu})"


class _Rewriter(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, torch_name: str | None, target: Version | None):
        super().__init__()
        self.torch, self.count, self.target = torch_name, 0, target
        self.leave: set[cst.CSTNode] = set()  # calls that are left alone
        self.done: set[cst.CSTNode] = set()

    def has(self, since: Version) -> bool:
        """Whether the torch that is written for has what came with this version."""
        return self.target is None or self.target >= since

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
        if torch is None or original in self.leave:
            return updated  # torch has no name here, and an import would load it for all
        if path in SAFE:
            name, most, since = SAFE[path]
            plain = all(not a.star and a.keyword is None for a in original.args)
            named = any(isinstance(a.value, cst.SimpleString) for a in original.args)
            if plain and not named and len(original.args) <= most:
                self.count += 1
                self.done.add(original)
                twin = f"accelerator.{name}" if self.has(since) else f"npu.{path.split('.')[-1]}"
                return updated.with_changes(func=cst.parse_expression(f"{torch}.{twin}"))
        if (
            path == "torch.device"
            and len(original.args) == 1
            and self.chooses(original.args[0].value)
        ):
            self.count += 1
            self.done.add(original)
            cpu = original.args[0].value.orelse.value  # with its quotes: it may be in an f-string
            words = CHOICE if self.has(CHOICE_SINCE) else OLD_CHOICE
            npu = cpu.replace("cpu", "npu")
            return cst.parse_expression(words.format(torch=torch, cpu=cpu, npu=npu))
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


def fixed(source: str, target: Version | None = None) -> tuple[str, int]:
    """The source with the safe rewrites made, and how many; for this torch, else for a new one.

    A file that chooses among devices itself is left alone, and so is a function that would name
    CUDA still: what belongs together is rewritten together.

    ValueError, as a sentence, for a source that is no Python 3, that is too large, or that
    libcst would not give back as it was.
    """
    if "cuda" not in source or not any(path.rsplit(".", 1)[1] in source for path in NAMES):
        return source, 0
    if CHOOSES.search(source):
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
    rewriter = _Rewriter(name, target)
    wrapper = MetadataWrapper(module)
    try:
        wrapper.visit(rewriter)  # what could be
        units = Units(rewriter.done)
        wrapper.module.visit(units)
        again = _Rewriter(name, target)
        again.leave = {call for call in rewriter.done if not _provable(units, call)}
        module, rewriter = wrapper.visit(again), again
    except RecursionError:
        raise ValueError("it is nested too deeply: rewrite it by hand") from None
    if rewriter.count and missing and re.search(r"\btorch\.(accelerator|npu)\b", module.code):
        context = CodemodContext()
        AddImportsVisitor.add_needed_import(context, "torch")
        module = AddImportsVisitor(context).transform_module(module)
    try:
        ast.parse(module.code)
    except SyntaxError as error:
        raise ValueError(f"rewritten it would be no Python ({error.msg}): do it by hand") from None
    return module.code, rewriter.count


def _provable(units: Units, call: cst.Call) -> bool:
    """Whether a rewrite changes nothing but the device: a wait is one by itself."""
    name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    if name == "synchronize":
        return all(units.is_index(a.value) or not _text(a.value) for a in call.args)
    if name == "set_device" and not all(units.is_index(a.value) for a in call.args):
        return False
    return not units.half(call)


def _text(node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString))


def pinned(folder: Path) -> Version | None:
    """The lowest torch that a project's own files allow, None where they name none."""
    found: list[Version] = []
    while not any(True for n in PINS for _ in folder.glob(n)) and folder.parent != folder:
        if (folder / ".git").exists():
            break
        folder = folder.parent
    for path in [p for name in PINS for p in folder.glob(name)]:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        found += [(int(a), int(b)) for a, b in PIN.findall(text)]
    return min(found, default=None)


def diff(source: str, file: str, target: Version | None = None) -> str:
    """The safe rewrites of a file as a unified diff, empty where there are none."""
    new, count = fixed(source, target)
    if not count:
        return ""
    lines = difflib.unified_diff(_lines(source), _lines(new), file, file + " (fixed)")
    ended = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + ended for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as diff and patch know them: a form feed or a lone carriage return ends none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
