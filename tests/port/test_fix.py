"""What --fix writes for which torch, and what it leaves alone."""

import ast

import pytest

from shardbook.__main__ import main
from shardbook.port.fix import fixed, pinned

CODE = """import torch


def setup(rank):
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.cuda.current_device()
"""


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (None, ["accelerator.device_count", "accelerator.set_device_index", "current_accelerator"]),
        ((2, 7), ["accelerator.device_count", "accelerator.current_device_index"]),
        ((2, 6), ["accelerator.device_count", "npu.set_device(", "npu.current_device("]),
        ((2, 4), ["npu.device_count", "npu.set_device(", "npu.synchronize", '"npu" if torch.npu.']),
    ],
)
def test_names_that_the_version_has(target, names):
    new, count = fixed(CODE, target)
    assert count == 5
    ast.parse(new)
    assert all(name in new for name in names), new
    assert "cuda" not in new
    assert target is None or target >= (2, 6) or "accelerator" not in new


LEFT = {
    "a device in a string": """import torch
torch.cuda.set_device(f'cuda:{torch.cuda.device_count() - 1}')
""",
    "a loop that asks CUDA": """import torch
for i in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_name(i))
""",
    "a loop over a function that asks CUDA": """import torch
def name(i):
    return torch.cuda.get_device_name(i)
def names():
    return [name(i) for i in range(torch.cuda.device_count())]
""",
    "a switch over devices": """import torch
def pick():
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.xpu.current_device()
    return torch.cuda.current_device()
""",
    "privateuse1": """import torch
NAME = torch._C._get_privateuse1_backend_name()
torch.cuda.synchronize()
""",
    "a device that is not proved to be a number": """import torch
def f(device):
    torch.cuda.set_device(device)
""",
    "a choice beside a CUDA call": """import torch
def f(x):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return x.cuda() if device.type != "cpu" else x
""",
}


@pytest.mark.parametrize("name", LEFT)
def test_leaves_alone_what_it_cannot_prove(name):
    assert fixed(LEFT[name]) == (LEFT[name], 0)


def test_a_wait_is_rewritten_by_itself():
    new, count = fixed("import torch\ndef f(x):\n    torch.cuda.synchronize()\n    x.cuda()\n")
    assert count == 1 and "torch.accelerator.synchronize()" in new and "x.cuda()" in new


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("requirements.txt", "numpy\ntorch==2.4.0+cu121\ntorchvision==0.19\n", (2, 4)),
        ("setup.py", "setup(install_requires=['torchvision==0.1', 'torch>=2.5.1'])", (2, 5)),
        ("pyproject.toml", 'dependencies = ["torch ~= 2.6", "pytorch-lightning==1.9"]', (2, 6)),
        ("requirements-dev.txt", "torch\ntorchaudio==2.1\n", None),
    ],
)
def test_the_projects_pins(tmp_path, capsys, name, text, version):
    (tmp_path / ".git").mkdir()
    (tmp_path / name).write_text(text)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(CODE)
    assert pinned(tmp_path / "src") == version
    assert main(["port", "--fix", str(tmp_path / "src")]) == 1
    said = capsys.readouterr()
    assert ("torch.npu.set_device(" in said.out) == (version is not None)
    assert ("# written for torch" in said.err) == (version is not None)


def test_the_version_that_is_asked_for(tmp_path, capsys):
    (tmp_path / "a.py").write_text(CODE)
    assert main(["port", "--fix", "--torch", "2.4", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "+    device = rank % torch.npu.device_count()" in said.out
    assert "written for torch 2.4: import torch_npu first" in said.err
    with pytest.raises(SystemExit):
        main(["port", "--fix", "--torch", "new", str(tmp_path)])
