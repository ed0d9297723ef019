"""The command and the inline report, on files as they are found in the wild."""

import ast
import json
import os
import subprocess
import sys
import time
import warnings

import pytest

import shardbook as sb
from shardbook.__main__ import main
from shardbook.port.fix import fixed
from shardbook.port.scan import scan, scan_source

PROJECT = "book/44_dit_port/cuda_project"
CODE = "import torch\nx = torch.ones(3).cuda()\ntorch.cuda.manual_seed(0)\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(CODE)
    return path


def test_lists_what_and_why(file, capsys):
    assert main(["port", str(file)]) == 1
    out = capsys.readouterr().out
    assert "2:5  breaks cuda-method: x = torch.ones(3).cuda()" in out
    assert "3:1  wrong  cuda-silent" in out
    assert "1 breaks, 1 wrong" in out.splitlines()[-1]


def test_json(file, capsys):
    assert main(["port", "--json", str(file)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(f["line"], f["severity"], f["rule"]) for f in found] == [
        (2, "breaks", "cuda-method"),
        (3, "wrong", "cuda-silent"),
    ]
    assert all(f[k] for f in found for k in ("file", "what", "why", "instead", "reference"))


def test_severity_and_worse(file, capsys):
    assert main(["port", "--json", "--severity", "breaks", str(file)]) == 1
    assert [f["line"] for f in json.loads(capsys.readouterr().out)] == [2]


def test_a_variable_is_named_with_its_twin(tmp_path, capsys):
    path = tmp_path / "a.py"
    path.write_text(
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nos.environ['NCCL_DEBUG'] = 'INFO'\n"
        "os.environ['NCCL_IB_HCA'] = 'mlx5'\n"
    )
    assert main(["port", str(path)]) == 1
    out = capsys.readouterr().out
    assert "instead  CUDA_VISIBLE_DEVICES: ASCEND_RT_VISIBLE_DEVICES\n" in out
    assert "instead  NCCL_DEBUG: HCCL_DEBUG_CONFIG, or ASCEND_GLOBAL_LOG_LEVEL\n" in out
    assert "2 wrong, 1 style  in all, 1 file" in out.splitlines()[-1]
    assert main(["port", "--json", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [f["instead"].split(":")[0] for f in found[:2]] == ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"]
    assert found[2]["instead"].startswith("its Ascend twin, where there is one")
    assert "CUDA_VISIBLE_DEVICES: ASCEND_RT_VISIBLE_DEVICES" in sb.port.report(path)._repr_html_()


def test_nothing_found(tmp_path, capsys):
    (tmp_path / "a.py").write_text("x = 1\n")
    assert main(["port", str(tmp_path)]) == 0
    assert "Nothing found" in capsys.readouterr().out


def test_a_missing_path_is_a_sentence(tmp_path, capsys):
    assert main(["port", str(tmp_path / "no.py")]) == 2
    said = capsys.readouterr()
    assert "no.py does not exist" in said.err
    assert not said.out


SAFE = """import torch as th  # kept


def wait():
    th.cuda.synchronize()


def f():
    device = th.device("cuda" if th.cuda.is_available() else "cpu")
    return device, th.cuda.device_count()
"""


def test_fix_shows_a_diff_and_writes_only_when_told(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SAFE)
    assert main(["port", "--fix", str(path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("# 1 file would change")
    shown = said.out
    assert "-    th.cuda.synchronize()\n+    th.accelerator.synchronize()\n" in shown
    assert "-    return device, th.cuda.device_count()\n" in shown
    assert path.read_text() == SAFE
    assert main(["port", "--fix", "--write", str(path)]) == 0
    text = path.read_text()
    assert "import torch as th  # kept" in text
    assert "th.accelerator.device_count()" in text
    assert not scan([path])
    scope = {}
    exec(text, scope)  # what was written runs here
    assert scope["f"]()[0].type == sb.device().type
    capsys.readouterr()
    assert main(["port", "--fix", str(path)]) == 0  # nothing left to do
    assert not capsys.readouterr().out


def test_fix_leaves_unsafe_calls_alone(tmp_path, capsys):
    path = tmp_path / "a.py"
    path.write_text("import torch\ntorch.cuda.synchronize(device='cuda:0')\nx.cuda.synchronize()\n")
    assert main(["port", "--fix", str(path)]) == 0
    assert not capsys.readouterr().out


SYNC = b"torch.cuda.synchronize()"


@pytest.mark.parametrize(
    "before",
    [
        b"import torch\r\n\r\ndef f():\r\n    SYNC\r\n    s = 'a\\\r\nb'\r\n",
        b"import torch\r\n\ndef f():\n    SYNC\r\n    x = 1   # two  blanks \n",
        b"import torch\n\x0c\ndef f():\n\tSYNC\n\x0c\n",
        b"\xef\xbb\xbfimport torch\nSYNC\n",
        b"import torch\nSYNC",
        "import torch\ns = 'a\u2028b\x85c\x0bd \u00e9'\nSYNC\n\n\n".encode(),
    ],
    ids=["crlf", "mixed", "form feed", "bom", "no last newline", "unicode"],
)
def test_fix_changes_nothing_else(tmp_path, capsys, before):
    path = tmp_path / "a.py"
    path.write_bytes(before.replace(b"SYNC", SYNC))
    assert main(["port", "--fix", "--write", str(path)]) == 0
    assert path.read_bytes() == before.replace(b"SYNC", b"torch.accelerator.synchronize()")
    shown = [x for x in capsys.readouterr().out.split("\n") if x.startswith(("-", "+"))]
    assert [x.strip() for x in shown[2:]] == [
        "-" + before.split(b"SYNC")[0].split(b"\n")[-1].decode() + SYNC.decode(),
        "+"
        + before.split(b"SYNC")[0].split(b"\n")[-1].decode()
        + "torch.accelerator.synchronize()",
    ]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"# \xe9\nimport torch\n" + SYNC + b"\n", "not UTF-8"),
        (b"import torch\r" + SYNC + b"\r", "not be given back as it is"),
        (b"import torch\n" + SYNC + b"\nprint 'done'\n", "no Python 3 at line 3"),
        (b"import torch\n" + SYNC + b"\nx = '" + b"a" * 2_000_000 + b"'\n", "2,000,000 characters"),
    ],
    ids=["latin-1", "carriage returns", "python 2", "huge"],
)
def test_fix_says_what_it_leaves_alone(tmp_path, capsys, data, why):
    path = tmp_path / "a.py"
    path.write_bytes(data)
    assert main(["port", "--fix", "--write", str(path)]) == 0
    assert path.read_bytes() == data
    assert f"{path} left alone: " in (said := capsys.readouterr().err)
    assert why in said


def test_lines_are_counted_and_shown_as_python_counts_them(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("import torch\ns = 'a\u2028b\x85c'\n\x0c\nx = torch.ones(1).cuda()\n")
    assert [(f.line, f.code) for f in scan([path])] == [(4, "x = torch.ones(1).cuda()")]


def test_folders_as_they_are_found(tmp_path, capsys):
    (tmp_path / "sub" / "folder.py").mkdir(parents=True)
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nothing.py")
    (tmp_path / "sub" / "folder.py" / "a.py").write_text(CODE)
    found = scan([tmp_path])
    assert [f.rule for f in found] == ["unreadable", "cuda-method", "cuda-silent"]
    assert main(["port", ""]) == 2
    assert "a path without a name does not exist" in capsys.readouterr().err


def test_what_is_no_python_file_is_said(tmp_path):
    notebook, other = tmp_path / "a.ipynb", tmp_path / "notes"
    notebook.write_text('{"cells": [{"source": ["x.cuda()"]}]}')
    other.write_text("not Python at all\n")
    assert ["notebook" in f.code for f in scan([notebook])] == [True]
    assert [f.rule for f in scan([other])] == ["unreadable"]


def test_long_chains_are_read_to_the_end():
    calls = "".join(f"def f{i}(x):\n    return f{i + 1}(x)\n" for i in range(400))
    nested = "".join("    " * i + f"if a{i}:\n" for i in range(90)) + "    " * 90 + "x.cuda()\n"
    source = f"import torch\n{calls}def f400(x):\n    return x.cuda()\n{nested}"
    assert [f.line for f in scan_source(source)] == [803, 894]


@pytest.mark.parametrize(
    ("data", "rules"),
    [
        (b"", []),
        (b"print 'hello'  # cuda\n", ["unreadable"]),
        (b"import torch\nx.cuda(\n", ["unreadable"]),
        (b"# caf\xe9\nimport torch\nx = torch.ones(3).cuda()\n", ["cuda-method"]),
        (b"import torch\nx = 1\0\ny = torch.ones(1).cuda()\n", ["cuda-method"]),
        (b"\xef\xbb\xbfimport torch\ny = torch.ones(1).cuda()\n", ["cuda-method"]),
        (b"import torch\r\ny = torch.ones(1).cuda()\r\n", ["cuda-method"]),
        (b"cuda = " + b"(" * 5000 + b"1" + b")" * 5000 + b"\n", ["unreadable"]),
        (b"cuda = " + b"-" * 5000 + b"1\n", ["unreadable"]),
        (b"cuda = " + b" + ".join([b"x"] * 5000) + b"\n", ["unreadable"]),
        (bytes(range(256)) * 3 + b"cuda", ["unreadable"]),
        ("x.cuda()".encode("utf-16"), ["unreadable"]),
    ],
    ids=["empty", "python 2", "cut off", "latin-1", "null", "bom", "crlf", "parentheses", "deep",
         "sum", "binary", "utf-16"],
)  # fmt: skip
def test_any_file_is_read_or_said_to_be_unreadable(tmp_path, data, rules):
    (tmp_path / "a.py").write_bytes(data)
    (tmp_path / "b.py").write_text(CODE)
    found = scan([tmp_path])
    assert [f.rule for f in found if f.file.endswith("a.py")] == rules
    assert sum(f.file.endswith("b.py") for f in found) == 2  # and the others are read


def test_invalid_escapes_of_others_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan_source("import torch\ns = '\\d'\ntorch.cuda.synchronize()\n")


def test_five_thousand_lines_a_second():
    source = "".join(p.read_text() for p in sorted(_project()))
    many, lines = 10, source.count("\n")
    start = time.process_time()
    for _ in range(many):
        scan_source(source)
    assert many * lines / (time.process_time() - start) > 5_000


def _project():
    from pathlib import Path

    return (Path(__file__).parents[2] / PROJECT).glob("*.py")


def test_report_inline(tmp_path):
    path = tmp_path / "<b>.py"
    path.write_text("import torch\nx = torch.ones(3).cuda(), '<script>alert(1)</script>'\n")
    found = sb.port.report(path)
    assert len(found) == 1
    assert "cuda-method" in str(found)
    page = found._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;.py" in page
    assert str(tmp_path) not in page + str(found)
    assert sb.port.report(tmp_path).findings[0].file == f"{tmp_path.name}/<b>.py"
    assert list(found.counts().values()) == [{"breaks": 1, "wrong": 0, "slow": 0, "style": 0}]
    with pytest.raises(ValueError, match="no path"):
        sb.port.report()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        sb.port.report(tmp_path / "none.py")


def test_what_was_not_read_is_never_nothing_found(tmp_path, capsys):
    assert main(["port", str(tmp_path)]) == 2
    assert "holds no Python file: nothing was checked" in capsys.readouterr().err
    (tmp_path / "a.ipynb").write_text('{"cells": [{"source": "x.cuda()"}]}')
    (tmp_path / "plain.ipynb").write_text('{"cells": []}')
    (tmp_path / "k.cu").write_text("__global__ void k() {}")
    (tmp_path / "old.py").write_text("print 'cuda'\n")
    os.mkfifo(tmp_path / "pipe.py")
    for options in ([], ["--severity", "breaks"]):
        assert main(["port", *options, str(tmp_path)]) == 1
        out = capsys.readouterr().out
        for name in ("a.ipynb", "k.cu", "old.py", "pipe.py"):
            assert name in out, options
        assert "plain" not in out


def test_fix_loses_nothing_on_a_full_disk(tmp_path):
    path = tmp_path / "big.py"
    text = "import torch\n" + "x = 1  # a line\n" * 3000 + "torch.cuda.synchronize()\n"
    path.write_text(text)
    path.chmod(0o640)
    command = f"ulimit -f 8; {sys.executable} -m shardbook port --fix --write {path} > /dev/null"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert "left alone: File too large" in done.stderr
    assert path.read_text() == text and os.listdir(tmp_path) == ["big.py"]
    assert main(["port", "--fix", "--write", str(path)]) == 0
    assert path.read_text() == text.replace("torch.cuda.s", "torch.accelerator.s")
    assert path.stat().st_mode & 0o777 == 0o640


def test_fix_writes_python_that_parses_and_names_no_cuda():
    inside = (
        'import torch\nprint(f\'{torch.device("cuda" if torch.cuda.is_available() else "cpu")}\')\n'
    )
    new, count = fixed(inside)
    assert count == 1 and 'torch.device("cpu")' in new
    ast.parse(new)
    named = "import torch\ntorch.cuda.set_device('cuda:0')\n"
    assert fixed(named) == (named, 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f():\n    import torch\n\n    return torch.cuda.device_count()\n",) * 2,
        ("import json\n\n\ndef f():\n    import torch as t\n\n    t.cuda.synchronize()\n",) * 2,
        ("def f():\n    from torch import cuda\n\n    cuda.synchronize()\n", None),
        ("from torch import cuda\n\ncuda.synchronize()\n",
         "from torch import cuda\nimport torch\n\ntorch.accelerator.synchronize()\n"),
    ],
    ids=["in the function", "renamed", "no name", "at the top"],
)  # fmt: skip
def test_fix_imports_torch_only_where_it_is_loaded_already(before, after):
    after = after and after.replace("cuda.sync", "accelerator.sync")
    after = after and after.replace("cuda.device", "accelerator.device")
    assert fixed(before) == ((before, 0) if after is None else (after, 1))
