"""`python -m shardbook check`: one bad exercise costs no other anything, and nothing waits long."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardbook.checks import answers, cli, isolate
from shardbook.checks.report import Property, Verdict
from shardbook.notebook import lab
from tests.test_check_cli import ROOT, check

SPLIT = """
def split_heads(x, num_heads):
    if x.shape[-1] % num_heads:
        raise ValueError('the channels do not divide by the heads')
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
"""


def notebook(path: Path, *cells: str) -> Path:
    listed = [{"cell_type": "code", "source": text, "metadata": {}} for text in cells]
    path.write_text(json.dumps({"cells": listed, "metadata": {}, "nbformat": 4}))
    return path


def statuses(out: str) -> dict[str, str]:
    return {v["exercise"]: v["status"] for v in json.loads(out)}


def detail(out: str, exercise: str) -> str:
    found = next(v for v in json.loads(out) if v["exercise"] == exercise)
    return " ".join(p["detail"] for p in found["properties"])


def test_an_endless_loop_costs_its_timeout_once(tmp_path):
    file = notebook(
        tmp_path / "lab.ipynb",
        "def shard(x, world_size, rank, dim=0):\n    while True: pass",
        "import no_such_module",
        "pieces = shard(0, 1, 2)",  # a demo that never ends
        SPLIT + "    pieces = x",  # a local of that name
        "def unshard(shards, dim=0):\n    return shard(shards, 1, 0)",  # uses what hangs
        "LIMIT = shard(0, 1, 2)",
        "def merge_heads(x):\n    return LIMIT",  # needs a definition that hangs
        "def patchify(images, patch):\n    return LIMIT",  # so does this
        "def unpatchify(tokens, patch, channels, height):\n    return no_such_module.x(tokens)",
    )
    names = ("split_heads", "merge_heads", "shard", "unshard", "patchify", "unpatchify")
    asked = [a for n in names for a in ("--exercise", n)]
    code, out, err = check("check", 11, file, "--json", "--timeout", 12, *asked)
    assert code == 1 and err == ""
    assert statuses(out) == {
        "split_heads": "right",
        "merge_heads": "not examined",
        "shard": "wrong",
        "unshard": "not examined",
        "patchify": "not examined",
        "unpatchify": "not examined",
    }
    assert "it uses shard, which does not finish" in detail(out, "unshard")
    assert "it uses no_such_module, and cell 2, line 1: Module" in detail(out, "unpatchify")
    waited = [v for v in json.loads(out) if v["seconds"] > 11]
    assert len(waited) == 1, waited
    assert sum(v["seconds"] for v in json.loads(out)) < 12 + 20


def test_a_definition_that_hangs_is_waited_for_once(tmp_path):
    file = notebook(
        tmp_path / "lab.ipynb",
        "import time\nLIMIT = time.sleep(1000)",
        "def merge_heads(x):\n    return LIMIT",
        "def patchify(images, patch):\n    return LIMIT",
        SPLIT,
    )
    asked = [a for n in ("split_heads", "merge_heads", "patchify") for a in ("--exercise", n)]
    code, out, _ = check("check", 11, file, "--json", "--timeout", 5, *asked)
    assert code == 2
    assert statuses(out) == {
        "split_heads": "right",
        "merge_heads": "not examined",
        "patchify": "not examined",
    }
    assert "cell 1, line 2 did not finish within 5 s" in detail(out, "merge_heads")
    assert "it needs cell 1, line 2, which did not finish" in detail(out, "patchify")
    assert [v["exercise"] for v in json.loads(out) if v["seconds"] > 4] == ["merge_heads"]


def test_what_could_not_be_examined_is_no_unwritten_exercise(tmp_path):
    file = notebook(
        tmp_path / "lab.ipynb", SPLIT, "def shard(x:\n    return x", "merge_heads = nil"
    )
    asked = [a for n in ("split_heads", "shard", "merge_heads") for a in ("--exercise", n)]
    code, out, err = check("check", 11, file, *asked)
    assert code == 2 and err == ""
    assert "split_heads: right" in out
    assert "– shard was not examined: cell 2, line 1: SyntaxError" in out
    assert "– merge_heads was not examined: cell 3, line 1: NameError" in out
    assert out.endswith("chapter 11: 1 right, 2 not examined\n")


def test_a_file_that_fails_shows_its_line(tmp_path):
    file = tmp_path / "answers.py"
    file.write_text("import torch\nLIMIT = int('three')\n" + SPLIT)
    code, out, err = check("check", 11, file, "--exercise", "split_heads")
    assert code == 2
    assert "line 2: ValueError" in err and "(LIMIT = int('three'))" in err
    assert "split_heads was not examined" in out


def test_ranks_that_flood_end_at_once(tmp_path):
    file = tmp_path / "answers.py"
    file.write_text(
        "def ring_all_reduce(x, group=None):\n    while True: print('flooding', 'z' * 50)\n"
    )
    code, out, _ = check("check", 13, file, "--exercise", "ring_all_reduce", "--json")
    assert code == 1
    assert "printed more than 1 MB" in detail(out, "ring_all_reduce")
    assert json.loads(out)[0]["seconds"] < 40  # two or three runs, each ended in its first second


def test_a_flood_while_the_file_is_loaded_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(isolate, "FLOOD_LOADING", isolate.FLOOD)
    file = tmp_path / "answers.py"
    file.write_text("while True: print('flooding', 'z' * 50)\n")
    cli._start_server(11)
    found = isolate.examine(answers.read(file), 11, "shard", 100)
    assert "loading it printed more than 1 MB" in found.verdict.properties[0].detail


def test_an_answer_that_is_done_before_we_look_is_no_hang():
    """Everything it has to say lies in the pipe, and what it printed into has ended."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    printed, output = multiprocessing.Pipe(duplex=False)
    os.set_blocking(printed.fileno(), False)
    verdict = Verdict("shard", "right", [Property("holds", True)], "", 0.1)
    for said in [("started", None), ("statement", 0), ("loaded", None), ("verdict", verdict)]:
        theirs.send(said)
    theirs.close()
    output.close()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    ended, other = multiprocessing.Pipe(duplex=False)
    other.close()
    child = SimpleNamespace(sentinel=ended, exitcode=0, join=lambda seconds: None)
    read = answers.Answers("x.ipynb", [("cell 1", "shard = print")], True)
    found = isolate._Watch(ours, printed, child, 5).follow(read, "shard")
    assert found.verdict == verdict and not found.hung


@pytest.mark.parametrize("command", [["doctor"], ["progress"], ["check", "11", "FILE"]])
def test_a_terminal_that_is_not_utf8_changes_no_exit_code(tmp_path, command):
    file = tmp_path / "answers.py"
    file.write_text(SPLIT)
    asked = [str(file) if c == "FILE" else c for c in command]
    asked += ["--exercise", "split_heads"] if command[0] == "check" else []
    done = [
        subprocess.run(
            [sys.executable, "-m", "shardbook", *asked],
            capture_output=True,
            timeout=120,
            cwd=ROOT,
            env=os.environ | {"PYTHONIOENCODING": encoding},
        )
        for encoding in ("utf-8", "latin-1")
    ]
    utf8, latin = done
    assert utf8.returncode == latin.returncode and b"Traceback" not in latin.stderr
    assert len(utf8.stdout.splitlines()) == len(latin.stdout.splitlines())
    assert ("✓" in utf8.stdout.decode()) <= (b"?" in latin.stdout)


def test_what_needs_no_torch_loads_none(tmp_path):
    for command in (["progress"], ["check", "--help"], ["check", "99", "x.py"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "shardbook", *command],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "shardbook" in loaded
        assert not loaded & {"torch", "numpy", "libcst", "IPython", "psutil"}, command


def test_the_help_says_that_it_is_no_sandbox(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "no sandbox" in capsys.readouterr().out


def test_long_lines_break_between_words_where_a_person_reads(monkeypatch):
    right = "✓ " + "a property that holds " * 8
    wrong = "  ✗ " + "what came is not what was expected, " * 5 + "x" * 120
    lines = [right, wrong, "  hint: short"]
    assert lab.readable(lines) == "\n".join(lines), "nothing is broken in a file or a pipe"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = lab.readable(lines).split("\n")
    assert shown[0] == right and shown[-1] == "  hint: short"
    assert all(len(line) <= 100 for line in shown[1:] if "x" * 120 not in line)
    assert " ".join(" ".join(shown[1:-1]).split()) == " ".join(wrong.split())


def test_checks_of_classes_are_found_by_both_names():
    from shardbook.checks import data_parallel as check

    assert check.BucketedDataParallel is check.bucketed_data_parallel
    assert check.FullySharded is check.fully_sharded
