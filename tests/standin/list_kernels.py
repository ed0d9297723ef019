"""Write kernels.txt: the operators that torch_npu registers a kernel for.

    pip install --no-deps --target WHEEL torch_npu==2.13.0 pyyaml
    python tests/standin/list_kernels.py WHEEL

The wheel is the real one. CANN, which it wants to load and which is not here, is replaced by
libraries whose functions return 0: enough to import it and ask PyTorch's dispatcher, not to
compute.
"""

import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ANSWERS = {  # the few functions whose result is used while importing
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *n) { *n = 0; return 0; }",
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "no CANN"; }',
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B1"; }',
}
LIBRARIES = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")


def symbols(library: Path, which: str) -> set[str]:
    """Undefined or defined dynamic symbols without a version (those come from libc)."""
    listed = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True).stdout
    names = (line.split()[-1] for line in listed.splitlines() if line.split()[-2:-1] != ["w"])
    return {n for n in names if "@" not in n}


def stub_cann(wheel: Path, torch_lib: Path, into: Path) -> None:
    """Compile libraries that define what torch_npu's need and nothing else has."""
    own = [*wheel.glob("torch_npu/lib/*.so"), *wheel.glob("torch_npu/_C*.so")]
    there = [*own, *torch_lib.glob("*.so*")]
    needed = set().union(*(symbols(lib, "--undefined-only") for lib in own))
    defined = set().union(*(symbols(lib, "--defined-only") for lib in there))
    skip = ("Py", "_Py", "_Z", "pthread_", "dl")
    missing = {s for s in needed - defined if not s.startswith(skip)} | set(ANSWERS)
    source = "\n".join(ANSWERS.get(s, f"long {s}(void) {{ return 0; }}") for s in sorted(missing))
    for name, text in [("ascendcl", source), *((name, "") for name in LIBRARIES)]:
        command = ["gcc", "-w", "-shared", "-fPIC", "-o", into / f"lib{name}.so", "-xc", "-"]
        subprocess.run(command, input=text, text=True, check=True)


def main(wheel: str) -> None:
    import torch  # finds it, and where its libraries are

    if "STUBS" not in os.environ:  # the loader reads its path once, at the start
        with tempfile.TemporaryDirectory() as folder:
            stub_cann(Path(wheel), Path(torch.__file__).parent / "lib", Path(folder))
            env = os.environ | {"STUBS": "1", "LD_LIBRARY_PATH": folder, "PYTHONPATH": wheel}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=env).returncode)
    import torch_npu  # noqa: F401

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    aten = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    kernels = sorted(n for n in aten if has(n, "PrivateUse1"))
    version = metadata.version("torch-npu")
    lines = [
        f"# torch_npu {version} beside torch {torch.__version__}:",
        f"# {len(kernels)} of {len(aten)} aten overloads have a kernel under PrivateUse1.",
        "# Made by tests/standin/list_kernels.py from the real wheel. A kernel's being here says",
        "# nothing of the dtypes it takes.",
        *kernels,
    ]
    Path(__file__).with_name("kernels.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    main(sys.argv[1])
