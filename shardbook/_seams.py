"""Every private name of torch and of CPython that this library needs: no other file touches one.

Beside each stands why it is needed and which public way is missing. A name that another version
no longer has is replaced by a function that says so in a sentence when it is called, so nothing
here goes missing in silence; `gone` lists them, and tests/test_seams.py uses each one.
"""

import contextlib
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the ops of _c10d_functional
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # in torch's docs
from torch.utils._pytree import tree_leaves as tree_leaves  # what torch itself flattens with

gone: list[str] = []
"""A sentence for each name that this torch or Python does not have."""


def _sentence(path: str, need: str) -> str:
    version = f"torch {torch.__version__}"
    if not path.startswith("torch"):
        version = f"Python {sys.version.split()[0]}"
    return (
        f"{version} has no {path}, without which shardbook can't {need}: use the versions that "
        "pyproject.toml names, or mend shardbook/_seams.py"
    )


def _need(path: str, need: str) -> Any:
    """What lies at a dotted path; RuntimeError with the reason where nothing does."""
    module, names, found = path, [], None
    while found is None:  # the longest part of the path that can be imported
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        if not hasattr(found, name):
            raise RuntimeError(_sentence(path, need))
        found = getattr(found, name)
    return found


def _find(path: str, need: str) -> Any:
    """What lies at a dotted path; where nothing does, a function that raises with the reason."""
    try:
        return _need(path, need)
    except RuntimeError as error:
        sentence = str(error)
    gone.append(sentence)

    def missing(*args, **kwargs):
        raise RuntimeError(sentence)

    return missing


# A trace: forward and backward of every module (tracing/record.py)

_MODULE_CALL = "torch.nn.Module._call_impl", "trace the calls of a module"
_ENGINE = "torch.autograd.graph._engine_run_backward", "trace backward"

module_call: Callable = _find(*_MODULE_CALL)
"""What runs a module with its hooks. Global hooks run inside of the module's own, so what those do
(FSDP gathers there) would fall outside the module's slice, and a raise would leave it open."""

backward_engine: Callable = _find(*_ENGINE)
"""What `backward()` and `torch.autograd.grad()` end in; autograd tells nobody that it starts."""

next_node_number: Callable[[], int] = _find(
    "torch._C._autograd._get_sequence_nr", "tell which module an autograd node belongs to"
)
"""The number that the next autograd node will get. Only torch.profiler reads it, at its price."""

node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The number of an autograd node."""

backward_number: Callable[[], int] = _find(
    "torch._C._current_graph_task_id", "tell one backward from another"
)
"""The number of the backward this thread runs, -1 outside: backwards nest and run in threads."""


def call_modules_with(call: Callable) -> None:
    """Have every module call run `call(module, *args, **kwargs)`; `module_call` is the usual."""
    _need(*_MODULE_CALL)
    nn.Module._call_impl = call


def run_backward_with(engine: Callable) -> None:
    """Have every backward run `engine`; `backward_engine` is the usual."""
    for module in (torch.autograd, torch.autograd.graph):  # the first imported it by name
        _need(f"{module.__name__}._engine_run_backward", _ENGINE[1])
        module._engine_run_backward = engine


exporting: Callable[[], bool] = functools.partial(getattr, torch.compiler, "_is_compiling_flag")
"""torch.compiler.is_compiling() without a Python frame: every module call asks. AttributeError
where it is gone."""


@contextlib.contextmanager
def hooks_registered_by(register: Callable[[Callable], Callable]) -> Iterator[None]:
    """Inside, the hook of an autograd node is put in its dictionary by `register(usual)`.

    The public `register_prehook` makes a RemovableHandle, which costs more than a hook of ours.
    """
    function = torch.autograd.Function
    _need("torch.autograd.Function._register_hook", "hook autograd nodes quickly")
    function._register_hook = staticmethod(register(function._register_hook))
    try:
        yield
    finally:
        del function._register_hook  # it is inherited


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that is running ends; there is no public hook for it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Tensors and operators as plain data (tracing/describe.py, tracing/extras.py)


def local_part(x: Tensor) -> Tensor:
    """A DTensor's own part. `to_local()` would run an operator, and put it in the trace."""
    return x._local_tensor


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What scaled_dot_product_attention runs on a CPU; torch's registry of FLOPs lacks it."""

# Memory (checks)


def storage_bytes(ref: StorageWeakRef) -> int:
    """The bytes of a storage that something still holds, else 0. `expired()` counts views alone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return 0 if storage is None else storage.nbytes()


# Collectives, seen where all of them pass (calls.py)

_BACKEND_SELECT = torch._C.DispatchKey.BackendSelect
_AFTER = torch._C._dispatch_keyset_full_after(_BACKEND_SELECT)


def intercept(
    library: "torch.library.Library", name: str, around: Callable[[Callable, tuple, dict], Any]
) -> None:
    """Have every call of an operator run `around(hand_on, args, kwargs)`.

    No hook of torch.distributed sees the calls that C++ makes (DDP's reducer) or functional
    collectives; a dispatch mode would slow every operator. RuntimeError where torch has no such
    operator: a call nobody sees would look like none.
    """
    namespace = getattr(torch.ops, library.ns)
    if not hasattr(namespace, name):
        raise RuntimeError(_sentence(f"torch.ops.{library.ns}.{name}", "see its calls"))
    redispatch = getattr(namespace, name).default.redispatch

    def kernel(keyset, *args, **kwargs):
        return around(functools.partial(redispatch, keyset & _AFTER), args, kwargs)

    library.impl(name, kernel, _BACKEND_SELECT.name, with_keyset=True)


def operators(namespace: str) -> set[str]:
    """Every operator of a namespace, by its name without overload."""
    names = torch._C._dispatch_get_all_op_names()
    return {n.split("::")[1].split(".")[0] for n in names if n.startswith(f"{namespace}::")}


_REDUCES = {int(op): name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}


def reduce_name(op: torch.ScriptObject) -> str:
    """ "sum", "max" and so on, of the ReduceOp that an operator of c10d got."""
    return _REDUCES[op.op()]


def called_by_torch_distributed() -> bool:
    """Whether torch.distributed called the function that asks: ``dist.all_reduce(x)`` waits so."""
    return sys._getframe(2).f_globals.get("__name__") == dist.distributed_c10d.__name__


# What a rank would import by itself (ranks/preload.py)


def import_ahead() -> None:
    """Import what the first optimizer of a process imports, in 3 s: forked ranks have it then."""
    import torch._dynamo  # noqa: F401


# Pipelines (studies/zero_bubble.py)


def schedule_operations(name: str, num_stages: int, num_microbatches: int) -> list[list]:
    """What each rank of a schedule of torch.distributed.pipelining computes, in order.

    The schedule itself tells only once it has stages on real ranks.
    """
    path = "torch.distributed.pipelining._schedule_visualizer.get_schedule_ops"
    list_operations = _need(path, "show the order of torch's own schedules")
    return list_operations(name, num_stages, num_microbatches)


# The fork server (checks/isolate.py)


def keep_parents_fork_server() -> None:
    """In a process that the fork server started: have the same server start its children.

    ensure_running() only knows servers that this process started, and would start another.
    """
    from multiprocessing import forkserver

    if _known(forkserver._forkserver, "_forkserver_address"):
        forkserver._forkserver.ensure_running = lambda: None


def helper_processes() -> set[int | None]:
    """The fork server and the resource tracker of this process, which are not to be killed."""
    from multiprocessing import forkserver, resource_tracker

    return {
        _known(forkserver._forkserver, "_forkserver_pid"),
        _known(resource_tracker._resource_tracker, "_pid"),
    }


def _known(thing: Any, name: str) -> Any:
    if not hasattr(thing, name):
        path = f"multiprocessing's {type(thing).__name__}.{name}"
        raise RuntimeError(_sentence(path, "give an answer a process of its own"))
    return getattr(thing, name)
