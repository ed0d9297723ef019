"""Each private name of torch and CPython that _seams.py uses is there, and does what we need."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardbook import _seams, calls


def test_every_name_is_there():
    assert not _seams.gone, "\n".join(_seams.gone)


def test_a_name_that_went_says_so_when_it_is_used():
    used = _seams._find("torch.nn.Module._no_such_call", "trace the calls of a module")
    sentence = _seams.gone.pop()
    with pytest.raises(RuntimeError, match=r"has no torch\.nn\.Module\._no_such_call, without"):
        used()
    assert sentence.startswith(f"torch {torch.__version__}") and "_seams.py" in sentence
    with pytest.raises(RuntimeError, match=r"^Python 3\.\d+\.\d+ has no multiprocessing\._gone"):
        _seams._need("multiprocessing._gone", "start ranks")


def test_every_module_call_passes_what_we_put_there(monkeypatch):
    monkeypatch.setattr(nn.Module, "_call_impl", _seams.module_call)  # undone at the end
    seen = []

    def call(module, *args, **kwargs):
        seen.append(type(module).__name__)
        return _seams.module_call(module, *args, **kwargs)

    _seams.call_modules_with(call)
    nn.Sequential(nn.Linear(2, 3), nn.Tanh())(torch.ones(1, 2))
    assert seen == ["Sequential", "Linear", "Tanh"], "nn.Module no longer calls _call_impl"


def test_every_backward_passes_what_we_put_there():
    seen = []

    def engine(*args, **kwargs):
        seen.append(_seams.backward_number())
        return _seams.backward_engine(*args, **kwargs)

    _seams.run_backward_with(engine)
    try:
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        torch.autograd.grad((x * 2).sum(), x)
        torch.autograd.backward((x * 3).sum())
    finally:
        _seams.run_backward_with(_seams.backward_engine)
    assert seen == [-1] * 3, "backward no longer ends in _engine_run_backward"


def test_nodes_are_numbered_in_order_of_creation_and_backwards_too():
    x = torch.ones(2, requires_grad=True)
    first = _seams.next_node_number()
    y = x * 2
    z = y + 1
    assert _seams.node_number(y.grad_fn) == first
    assert _seams.node_number(z.grad_fn) == first + 1 == _seams.next_node_number() - 1
    accumulate = y.grad_fn.next_functions[0][0]
    assert _seams.node_number(accumulate) > 2**62
    seen = []
    z.grad_fn.register_prehook(lambda grads: seen.append(_seams.backward_number()))
    for _ in range(2):
        z.sum().backward(retain_graph=True)
    assert 0 <= seen[0] < seen[1]


def test_exporting_is_what_the_compiler_says():
    class Asks(nn.Module):
        def forward(self, x):
            asked.append((_seams.exporting(), torch.compiler.is_compiling()))
            return x + 1

    asked = []
    model = Asks()
    model(torch.ones(1))
    assert asked.pop() == (False, False)
    torch.export.export(model, (torch.ones(1),), strict=False)
    assert asked and set(asked) == {(True, True)}


def test_a_hook_of_ours_lies_in_the_nodes_own_dictionary():
    ours, fired = [], []

    def register(usual):
        def put(hooks, hook):
            hooks, handle = usual(hooks, hook)
            ours.append(hooks)
            return hooks, handle

        return put

    before = torch.autograd.Function._register_hook
    y = torch.ones(2, requires_grad=True) * 2
    with _seams.hooks_registered_by(register):
        y.grad_fn.register_prehook(lambda grads: fired.append(grads))
    assert len(ours) == 1 and len(ours[0]) == 1, "register_prehook no longer asks Function"
    y.sum().backward()
    assert len(fired) == 1
    assert torch.autograd.Function._register_hook is before


def test_after_backward_runs_at_the_end_of_the_backward_that_asks():
    order = []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: order.append("gradient"))
    y = x * 2
    y.register_hook(lambda g: _seams.after_backward(lambda: order.append("end")))
    y.sum().backward()
    assert order == ["gradient", "end"]


def test_a_storage_counts_while_something_holds_it():
    x = torch.ones(10)
    ref, part = StorageWeakRef(x.untyped_storage()), x[2:]
    del x
    assert _seams.storage_bytes(ref) == 40
    del part
    assert _seams.storage_bytes(ref) == 0


def test_every_operator_of_c10d_is_watched():
    missing = set(calls.OPS) - _seams.operators("c10d")
    assert not missing, f"torch renamed {missing}: their calls would not be counted"
    new = _seams.operators("c10d") - set(calls.OPS) - {"check_for_nan"}  # which talks to nobody
    assert not new, f"torch has {new} besides: name them in calls.OPS, or a check counts too little"


def test_an_operator_that_is_gone_is_an_error_and_not_silence():
    library = torch.library.Library("c10d", "IMPL")
    with pytest.raises(RuntimeError, match=r"has no torch\.ops\.c10d\.allreduce_gone_, without"):
        _seams.intercept(library, "allreduce_gone_", lambda hand_on, args, kwargs: None)


def test_an_operator_passes_what_we_put_there_and_goes_on():
    with torch.library._scoped_library("shardbook_test", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        seen = []

        def around(hand_on, args, kwargs):
            seen.append(args)
            return hand_on(*args, **kwargs)

        _seams.intercept(library, "double", around)
        with torch.inference_mode():
            assert torch.ops.shardbook_test.double(torch.ones(2)).tolist() == [2.0, 2.0]
        assert len(seen) == 1


def test_reduce_ops_have_names():
    assert set(_seams._REDUCES.values()) >= {"sum", "avg", "max", "min", "product"}
    assert _seams._REDUCES[int(dist.ReduceOp.RedOpType.MAX)] == "max"


def test_torch_lists_its_own_schedules():
    ranks = _seams.schedule_operations("1F1B", 2, 3)
    assert len(ranks) == 2 and all(ranks)


def test_what_ranks_need_is_imported_ahead():
    code = "from shardbook import _seams; _seams.import_ahead(); import sys; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    needed = {"torch._dynamo", "torch.distributed._functional_collectives"}
    assert needed <= set(shown.stdout.split())


FORKS = """
import multiprocessing, os
from multiprocessing import forkserver
from shardbook import _seams

def inner(pipe):
    pipe.send(os.getppid())

def outer(pipe):
    _seams.keep_parents_fork_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    child = context.Process(target=inner, args=(theirs,))
    child.start()
    pipe.send((os.getppid(), ours.recv()))
    child.join()

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    child = context.Process(target=outer, args=(theirs,))
    child.start()
    mine, below = ours.recv()
    child.join()
    helpers = _seams.helper_processes()
    assert mine in helpers, (mine, helpers)
    assert below == mine, "a child of the fork server started another one"
    assert None not in helpers and len(helpers) == 2, helpers
    print("held")
"""


@pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="no fork server here"
)
def test_one_fork_server_serves_a_process_and_its_children(tmp_path):
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert ran.stdout == "held\n", ran.stderr


def test_a_part_of_the_fork_server_that_went_is_named():
    with pytest.raises(RuntimeError, match="has no multiprocessing's object"):
        _seams._known(object(), "_forkserver_pid")
