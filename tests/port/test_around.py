"""What lies around the Python files, and what transfer_to_npu leaves to do."""

import json

import pytest

from shardbook.port.scan import scan

FILES = {
    "requirements.txt": """numpy
torch==2.5.0
--extra-index-url https://example.org/whl/cu121
flash_attn>=2.5
decord
xfuser==0.4.0
einops
torchvision
# xformers
""",
    "pyproject.toml": """[project]
dependencies = [
  "torch>=2.4",
  "bitsandbytes==0.43",
  "apexpy",
]
""",
    "setup.py": """from setuptools import setup
setup(
    name="triton_free",
    install_requires=["torch==2.5.0", "optimus==2.1", "numpy"],
)
""",
    "run.sh": """#!/bin/bash
# nvidia-smi shows the cards
export CUDA_VISIBLE_DEVICES=0,1
NCCL_IB_DISABLE=1 torchrun train.py
nvidia-smi -L | head
echo done
pip install xformers
""",
    "Dockerfile": """FROM nvidia/cuda:12.1.0-devel-ubuntu22.04
RUN pip install -r requirements.txt
ENV NCCL_SOCKET_IFNAME eth0
""",
    "ops/k.cu": "__global__ void k() {}\n",
    "ops/bind.cpp": "#include <ATen/cuda/CUDAContext.h>\n",
    "ops/plain.cpp": "#include <vector>\n",
}
EXPECTED = {
    "requirements.txt": {(2, "torch-pin"), (3, "dependency"), (4, "dependency"), (5, "dependency"),
                         (6, "dependency")},
    "pyproject.toml": {(4, "dependency")},
    "setup.py": {(4, "torch-pin"), (4, "dependency")},
    "run.sh": {(3, "cuda-env"), (4, "cuda-env"), (5, "nvidia-tool"), (7, "dependency")},
    "Dockerfile": {(1, "dependency"), (3, "cuda-env")},
    "ops/k.cu": {(1, "cuda-source")},
    "ops/bind.cpp": {(1, "cuda-source")},
    "ops/plain.cpp": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_lies_around(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(FILES[name])
    (tmp_path / "a.py").write_text("x = 1\n")
    assert {(f.line, f.rule) for f in scan([tmp_path])} == EXPECTED[name]


def test_the_code_of_a_notebook(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["call x.cuda()"]},
        {"cell_type": "code", "source": ["import torch\n", "!nvidia-smi\n", "%time y = 1"]},
        {"cell_type": "code", "source": "%%bash\nls cuda"},
        {"cell_type": "code", "source": ["x = torch.ones(3).cuda()"]},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    found = [(f.line, f.rule, f.code) for f in scan([tmp_path])]
    assert found == [
        (2, "nvidia-tool", "!nvidia-smi"),
        (4, "cuda-method", "x = torch.ones(3).cuda()"),
    ]


MODEL = """import torch
import torch.distributed as dist
from flash_attn import flash_attn_func
def f(x, table):
    dist.init_process_group("nccl")
    if not torch.cuda.is_available():
        raise RuntimeError
    if x.device.type == "cuda":
        x = x.cuda()
    torch.cuda.synchronize()
    return x.double() if x.is_cuda else torch.polar(x, x)
"""
REMAINS = {(3, "cuda-library"), (8, "cuda-branch"), (11, "float64"), (11, "complex")}


def lines(path, name, **options):
    found = scan([path], **options)
    return {(f.line, f.rule) for f in found if f.file == str(path / name)}


def test_what_transfer_to_npu_leaves(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "other.py").write_text("import torch\ntorch.cuda.synchronize()\n")
    before = lines(tmp_path, "model.py")
    assert before > REMAINS and len(before) > 9
    assert lines(tmp_path, "model.py", transferred=True) == REMAINS
    assert lines(tmp_path, "other.py", transferred=True) == set()
    (tmp_path / "train.py").write_text(
        "from torch_npu.contrib import transfer_to_npu\nimport model\n"
    )
    assert lines(tmp_path, "model.py") == REMAINS
    assert lines(tmp_path, "other.py") == {(2, "cuda-call")}  # no one imports it


def test_the_variable_that_switches_it_on(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "run.sh").write_text("export TORCH_TRANSFER_TO_NPU=1\npython model.py\n")
    assert lines(tmp_path, "model.py") == REMAINS
