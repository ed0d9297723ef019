"""The choice of the device, its override, and what the doctor says of every case it knows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardbook as sb
from shardbook import doctor
from shardbook.doctor import Facts, examine

device = sys.modules["shardbook.devices"]  # sb.device is the function
ROOT = Path(__file__).parents[1]


@pytest.fixture
def accelerator(monkeypatch):
    """Pretend that torch sees `count` devices of a type; the devices themselves are not used."""

    def pretend(kind: str | None, count: int):
        class Found:
            type = kind

        found = Found() if kind and count else None
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: found
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
        monkeypatch.setattr(device, "_of_rank", None)
        monkeypatch.delenv("SHARDBOOK_DEVICE", raising=False)

    return pretend


def test_cpu_where_there_is_no_accelerator(accelerator):
    accelerator(None, 0)
    assert sb.device() == torch.device("cpu") and sb.backend() == "gloo"
    assert "CPU" in device.describe() and "gloo" in device.describe()


def test_cuda_where_there_is_one(accelerator):
    accelerator("cuda", 2)
    assert sb.device() == torch.device("cuda:0") and sb.backend() == "nccl"


def test_other_accelerators_are_left_alone(accelerator):
    accelerator("mps", 1)
    assert sb.device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("there", "wanted", "error", "says"),
    [
        (None, "npu", RuntimeError, "SHARDBOOK_DEVICE=npu, but no npu device can be used here"),
        (None, "cuda", RuntimeError, "SHARDBOOK_DEVICE=cuda, but no cuda device can be used here"),
        ("cuda", "npu", RuntimeError, "no npu device can be used here"),
        (None, "gpu", ValueError, "SHARDBOOK_DEVICE=gpu is not known: use npu, cuda or cpu"),
    ],
)
def test_an_override_that_can_not_be(accelerator, monkeypatch, there, wanted, error, says):
    accelerator(there, 1)
    monkeypatch.setenv("SHARDBOOK_DEVICE", wanted)
    with pytest.raises(error, match=says):
        sb.device()


@pytest.mark.parametrize("wanted", ["cpu", "cuda"])
def test_an_override_that_can(accelerator, monkeypatch, wanted):
    accelerator("cuda", 1)
    monkeypatch.setenv("SHARDBOOK_DEVICE", wanted)
    assert sb.device().type == wanted


def test_ranks_take_the_device_of_their_number(accelerator):
    accelerator("cuda", 4)
    assert [device.set_rank_device(r, 4) for r in range(4)] == [
        torch.device("cuda", r) for r in range(4)
    ]
    assert sb.device() == torch.device("cuda:3"), "sb.device() is the rank's"
    assert device.too_few(4) == ""


def test_more_ranks_than_devices_all_use_the_cpu(accelerator):
    accelerator("cuda", 2)
    assert {device.set_rank_device(r, 3) for r in range(3)} == {torch.device("cpu")}
    assert sb.backend() == "gloo"
    assert device.too_few(3).startswith("More ranks than devices (3 ranks, 2 cuda devices)")
    accelerator(None, 0)
    assert device.too_few(3) == "", "nothing to say where there is no accelerator"


def test_a_rank_outside_its_world(accelerator):
    accelerator("cuda", 4)
    with pytest.raises(ValueError, match=r"local rank 4 is not in 0\.\.3"):
        device.set_rank_device(4, 4)


def python(*args: str, **environ: str) -> subprocess.CompletedProcess:
    """A fresh Python, without what this process set for itself (torch's loading of torch_npu)."""
    ours = ("SHARDBOOK_", "TORCH_DEVICE_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return subprocess.run(
        [sys.executable, *args], env=env | environ, cwd=ROOT, capture_output=True, text=True
    )


BROKEN = {
    "no CANN": 'raise ImportError("libhccl.so: cannot open shared object file")',
    "anything": "1 / 0",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_torch_npu_that_can_not_load_is_a_reason_not_a_crash(tmp_path, how):
    (tmp_path / "torch_npu.py").write_text(BROKEN[how])
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    # torch itself would load it, and fail, were it not told to wait
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    code = "import shardbook as sb, shardbook.doctor as d; print(sb.device()); print(d.npu_reason)"
    done = python("-c", code, PYTHONPATH=str(tmp_path))
    if torch.accelerator.is_available() and sb.device().type == "cuda":
        pytest.skip("torch_npu is not tried where CUDA is used")
    assert done.returncode == 0, done.stderr
    where, reason = done.stdout.strip().splitlines()
    assert where == "cpu"
    words = BROKEN[how].split('"')[1] if '"' in BROKEN[how] else "division by zero"
    assert words in reason


def test_a_plugin_that_does_not_exist_says_its_name():
    done = python("-c", "import shardbook.devices", SHARDBOOK_DEVICE_PLUGIN="no_such_plugin")
    assert done.returncode == 1 and "no_such_plugin" in done.stderr


# The doctor: each case of facts, the words that must be said, and the next step

NO_CANN = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
SOURCE = "source /usr/local/Ascend/cann/set_env.sh"
CASES = {
    "nothing expected": (Facts(), "no NPU is expected", None),
    "chips but no torch_npu": (
        Facts(chips=8, scripts=("/usr/local/Ascend/cann/set_env.sh",)),
        "torch_npu is not installed, though there are 8 Ascend chips",
        "source /usr/local/Ascend/cann/set_env.sh, then pip install torch_npu==2.13.0",
    ),
    "no CANN, script on disk": (
        Facts(torch_npu="2.13.0", npu_reason=NO_CANN, scripts=(SOURCE.split()[1],)),
        "CANN's libraries are missing (libhccl.so)",
        SOURCE + ", and start Jupyter again",
    ),
    "no CANN at all": (
        Facts(torch_npu="2.13.0", npu_reason=NO_CANN),
        "CANN's libraries are missing",
        "install the CANN toolkit and the ops of your chip, then " + SOURCE,
    ),
    "no driver": (
        Facts(torch_npu="2.13.0", npu_reason=NO_CANN.replace("hccl", "ascend_hal")),
        "the NPU driver's libraries are missing",
        "mount /usr/local/Ascend/driver",
    ),
    "another error": (
        Facts(torch_npu="2.13.0", npu_reason="RuntimeError: ERR99999"),
        "can't be loaded: RuntimeError: ERR99999",
        "CANN version",
    ),
    "no device": (
        Facts(torch_npu="2.13.0", npu_reason=""),
        "sees no NPU: there is no /dev/davinci0",
        "--device /dev/davinci_manager",
    ),
    "sick devices": (
        Facts(torch_npu="2.13.0", npu_reason="", chips=2),
        "sees no NPU, though there are 2 Ascend chips",
        "npu-smi info",
    ),
    "older torch_npu": (
        Facts(torch="2.13.0+cpu", torch_npu="2.12.0.post1", npu_reason="RuntimeError: x"),
        "torch_npu 2.12.0.post1 was built for another torch than 2.13.0+cpu",
        "pip install torch_npu==2.13.0",
    ),
    "order": (
        Facts(torch_npu="2.13.0", npu_reason="", npus=1, visible="0,3,1,1", ranks=1),
        "ASCEND_RT_VISIBLE_DEVICES=0,3,1,1 does not ascend",
        "export ASCEND_RT_VISIBLE_DEVICES=0,1,3",
    ),
    "order that hides all": (
        Facts(torch_npu="2.13.0", npu_reason="", chips=2, visible="1,0"),
        "ASCEND_RT_VISIBLE_DEVICES=1,0 does not ascend",
        "export ASCEND_RT_VISIBLE_DEVICES=0,1",
    ),
    "not numbers": (
        Facts(torch_npu="2.13.0", npu_reason="", npus=1, visible="npu:0", ranks=1),
        "ASCEND_RT_VISIBLE_DEVICES=npu:0 is not a list of numbers",
        "write 0,1,2,3",
    ),
    "dropped": (
        Facts(torch_npu="2.13.0", npu_reason="", npus=2, visible="0,1,9", ranks=2),
        "names 3 NPUs and 2 came",
        "npu-smi info",
    ),
    "renumbered": (
        Facts(torch_npu="2.13.0", npu_reason="", npus=2, visible="4,5", ranks=2),
        "npu:0 is chip 4",
        None,
    ),
    "more ranks than devices": (
        Facts(torch_npu="2.13.0", npu_reason="", npus=2, ranks=4),
        "a run of 4 ranks has 2 npu devices: such runs use the cpu and gloo",
        "a machine with 4 devices",
    ),
    "both": (
        Facts(torch_npu="2.13.0", npu_reason="CUDA is available", cudas=8),
        "CUDA and Ascend are both present",
        "CUDA_VISIBLE_DEVICES=",
    ),
    "CUDA alone": (Facts(cudas=8, cuda_name="H200"), "8 CUDA devices found (H200)", None),
    "NPUs": (
        Facts(torch_npu="2.13.0.post2", npu_reason="", npus=8, npu_name="Ascend910B3"),
        "8 NPUs found (Ascend910B3)",
        None,
    ),
    "override": (Facts(wanted="cpu"), "SHARDBOOK_DEVICE=cpu decides", None),
    "override missing": (Facts(wanted="npu"), "SHARDBOOK_DEVICE=npu, and there is no", "unset"),
    "override unknown": (Facts(wanted="gpu"), "SHARDBOOK_DEVICE=gpu is not known", "use npu"),
}
HARMLESS = {"more ranks than devices", "both"}  # they have a next step, and nothing is broken


@pytest.mark.parametrize("case", CASES)
def test_doctor(case):
    facts, says, next_step = CASES[case]
    findings = examine(facts)
    found = [f for f in findings if says in f.text]
    assert found, [f.text for f in findings]
    if next_step is None:
        assert not any(f.problem or f.next for f in findings), findings
    else:
        assert next_step in found[0].next, found[0]
        assert any(f.problem for f in findings) is (case not in HARMLESS), findings


def test_doctor_on_this_machine(capsys):
    code = doctor.main(["--ranks", "1"])
    said = capsys.readouterr().out
    assert code in (0, 1) and f"torch {torch.__version__}" in said
    assert said.strip().splitlines()[-1] == device.describe()


@pytest.mark.slow
def test_the_real_torch_npu_without_cann(tmp_path):
    """Install the wheel beside torch: everything works on the CPU and doctor says why."""
    wheel = f"torch_npu=={doctor._release(torch.__version__)}"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--retries", "0"]
    pip += ["--timeout", "15", "--target", str(tmp_path)]
    installed = subprocess.run([*pip, wheel], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the registry does not offer {wheel} for this Python and machine")
    path = {"PYTHONPATH": str(tmp_path)}
    plain = python("-c", "import torch", **path)
    if plain.returncode == 0:
        pytest.skip("CANN is installed here, so torch_npu loads")
    script = tmp_path / "ranks.py"
    script.write_text(
        "import shardbook as sb, torch, torch.distributed as dist\n"
        "def add():\n"
        "    x = torch.ones(3, device=sb.device())\n"
        "    dist.all_reduce(x)\n"
        "    return str(x.device), x.tolist()\n"
        "if __name__ == '__main__':\n"
        "    print(sb.run(add, world_size=2).values)\n"
    )
    done = python(str(script), **path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([("cpu", [2.0, 2.0, 2.0])] * 2)
    seen = python("-m", "shardbook", "doctor", **path)
    assert seen.returncode == 1, seen.stdout + seen.stderr
    assert "CANN's libraries are missing (libhccl.so)" in seen.stdout
    assert "set_env.sh" in seen.stdout


def test_the_doctor_reads_the_version_of_cann(tmp_path):
    record = tmp_path / "cann" / "x86_64-linux" / "ascend_toolkit_install.info"
    record.parent.mkdir(parents=True)
    record.write_text("package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=x86_64\n")
    patterns = (str(tmp_path / "none" / "*"), str(tmp_path / "cann" / "*-linux" / record.name))
    assert doctor.cann_version(patterns) == "9.1.0"
    assert doctor.cann_version(patterns[:1]) == ""


def test_the_doctor_shows_the_versions_that_go_together():
    line = doctor.versions(Facts(torch_npu="2.13.0", cann="9.1.0"))
    assert line.endswith("torch 2.13.0, torch_npu 2.13.0, CANN 9.1.0")
    assert doctor.versions(Facts(torch_npu="2.13.0")).endswith("CANN not found")
    assert "CANN" not in doctor.versions(Facts())
