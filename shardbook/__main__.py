"""The command line: ``python -m shardbook`` lists what there is; each command is in its room."""

import importlib
import os
import sys

COMMANDS = {  # name: (module with main(arguments) -> exit code, what it does)
    "check": ("shardbook.checks.cli", "examine the answers of a chapter: check 22 answers.py"),
    "progress": ("shardbook.notebook.progress", "which exercises you have passed"),
    "diff": ("shardbook.tracing.diff_cli", "where two saved traces differ: diff A.json B.json"),
    "doctor": ("shardbook.doctor", "which device is used, and why not another"),
    "port": ("shardbook.port.cli", "find what a CUDA project does that an NPU does not"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that knows no ✓ gets a "?" in its place
        sys.stdout.reconfigure(errors="replace")
    if not argv or argv[0] in ("-h", "--help", "help"):
        print("usage: python -m shardbook COMMAND …\n")
        print("\n".join(f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()))
        print("\nThe book itself opens with `make lab`.")
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        there = ", ".join(COMMANDS)
        print(f"shardbook: no command {command!r}; there are {there}", file=sys.stderr)
        return 2
    return int(importlib.import_module(COMMANDS[command][0]).main(rest) or 0)


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output, `| head` for one, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)
