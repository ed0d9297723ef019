"""Every rule flags what it must, at its line, and leaves near-identical code alone."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardbook.port.rules import HOST_LINALG, RULES
from shardbook.port.scan import scan, scan_source

from .cases import CLEAN, FLAGGED
from .field_cases import FIELD

flagged = [pytest.param(r, c, id=f"{r}-{i}") for r, cs in FLAGGED.items() for i, c in enumerate(cs)]
clean = [pytest.param(r, c, id=f"{r}-{i}") for r, cs in CLEAN.items() for i, c in enumerate(cs)]


@pytest.mark.parametrize(("rule", "code"), flagged)
def test_flags(rule, code):
    source = "import torch\n" + code + "\n"
    expected = {i for i, line in enumerate(source.splitlines(), 1) if line.endswith("# !")}
    found = {f.line for f in scan_source(source) if f.rule == rule}
    assert found == expected, [(f.line, f.rule) for f in scan_source(source)]


@pytest.mark.parametrize(("rule", "code"), clean)
def test_leaves_alone(rule, code):
    found = [(f.line, f.rule) for f in scan_source("import torch\n" + code + "\n")]
    assert not found


@pytest.mark.parametrize(("name", "code", "rules"), FIELD, ids=[case[0] for case in FIELD])
def test_public_code(name, code, rules):
    expected = {i for i, line in enumerate(code.splitlines(), 1) if line.endswith("# !")}
    found = scan_source(code)
    assert {f.line for f in found} == expected, [(f.line, f.rule) for f in found]
    assert {f.rule for f in found} == rules


def test_a_failure_of_the_checker_loses_one_statement(monkeypatch):
    def fails(reader, node, path, *rest):
        raise IndexError("string index out of range")

    code = "import torch\nx = torch.ones(3)\ndef f(y):\n    z = [torch.ones(i) for i in y]\n"
    code += "    return y.cuda()\ny = x.cuda()\n"
    monkeypatch.setattr("shardbook.port.library.creates", fails)
    found = [(f.line, f.rule, f.severity) for f in scan_source(code)]
    assert found == [
        (2, "unchecked", "breaks"),
        (4, "unchecked", "breaks"),
        (5, "cuda-method", "breaks"),
        (6, "cuda-method", "breaks"),
    ]


def test_uses_of_one_integer_are_one_cause():
    code = """import torch
import torch.distributed as dist
def f(model, ema, x, y):
    device = dist.get_rank() % torch.cuda.device_count()
    model, ema = model.to(device), ema.to(device)
    return x.to(device), torch.zeros(3, device=device)
def g(x, y, local_rank):
    x = x.to(local_rank)
    return x, y.to(local_rank)
"""
    found = [(f.line, f.cause) for f in scan_source(code) if f.rule == "bare-int-device"]
    assert found == [(5, "line 4"), (6, "line 4"), (8, ""), (9, "line 8")]


PROJECT = {
    "setup.py": """
from setuptools import setup
from torch.utils.cpp_extension import CUDAExtension
setup(ext_modules=[CUDAExtension(name="mypkg.kernels", sources=["k.cu"])])  # !
""",
    "mypkg/__init__.py": "",
    "mypkg/ops.py": """
try:
    from flash_attn import flash_attn_varlen_func  # !
except ImportError:
    flash_attn_varlen_func = None
from xformers.ops import memory_efficient_attention as attend  # !
from .norm_cuda import fast
from mypkg import kernels  # !
""",
    "mypkg/norm_cuda.py": "def fast(x):\n    return x\n",
    "mypkg/hands_on.py": "from .ops import attend, kernels\n",
    "mypkg/model.py": """
from .hands_on import attend as a, kernels
from .ops import flash_attn_varlen_func, fast
def f(q, k, v):
    q = kernels.norm(q)  # !
    q = flash_attn_varlen_func(q, k, v)  # !
    return a(fast(q), k, v)  # !
""",
}


def test_names_are_followed_through_the_files_of_a_project(tmp_path):
    expected = set()
    for name, code in PROJECT.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
        lines = enumerate(code.splitlines(), 1)
        expected |= {(name, i) for i, line in lines if line.endswith("# !")}
    found = scan([tmp_path])
    name = {str(tmp_path / n): n for n in PROJECT}
    assert {(name[f.file], f.line) for f in found} == expected
    causes = {f.line: f.cause for f in found if name[f.file] == "mypkg/model.py"}
    ops = tmp_path / "mypkg/ops.py"
    assert causes == {5: f"{ops}:8", 6: f"{ops}:3", 7: f"{ops}:6"}


def test_every_rule_has_both_kinds_of_tests():
    public = set().union(*(rules for _, _, rules in FIELD)) - set(FLAGGED)  # with both in a case
    around = {"cuda-source", "dependency", "torch-pin"}  # in test_around.py
    known = set(RULES) - {"unreadable", "unchecked"} - public - around
    assert set(FLAGGED) == known
    assert set(CLEAN) == known


class _Operators(TorchDispatchMode):
    """Names of the operators that reach a kernel."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(
            f"aten::{function}".replace("aten::aten.", "aten::").removesuffix(".default")
        )
        return function(*args, **(kwargs or {}))


def test_linear_algebra_that_is_flagged_has_no_npu_kernel():
    kernels = set((Path(__file__).parents[1] / "standin" / "kernels.txt").read_text().split())
    square = torch.tensor([[2.0, 1.0], [1.0, 3.0]])

    def without_kernel(name):
        function = torch
        for part in name.split("."):
            function = getattr(function, part)
        two = name.endswith(("solve", "solve_ex", "lstsq"))
        with _Operators() as operators:
            function(square, square) if two else function(square)
        return {o for o in operators.names if "linalg" in o and o not in kernels}

    for name in sorted(HOST_LINALG):
        assert without_kernel(name), f"torch.{name} has a kernel for each operator"
        assert "aten::" + name.replace(".", "_") not in kernels, name
    for name in ("linalg.qr", "linalg.svd", "linalg.norm"):
        assert not without_kernel(name), name
