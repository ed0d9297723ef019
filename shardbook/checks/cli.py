"""``python -m shardbook check 22 answers.py``: examine the answers of a chapter."""

import argparse
import dataclasses
import json
import os
import sys

from ..chapters import CHAPTERS, exercises
from ..notebook import progress
from .answers import Unusable, read


def main(argv: list[str]) -> int:
    """0 if all that were asked hold, 1 if one is wrong, 2 if one is not written or unusable."""
    parser = argparse.ArgumentParser(
        prog="python -m shardbook check", description="Examine the answers of a chapter."
    )
    parser.add_argument("chapter", help="its number, like 22")
    parser.add_argument("answers", help="a Python file or a notebook that defines the exercises")
    parser.add_argument(
        "--exercise", action="append", metavar="NAME", help="only this one (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print the verdicts as a JSON list")
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds for each exercise (default 120)"
    )
    args = parser.parse_args(argv)
    number = args.chapter.partition("_")[0]  # 11_tensors too
    chapter = int(number) if number.isdecimal() else 0
    if chapter not in CHAPTERS or not exercises(chapter):
        there = ", ".join(str(c) for c in CHAPTERS if exercises(c))
        return _refuse(f"there is no chapter {args.chapter} with checks; there are {there}")
    names = exercises(chapter)
    unknown = [n for n in args.exercise or [] if n not in names]
    if unknown:
        return _refuse(
            f"chapter {chapter} has no exercise {', '.join(unknown)}; it has {', '.join(names)}"
        )
    asked = [n for n in names if not args.exercise or n in args.exercise]
    if not 0 < args.timeout <= 1e6:  # nan is neither
        return _refuse("--timeout must be a number of seconds above 0, at most a million")

    from ..ranks import processes  # torch, which a wrong argument need not wait for
    from . import isolate

    try:
        answers = read(args.answers)
    except Unusable as error:
        if args.json:
            _print_json([isolate.unusable(name, str(error), 0.0) for name in asked])
        return _refuse(str(error))

    processes.adopt_orphans()
    isolate.start(chapter)
    verdicts, trouble = [], ""
    try:
        for name in asked:
            found = isolate.examine(answers, chapter, name, args.timeout)
            verdicts.append(found.verdict)
            if not args.json:
                _print(found.verdict, found.trouble)
            if found.trouble:
                trouble = found.trouble
                if not answers.notebook:  # the file as a whole: the others would say the same
                    rest = asked[len(verdicts) :]
                    verdicts += [isolate.unusable(n, trouble, 0.0) for n in rest]
                    break
            if "solutions" not in os.path.abspath(args.answers).split(os.sep):
                progress.record(chapter, name, found.verdict.status)
    except KeyboardInterrupt:
        processes.end_descendants()
        print("shardbook: interrupted", file=sys.stderr)
        return 130
    if args.json:
        _print_json(verdicts)
    else:
        counts = [
            (s, sum(v.status == s for v in verdicts)) for s in ("right", "wrong", "not written")
        ]
        print(f"\nchapter {chapter}: " + ", ".join(f"{n} {s}" for s, n in counts if n))
    if trouble:
        _refuse(f"{args.answers} can't be used: {trouble}")
    statuses = {v.status for v in verdicts}
    return 1 if "wrong" in statuses else 2 if "not written" in statuses else 0


def _print(verdict, trouble: str) -> None:
    if trouble:
        print(f"✎ {verdict.exercise} was not examined", flush=True)
        return
    lines = verdict.lines()
    if verdict.status != "not written":
        lines = [f"{verdict.exercise}: {verdict.status}", *(f"  {line}" for line in lines)]
    elif verdict.hint:
        lines = [f"{lines[0]} ({verdict.hint})"]
    print("\n".join(lines), flush=True)


def _print_json(verdicts: list) -> None:
    print(json.dumps([dataclasses.asdict(v) for v in verdicts], indent=1, ensure_ascii=True))


def _refuse(message: str) -> int:
    print(f"shardbook: {message}", file=sys.stderr)
    return 2
