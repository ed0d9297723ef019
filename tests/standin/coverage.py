"""Which operators of each notebook an NPU has no kernel for: ``python -m tests.standin.coverage``.

Notebooks executed on the stand-in leave the names of their operators in a folder, a file each
(SHARDBOOK_STANDIN_OPS_DIR, see conftest.py). This compares them with kernels.txt, by base name:
which overload runs differs between a device's kernels. It exits with 1 if an operator is neither
there nor among the exceptions below.
"""

import os
import sys
from pathlib import Path

EXCEPTIONS = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "PyTorch's choice for cpu tensors inside scaled_dot_product_attention, which has a kernel"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": "the same, backward",
    "_fused_sdp_choice": "how scaled_dot_product_attention picks it",
}
"""Operators that torch_npu has no kernel for, why they are used, and what a user meets."""


def base(op: str) -> str:
    """aten::add_.Tensor -> add."""
    name = op.removeprefix("aten::").split(".")[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def kernels() -> set[str]:
    """Base names of the operators in kernels.txt."""
    lines = Path(__file__).with_name("kernels.txt").read_text().splitlines()
    return {base(line) for line in lines if not line.startswith("#")}


def uncovered(ops: set[str]) -> set[str]:
    """Those of ops that have no kernel; c10d and prim operators run no kernel of a device."""
    known = kernels()
    return {op for op in ops if op.startswith("aten::") and base(op) not in known}


def read(folder: Path) -> dict[str, set[str]]:
    """``{notebook: names of its operators}``."""
    return {f.stem: set(f.read_text().split()) for f in sorted(folder.glob("*.ops"))}


def main(folder: Path) -> int:
    """Print a line per notebook and forget its list; 0 if all is covered or excepted."""
    used = read(folder)
    if not used:
        print(f"no .ops files in {folder}: run the notebooks on the stand-in first")
        return 1
    bad = False
    for notebook, ops in used.items():
        left = uncovered(ops)
        excepted = {op for op in left if base(op) in EXCEPTIONS}
        bad |= bool(left - excepted)
        print(f"{notebook}: {len(ops)} operators, {len(left - excepted)} without a kernel")
        for op in sorted(excepted):
            print(f"    {op}: {EXCEPTIONS[base(op)]}")
        for op in sorted(left - excepted):
            print(f"  ✗ {op}: no kernel in torch_npu, it would run on the cpu with a warning")
        (folder / f"{notebook}.ops").unlink()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(Path(os.environ.get("SHARDBOOK_STANDIN_OPS_DIR", ".cache/standin-ops"))))
