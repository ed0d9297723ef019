"""What each use of a name, a string or a tensor means for an NPU: where the rules are decided.

The reader calls these functions while it follows a file; each reports rules of the table. A
string such as "cuda" is reported where it is written, once it reaches a place that takes a device.
"""

import ast

from .rules import (
    CUDA_LIBRARIES,
    ENVIRONMENT,
    GRAPHS,
    NVIDIA_TOOLS,
    SILENT,
    STREAMS,
    TENSOR_TYPES,
)
from .tensors import casts, combined, creates, moves, numpy_call, tensor_method
from .values import (
    INT_NAMES,
    Value,
    Values,
    dotted,
    is_backend_name,
    is_cuda_text,
    is_device_name,
    is_tensor_type_text,
    join,
    names_npu,
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
STARTS_GROUP = {"init_process_group": 0, "new_group": 2, "new_subgroups": 9}
SHELLS = {"system", "popen", "run", "call", "check_call", "check_output", "Popen", "getoutput",
          "getstatusoutput", "create_subprocess_shell"}  # fmt: skip
PUBLIC_OPS = {"aten", "prims", "prim", "c10d", "_c10d_functional", "quantized", "torchvision",
              "torchaudio", "npu", "profiler", "inductor", "load_library", "loaded_libraries",
              "higher_order", "symm_mem", "fsdp", "streams", "_c10d_functional_autograd",
              "import_module", "debugprims", "rngprims"}  # fmt: skip
MOVERS = {"to", "to_empty", "cuda"}


# ---- names and imports


def imported(reader, node: ast.stmt, module: str, name: str | None) -> None:
    """An import statement."""
    full = f"{module}.{name}" if name else module
    parts = full.split(".")
    if module.startswith(("torch", ".")) and "cpp_extension" not in full:
        return
    library = parts[0] in CUDA_LIBRARIES or ".".join(parts[:2]) in CUDA_LIBRARIES
    if parts[0] == "triton":
        reader.report(node, "optional-cuda-library" if reader.guarded else "triton")
    elif library:
        if reader.guarded:
            reader.optional.add(parts[0])
        reader.report(node, "optional-cuda-library" if reader.guarded else "cuda-library")


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
            reader.report(node, "bare-int-device")
        elif v.kind == "dict":  # map_location={"cuda:0": "cuda:1"}, dict(device="cuda")
            for key, inner in v.data.items():
                if is_cuda_text(key):
                    reader.report(v.node, "cuda-device")
                device(reader, node, inner)
    if not values:
        last = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if last in INT_NAMES:
            reader.report(node, "bare-int-device")


def used(reader, node: ast.expr, path: str, called: bool = False) -> None:
    """A dotted name of torch or a library is used."""
    if path.startswith("torch.cuda."):
        cuda(reader, node, path.split(".")[2:])
    elif path.startswith("torch.backends."):
        parts = path.split(".")
        if parts[2:3] == ["cuda"] and "sdp" in path:
            reader.report(node, "sdpa-backend")
        elif path in ("torch.backends.cuda.is_built", "torch.backends.cudnn.is_available"):
            reader.report(node, "cuda-or-cpu")
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
    elif path.startswith("torch.distributed.") and path.endswith((".NCCL", "ProcessGroupNCCL")):
        reader.report(node, "nccl")
    elif path.startswith("torch.distributed.") and path.endswith((".BAND", ".BOR", ".BXOR",
                         ".PREMUL_SUM")):  # fmt: skip
        reader.report(node, "reduce-op")
    elif path.startswith("torch.utils.cpp_extension."):
        if path.rsplit(".", 1)[1] in ("CUDAExtension", "CUDA_HOME", "load", "load_inline"):
            reader.report(node, "cuda-extension")
    elif "autocast_gpu" in path:
        reader.report(node, "cuda-autocast")
    elif called and path.split(".")[0] in CUDA_LIBRARIES and not reader.guarded:
        if path.split(".")[0] not in reader.optional:
            reader.report(node, "cuda-library")


def cuda(reader, node: ast.expr, parts: list[str]) -> None:
    """A name below torch.cuda is used."""
    head, last = parts[0], parts[-1]
    if head == "amp":
        if last == "GradScaler":
            reader.report(node, "cuda-grad-scaler")
        elif last in ("autocast", "custom_fwd", "custom_bwd"):
            reader.report(node, "cuda-autocast")
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
        if v.kind == "mod" and not (reader.chain and reader.chain[-1] is node):
            if not is_prefix(reader, node):
                used(reader, node, v.data)
                if v.data in ("torch.cuda.is_available",):
                    return [Value("flag", "cuda", node)]
    if out:
        return out
    if node.attr == "is_cuda":
        reader.report(node, "cuda-branch")
        return [Value("flag", "is_cuda", node)]
    if node.attr in ("T", "data", "real", "imag", "grad", "mT"):
        return [v for v in base if v.kind in ("tensor", "array")]
    if node.attr == "device":
        return [Value("device", "?", node)]
    return []


def is_prefix(reader, node: ast.Attribute) -> bool:
    """Whether this attribute is only the beginning of a longer dotted name."""
    return getattr(node, "prefix", False)


def attribute_set(reader, target: ast.Attribute, base: Values, values: Values) -> None:
    """`base.attr = values`."""
    for v in base:
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


def variable(reader, node: ast.AST, name: str) -> None:
    """The name of an environment variable is used as one."""
    if name in ENVIRONMENT or name.startswith(("NCCL_", "TORCH_NCCL_")):
        reader.report(node, "cuda-env")


# ---- conditions


def asks_cuda(reader, node: ast.expr) -> ast.AST | None:
    """The part of a test that asks torch.cuda.is_available(), if any."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            for v in quietly(reader, part.func):
                if v.kind == "flag" and v.data == "cuda":
                    return part
                if v.kind == "mod" and v.data == "torch.cuda.is_available":
                    return part
    return None


def quietly(reader, node: ast.expr) -> Values:
    """What an expression is, without reporting anything."""
    reader.quiet += 1
    try:
        return reader.eval(node)
    finally:
        reader.quiet -= 1


def insisted(reader, statement: ast.stmt, test_: ast.expr) -> None:
    """`assert test`."""
    asked = asks_cuda(reader, test_)
    if asked is not None:
        reader.report(statement, "cuda-assert")
        return
    for part in ast.walk(test_):
        if isinstance(part, ast.Attribute) and part.attr == "is_cuda":
            reader.report(statement, "cuda-assert")
            return
    if isinstance(test_, ast.Compare) and compares_cuda(reader, test_):
        reader.report(statement, "cuda-assert")
        return
    reader.eval(test_)


def test(reader, node: ast.expr) -> None:
    """The test of an if, a while, a conditional expression."""
    if names_npu(node):
        quietly(reader, node)
        return
    reader.eval(node)


def condition(reader, statement: ast.If) -> None:
    """An if statement as a whole: does it insist, or take everything but the CPU for CUDA?"""
    test_ = statement.test
    if names_npu(test_):
        return
    negated = isinstance(test_, ast.UnaryOp) and isinstance(test_.op, ast.Not)
    stops = any(isinstance(s, ast.Raise) or is_exit(s) for s in statement.body)
    if negated and stops and asks_cuda(reader, test_) is not None:
        reader.report(statement, "cuda-assert")
    if statement.orelse and isinstance(test_, ast.Compare) and len(test_.ops) == 1:
        right = test_.comparators[0]
        cpu = isinstance(right, ast.Constant) and right.value == "cpu"
        if cpu and isinstance(test_.ops[0], ast.Eq) and mentions_cuda(statement.orelse):
            reader.report(statement, "not-cpu-is-cuda")


def mentions_cuda(body: list[ast.stmt]) -> bool:
    """Whether statements use CUDA by name."""
    for statement in body:
        for part in ast.walk(statement):
            if isinstance(part, ast.Attribute) and part.attr == "cuda":
                return True
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                if is_cuda_text(part.value) or part.value == "nccl":
                    return True
    return False


def is_exit(statement: ast.stmt) -> bool:
    """`sys.exit(…)`, `exit(…)`, `quit()`."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return (dotted(statement.value.func) or "").rsplit(".", 1)[-1] in ("exit", "quit", "_exit")
    return False


def compares_cuda(reader, node: ast.Compare) -> bool:
    """Whether a comparison asks if a device is CUDA, or a backend NCCL."""
    sides = [node.left, *node.comparators]
    texts: list[str] = []
    for side in sides:
        if isinstance(side, ast.Constant) and isinstance(side.value, str):
            texts.append(side.value)
        elif isinstance(side, (ast.Tuple, ast.List, ast.Set)):
            elements = [e.value for e in side.elts if isinstance(e, ast.Constant)]
            texts += [e for e in elements if isinstance(e, str)]
        elif isinstance(side, ast.Call):  # == torch.device("cuda")
            texts += [v.data for v in quietly(reader, side) if v.kind == "device"]
    cuda_text = any(is_cuda_text(t) for t in texts)
    nccl_text = any(t.lower() == "nccl" for t in texts)
    if not cuda_text and not nccl_text:
        return False
    if any(t.startswith("npu") or t == "hccl" for t in texts):
        return False
    for side in sides:
        if isinstance(side, ast.Constant):
            continue
        inner = side
        while isinstance(inner, (ast.Call, ast.Subscript)):
            if isinstance(inner, ast.Call) and dotted(inner.func) == "str" and inner.args:
                inner = inner.args[0]
            else:
                inner = inner.func if isinstance(inner, ast.Call) else inner.value
        name = dotted(inner) or (inner.attr if isinstance(inner, ast.Attribute) else "")
        parts = name.split(".")
        if nccl_text and any(is_backend_name(p) for p in parts):
            return True
        if cuda_text and (
            parts[-1] == "type" or any(is_device_name(p) or p == "split" for p in parts)
        ):
            return True
        if cuda_text and any(v.kind == "device" for v in quietly(reader, inner)):
            return True
    return False


def compare(reader, node: ast.Compare) -> None:
    """A comparison is read."""
    for side in [node.left, *node.comparators]:
        if not isinstance(side, ast.Constant) and not is_dtype(side):
            reader.eval(side)
    if compares_cuda(reader, node):
        reader.report(node, "cuda-branch")


def is_dtype(node: ast.expr) -> bool:
    """`torch.float64` and the like: a comparison with one computes nothing."""
    name = dotted(node) or ""
    return name.rsplit(".", 1)[-1].startswith(("float", "complex", "bfloat", "double", "half"))


def modulo(reader, node: ast.BinOp) -> None:
    """`a % b` of numbers nothing is known of: kept as an integer by the reader."""


def subscript(reader, node: ast.Subscript, base: Values, index: Values) -> Values:
    """`base[index]`."""
    for v in index:
        if v.kind == "str":
            environment = (dotted(node.value) or "").endswith("environ")
            if environment:
                variable(reader, node, v.data)
    out: Values = []
    for v in base:
        if v.kind == "dict" and len(index) == 1 and index[0].kind == "str":
            out += v.data.get(index[0].data, [])
        elif v.kind in ("tensor", "array"):
            out.append(v)
        elif v.kind == "list":
            out += v.data
    return join(out)


# ---- calls


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
                targets += [
                    Value("local", f, f) for f in v.data.body
                    if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) and f.name == func.attr
                ]  # fmt: skip
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
        sources = ast.dump(node)
        if "cuda" in sources or ".cu'" in sources:
            reader.report(node, "cuda-extension")
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
    if last in ("Conv3d", "conv3d") and path.startswith("torch."):
        if reader.words & {"bfloat16", "bf16"}:
            reader.report(node, "bf16-conv3d")
    if last in ("set_start_method", "get_context") and "multiprocessing" in path and args:
        if any(v.kind == "str" and v.data == "fork" for v in args[0]):
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


def method(reader, node: ast.Call, func: ast.Attribute, base: Values, args, keywords) -> Values:
    """A method of something that is no module."""
    name = func.attr
    if name == "cuda":
        own = any(
            v.kind == "self" and any(getattr(m, "name", "") == "cuda" for m in v.data.body)
            for v in base
        )
        if not own:
            reader.report(node, "cuda-method")
        return [Value("tensor", (v.data[0], "device"), node) for v in base if v.kind == "tensor"]
    if name == "format":
        for v in base:
            if v.kind == "str":
                text = "".join("\0" if i else p for i, p in enumerate(split_braces(v.data)))
                return [Value("str", text, v.node)]
    if name in ("startswith", "endswith", "find", "count", "index", "split") and node.args:
        inner = func.value
        cuda_text = any(v.kind == "str" and is_cuda_text(v.data) for v in args[0])
        if cuda_text:
            names = (dotted(strip_calls(inner)) or "").split(".")
            if any(is_device_name(n) or n == "type" for n in names):
                reader.report(node, "cuda-branch")
        return []
    if name in ("add_argument", "option", "add_option") or name.endswith("add_argument"):
        options = [v.data for a in args for v in a if v.kind == "str" and v.data.startswith("-")]
        for option in options:
            named(reader, option, keywords.get("default", []))
        return []
    if name in ("get", "pop", "setdefault", "getenv") and args:
        environment = (dotted(func.value) or "").endswith("environ")
        for v in args[0]:
            if v.kind == "str":
                if environment:
                    variable(reader, node, v.data)
                if len(args) > 1:
                    named(reader, v.data, args[1])
        out = []
        for v in base:
            if v.kind == "dict":
                for key in args[0]:
                    if key.kind == "str":
                        out += v.data.get(key.data, [])
        return out
    if name in ("table",) and any(
        v.kind == "str" and "cuda_" in v.data for v in keywords.get("sort_by", [])
    ):
        reader.report(node, "cuda-profiler")
        return []
    if name in MOVERS and (args or keywords):
        moved(reader, node, func, args)
    if name == "type" and args:
        for v in args[0]:
            if v.kind == "str" and is_tensor_type_text(v.data):
                reader.report(v.node, "cuda-tensor-type")
    if (
        name == "set_start_method"
        and args
        and any(v.data == "fork" for v in args[0] if v.kind == "str")
    ):
        reader.report(node, "fork")
    if name == "register_buffer" and len(args) > 1:
        for v in args[1]:
            if v.kind == "tensor" and v.data == ("f64", "host"):
                reader.report(node, "float64-move")
    return tensor_method(reader, node, func, base, args, keywords)


def strip_calls(node: ast.expr) -> ast.expr:
    """`str(x)` and `x.lower()` as `x`."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.args:
            node = node.args[0]
        elif isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return node
    return node


def split_braces(text: str) -> list:
    """The pieces of a format string; every second one is a replaced field."""
    import re

    return [piece for piece in re.split(r"(\{[^{}]*\})", text)] if "{" in text else [text]


def moved(reader, node: ast.Call, func: ast.Attribute, args: list[Values]) -> None:
    """`x.to(…)`: the first positional argument may be a device."""
    if node.args and func.attr == "to":
        device(reader, node.args[0], args[0], to=True)


__all__ = ["casts", "combined", "moves"]
