"""What a name, a string or an import means for an NPU once it reaches a place that matters.

The reader calls these functions while it follows a file. A string such as "cuda" is reported where
it is written, once it reaches a place that takes a device.
"""

import ast
import re

from . import uses
from .rules import CUDA_LIBRARIES, ENVIRONMENT, GRAPHS, NO_EFFECT, SILENT, STREAMS, TENSOR_TYPES
from .values import (
    INT_NAMES,
    Value,
    Values,
    is_backend_name,
    is_cuda_text,
    is_device_name,
    is_tensor_type_text,
)

PUBLIC_OPS = {"aten", "prims", "prim", "c10d", "c10d_functional", "_c10d_functional",
              "_c10d_functional_autograd", "quantized", "torchvision", "torchaudio", "npu",
              "profiler", "inductor", "load_library", "loaded_libraries", "higher_order",
              "symm_mem", "fsdp", "streams", "import_module", "debugprims", "rngprims"}  # fmt: skip


def imported(reader, node: ast.AST, module: str, name: str | None) -> str | None:
    """An import; the dotted name of the compiled CUDA module it loads, if it does."""
    full = f"{module}.{name}" if name else module
    parts = full.split(".")
    place = f"line {node.lineno}"
    compiled = uses.is_compiled(reader, module, name)
    if compiled and parts[0] not in CUDA_LIBRARIES:
        reader.origin.setdefault(uses.COMPILED + compiled, place)
        if reader.guarded:
            reader.optional.add(uses.COMPILED + compiled)
        reader.report(node, "optional-cuda-library" if reader.guarded else "cuda-extension")
        own = name and compiled != name
        return f"{uses.COMPILED}{compiled}.{name}" if own else uses.COMPILED + compiled
    if module.startswith(("torch", ".")) and "cpp_extension" not in full:
        return None
    library = parts[0] in CUDA_LIBRARIES or ".".join(parts[:2]) in CUDA_LIBRARIES
    if parts[0] == "triton":
        reader.report(node, "optional-cuda-library" if reader.guarded else "triton")
    elif library:
        reader.origin.setdefault(uses.library(full), place)
        if reader.guarded:
            reader.optional.add(parts[0])
        reader.report(node, "optional-cuda-library" if reader.guarded else "cuda-library")
    return None


def named(reader, name: str, values: Values, local: bool = False) -> None:
    """Values are given to a variable, keyword, option or default of this name."""
    if is_device_name(name):
        for v in values:
            if v.kind == "str" and (is_cuda_text(v.data) or is_tensor_type_text(v.data)):
                reader.report(v.node, "cuda-device")
            elif v.kind == "dict":
                for inner in v.data.values():
                    named(reader, name, inner)
    elif is_backend_name(name) and not local:
        backend(reader, values)


def backend(reader, values: Values) -> None:
    """Values reach a place that takes a torch.distributed backend."""
    for v in values:
        if v.kind == "str" and "nccl" in v.data.lower():
            reader.report(v.node, "nccl")


def device(reader, node: ast.expr, values: Values, to: bool = False) -> None:
    """Values reach a place that takes a device."""
    for v in values:
        if v.kind in ("str", "device") and is_cuda_text(v.data):
            reader.report(v.node, "cuda-device")
        elif v.kind == "str" and is_tensor_type_text(v.data):
            reader.report(v.node, "cuda-tensor-type")
        elif v.kind == "int" or (v.kind == "param" and v.data in INT_NAMES):
            bare_int(reader, node, v.node)
        elif v.kind == "dict":  # map_location={"cuda:0": "cuda:1"}, dict(device="cuda")
            for key, inner in v.data.items():
                if is_cuda_text(key):
                    reader.report(v.node, "cuda-device")
                device(reader, node, inner)
    if not values:
        last = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if last in INT_NAMES:
            bare_int(reader, node, last)


def bare_int(reader, node: ast.expr, origin: ast.AST | str | None) -> None:
    """An integer is used as a device: the first use of one is a cause, the others follow from it.

    After `device = rank % torch.cuda.device_count()`, that line is the cause of them all.
    """
    parts = ast.walk(origin) if isinstance(origin, ast.AST) else ()
    counted = any(isinstance(n, ast.Attribute) and n.attr == "device_count" for n in parts)
    first = reader.ints.setdefault(origin, origin if counted else node)
    own = first is node or first.lineno == node.lineno
    reader.report(node, "bare-int-device", "" if own else f"line {first.lineno}")


def used(reader, node: ast.expr, path: str, called: bool = False) -> None:
    """A dotted name of torch or a library is used."""
    if path.startswith("torch.cuda."):
        cuda(reader, node, path.split(".")[2:])
    elif path.startswith("torch.backends."):
        parts = path.split(".")
        if parts[2:3] == ["cuda"] and "sdp" in path:
            reader.report(node, "sdpa-backend")
    elif path.startswith("torch.ops."):
        if path.endswith(".load_library") or (
            path.split(".")[2] not in PUBLIC_OPS and len(path.split(".")) >= 4
        ):
            reader.report(node, "custom-op")
    elif path in ("torch.version.cuda",):
        reader.report(node, "cuda-branch")
    elif path.startswith("torch.float8_"):
        reader.report(node, "float8")
    elif path.endswith("ProfilerActivity.CUDA"):
        reader.report(node, "cuda-profiler")
    elif path.endswith(("SDPBackend.FLASH_ATTENTION", "SDPBackend.CUDNN_ATTENTION",
                        "SDPBackend.EFFICIENT_ATTENTION")):  # fmt: skip
        reader.report(node, "sdpa-backend")
    elif path.endswith(".ProcessGroupNCCL") or (
        path.startswith("torch.distributed.") and path.endswith(".NCCL")
    ):
        reader.report(node, "nccl")
    elif path.startswith("torch.distributed.") and path.endswith((".BAND", ".BOR", ".BXOR",
                         ".PREMUL_SUM", "._make_nccl_premul_sum")):  # fmt: skip
        reader.report(node, "reduce-op")
    elif path.startswith("torch.utils.cpp_extension."):
        if path.rsplit(".", 1)[1] in ("CUDAExtension", "CUDA_HOME", "load", "load_inline"):
            reader.report(node, "cuda-extension")
    elif "autocast_gpu" in path:
        reader.report(node, "cuda-autocast")
    else:
        uses.used(reader, node, path, called)


def autocast_rule(node: ast.AST, rule: str) -> str:
    """`autocast(enabled=False)` is another matter: what it switches off stays on."""
    off = any(
        k.arg == "enabled" and isinstance(k.value, ast.Constant) and k.value.value is False
        for k in getattr(node, "keywords", [])
    )
    return "autocast-off" if off and rule == "cuda-autocast" else rule


def cuda(reader, node: ast.expr, parts: list[str]) -> None:
    """A name below torch.cuda is used."""
    head, last = parts[0], parts[-1]
    if head == "amp":
        if last == "GradScaler":
            reader.report(node, "cuda-grad-scaler")
        elif last in ("autocast", "custom_fwd", "custom_bwd"):
            reader.report(node, autocast_rule(node, "cuda-autocast"))
    elif head == "nvtx":
        if len(parts) > 1:
            reader.report(node, "nvtx")
    elif head == "is_available":
        pass  # what it decides is reported by test(), condition() and insisted()
    elif head == "device_count":
        reader.report(node, "device-count")
    elif head in GRAPHS:
        reader.report(node, "cuda-graph")
    elif head in STREAMS or last in STREAMS:
        reader.report(node, "cuda-stream")
    elif head in TENSOR_TYPES:
        reader.report(node, "cuda-tensor-type")
    elif last in NO_EFFECT:
        reader.report(node, "cuda-no-effect")
    elif last in SILENT:
        reader.report(node, "cuda-silent")
    elif head in ("OutOfMemoryError", "random", "memory", "comm", "graphs", "streams", "jiterator"):
        if len(parts) > 1:
            reader.report(node, "cuda-call")
    else:
        reader.report(node, "cuda-call")


def attribute(reader, node: ast.Attribute, base: Values, out: Values) -> Values:
    """An attribute is read; `out` is what is known of it."""
    for v in out:
        is_callee = reader.chain and reader.chain[-1] is node
        if v.kind == "mod" and not is_callee and not is_prefix(reader, node):
            used(reader, node, v.data)
            if v.data == "torch.cuda.is_available":
                return [Value("flag", "cuda", node)]
    if out:
        return out
    if node.attr == "is_cuda":
        reader.report(node, "cuda-branch")
        return [Value("flag", "is_cuda", node)]
    if node.attr in ("real", "imag"):
        return [v for v in base if v.kind == "array"]
    if node.attr in ("T", "data", "grad", "mT"):
        return [v for v in base if v.kind in ("tensor", "array")]
    if node.attr == "device":
        host = base and all(v.kind == "tensor" and v.data[1] == "host" for v in base)
        return [Value("device", "cpu" if host else "?", node)]
    return []


def is_prefix(reader, node: ast.Attribute) -> bool:
    """Whether this attribute is only the beginning of a longer dotted name."""
    return getattr(node, "prefix", False)


def attribute_set(reader, target: ast.Attribute, base: Values, values: Values) -> None:
    """`base.attr = values`."""
    for v in base:
        if v.kind == "mod" and v.data.startswith("torch._inductor.config"):
            reader.report(target, "inductor-config")
            return
        if v.kind == "mod" and v.data.startswith("torch.backends."):
            if v.data.split(".")[2] in ("cuda", "cudnn"):
                reader.report(target, "tf32")
            return
    named(reader, target.attr, values)


def item_set(reader, target: ast.Subscript, values: Values) -> None:
    """`base[key] = values`: os.environ and configuration dictionaries."""
    if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
        key = target.slice.value
        named(reader, key, values)
        variable(reader, target, key)


def written(reader, node: ast.Constant) -> None:
    """A string is the name of one of NCCL's variables, or sets one."""
    if re.fullmatch(r"(export )?(TORCH_)?NCCL_[A-Z0-9_]+(=.*)?", node.value):
        name = node.value.removeprefix("export ").partition("=")[0]
        reader.report(node, "cuda-no-effect" if name in NO_EFFECT else "cuda-env")


def variable(reader, node: ast.AST, name: str) -> None:
    """The name of an environment variable is used as one."""
    if name in NO_EFFECT:
        reader.report(node, "cuda-no-effect")
    elif name in ENVIRONMENT or name.startswith(("NCCL_", "TORCH_NCCL_")):
        reader.report(node, "cuda-env")
