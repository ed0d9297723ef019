"""``python -m shardbook check 22 answers.py``: examine the answers of a chapter."""

import argparse
import json
import multiprocessing
import multiprocessing.forkserver
import sys
from collections.abc import Iterator

from ..chapters import CHAPTERS, exercises
from ..notebook import lab, progress
from .answers import Answers, Unusable, read, uses

STATUSES = ("right", "wrong", "not written", "not examined")
SECONDS = 60  # for one exercise

HELP = """Examine the answers of a chapter, each in a process of its own.

The exit code is 0 if all that were asked hold, 1 if one is wrong, and 2 if none is wrong but one is
not written or could not be examined. It is no sandbox: an answer can read and write what you can.
"""


def main(argv: list[str]) -> int:
    """0 if all that were asked hold, 1 if one is wrong, 2 if one is not written or examined."""
    parser = argparse.ArgumentParser(
        prog="python -m shardbook check",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("chapter", help="its number, like 22")
    parser.add_argument("answers", help="a Python file or a notebook that defines the exercises")
    parser.add_argument(
        "--exercise", action="append", metavar="NAME", help="only this one (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print the verdicts as a JSON list")
    parser.add_argument(
        "--timeout",
        type=float,
        default=SECONDS,
        metavar="SECONDS",
        help=f"for each exercise (default {SECONDS})",
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
    try:
        answers = read(args.answers)
    except Unusable as error:
        if args.json:
            from . import isolate

            _print_json([isolate.not_examined(name, str(error)) for name in asked])
        return _refuse(str(error))
    verdicts = {}
    counts = not (answers.notebook and progress.is_shown(args.answers))
    try:
        for verdict in _examined(answers, chapter, asked, args.timeout):
            verdicts[verdict.exercise] = verdict
            if not args.json:
                print(lab.readable(_lines(verdict)), flush=True)
            if counts:
                progress.record(chapter, verdict.exercise, verdict.status)
    except KeyboardInterrupt:
        print("shardbook: interrupted", file=sys.stderr)
        return 130
    statuses = [verdicts[name].status for name in asked]
    if args.json:
        _print_json([verdicts[name] for name in asked])
    else:
        there = [f"{statuses.count(s)} {s}" for s in STATUSES if s in statuses]
        print(f"\nchapter {chapter}: {', '.join(there)}")
    if not answers.notebook and set(statuses) == {"not examined"}:
        _refuse(f"{args.answers} can't be used: {verdicts[asked[0]].properties[0].detail}")
    return 1 if "wrong" in statuses else 0 if set(statuses) == {"right"} else 2


def _examined(answers: Answers, chapter: int, asked: list[str], timeout: float) -> Iterator:
    """The verdicts. What an exercise uses comes before it, and is waited for only once."""
    _start_server(chapter)
    from ..ranks import processes  # torch, which this process imports while the server does
    from . import isolate

    processes.adopt_orphans()
    needs = {name: uses(answers, name) for name in asked}
    left = list(asked)
    hung: set[str] = set()
    try:
        while left:
            name = next((n for n in left if not needs[n] & set(left)), left[0])
            left.remove(name)
            if stuck := sorted(hung & needs[name]):
                why = f"it uses {stuck[0]}, which does not finish: mend that first"
                yield isolate.not_examined(name, why)
                continue
            found = isolate.examine(answers, chapter, name, timeout)
            yield found.verdict
            if found.hung:
                hung.add(name)
            if found.verdict.status == "not examined" and not answers.notebook:  # nor is any other
                why = found.verdict.properties[0].detail
                yield from (isolate.not_examined(n, why) for n in left)
                return
    finally:
        processes.end_descendants()


def _start_server(chapter: int) -> None:
    """Start the fork server that every answer's process comes from, with all that checks import."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        from ..ranks.launch import short_sockets  # torch, which a wrong argument need not wait for

        chapters = f"shardbook.checks.{CHAPTERS[chapter]}"
        preload = ["shardbook.ranks.preload", chapters, "shardbook.checks.isolate"]
        multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
        with short_sockets():
            multiprocessing.forkserver.ensure_running()


def _lines(verdict) -> list[str]:
    if verdict.status == "not examined":
        return [f"– {verdict.exercise} was not examined: {verdict.properties[0].detail}"]
    lines = verdict.lines()
    if verdict.status == "not written":
        return [f"{lines[0]} ({verdict.hint})"] if verdict.hint else lines
    return [f"{verdict.exercise}: {verdict.status}", *(f"  {line}" for line in lines)]


def _print_json(verdicts: list) -> None:
    plain = [
        {
            "exercise": v.exercise,
            "status": v.status,
            "properties": [{"name": p.name, "ok": p.ok, "detail": p.detail} for p in v.properties],
            "hint": v.hint,
            "seconds": v.seconds,
        }
        for v in verdicts
    ]
    print(json.dumps(plain, indent=1, ensure_ascii=True))


def _refuse(message: str) -> int:
    print(f"shardbook: {message}", file=sys.stderr)
    return 2
