"""Calls of torch and of other libraries: what a dotted name does with its arguments."""

import ast

from .detect import autocast_rule, backend, device, imported, named, used, variable
from .rules import ENVIRONMENT, HOST_LINALG, NVIDIA_TOOLS
from .tensors import creates, numpy_call
from .torch_rules import elsewhere
from .uses import COMPILED
from .values import INT_NAMES, Value, Values, dotted, is_cuda_text, is_tensor_type_text

TAKES_DEVICE = {  # torch function -> index of the positional argument that is a device
    "torch.device": 0,
    "torch.set_default_device": 0, "torch.load": 1,
    "torch.get_device_module": 0, "torch.Stream": 0, "torch.Event": 0,
    "torch.distributed.device_mesh.init_device_mesh": 0, "torch.distributed.init_device_mesh": 0,
    "torch.accelerator.set_device_index": 9, "torch.distributed.device_mesh.DeviceMesh": 0,
}  # fmt: skip
AUTOCAST = {
    "torch.autocast": "cuda-autocast", "torch.amp.autocast": "cuda-autocast",
    "torch.amp.autocast_mode.autocast": "cuda-autocast", "torch.amp.GradScaler": "cuda-grad-scaler",
    "torch.amp.grad_scaler.GradScaler": "cuda-grad-scaler",
    "torch.amp.custom_fwd": "cuda-autocast", "torch.amp.custom_bwd": "cuda-autocast",
}  # fmt: skip
STARTS_GROUP = {"init_process_group": 0, "new_group": 2, "new_subgroups": 9}
SHELLS = {"system", "popen", "run", "call", "check_call", "check_output", "Popen", "getoutput",
          "getstatusoutput", "create_subprocess_shell"}  # fmt: skip
DECLARES = {"option", "add_option", "DEFINE_string", "DEFINE_enum"}  # click, absl
HOLDS_DEFAULT = {"field", "Field", "Option", "Argument"}  # dataclasses, pydantic, typer


def called(reader, node, path: str, args: list[Values], keywords: dict) -> Values:
    """A dotted name of a library is called (or used as a decorator); what it returns."""
    last = path.rsplit(".", 1)[-1]
    if path == "torch.cuda.is_available":
        reader.report(node, "cuda-or-cpu")
        return [Value("flag", "cuda", node)]
    if path == "importlib.import_module" and args:
        for v in args[0]:
            if v.kind == "str":
                imported(reader, node, v.data, None)
                return [Value("mod", v.data, node)]
    if path.endswith(("cpp_extension.load", "cpp_extension.load_inline")):
        return extension(reader, node)
    if path.endswith("cpp_extension.CUDAExtension"):
        for v in keywords.get("name", args[0] if args else []):
            reader.builds |= {v.data} if v.kind == "str" else set()
    used(reader, node, path, called=True)
    if path.startswith(("os.", "subprocess.", "asyncio.")):
        return system(reader, node, path, args)
    if path.startswith(("numpy.", "np.")):
        return numpy_call(node, path, args, keywords)
    if last in HOLDS_DEFAULT and not path.startswith("torch."):
        return keywords.get("default", args[0] if args else [])
    if last in DECLARES:
        declared(reader, args, keywords)
        return []
    if path.startswith("ray."):
        ray_gpus(reader, node)
        return []
    if path.startswith(("pytorch_lightning.", "lightning.")):
        for v in keywords.get("accelerator", []):
            if v.kind == "str" and v.data == "gpu":  # Lightning's word for CUDA or MPS
                reader.report(v.node, "cuda-device")
    if (
        path.startswith("torch.distributed") or last in STARTS_GROUP
    ) and last != "init_device_mesh":
        number = distributed(reader, node, last, args, keywords)
        if number:
            return number
    if path == "os.fork" or (
        last in ("set_start_method", "get_context")
        and "multiprocessing" in path
        and args
        and any(v.kind == "str" and v.data == "fork" for v in args[0])
    ):
        reader.report(node, "fork")
    if path in ("ctypes.CDLL", "ctypes.cdll.LoadLibrary", "ctypes.PyDLL") and args:
        texts = [v.data for v in args[0] if v.kind == "str"]
        if any("cuda" in t or "nv" in t for t in texts):
            reader.report(node, "custom-op")
    if path.startswith("torch."):
        return torch_call(reader, node, path, args, keywords)
    return []


def torch_call(reader, node, path: str, args: list[Values], keywords: dict) -> Values:
    """A function of torch outside torch.cuda and torch.distributed."""
    last = path.rsplit(".", 1)[-1]
    where = node.func if isinstance(node, ast.Call) else node
    first = args[0] if args else []
    if path in AUTOCAST:
        given = first + keywords.get("device_type", []) + keywords.get("device", [])
        if any(v.kind == "str" and is_cuda_text(v.data) for v in given):
            reader.report(node, autocast_rule(node, AUTOCAST[path]))
    elif len(args) > TAKES_DEVICE.get(path, 99):
        index = TAKES_DEVICE[path]
        device(reader, node.args[index], args[index])
    if path == "torch.device":
        known = [v for v in first or keywords.get("type", []) if v.kind == "str"]
        return [Value("device", v.data, v.node) for v in known] or [Value("device", "?", node)]
    if path == "torch.Generator":
        given = [v for v in first + keywords.get("device", []) if v.kind in ("str", "device")]
        if any(is_cuda_text(v.data) for v in given):
            reader.report(node, "cuda-generator")
        return []
    if path == "torch.compile":
        engine = [v.data for v in keywords.get("backend", []) if v.kind == "str"]
        if "backend" not in keywords or set(engine) & {"inductor", "cudagraphs"}:
            reader.report(where, "compile")
    elif path in ("torch.set_default_tensor_type", "torch.set_default_dtype"):
        for v in first:
            if v.kind == "str" and is_tensor_type_text(v.data):
                reader.report(v.node, "cuda-tensor-type")
            elif v.kind == "mod" and v.data in ("torch.float64", "torch.double"):
                reader.report(node, "float64")
    elif last in ("Conv3d", "conv3d", "ConvTranspose3d", "conv_transpose3d"):
        conv3d(reader, node)
    elif path.removeprefix("torch.") in HOST_LINALG:
        if not any(
            v.kind == "array" or (v.kind == "tensor" and v.data[1] == "host") for v in first
        ):
            reader.report(where, "host-linalg")
    elif path == "torch.classes.load_library":
        reader.report(node, "custom-op")
    elif path.endswith("autograd.profiler.profile") and "use_cuda" in keywords:
        reader.report(node, "cuda-profiler")
    elsewhere(reader, node, path, keywords)
    return creates(reader, node, path, args, keywords)


def conv3d(reader, node: ast.AST) -> None:
    """A 3-D convolution, in a file that speaks of bf16."""
    if reader.words & {"bfloat16", "bf16"}:
        reader.report(node, "bf16-conv3d")


def distributed(reader, node, last: str, args: list[Values], keywords: dict) -> Values:
    """A function of torch.distributed; an integer where it returns one."""
    if last in STARTS_GROUP:
        index = STARTS_GROUP[last]
        backend(reader, keywords.get("backend", args[index] if len(args) > index else []))
        for v in keywords.get("device_id", []):
            if v.kind == "int" or (v.kind == "param" and v.data in INT_NAMES):
                reader.report(node, "int-device-id")
            elif v.kind in ("str", "device") and is_cuda_text(v.data):
                reader.report(v.node, "cuda-device")
        if "device_id" in keywords and not keywords["device_id"]:
            value = next(k.value for k in node.keywords if k.arg == "device_id")
            if (dotted(value) or "").rsplit(".", 1)[-1] in INT_NAMES:
                reader.report(node, "int-device-id")
    elif last == "is_nccl_available":
        reader.report(node, "nccl-available")
    elif last in ("get_rank", "get_world_size", "get_node_local_rank"):
        return [Value("int", None, node)]
    return []


def ray_gpus(reader, node: ast.AST) -> None:
    """`ray.remote(num_gpus=1)`, `Actor.options(num_gpus=…)`, `placement_group([{"GPU": 1}])`."""
    for part in ast.walk(node):
        wanted = []
        if isinstance(part, ast.keyword) and part.arg == "num_gpus":
            wanted = [part.value]
        elif isinstance(part, ast.Dict):
            wanted = [v for k, v in zip(part.keys, part.values, strict=True) if literal(k) == "GPU"]
        for value in wanted:
            if literal(value) not in (0, None):
                reader.report(value, "ray-gpus")


def literal(node: ast.expr | None) -> object:
    """What a constant is; "?" for anything else."""
    return node.value if isinstance(node, ast.Constant) else "?"


def declared(reader, args: list[Values], keywords: dict) -> None:
    """`click.option("--device", default=…)`, `flags.DEFINE_string("device", …, help)`."""
    names = [v.data for v in args[0] if v.kind == "str"] if args else []
    names += [v.data for a in args[1:] for v in a if v.kind == "str" and v.data.startswith("-")]
    default = keywords.get("default", args[1] if len(args) > 1 else [])
    for name in names:
        named(reader, name, default)


def extension(reader, node: ast.Call) -> Values:
    """`cpp_extension.load(…)`: a CUDA extension unless its sources are known to be C++ alone."""
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    texts = [t for t in texts if isinstance(t, str)]
    plain = any(t.endswith((".cpp", ".cc", ".c")) for t in texts)
    if not plain or any("cuda" in t or t.endswith(".cu") for t in texts):
        reader.report(node, "cuda-extension")
        name = next((t for t in texts if t.isidentifier()), "loaded")
        reader.origin.setdefault(COMPILED + name, f"line {node.lineno}")
        return [Value("mod", COMPILED + name, node)]
    return []


def system(reader, node, path: str, args: list[Values]) -> Values:
    """A function of os or subprocess: environment variables, and commands for the shell."""
    if path.rsplit(".", 1)[-1] in SHELLS:
        texts = [v for a in args for v in a if v.kind == "str"]
        texts += [i for a in args for v in a if v.kind == "list" for i in v.data if i.kind == "str"]
        for v in texts:
            if any(name in v.data for name in ENVIRONMENT) or "NCCL_" in v.data:
                reader.report(v.node, "cuda-env")
            if any(tool in v.data + " " for tool in NVIDIA_TOOLS):
                reader.report(v.node, "nvidia-tool")
    if path == "os.fork":
        reader.report(node, "fork")
    if path in ("os.getenv", "os.environ.get", "os.environ.setdefault", "os.environ.pop"):
        for v in args[0] if args else []:
            if v.kind == "str":
                variable(reader, node, v.data)
                if len(args) > 1:
                    named(reader, v.data, args[1])
                if v.data.upper().endswith("RANK"):
                    return [Value("str", "\0", node)]
    return []
