"""The learner's side: the ``%%ranks`` magic, what makes a lab pleasant, the progress."""

import sys

from . import lab


def install() -> None:
    """In IPython, know ``%%ranks`` and let unwritten exercises pass; elsewhere do nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return
    lab.install(shell)

    def ranks(line: str, cell: str):
        from . import magic  # it needs torch, which `import shardbook` does not

        return magic.ranks(line, cell)

    shell.register_magic_function(ranks, "cell", "ranks")
