"""The cell magic ``%%ranks 4``: run a cell's body on every rank."""

import ast
import shlex
import types
from typing import Any

import torch

from ..ranks import cell as on_rank
from ..ranks import run, worker
from . import names

USAGE = "%%ranks [number of ranks] [--trace] [--timeout SECONDS]"


def ranks(line: str, cell: str) -> Any:
    """``%%ranks [number of ranks] [--trace] [--timeout SECONDS]`` runs the cell on every rank.

    The body finds `rank`, `world_size`, `device`, `torch`, `dist` and the names of the notebook it
    uses. What it assigns stays on the ranks; a last expression is printed. With --trace the cell
    shows the trace of all ranks.
    """
    from IPython import get_ipython

    shell = get_ipython()
    world_size, trace, timeout = options(line)
    source = "\n" + shell.transform_cell(cell)  # the magic's own line is the cell's first
    name = shell.compile.cache(source)
    code = compile(_print_last(ast.parse(source, name)), name, "exec")
    read, assigned = names.reads(source), names.binds(source)
    if "get_ipython" in read and "get_ipython" not in cell:
        raise ValueError(
            "magics (%…), shell commands (!…) and help (?) don't run on ranks: take them out of "
            "the %%ranks cell, or run them in a cell of their own"
        )
    wanted = sorted(read - on_rank.GIVEN)
    given = {n: shell.user_ns[n] for n in wanted if n in shell.user_ns}
    given = _can_be_sent(given, assigned)
    result = run(on_rank.body, code, given, world_size=world_size, timeout=timeout, trace=trace)
    return result.trace


def _can_be_sent(given: dict[str, Any], assigned: set[str]) -> dict[str, Any]:
    """The names that ranks can get; one that the cell makes itself need not be sent."""
    sent = dict(given)
    for name, value in given.items():
        if isinstance(value, (torch.Tensor, types.ModuleType)):
            continue
        try:
            worker.dumps(value)
        except Exception as error:
            if name in assigned:
                del sent[name]
                continue
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"the cell uses the notebook's {name!r}, which can't be sent to the ranks "
                f"({reason}); make it inside the cell instead"
            ) from None
    return sent


def options(line: str) -> tuple[int, bool, float]:
    """(ranks, trace, timeout) of the magic's line; ValueError with the usage if it has others."""
    world_size, trace, timeout = None, False, 60.0
    try:
        words = shlex.split(line)
        while words:
            word = words.pop(0)
            if word == "--trace":
                trace = True
            elif word == "--timeout":
                timeout = float(words.pop(0))
            elif world_size is None:
                world_size = int(word)
            else:
                raise ValueError("two numbers of ranks")
    except (ValueError, IndexError):
        raise ValueError(f"%%ranks {line}: expected {USAGE}") from None
    return 4 if world_size is None else world_size, trace, timeout


def _print_last(tree: ast.Module) -> ast.Module:
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1]
        show = ast.Name("_show", ast.Load())
        last.value = ast.copy_location(ast.Call(show, [last.value], []), last.value)
        ast.fix_missing_locations(last)
    return tree
