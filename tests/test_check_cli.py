"""`python -m shardbook check`: hostile answers, notebooks, exit codes, the JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardbook.__main__ import main
from shardbook.chapters import CHAPTERS, exercises
from shardbook.checks import answers

ROOT = Path(__file__).resolve().parent.parent


def check(*args, progress_file=""):
    """(exit code, stdout, stderr) of the command line."""
    done = subprocess.run(
        [sys.executable, "-m", "shardbook", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | {"SHARDBOOK_PROGRESS": str(progress_file)},
    )
    return done.returncode, done.stdout, done.stderr


HOSTILE = """
import os, signal, sys
import torch
print("at the top level", "y" * 10_000_000)
os.remove(__file__)


def contiguous_strides(shape):
    while True:
        pass


def can_view(shape, strides, new_shape):
    sys.exit(0)


def split_heads(x, num_heads):
    os._exit(0)


def merge_heads(x):
    os.kill(os.getpid(), signal.SIGKILL)


def shard(x, world_size, rank, dim=0):
    return shard(x, world_size, rank, dim)


def unshard(shards, dim=0):
    print("z" * 10_000_000)
    return torch.cat(shards, dim)


def patchify(images, patch):
    if os.fork() == 0:
        os.setsid()
        os.execlp("sleep", "sleep", "98765")  # left behind
    os.abort()


unpatchify = 3


def sliding_windows(x, size, step):
    raise KeyboardInterrupt
"""


def test_hostile_answers_are_wrong_with_the_reason_and_leave_nothing(tmp_path):
    file = tmp_path / "answers.py"
    file.write_text(HOSTILE)
    code, out, _ = check("check", 11, file, "--json", "--timeout", 8)
    verdicts = {v["exercise"]: v for v in json.loads(out)}
    assert code == 1
    assert list(verdicts) == exercises(11)
    expected = {
        "contiguous_strides": "did not finish within 8 s",
        "can_view": "SystemExit",
        "split_heads": "exit code 0",
        "merge_heads": "SIGKILL",
        "shard": "RecursionError",
        "unshard": "printed more than",
        "patchify": "SIGABRT",
        "unpatchify": "is int, expected a function",
        "sliding_windows": "KeyboardInterrupt",
    }
    for name, reason in expected.items():
        verdict = verdicts[name]
        assert set(verdict) == {"exercise", "status", "properties", "hint", "seconds"}
        assert verdict["status"] == "wrong", name
        assert verdict["hint"], name
        failed = [p["detail"] for p in verdict["properties"] if not p["ok"]]
        assert any(reason in detail for detail in failed), (name, failed)
    assert file.exists(), "the learner's file is not what the answer deletes"
    assert not [pid for pid in psutil.pids() if _holds(pid, "sleep 98765")]


def _holds(pid: int, text: str) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return False
    return text in command and pid != os.getpid()


def test_right_answers_pass_alone_and_are_remembered(tmp_path, monkeypatch, capsys):
    file, kept = tmp_path / "mine.py", tmp_path / "progress.jsonl"
    file.write_text(
        "def split_heads(x, num_heads):\n"
        "    if x.shape[-1] % num_heads:\n"
        "        raise ValueError('the channels do not divide by the heads')\n"
        "    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)\n"
    )
    asked = ("check", 11, file, "--exercise", "split_heads")
    code, out, err = check(*asked, progress_file=kept)
    assert (code, err) == (0, ""), out + err
    assert out.startswith("split_heads: right") and "1 right" in out
    verdict = json.loads(kept.read_text())
    assert (verdict["chapter"], verdict["exercise"]) == (11, "split_heads")
    monkeypatch.setenv("SHARDBOOK_PROGRESS", str(kept))
    assert main(["progress"]) == 0 and "1/9" in capsys.readouterr().out
    code, out, _ = check(*asked, "--exercise", "can_view")
    assert code == 2 and "can_view is not written yet" in out and "defines no can_view" in out


LAB = {
    "cells": [
        ("markdown", "# Answers"),
        ("code", "%matplotlib inline\nimport torch\n!echo hello"),
        ("code", "raise RuntimeError('a demo that fails')"),
        ("code", "import sys\nsys.exit(3)"),
        ("code", "this is no Python ("),
        ("code", "%%time\ndef half(n):\n    return n // 2"),
        ("code", "%%bash\nexit 1"),
        ("code", "while True: print('a demo that never ends')"),
        ("code", "def contiguous_strides(shape):\n    raise NotImplementedError('todo')"),
        (
            "code",
            "def split_heads(x, num_heads):\n"
            "    if x.shape[-1] % num_heads:\n"
            "        raise ValueError(SENTENCE)\n"
            "    width = half(2 * x.shape[-1]) // num_heads\n"
            "    return torch.unflatten(x, -1, (num_heads, width)).transpose(1, 2)",
        ),
        ("code", "SENTENCE = 'the channels do not divide by the heads'\nsplit_heads(1, 2)"),
        ("code", "merge_heads = undefined_name"),
        ("code", "def shard(x, world_size, rank, dim=0):\n    return x"),
    ]
}


def write_notebook(path: Path) -> Path:
    cells = [{"cell_type": kind, "source": text} for kind, text in LAB["cells"]]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    return path


def test_a_notebook_whose_demos_fail_is_still_examined(tmp_path):
    file = write_notebook(tmp_path / "lab.ipynb")
    names = ("contiguous_strides", "split_heads", "merge_heads", "shard", "unshard")
    asked = [a for n in names for a in ("--exercise", n)]
    code, out, _ = check("check", 11, file, "--json", *asked)
    verdicts = {v["exercise"]: v for v in json.loads(out)}
    assert code == 1
    assert {n: v["status"] for n, v in verdicts.items()} == {
        "contiguous_strides": "not written",
        "split_heads": "right",
        "merge_heads": "not examined",
        "shard": "wrong",
        "unshard": "not written",
    }
    assert "undefined_name" in verdicts["merge_heads"]["properties"][0]["detail"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("syntax.py", "def split_heads(:\n", "line 1"),
        ("latin.py", b"# \xff\xfe\nx = 1\n", "encoding"),
        ("null.py", "x = 1\0", "null"),
        ("not.ipynb", "hello", "no notebook"),
        ("empty.ipynb", '{"cells": []}', "no code cells"),
        ("missing.py", None, "No such file"),
        ("README.md", "# text", r"a .py or .ipynb file is expected"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, text, says):
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(answers.Unusable, match=says):
        answers.read(file)


def test_exit_codes_of_what_cannot_be_examined(tmp_path):
    file = tmp_path / "answers.py"
    file.write_text("import torch\nimport no_such_module\n")
    code, out, err = check("check", 11, file, "--json")
    assert code == 2
    assert "line 2" in err and "no_such_module" in err
    verdicts = json.loads(out)
    assert [v["exercise"] for v in verdicts] == exercises(11)
    assert {v["status"] for v in verdicts} == {"not examined"}


def test_what_does_not_exist_is_named_with_what_does(capsys):
    assert main(["check", "99", "x.py"]) == 2
    assert "no chapter 99" in capsys.readouterr().err
    assert main(["check", "11", "x.py", "--exercise", "nothing"]) == 2
    assert "split_heads" in capsys.readouterr().err
    assert main(["check", "11", "x.py", "--json"]) == 2
    said = capsys.readouterr()
    assert "No such file" in said.err and len(json.loads(said.out)) == len(exercises(11))


def test_commands_are_listed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "check" in out and "progress" in out
    assert main(["frobnicate"]) == 2
    assert "no command 'frobnicate'" in capsys.readouterr().err


def test_answers_reach_the_ranks_by_value(tmp_path):
    chapter = next((c for c in (22, 21, 13) if exercises(c)), None)
    if chapter is None:
        pytest.skip("no chapter with ranks yet")
    (tmp_path / "beside_it.py").write_text("def nothing(x):\n    return x\n")
    name = {22: "reduce_from_group", 21: "average_gradients_", 13: "ring_all_reduce"}[chapter]
    file = tmp_path / "answers.py"
    file.write_text(
        f"from beside_it import nothing\ndef {name}(x, group=None): return nothing(x)\n"
    )
    code, out, err = check("check", chapter, file, "--exercise", name, "--json")
    assert code == 1, out + err
    failed = [p["detail"] for p in json.loads(out)[0]["properties"] if not p["ok"]]
    assert failed and not any("ModuleNotFound" in d or "answers" in d for d in failed), failed


def test_every_chapter_with_checks_has_a_module():
    assert any(exercises(c) for c in CHAPTERS)
    for chapter in CHAPTERS:
        names = exercises(chapter)
        assert len(names) == len(set(names))


def test_a_name_that_is_imported_from_the_library_is_no_answer(tmp_path, capsys):
    file = tmp_path / "answers.py"
    file.write_text("from shardbook.basics.tensors import split_heads\n")
    assert main(["check", "11", str(file), "--exercise", "split_heads"]) == 2
    assert "imports split_heads from shardbook.basics.tensors" in capsys.readouterr().out


def test_who_reads_our_output_may_stop_early():
    command = f"{sys.executable} -m shardbook doctor | head -c 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
