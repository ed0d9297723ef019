"""What the checker can know of a value without running anything.

A value is a small tuple ``Value(kind, data, node)``; an expression has a list of possible values.
Unknown parts of a string are written as ``UNKNOWN`` inside it, so ``"cuda:%d" % r`` is still seen
as a CUDA device.
"""

import ast
from typing import Any, NamedTuple

UNKNOWN = "\0"


class Value(NamedTuple):
    """kind is one of the kinds below; node is where the value was written, for the report.

    mod      data: the dotted name of something imported ("torch.cuda.amp.autocast")
    str      data: the text, with UNKNOWN for what is not known
    int      data: None (an integer that could index a device)
    device   data: the text of a torch.device
    tensor   data: (dtype, place), dtype f64, complex or ?, place host, device or ?
    array    data: dtype of a numpy array, f64 or ?
    dict     data: {key: values}
    list     data: values of all items
    local    data: a function or class of this file (ast node)
    self     data: the class whose instance this is
    param    data: the name of a parameter nothing is known of
    flag     data: "cuda": the answer of torch.cuda.is_available()
    """

    kind: str
    data: Any
    node: ast.AST | None = None


Values = list[Value]
MOST = 6  # possible values kept for one expression


def join(*many: Values) -> Values:
    """The possible values of several branches, without repeats."""
    out: Values = []
    for values in many:
        for value in values:
            if value not in out and len(out) < MOST:
                out.append(value)
    return out


def nothing_known(*many: Values) -> bool:
    """Whether nothing is known of any of these expressions."""
    return all(v.kind == "param" for values in many for v in values)


def is_cuda_text(text: str) -> bool:
    """Whether a string names a CUDA device: "cuda", "cuda:0", "cuda:" and something unknown."""
    text = text.strip()
    return text == "cuda" or (text.startswith("cuda") and text[4:5] in (":", UNKNOWN))


def is_tensor_type_text(text: str) -> bool:
    """Whether a string names a CUDA tensor type: "torch.cuda.FloatTensor"."""
    return text.startswith("torch.cuda.") and text.endswith("Tensor")


DEVICE_WORDS = ("device", "dev", "map_location", "accelerator", "gpu")
INT_NAMES = {"rank", "local_rank", "gpu", "gpu_id", "gpu_idx", "gpu_index", "local_process_index",
             "rank_id", "device_id", "device_idx", "device_index", "dev_id", "cuda_id", "cuda_idx",
             "devid", "gpus", "local_process_id"}  # fmt: skip


def is_device_name(name: str) -> bool:
    """Whether a variable, keyword or option of this name is meant to hold a device."""
    parts = name.lower().strip("-").replace("-", "_").split("_")
    if name.lower().strip("-") in INT_NAMES or name.lower().endswith(("_ids", "devices", "name")):
        return False
    return any(p in DEVICE_WORDS for p in parts) or name.lower().replace("-", "_").strip("_") in (
        "map_location",
        "device_type",
        "devicetype",
    )


def is_backend_name(name: str) -> bool:
    """Whether a variable, keyword or option of this name is meant to hold a dist backend."""
    return "backend" in name.lower()


def names_npu(node: ast.AST) -> bool:
    """Whether an expression asks about an NPU: `is_npu`, `torch.npu…`, `== "npu"`, hccl."""
    for part in ast.walk(node):
        text = None
        if isinstance(part, ast.Name):
            text = part.id
        elif isinstance(part, ast.Attribute):
            text = part.attr
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            text = part.value
        if text is not None:
            words = text.lower().replace(".", "_").replace("-", "_").replace(":", "_").split("_")
            if {"npu", "ascend", "hccl", "torchnpu", "privateuse1", "privateuseone"} & set(words):
                return True
    return False


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` as text, None for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
        return ".".join(reversed(parts))
    return None
