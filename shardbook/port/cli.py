"""`python -m shardbook port PATH…`: what in these files will not run, or differs, on an NPU."""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from . import fix
from .rules import RULES, SEVERITIES
from .scan import Finding, existing, python_files, scan

EPILOG = """severities:
  breaks  stops with an error on an NPU
  wrong   runs, but differs silently (another device, no seed, a lost branch)
  slow    runs where a faster way exists
  style   has no effect on an NPU
exit code: 0 nothing found, 1 something found, 2 a path that can't be used"""


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m shardbook port",
        description="Read Python source without running it; list what an NPU will not do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a Python file or a folder")
    parser.add_argument("--json", action="store_true", help="print a JSON list of findings")
    parser.add_argument("--severity", choices=SEVERITIES, help="list this severity and worse")
    parser.add_argument("--fix", action="store_true", help="show the safe rewrites as a diff")
    parser.add_argument("--write", action="store_true", help="with --fix: also make them")
    oldest = "with --fix: the oldest torch to write for (else the project's pins)"
    parser.add_argument("--torch", metavar="VERSION", type=version, help=oldest)
    moved = "as if every file ran after `import torch_npu.contrib.transfer_to_npu`"
    parser.add_argument("--transfer", action="store_true", help=moved)
    args = parser.parse_args(argv)
    if args.write and not args.fix:
        parser.error("--write goes with --fix: see the diff first")
    try:
        if args.fix:
            return rewrite(args.paths, args.write, args.torch)
        return show(scan(args.paths, args.transfer), args.severity, args.json)
    except BrokenPipeError:  # `port … | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"port: {error}", file=sys.stderr)
        return 2


def show(findings: list[Finding], severity: str | None, as_json: bool) -> int:
    """Print the findings of this severity and worse; the exit code."""
    if severity:
        worst = SEVERITIES[: SEVERITIES.index(severity) + 1]
        findings = [f for f in findings if f.severity in worst or f.rule == "unreadable"]
    print(json.dumps([as_dict(f) for f in findings], indent=1) if as_json else text(findings))
    sys.stdout.flush()
    return 1 if findings else 0


def as_dict(finding: Finding) -> dict:
    """A finding with its rule's words, as --json prints it."""
    rule = RULES[finding.rule]
    words = {k: getattr(rule, k) for k in ("severity", "what", "why", "reference")}
    return dataclasses.asdict(finding) | words | {"instead": finding.instead}


def text(findings: list[Finding]) -> str:
    """The findings as people read them, file by file, and a summary a file."""
    if not findings:
        return "Nothing found that an NPU would refuse, as far as these files show."
    lines: list[str] = []
    explained: set[str] = set()
    for file, all_ in by_file(findings).items():
        lines.append(file)
        mine, following = roots(all_), [f for f in all_ if f.cause]
        for f in mine:
            rule = RULES[f.rule]
            lines.append(f"  {f.line}:{f.column}  {rule.severity:6} {rule.id}: {f.code[:90]}")
            if rule.id not in explained:  # said once, at its first place
                explained.add(rule.id)
                lines.append(f"      what     {rule.what}")
                lines.append(f"      why      {rule.why}")
                lines.append(f"      instead  {f.instead}")
                lines.append(f"      see      {rule.reference}")
            elif f.instead != rule.instead:  # of this place, not of the rule
                lines.append(f"      instead  {f.instead}")
        for (rule_id, cause), places in grouped(following).items():
            where = ", ".join(str(f.line) for f in places)
            lines.append(f"  {where}  {rule_id}: follows from {cause}")
    lines += ["", "summary"]
    code = [f for f in findings if not in_tests(f)]
    for file, mine in by_file(code).items():
        lines.append(f"  {counts(mine)}  {file}")
    lines.append(f"  {counts(code)}  in all, {files(len(by_file(code)))}")
    if len(code) < len(findings):
        tests = [f for f in findings if in_tests(f)]
        lines.append(f"  {counts(tests)}  in tests, {files(len(by_file(tests)))}")
    return "\n".join(lines)


def roots(findings: list[Finding]) -> list[Finding]:
    """The findings that follow from no other."""
    return [f for f in findings if not f.cause]


def grouped(findings: list[Finding]) -> dict[tuple[str, str], list[Finding]]:
    """Findings that follow from others, by rule and cause."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for f in findings:
        found.setdefault((f.rule, f.cause), []).append(f)
    return found


def in_tests(finding: Finding) -> bool:
    """Whether a finding is in a project's tests, which it does not ship."""
    path = Path(finding.file)
    named = path.name.startswith("test_") or path.stem.endswith("_test")
    return named or path.name == "conftest.py" or bool({"tests", "test"} & set(path.parts[:-1]))


def by_file(findings: list[Finding]) -> dict[str, list[Finding]]:
    """The findings of each file, in order."""
    files: dict[str, list[Finding]] = {}
    for f in findings:
        files.setdefault(f.file, []).append(f)
    return files


def counts(findings: list[Finding]) -> str:
    """`3 breaks, 1 wrong`, and how many places follow from these."""
    number = Counter(f.severity for f in roots(findings))
    said = ", ".join(f"{number[s]} {s}" for s in SEVERITIES if number[s]) or "nothing"
    more = len(findings) - number.total()
    return f"{said} (+ {more} that follow)" if more else said


def files(number: int) -> str:
    """`1 file`, `2 files`."""
    return f"{number} file" if number == 1 else f"{number} files"


def replace(path: Path, data: bytes) -> None:
    """Write a file in one step: on a full disk the old one is still whole."""
    path = path.resolve()  # a link stays a link
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".port-", delete=False) as new:
        try:
            new.write(data)
            new.flush()
            shutil.copymode(path, new.name)
            os.replace(new.name, path)
        except BaseException:
            os.unlink(new.name)
            raise


def version(text: str) -> tuple[int, int]:
    """`2.4` or `2.4.1` as (2, 4)."""
    parts = text.split(".")
    if len(parts) < 2 or not all(p.isdigit() for p in parts[:2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no version: write --torch 2.4")
    return int(parts[0]), int(parts[1])


def rewrite(paths: list[str], write: bool, target: tuple[int, int] | None = None) -> int:
    """Show the safe rewrites of every file; make them if asked."""
    changed = 0
    given = existing(paths)
    if target is None:
        folders = [p if p.is_dir() else p.parent for p in given]
        target = min(filter(None, (fix.pinned(f.resolve()) for f in folders)), default=None)
    for path in python_files(given):
        try:
            text = path.read_bytes().decode("utf-8")
            mark = "\ufeff" if text.startswith("\ufeff") else ""  # a byte order mark stays
            source = text.removeprefix(mark)
            shown = fix.diff(source, str(path), target)
        except (OSError, ValueError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
            print(f"# {path} left alone: {why}", file=sys.stderr)
            continue
        if shown:
            changed += 1
            print(shown, end="")
            if write:
                try:
                    replace(path, (mark + fix.fixed(source, target)[0]).encode("utf-8"))
                except OSError as error:
                    changed -= 1
                    print(f"# {path} left alone: {error.strerror or error}", file=sys.stderr)
    verb = "rewritten" if write else "would change; add --write to make the changes"
    print(f"# {files(changed)} {verb}", file=sys.stderr)
    if changed and target and target < (2, 7):
        old = ": import torch_npu first, it is not loaded by itself" if target < (2, 5) else ""
        print(f"# written for torch {target[0]}.{target[1]}{old}", file=sys.stderr)
    return 1 if changed and not write else 0
