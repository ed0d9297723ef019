"""The checker on the chapter's own project: every planted habit, no false alarm on its port."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardbook.port.project import modules
from shardbook.port.rules import RULES
from shardbook.port.scan import scan

ROOT = Path(__file__).parents[2]
CHAPTER = ROOT / "book/44_dit_port"
PLANTED = json.loads((CHAPTER / "planted.json").read_text())  # made by reading, not by the checker


def named() -> set[tuple[str, int]]:
    return {(Path(f.file).name, f.line) for f in scan([CHAPTER / "cuda_project"])}


def start(script: str, *args: str, npu: bool) -> list:
    """Run a script of this folder on the cpu or on four stand-in NPUs; the JSON it ends with."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    if npu:
        env |= {"SHARDBOOK_DEVICE_PLUGIN": "tests.standin", "SHARDBOOK_STANDIN": "4"}
        env.pop("SHARDBOOK_DEVICE", None)
    else:
        env["SHARDBOOK_DEVICE"] = "cpu"
        env.pop("SHARDBOOK_DEVICE_PLUGIN", None)
    command = [sys.executable, str(Path(__file__).parent / script), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_planted_list_is_of_these_files():
    for p in PLANTED:
        lines = (CHAPTER / "cuda_project" / p["file"]).read_text().splitlines()
        assert lines[p["line"] - 1].strip() == p["code"], p
        assert p["rule"] in RULES
    assert len(PLANTED) > 80


def test_every_planted_habit_is_found():
    found = {(Path(f.file).name, f.line, f.rule) for f in scan([CHAPTER / "cuda_project"])}
    wanted = {(p["file"], p["line"], p["rule"]) for p in PLANTED}
    assert not wanted - found


def test_nothing_else_is_found():
    following = {(Path(f.file).name, f.line) for f in scan([CHAPTER / "cuda_project"]) if f.cause}
    assert named() - following == {(p["file"], p["line"]) for p in PLANTED} - following
    assert following == {("model.py", 26)}  # a product of the complex numbers of line 25


def test_no_false_alarm_on_the_port():
    assert scan([CHAPTER / "ported_project"]) == []


@pytest.mark.npu
def test_the_unported_project_stops_where_the_checker_said():
    stops = start("original.py", npu=True)
    places = named() | {("dist_utils.py", 83)}  # starts the nvidia-smi that is named in line 82
    for part, error, file, line in stops:
        if part == "stubs":
            continue
        assert error, f"{part} ran on an NPU"
        assert (file, line) in places, (part, error, file, line)
    assert len({(file, line) for *_, file, line in stops}) > 12


def test_the_port_gives_each_rank_a_device_of_its_own(monkeypatch):
    device = modules(CHAPTER / "ported_project", "device").device
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
        patch.setattr(torch.accelerator, "device_count", lambda: 2)
        patch.setattr(torch.accelerator, "set_device_index", lambda _: None)
        assert [device.pick(r) for r in (0, 1)] == [torch.device("cuda", r) for r in (0, 1)]
        with pytest.raises(RuntimeError, match=r"local rank 2 has no cuda of its own .*: 2\)"):
            device.pick(2)
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
        assert device.pick(7).type == "cpu"  # ranks share it


@pytest.mark.npu
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_port_trains_and_samples_alike_on_cpu_and_npu(ranks):
    (cpu, clips), (npu, npu_clips) = (start("finished.py", str(ranks), npu=n) for n in (0, 1))
    assert {kind for _, kind in cpu} == {"cpu"}
    assert {kind for _, kind in npu} == {"npu"}
    for (losses, _), (others, _) in zip(cpu, npu, strict=True):
        assert len(losses) == 3
        assert others == pytest.approx(losses, abs=1e-5)  # fp32, sums in another order
    assert len(clips) > 50
    assert npu_clips == pytest.approx(clips, abs=1e-4)  # 3 steps of Adam, 2 of sampling
