"""Calls: what a function of torch, of a library or of the file does with its arguments."""

import ast

from .detect import backend, device, imported, named, used, variable
from .methods import method
from .rules import ENVIRONMENT, NVIDIA_TOOLS
from .tensors import creates, numpy_call
from .values import (
    INT_NAMES,
    Value,
    Values,
    dotted,
    is_cuda_text,
    is_device_name,
    is_tensor_type_text,
    join,
)

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
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STARTS_GROUP = {"init_process_group": 0, "new_group": 2, "new_subgroups": 9}
SHELLS = {"system", "popen", "run", "call", "check_call", "check_output", "Popen", "getoutput",
          "getstatusoutput", "create_subprocess_shell"}  # fmt: skip


def call(reader, node: ast.Call) -> Values:
    """A call: what it means, and what it returns."""
    func = node.func
    reader.chain.append(func)
    mark_prefixes(func)
    base: Values = []
    if isinstance(func, ast.Attribute):
        base = reader.eval(func.value)
        targets = [Value("mod", f"{v.data}.{func.attr}", func) for v in base if v.kind == "mod"]
        for v in base:
            if v.kind == "self":
                methods = (f for f in v.data.body if isinstance(f, FUNCTIONS))
                targets += [Value("local", f, f) for f in methods if f.name == func.attr]
                targets += reader.attributes.get(v.data, {}).get(func.attr, [])
    else:
        targets = reader.eval(func)
    reader.chain.pop()

    args = [reader.eval(a) for a in node.args]
    keywords: dict[str, Values] = {}
    for k in node.keywords:
        values = reader.eval(k.value)
        if k.arg is None:
            for v in values:
                if v.kind == "dict":
                    keywords.update(v.data)
        else:
            keywords[k.arg] = values
    paths = {t.data for t in targets if t.kind == "mod"}
    own_rule = paths & (AUTOCAST.keys() | {"torch.Generator"})  # they report CUDA themselves
    for name, values in keywords.items():
        if own_rule:
            continue
        where = next((k.value for k in node.keywords if k.arg == name), node)
        if name == "device_ids":
            continue
        if is_device_name(name) or name == "device_type":
            device(reader, where, values)
        elif name in ("device_id",):
            continue
        else:
            named(reader, name, values)
        variable(reader, node, name)

    out: Values = []
    for t in targets:
        if t.kind == "mod":
            out += called(reader, node, t.data, args, keywords, base)
        elif t.kind == "local":
            out += local_call(reader, node, t.data, args, keywords)
    if isinstance(func, ast.Attribute):
        if not any(v.kind == "mod" for v in base):
            out += method(reader, node, func, base, args, keywords)
    elif isinstance(func, ast.Name) and not targets:
        out += builtin(reader, node, func.id, args, keywords)
    return join(out)


def mark_prefixes(func: ast.expr) -> None:
    """Mark `torch.cuda` in `torch.cuda.f(…)` as no use of its own."""
    inner = func
    while isinstance(inner, ast.Attribute):
        if isinstance(inner.value, ast.Attribute):
            inner.value.prefix = True
        inner = inner.value


def local_call(reader, node: ast.Call, f, args: list[Values], keywords: dict) -> Values:
    """A call of a function or class of this file."""
    if isinstance(f, ast.ClassDef):
        init = next(
            (m for m in f.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None
        )
        names = [a.arg for a in init.args.args[1:]] if init else []
        out = [Value("self", f, node)]
    else:
        names = [a.arg for a in f.args.posonlyargs + f.args.args]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        out = reader.results(f)
    for name, value in zip(names, args, strict=False):
        named(reader, name, value)
    return out


def builtin(reader, node: ast.Call, name: str, args: list[Values], keywords: dict) -> Values:
    """A call of a name that this file does not define."""
    if name == "getattr" and len(args) >= 2:
        texts = [v.data for v in args[1] if v.kind == "str"]
        paths = [v.data for v in args[0] if v.kind == "mod"]
        if texts and paths:
            path = f"{paths[0]}.{texts[0]}"
            used(reader, node, path)
            return [Value("mod", path, node)]
    if name == "__import__" and args:
        return [Value("mod", v.data, node) for v in args[0] if v.kind == "str"]
    if name in ("int", "len", "ord"):
        return [Value("int", None, node)]
    if name == "range":
        return [Value("list", (Value("int", None, node),), node)]
    if name == "str" and args:
        return [v for v in args[0] if v.kind == "str"] + [
            Value("str", v.data, node) for v in args[0] if v.kind == "device" and v.data != "?"
        ]
    if name == "dict":
        return [Value("dict", keywords, node)]
    if name == "print":
        return []
    return []


def called(reader, node, path: str, args: list[Values], keywords: dict, base) -> Values:
    """A dotted name of a library is called (or used as a decorator)."""
    last = path.rsplit(".", 1)[-1]
    where = node.func if isinstance(node, ast.Call) else node
    arguments = node.args if isinstance(node, ast.Call) else []

    if path == "torch.cuda.is_available":
        reader.report(node, "cuda-or-cpu")
        return [Value("flag", "cuda", node)]
    if path in ("importlib.import_module",) and args:
        for v in args[0]:
            if v.kind == "str":
                imported(reader, node, v.data, None)
                return [Value("mod", v.data, node)]
    if path.endswith("cpp_extension.load") or path.endswith("cpp_extension.load_inline"):
        names = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
        names = [n for n in names if isinstance(n, str)]
        plain = any(n.endswith((".cpp", ".cc", ".c")) for n in names)
        if not plain or any("cuda" in n or n.endswith(".cu") for n in names):
            reader.report(node, "cuda-extension")  # also where the sources are not known
        return []
    used(reader, node, path, called=True)

    if path.startswith("torch.distributed") or last in STARTS_GROUP:
        if last in STARTS_GROUP:
            index = STARTS_GROUP[last]
            backend(reader, keywords.get("backend", args[index] if len(args) > index else []))
            for v in keywords.get("device_id", []):
                if v.kind == "int" or (v.kind == "param" and v.data in INT_NAMES):
                    reader.report(node, "int-device-id")
            if "device_id" in keywords and not keywords["device_id"]:
                value = next(k.value for k in node.keywords if k.arg == "device_id")
                if (dotted(value) or "").rsplit(".", 1)[-1] in INT_NAMES:
                    reader.report(node, "int-device-id")
            device_text(reader, keywords.get("device_id", []))
        elif last == "is_nccl_available":
            reader.report(node, "nccl-available")
        elif last in ("get_rank", "get_world_size", "get_node_local_rank"):
            return [Value("int", None, node)]
    precision = AUTOCAST.get(path)
    if precision:
        given = (
            (args[0] if args else []) + keywords.get("device_type", []) + keywords.get("device", [])
        )
        if any(v.kind == "str" and is_cuda_text(v.data) for v in given):
            reader.report(node, precision)
    elif path in TAKES_DEVICE and len(args) > TAKES_DEVICE[path]:
        device(reader, arguments[TAKES_DEVICE[path]], args[TAKES_DEVICE[path]])
    if path == "torch.device":
        known = [v for v in (args[0] if args else keywords.get("type", [])) if v.kind == "str"]
        return [Value("device", v.data, v.node) for v in known] or [Value("device", "?", node)]
    if path == "torch.Generator":
        text = [
            v
            for v in (args[0] if args else []) + keywords.get("device", [])
            if v.kind in ("str", "device")
        ]
        if any(is_cuda_text(v.data) for v in text):
            reader.report(node, "cuda-generator")
        return []
    if path == "torch.compile":
        named_backend = [v.data for v in keywords.get("backend", []) if v.kind == "str"]
        if "backend" not in keywords or set(named_backend) & {"inductor", "cudagraphs"}:
            reader.report(where, "compile")
    if path in ("torch.set_default_tensor_type", "torch.set_default_dtype") and args:
        for v in args[0]:
            if v.kind == "str" and is_tensor_type_text(v.data):
                reader.report(v.node, "cuda-tensor-type")
            elif v.kind == "mod" and v.data in ("torch.float64", "torch.double"):
                reader.report(node, "float64")
    convolves = last in ("Conv3d", "conv3d") and path.startswith("torch.")
    if convolves and reader.words & {"bfloat16", "bf16"}:
        reader.report(node, "bf16-conv3d")
    starts = last in ("set_start_method", "get_context") and "multiprocessing" in path and args
    if starts and any(v.kind == "str" and v.data == "fork" for v in args[0]):
        reader.report(node, "fork")
    if path == "os.fork":
        reader.report(node, "fork")
    if path in ("torch.classes.load_library",):
        reader.report(node, "custom-op")
    if (
        path in ("ctypes.CDLL", "ctypes.cdll.LoadLibrary", "ctypes.PyDLL")
        and args
        and any(
            v.kind == "str" and ("cuda" in v.data or "cudart" in v.data or "nv" in v.data)
            for v in args[0]
        )
    ):
        reader.report(node, "custom-op")
    if path.endswith("autograd.profiler.profile") and "use_cuda" in keywords:
        reader.report(node, "cuda-profiler")
    if path.startswith(("os.", "subprocess.", "asyncio.")):
        shell(reader, path, args, keywords)
        if path in ("os.getenv", "os.environ.get", "os.environ.setdefault", "os.environ.pop"):
            for v in args[0] if args else []:
                if v.kind == "str":
                    variable(reader, node, v.data)
                    if len(args) > 1:
                        named(reader, v.data, args[1])
                    if v.data.upper().endswith("RANK"):
                        return [Value("str", "\0", node)]
        return []
    if path.startswith("numpy.") or path.startswith("np."):
        return numpy_call(node, path, args, keywords)
    if path.startswith("torch."):
        return creates(reader, node, path, args, keywords)
    return []


def device_text(reader, values: Values) -> None:
    """Values that may name a CUDA device by text."""
    for v in values:
        if v.kind in ("str", "device") and is_cuda_text(v.data):
            reader.report(v.node, "cuda-device")


def shell(reader, path: str, args: list[Values], keywords: dict) -> None:
    """A command for the shell: its variables and tools."""
    if path.rsplit(".", 1)[-1] not in SHELLS:
        return
    texts = [v for a in args for v in a if v.kind == "str"]
    texts += [i for a in args for v in a if v.kind == "list" for i in v.data if i.kind == "str"]
    for v in texts:
        if any(name in v.data for name in ENVIRONMENT) or "NCCL_" in v.data:
            reader.report(v.node, "cuda-env")
        if any(tool in v.data + " " for tool in NVIDIA_TOOLS):
            reader.report(v.node, "nvidia-tool")
