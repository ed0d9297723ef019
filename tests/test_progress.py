"""What a learner has passed: appended line by line, never lost, and only what they did."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardbook.notebook import progress

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def kept(tmp_path, monkeypatch):
    file = tmp_path / "deep" / "progress.jsonl"
    monkeypatch.setenv("SHARDBOOK_PROGRESS", str(file))
    return file


def test_verdicts_are_counted_and_what_was_passed_stays_passed(kept, monkeypatch):
    for status in ("wrong", "right", "wrong"):
        progress.record(11, "shard", status)
    progress.record(11, "unshard", "not written")
    progress.record(11, "unshard", "not examined")
    entry = progress.load()[11]["shard"]
    assert entry["tries"] == 3 and entry["passed"]
    assert "unshard" not in progress.load()[11]
    monkeypatch.setenv("SHARDBOOK_PROGRESS", "")
    progress.record(11, "shard", "right")
    assert progress.load() == {}


@pytest.mark.parametrize("damage", ["{broken", '{"at": "2026', "\0\0", '[1, 2]\n"x"\n7\nnull'])
def test_a_damaged_line_is_skipped_and_never_overwritten(kept, damage):
    progress.record(11, "shard", "right")
    with open(kept, "a") as f:
        f.write(damage)
    progress.record(11, "unshard", "right")
    assert set(progress.load()[11]) == {"shard", "unshard"}
    assert damage in kept.read_text()
    assert "2/9" in progress.table()


def test_the_older_file_is_read_and_kept(kept):
    older = kept.with_suffix(".json")
    older.parent.mkdir()
    text = json.dumps({"11": {"shard": {"tries": 4, "passed": "2026-01-02"}}}, indent=1)
    older.write_text(text)
    progress.record(11, "shard", "wrong")
    assert progress.load()[11]["shard"] == {"tries": 5, "passed": "2026-01-02"}
    assert older.read_text() == text


def test_an_older_file_that_is_named_is_appended_to(tmp_path, monkeypatch):
    file = tmp_path / "progress.json"
    file.write_text(json.dumps({"11": {"shard": {"tries": 4, "passed": None}}}, indent=1))
    monkeypatch.setenv("SHARDBOOK_PROGRESS", str(file))
    progress.record(11, "shard", "right")
    entry = progress.load()[11]["shard"]
    assert entry["tries"] == 5 and entry["passed"]


def test_two_notebooks_that_check_at_once_lose_no_verdict(kept):
    code = (
        "from shardbook.notebook import progress\n"
        "for _ in range(40): progress.record(11, 'cat', 'wrong')"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
    assert [w.wait(60) for w in writers] == [0, 0, 0]
    assert progress.load()[11]["cat"]["tries"] == 120
    assert [f.name for f in kept.parent.iterdir()] == ["progress.jsonl"]


def test_a_full_disk_costs_one_verdict_at_most_and_leaves_nothing_beside(kept, monkeypatch):
    progress.record(11, "shard", "right")
    real = os.write
    with monkeypatch.context() as m:
        m.setattr(os, "write", lambda file, data: real(file, data[:20]))  # the disk takes no more
        progress.record(11, "unshard", "right")
    progress.record(11, "patchify", "right")
    assert set(progress.load()[11]) == {"shard", "patchify"}
    assert [f.name for f in kept.parent.iterdir()] == ["progress.jsonl"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_file_that_nobody_reads_never_holds_up_a_check(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for named in (pipe, tmp_path, tmp_path / "pipe" / "inside"):
        monkeypatch.setenv("SHARDBOOK_PROGRESS", str(named))
        progress.record(11, "shard", "right")
        assert progress.load() == {}


def test_it_lies_where_the_system_keeps_such_data(monkeypatch, tmp_path):
    for name in ("SHARDBOOK_PROGRESS", "CI", "PYTEST_CURRENT_TEST"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
        assert progress.path() == tmp_path / "shardbook" / "progress.jsonl"
    assert progress.path().parts[-2:] == ("shardbook", "progress.jsonl")
    monkeypatch.setenv("CI", "true")
    assert progress.path() is None


def answer():
    pass


def recorded_in(notebook, monkeypatch, kept, module="__main__"):
    monkeypatch.setattr(progress, "_live_notebook", lambda: notebook and str(notebook))
    monkeypatch.setattr(answer, "__module__", module, raising=False)
    progress.record_in_notebook(11, "shard", "right", answer)
    found = kept.exists()
    kept.unlink(missing_ok=True)
    return found


def test_only_a_learners_notebook_counts(kept, monkeypatch, tmp_path):
    mine = tmp_path / "solutions" / "11_tensors.ipynb"
    mine.parent.mkdir()
    shutil.copy(ROOT / "labs/11_tensors.ipynb", mine)
    copied = tmp_path / "elsewhere.ipynb"
    shutil.copy(ROOT / "solutions/11_tensors.ipynb", copied)
    for notebook, recorded in [
        (None, False),
        (ROOT / "labs/11_tensors.ipynb", True),
        (mine, True),  # a learner's folder may be called solutions
        (tmp_path / "solutions/not_saved_yet.ipynb", True),
        (ROOT / "solutions/11_tensors.ipynb", False),
        (copied, False),
        (ROOT / "notebooks/00_start_here.ipynb", False),  # its demo is no try of the learner's
    ]:
        assert recorded_in(notebook, monkeypatch, kept) == recorded, notebook
    lab = ROOT / "labs/11_tensors.ipynb"
    assert not recorded_in(lab, monkeypatch, kept, "shardbook.basics.tensors")
