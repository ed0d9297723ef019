"""What of a file may be rewritten: never half of what belongs together."""

import re

import libcst as cst

# A file that asks for several kinds of device chooses among them itself.
CHOOSES = re.compile(
    r"(?<![A-Za-z])(npu|xpu|mps|musa|mlu|hpu|privateuse\w*|hccl|ascend)(?![a-z])", re.I
)
CUDA = re.compile(r"cuda|nccl|nvidia")
INDEX = {"rank", "local_rank", "gpu", "gpu_id", "device_id", "local_process_index", "device_index"}


class Units(cst.CSTVisitor):
    """For each call: the function it stands in, and which functions still name CUDA.

    `done` are the calls that would be rewritten; what they hold counts no more.
    """

    def __init__(self, done: set[cst.CSTNode]):
        super().__init__()
        self.done, self.inside = done, [""]
        self.left: set[str] = set()  # functions that would still name CUDA
        self.names: dict[str, set[str]] = {"": set()}  # function -> names that it uses
        self.unit: dict[cst.CSTNode, str] = {}
        self.values: dict[str, list[cst.CSTNode]] = {}  # name -> what is assigned to it

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.inside.append(node.name.value)
        self.names.setdefault(node.name.value, set())

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self.inside.pop()

    def visit_Call(self, node: cst.Call) -> bool:
        self.unit[node] = self.inside[-1]
        if node not in self.done:
            return True
        for arg in node.args:
            if not isinstance(arg.value, cst.IfExp):  # "cuda" if … else "cpu" goes as a whole
                arg.visit(self)
        return False

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            if isinstance(target.target, cst.Name):
                self.values.setdefault(target.target.value, []).append(node.value)

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.names[self.inside[-1]].add(node.value)
        self._text(node.value)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        self._text(node.value)

    def visit_FormattedStringText(self, node: cst.FormattedStringText) -> None:
        self._text(node.value)

    def visit_Expr(self, node: cst.Expr) -> bool:
        return not isinstance(node.value, cst.SimpleString)  # a docstring

    def _text(self, text: str) -> None:
        if CUDA.search(text):
            self.left.add(self.inside[-1])

    def half(self, node: cst.CSTNode) -> bool:
        """Whether CUDA would still be named where this call stands, or in what it is used with."""
        unit = self.unit.get(node, "")
        return unit in self.left or bool(self.names.get(unit, set()) & (self.left - {""}))

    def is_index(self, node: cst.BaseExpression, depth: int = 4) -> bool:
        """Whether an expression is the number of a device, as far as the file proves it."""
        if isinstance(node, cst.Integer):
            return True
        if isinstance(node, cst.Call):
            func = node.func
            name = func.value if isinstance(func, cst.Name) else getattr(func, "attr", func)
            name = name.value if isinstance(name, cst.Name) else name
            return name in ("int", "get_rank", "get_node_local_rank", "device_count")
        if isinstance(node, cst.BinaryOperation):
            text = isinstance(node.left, (cst.SimpleString, cst.FormattedString))
            return isinstance(node.operator, cst.Modulo) and not text
        if isinstance(node, cst.Name) and depth:
            given = self.values.get(node.value, [])
            if given:
                return all(self.is_index(value, depth - 1) for value in given)
        last = node.attr.value if isinstance(node, cst.Attribute) else getattr(node, "value", "")
        return last in INDEX
