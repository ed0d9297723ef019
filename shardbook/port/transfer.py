"""What `torch_npu.contrib.transfer_to_npu` rewrites while a program runs, and what remains.

Read from torch_npu/contrib/transfer_to_npu.py (Ascend/pytorch, commit 023ee49; read 2026-11): it
puts torch.npu in the place of torch.cuda, names "npu" where torch's functions are given "cuda",
makes hccl of nccl in init_process_group, and switches TorchScript off. A comparison with "cuda" or
"nccl" is no call: it stays as it is.
"""

from .imports import Project

REWRITTEN = {
    "cuda-method", "cuda-device", "cuda-or-cpu", "not-cpu-is-cuda", "device-count",
    "bare-int-device", "cuda-tensor-type", "cuda-call", "cuda-silent", "cuda-stream",
    "cuda-generator", "cuda-profiler", "cuda-autocast", "cuda-grad-scaler", "nccl",
    "nccl-available", "int-device-id",
}  # fmt: skip


def remains(finding) -> bool:
    """Whether a place is left as it is."""
    if finding.rule in ("cuda-branch", "cuda-assert"):  # x.is_cuda is the NPU's now, "cuda" is not
        compares = "==" in finding.code or "!=" in finding.code or " in " in finding.code
        return compares or not ("is_cuda" in finding.code or "is_available" in finding.code)
    if finding.rule == "nccl":
        return "new_group" in finding.code
    return finding.rule not in REWRITTEN


def covered(project: Project, everywhere: bool) -> set[str]:
    """The files that run after the import: those that import it, and what these import."""
    if everywhere:
        return set(project.paths)
    done: set[str] = set()
    waiting = [
        f for f, wanted in project.imports.items() if any("transfer_to_npu" in w for w in wanted)
    ]
    while waiting:
        file = waiting.pop()
        if file in done:
            continue
        done.add(file)
        names = {part for pair in project.imports.get(file, ()) for part in pair}
        waiting += [f for f in project.paths if project.module(f) in names]
    return done
