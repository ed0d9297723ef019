"""``python -m shardbook doctor``: which device is used, why not another, and what to do next.

`gather` reads the facts of this machine, `examine` turns facts into findings and touches nothing,
so every case can be tested without the machine it happens on. The file is long because each case
is its own words.
"""

import argparse
import contextlib
import dataclasses
import glob
import os
import platform
import re
from importlib import metadata

import torch

from .devices import describe, npu_reason

SCRIPTS = (
    "/usr/local/Ascend/cann/set_env.sh",
    "/usr/local/Ascend/ascend-toolkit/set_env.sh",
    "~/Ascend/cann/set_env.sh",
    "~/Ascend/ascend-toolkit/set_env.sh",
)
"""Where CANN's installer puts the script that sets its environment: since 8.5, and before."""
RECORDS = (
    "/usr/local/Ascend/cann/*-linux/ascend_toolkit_install.info",
    "/usr/local/Ascend/ascend-toolkit/latest/*-linux/ascend_toolkit_install.info",
    "~/Ascend/cann/*-linux/ascend_toolkit_install.info",
    "~/Ascend/ascend-toolkit/latest/*-linux/ascend_toolkit_install.info",
)
"""Where it notes the version that it installed (CANN 8.5 and 8.0, software installation, paths)."""


@dataclasses.dataclass
class Facts:
    """What `examine` needs to know of a machine."""

    torch: str = "2.13.0"
    torch_npu: str | None = None  # the installed version, whether or not it loads
    npu_reason: str = "torch_npu is not installed"  # why it can't be used, "" if it loaded
    cann: str = ""  # the version of the toolkit found on disk
    npus: int = 0  # devices torch_npu sees
    npu_name: str = ""
    chips: int = 0  # /dev/davinci0 …: NPUs that the driver shows to this system or container
    cudas: int = 0
    cuda_name: str = ""
    scripts: tuple[str, ...] = ()  # those of SCRIPTS that exist
    visible: str | None = None  # ASCEND_RT_VISIBLE_DEVICES
    wanted: str = ""  # SHARDBOOK_DEVICE
    ranks: int = 4  # what most chapters start


@dataclasses.dataclass
class Finding:
    """One thing found, and the next step if there is one."""

    text: str
    next: str = ""
    problem: bool = False  # a device that seems to be there, or was asked for, can't be used


def gather(ranks: int = 4) -> Facts:
    """The facts of this machine."""
    try:
        version = metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        version = None
    npus, npu_name = _devices("npu")
    cudas, cuda_name = _devices("cuda")
    return Facts(
        torch=torch.__version__,
        torch_npu=version,
        npu_reason=npu_reason,
        cann=cann_version(RECORDS),
        npus=npus,
        npu_name=npu_name,
        chips=sum(bool(re.fullmatch(r"/dev/davinci\d+", p)) for p in glob.glob("/dev/davinci*")),
        cudas=cudas,
        cuda_name=cuda_name,
        scripts=tuple(s for s in SCRIPTS if os.path.exists(os.path.expanduser(s))),
        visible=os.environ.get("ASCEND_RT_VISIBLE_DEVICES"),
        wanted=os.environ.get("SHARDBOOK_DEVICE", ""),
        ranks=ranks,
    )


def cann_version(records: tuple[str, ...]) -> str:
    """The version in the first installation record that can be read, or ""."""
    for pattern in records:
        for path in sorted(glob.glob(os.path.expanduser(pattern))):
            with contextlib.suppress(OSError), open(path, errors="replace") as f:
                if found := re.search(r"(?m)^version=(\S+)", f.read()):
                    return found[1]
    return ""


def _devices(kind: str) -> tuple[int, str]:
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return 0, ""
    return module.device_count(), module.get_device_name(0)


def examine(facts: Facts) -> list[Finding]:
    """What the facts mean, in the order a person would act on them."""
    findings = [*_npu(facts), *_visible(facts), *_cuda(facts), *_wanted(facts)]
    kind, count = _used(facts)
    if kind != "cpu" and facts.ranks > count:
        findings.append(
            Finding(
                f"a run of {facts.ranks} ranks has {count} {kind} device{'s' * (count > 1)}: such "
                "runs use the cpu and gloo, so all chapters work, at the cpu's speed",
                f"use a machine with {facts.ranks} devices to run the ranks on them",
            )
        )
    return findings


def _used(facts: Facts) -> tuple[str, int]:
    """The type of device that `sb.device()` answers with, and how many there are."""
    for kind, count in (("npu", facts.npus), ("cuda", facts.cudas)):
        if count and facts.wanted in ("", kind):
            return kind, count
    return "cpu", 1


def _npu(facts: Facts) -> list[Finding]:
    there = "is 1 Ascend chip" if facts.chips == 1 else f"are {facts.chips} Ascend chips"
    if facts.npus:
        name = f" ({facts.npu_name})" if facts.npu_name else ""
        return [Finding(f"{facts.npus} NPU{'s' * (facts.npus > 1)} found{name}")]
    if facts.torch_npu is None:
        if not facts.chips:
            return [
                Finding("torch_npu is not installed, and no Ascend chip shows: no NPU is expected")
            ]
        return [
            Finding(
                f"torch_npu is not installed, though there {there}",
                f"{_source(facts)}, then pip install torch_npu=={_release(facts.torch)}",
                problem=True,
            )
        ]
    if _release(facts.torch_npu) != _release(facts.torch):
        return [
            Finding(
                f"torch_npu {facts.torch_npu} was built for another torch than {facts.torch}",
                f"pip install torch_npu=={_release(facts.torch)}",
                problem=True,
            )
        ]
    if facts.cudas:
        return []  # said by _cuda
    missing = re.search(r"(lib\w+\.so)[\w.]*: cannot open shared object", facts.npu_reason)
    if missing and missing[1] == "libascend_hal.so":
        return [
            Finding(
                "torch_npu is installed, but the NPU driver's libraries are missing "
                "(libascend_hal.so)",
                "install the NPU driver, or in a container mount /usr/local/Ascend/driver",
                problem=True,
            )
        ]
    if missing:
        return [
            Finding(
                f"torch_npu is installed, but CANN's libraries are missing ({missing[1]})",
                f"{_source(facts)}, and start Jupyter again from that shell",
                problem=True,
            )
        ]
    if facts.npu_reason:
        return [
            Finding(
                f"torch_npu is installed and can't be loaded: {facts.npu_reason}",
                "the message is torch_npu's; its README lists the CANN version it needs",
                problem=True,
            )
        ]
    if any(f.problem for f in _visible(facts)):
        return [Finding("torch_npu is loaded and sees no NPU, for the reason below")]
    if facts.chips:
        return [
            Finding(
                f"torch_npu is loaded and sees no NPU, though there {there}",
                "npu-smi info tells whether the chips are healthy and who holds them",
                problem=True,
            )
        ]
    return [
        Finding(
            "torch_npu is loaded and sees no NPU: there is no /dev/davinci0",
            "on the host install the driver (npu-smi info shows the chips); give a container the "
            "devices: --device /dev/davinci0 --device /dev/davinci_manager "
            "--device /dev/devmm_svm --device /dev/hisi_hdc",
            problem=True,
        )
    ]


def _source(facts: Facts) -> str:
    if facts.scripts:
        return f"source {facts.scripts[0]}"
    return f"install the CANN toolkit and the ops of your chip, then source {SCRIPTS[0]}"


def _release(version: str) -> str:
    """2.13.0+cpu and 2.13.0.post2 -> 2.13.0."""
    return ".".join(re.split(r"[.+]", version)[:3])


def _visible(facts: Facts) -> list[Finding]:
    if facts.visible is None:
        return []
    ids = [part.strip() for part in facts.visible.split(",")]
    setting = f"ASCEND_RT_VISIBLE_DEVICES={facts.visible}"
    if not all(part.isdigit() for part in ids):
        return [
            Finding(
                f"{setting} is not a list of numbers",
                "write 0,1,2,3, or unset it to see every NPU",
                problem=True,
            )
        ]
    numbers = [int(part) for part in ids]
    if numbers != sorted(set(numbers)):
        ordered = ",".join(str(n) for n in sorted(set(numbers)))
        return [
            Finding(
                f"{setting} does not ascend: CANN then shows fewer NPUs, or none, without an error",
                f"export ASCEND_RT_VISIBLE_DEVICES={ordered}",
                problem=True,
            )
        ]
    found = [Finding(f"{setting}: npu:0 is chip {numbers[0]}, the numbers start at 0 again")]
    if facts.npus and facts.npus < len(numbers):
        found.append(
            Finding(
                f"{setting} names {len(numbers)} NPUs and {facts.npus} came: CANN drops numbers "
                "that do not exist",
                "npu-smi info lists the chips",
                problem=True,
            )
        )
    return found


def _cuda(facts: Facts) -> list[Finding]:
    if not facts.cudas:
        return []
    name = f" ({facts.cuda_name})" if facts.cuda_name else ""
    found = [Finding(f"{facts.cudas} CUDA device{'s' * (facts.cudas > 1)} found{name}")]
    if facts.torch_npu is not None or facts.chips:
        found.append(
            Finding(
                "CUDA and Ascend are both present, and one process can't use both: CUDA is used",
                "to use the NPUs, export CUDA_VISIBLE_DEVICES= (empty), or install the cpu build "
                "of torch",
            )
        )
    return found


def _wanted(facts: Facts) -> list[Finding]:
    if not facts.wanted:
        return []
    setting = f"SHARDBOOK_DEVICE={facts.wanted}"
    if facts.wanted not in ("npu", "cuda", "cpu"):
        return [
            Finding(f"{setting} is not known", "use npu, cuda or cpu, or unset it", problem=True)
        ]
    if facts.wanted != _used(facts)[0]:
        return [
            Finding(
                f"{setting}, and there is no such device: every lab stops with that message",
                "unset SHARDBOOK_DEVICE to use what there is",
                problem=True,
            )
        ]
    return [Finding(f"{setting} decides the device")]


def versions(facts: Facts) -> str:
    """The versions that must go together, in one line."""
    parts = [f"Python {platform.python_version()}", f"torch {facts.torch}"]
    if facts.torch_npu:
        parts.append(f"torch_npu {facts.torch_npu}")
    if facts.torch_npu or facts.cann:
        parts.append(f"CANN {facts.cann or 'not found'}")
    return ", ".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Print what was found; 0 if the device to be used can be, 1 if something is in its way."""
    parser = argparse.ArgumentParser(prog="python -m shardbook doctor", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="how many ranks you want to run")
    facts = gather(parser.parse_args(argv).ranks)
    findings = examine(facts)
    print(versions(facts))
    for finding in findings:
        mark = "✗" if finding.problem else "!" if finding.next else "✓"
        print(f"{mark} {finding.text}")
        if finding.next:
            print(f"    next: {finding.next}")
    problem = any(f.problem for f in findings)
    print(_summary())
    return int(problem)


def _summary() -> str:
    try:
        return describe()
    except (RuntimeError, ValueError) as error:
        return str(error)
