"""Which tensors are float64 or complex, and whether they are on the host or on the device."""

import ast

from .values import Value, Values, dotted, join, nothing_known

F64 = {"torch.float64", "torch.double", "numpy.float64", "numpy.double"}
COMPLEX = {"torch.complex64", "torch.complex128", "torch.cfloat", "torch.cdouble"}
CREATORS = {"zeros", "ones", "arange", "linspace", "logspace", "tensor", "full", "empty", "rand",
            "randn", "eye", "as_tensor", "scalar_tensor", "randint", "randperm"}  # fmt: skip
LIKE = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"}
MAKES_COMPLEX = {"torch.polar", "torch.view_as_complex", "torch.complex", "torch.istft"}
LEAVES_COMPLEX = {"torch.view_as_real", "torch.abs", "torch.angle", "torch.real", "torch.imag"}
FLOATS = {"float": "?", "half": "?", "bfloat16": "?", "double": "f64", "int": "?", "long": "?"}
NO_TENSOR = {
    "abs",
    "angle",
    "item",
    "tolist",
    "numpy",
    "size",
    "dim",
    "numel",
    "shape",
    "stride",
    "keys",
    "items",
}


def dtype_of(values: Values) -> str | None:
    """f64, complex or ? for a dtype argument, None where it is none; of several, the worst."""
    found = {_dtype(v) for v in values}
    return next((kind for kind in ("f64", "complex", "?") if kind in found), None)


def _dtype(v: Value) -> str | None:
    if v.kind == "str":
        return "f64" if v.data in ("float64", "f8", "double") else None
    if v.kind != "mod":
        return None
    if v.data in F64 or v.data in COMPLEX:
        return "f64" if v.data in F64 else "complex"
    kinds = ("float", "bfloat", "half", "int", "long", "bool", "uint", "short")
    return "?" if v.data.rsplit(".", 1)[-1].startswith(kinds) else None


def wants(reader, node: ast.AST, values: Values) -> None:
    """A parameter is the dtype of a tensor on the device: float64 where a caller gives that."""
    for v in values:
        if v.kind == "param" and not reader.quiet:
            reader.wanted.append((v.node, node))


def place_of(values: Values | None) -> str:
    """host, device or ? for a device argument."""
    if values is None:
        return "host"
    named = [v.data for v in values if v.kind in ("str", "device")]
    return "host" if named and all(n == "cpu" for n in named) else "device"


def numpy_call(node, path: str, args: list[Values], keywords: dict) -> Values:
    """numpy makes float64 unless told otherwise."""
    name = path.rsplit(".", 1)[-1]
    dtype = dtype_of(keywords.get("dtype", []))
    if dtype is None and "dtype" in keywords:
        return [Value("array", "?", node)]
    given = join(*args) if args else []
    if dtype is None:
        known = [v.data for v in given if v.kind == "array"]
        if known:
            dtype = "f64" if "f64" in known else "?"
        elif name in ("linspace", "logspace", "zeros", "ones", "geomspace", "eye", "cumprod"):
            dtype = "f64"
        else:
            dtype = "?"
    return [Value("array", dtype, node)]


def creates(reader, node, path: str, args: list[Values], keywords: dict) -> Values:
    """A torch function: what tensor it makes."""
    name = path.rsplit(".", 1)[-1]
    asked = keyword(node, "return_complex")
    spectrum = name == "stft" and not (isinstance(asked, ast.Constant) and asked.value is False)
    if path in MAKES_COMPLEX or path.startswith("torch.fft.") or spectrum:
        if not path.endswith(("freq", "shift")):
            reader.report(node, "complex")
        kind = "?" if path.endswith(("freq", "shift", "istft")) else "complex"
        return [Value("tensor", (kind, "?"), node)]
    if path in LEAVES_COMPLEX:
        return [Value("tensor", ("?", "?"), node)]
    given = [v for a in args for v in a if v.kind in ("tensor", "array")]
    given += [i for a in args for v in a if v.kind == "list" for i in v.data if i.kind == "tensor"]
    dtype = dtype_of(keywords.get("dtype", []))
    if name in CREATORS and path.count(".") == 1:
        place = place_of(keywords.get("device"))
        written = bool(node.args) and isinstance(node.args[0], ast.Constant)
        if name == "as_tensor" and "device" not in keywords and not written:
            place = "?" if nothing_known(*args[:1]) else place  # it leaves a tensor where it is
        if dtype is None:
            arrays = [v.data for v in given if v.kind == "array"]
            dtype = "f64" if "f64" in arrays else "?"
        if dtype in ("f64", "complex") and place == "device":
            reader.report(node, "float64" if dtype == "f64" else "complex")
        elif place == "device":
            wants(reader, node, keywords.get("dtype", []))
        return [Value("tensor", (dtype, place), node)]
    if path == "torch.from_numpy":
        arrays = [v.data for v in given if v.kind == "array"]
        unknown = not arrays or "?" in arrays
        kind = "maybe" if unknown else "f64" if "f64" in arrays else "?"
        return [Value("tensor", (kind, "host"), node)]
    if dtype in ("f64", "complex"):
        places = {v.data[1] for v in given if v.kind == "tensor"}
        if places != {"host"}:
            reader.report(node, "float64" if dtype == "f64" else "complex")
        return [Value("tensor", (dtype, places.pop() if len(places) == 1 else "?"), node)]
    if given:
        kept = combined(given, node)
        if dtype is None:
            return kept
        place = kept[0].data[1] if kept[0].kind == "tensor" else "?"  # an array has no place
        return [Value("tensor", ("?", place), node)]
    if name in LIKE:
        return [Value("tensor", ("?", "?"), node)]
    return []


def combined(values: Values, node: ast.AST) -> Values:
    """The result of an operation on several tensors or arrays."""
    tensors = [v for v in values if v.kind == "tensor"]
    if not tensors:
        return [Value("array", "f64" if any(v.data == "f64" for v in values) else "?", node)]
    dtypes = {v.data[0] for v in tensors}
    places = {v.data[1] for v in tensors}
    dtype = next((d for d in ("complex", "f64", "maybe") if d in dtypes), "?")
    place = "device" if "device" in places else "?" if "?" in places else "host"
    return [Value("tensor", (dtype, place), node)]


def tensor_method(
    reader, node: ast.Call, func: ast.Attribute, base: Values, args, keywords
) -> Values:
    """A method of a tensor, an array, a module or something unknown."""
    name = func.attr
    if name == "astype":
        dtype = dtype_of(args[0] if args else keywords.get("dtype", []))
        return [Value("array", "f64" if dtype == "f64" else "f32", node)]
    dtype = FLOATS.get(name) if not args else None
    if name in ("to", "type", "new_tensor", "new_zeros", "new_ones", "new_empty", "view"):
        everything = [*args, keywords.get("dtype", [])]
        dtype = next((d for d in map(dtype_of, everything) if d), None)
    known = [v for v in base if v.kind in ("tensor", "array")]
    if name == "cpu" and not known:
        return [Value("tensor", ("?", "host"), node)]
    if dtype in ("f64", "complex"):
        rule = "float64" if dtype == "f64" else "complex"
        host = known and all(v.kind == "array" or v.data[1] == "host" for v in known)
        if not host or (name == "to" and moves(args, keywords)):
            reader.report(node, rule)
    if name == "view_as_complex":
        reader.report(node, "complex")
        return [Value("tensor", ("complex", "?"), node)]
    if name == "stft" and keyword(node, "n_fft"):
        reader.report(node, "complex")
    if name in ("view_as_complex", "double") and not known and dtype is None:
        reader.report(node, "complex" if name != "double" else "float64")
    out: Values = []
    for v in known:
        if v.kind == "array":
            out.append(Value("array", v.data, node))
            continue
        kind, place = v.data
        if name == "numpy":
            out.append(Value("array", "f64" if kind == "f64" else "?", node))
        if name == "to" and moves(args, keywords):
            if kind == "f64" and dtype is None and place == "host":
                reader.report(node, "float64-move")
            place = "device"
            if kind == "maybe" and dtype is None:
                kind = "moved"
        elif name == "cpu":
            place = "host"
        if name in FLOATS and not args:
            if kind == "moved" and name == "float":  # the cast says that it was no fp32
                reader.report(node, "float64-move")
            kind = FLOATS[name]
        elif dtype is not None:
            kind = dtype
        if name not in NO_TENSOR:
            out.append(Value("tensor", (kind, place), node))
    return out


def keyword(node: ast.AST, name: str) -> ast.expr | None:
    """What is written for a keyword of a call."""
    given = node.keywords if isinstance(node, ast.Call) else []
    return next((k.value for k in given if k.arg == name), None)


def moves(args: list[Values], keywords: dict) -> bool:
    """Whether a `.to(…)` goes to a device other than the CPU, as far as can be seen."""
    if "device" in keywords:
        return place_of(keywords["device"]) == "device"
    if not args:
        return False
    first = args[0]
    if dtype_of(first) is not None:
        return False
    for v in first:
        if v.kind in ("str", "device"):
            return v.data != "cpu"
        if v.kind == "tensor":
            return v.data[1] == "device"
    return True


def casts(node: ast.Call) -> bool:
    """Whether a call names a dtype."""
    return any("float" in (dotted(a) or "") for a in node.args)
