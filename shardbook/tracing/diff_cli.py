"""The command ``diff``: compare two saved traces."""

import argparse
import json
import sys

from .diff import diff


def main(argv: list[str]) -> int:
    """``python -m shardbook diff A.json B.json``: 0 if equal, 1 if not, 2 for unusable files."""
    parser = argparse.ArgumentParser(
        prog="python -m shardbook diff",
        description="Name the first call in which the ranks of two saved traces differ.",
    )
    parser.add_argument("expected", help="a trace that t.save(path) wrote")
    parser.add_argument("got", help="the one to compare with it")
    parser.add_argument("--modules", action="store_true", help="compare the modules' calls as well")
    parser.add_argument(
        "--order",
        choices=("rank", "group"),
        default="rank",
        help="compare the order of all of a rank's calls, or only that in each group",
    )
    parser.add_argument("--json", action="store_true", help="print all differences as json")
    args = parser.parse_args(argv)
    try:
        found = diff(
            args.got,
            args.expected,
            modules=args.modules,
            order=args.order,
            names=(args.got, args.expected),
        )
    except (OSError, ValueError) as error:
        print(f"shardbook diff: {error}", file=sys.stderr)
        return 2
    if args.json:
        listed = [{"ranks": d.ranks, "step": d.step, "text": d.text} for d in found.differences]
        print(json.dumps({"equal": found.equal, "differences": listed}))
    else:
        print(found)
    return 0 if found.equal else 1
