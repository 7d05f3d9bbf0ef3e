"""Runs the worked examples whole, one after another, and prints how long each took: `run_examples.py [NAME ...] [--out FOLDER]`.

Exits with 1 if one of them fails, after all have run.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "examples"
TOUR = "quickstart"  # trains nothing and draws nothing: part of `make check`


def find(folder: Path) -> dict[str, Path]:
    """Name -> file of every worked example, in alphabetical order."""
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != TOUR}


def run(paths: dict[str, Path], out: Path) -> list[str]:
    """Runs them; returns the names of those that failed."""
    rows: list[tuple[str, float, int]] = []
    for name, path in paths.items():
        print(f"--- {name}", flush=True)
        start = time.perf_counter()
        code = subprocess.run([sys.executable, str(path), "--out", str(out)]).returncode
        rows.append((name, time.perf_counter() - start, code))
    print("---")
    for name, seconds, code in rows:
        print(f"{name:20} {seconds:7.1f} s  {'' if code == 0 else f'failed with exit code {code}'}".rstrip())
    return [name for name, _, code in rows if code != 0]


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    found = find(folder)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"examples to run (default: all): {', '.join(found)}")
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the pictures (default: %(default)s)")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in found]
    if unknown:
        parser.error(f"NAME: expected one of {', '.join(found)}, got {', '.join(unknown)}")
    return 1 if run({name: found[name] for name in args.names or found}, args.out) else 0


if __name__ == "__main__":
    sys.exit(main())
