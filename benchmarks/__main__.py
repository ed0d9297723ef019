"""All benchmarks, one after the other: ``python -m benchmarks [name …]``.

Each prints ratios that were measured in that one run; absolute times are this machine's.
"""

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> int:
    names = sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="*", help=f"of {', '.join(names)}; default: all")
    chosen = parser.parse_args().name or names
    unknown = [n for n in chosen if n not in names]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    failed = []
    for name in chosen:
        print(f"\n──── {name} ────", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=FOLDER.parent)
        failed += [name] if done.returncode else []
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
