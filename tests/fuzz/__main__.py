"""Command line of the fuzzer: `python -m fuzz`."""

import argparse
import sys
import time
from pathlib import Path

from fuzz.runner import fuzz
from fuzz.targets import TARGETS


def main() -> int:
    """Fuzz targets; return 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Fuzz what strangers can send.")
    parser.add_argument("--target", action="append", choices=TARGETS, help="target; may be repeated (default: all)")
    parser.add_argument("--cases", type=int, default=10**9, metavar="N", help="cases of each target")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the cases (default: 1)")
    parser.add_argument("--minutes", type=float, metavar="N", help="time of each target (default: 1 without --cases)")
    parser.add_argument("--findings", type=Path, default=Path(".fuzz"), metavar="FOLDER", help="default: .fuzz")
    parser.add_argument(
        "--engine", choices=("fastest", "hypothesis", "atheris"), default="fastest",
        help="what makes the cases (default: random numbers)",
    )  # fmt: skip
    given = parser.parse_args()
    minutes = given.minutes if given.minutes or given.cases < 10**9 else 1.0
    print("target           cases   refused findings  slow   slowest    growth     time")
    failed = False
    for name in given.target or TARGETS:
        result = fuzz(
            f"fuzz.targets:{name}",
            cases=given.cases,
            seed=given.seed,
            findings=given.findings,
            deadline=time.monotonic() + 60 * minutes if minutes else None,
            corpus=given.findings.resolve() / "corpus" / name if given.engine == "atheris" else None,
            by_hypothesis=given.engine == "hypothesis",
        )
        failed |= bool(result.findings)
        print(
            f"{name:12} {result.n_cases:9} {result.n_refused:9} {len(result.findings):8} {result.n_slow:5} "
            f"{result.slowest:7.2f} s {result.growth / (1 << 20):5.1f} MiB {result.seconds:6.0f} s",
            flush=True,
        )
        for path in sorted(result.findings):
            print(f"  {path}: {path.read_text(encoding='utf-8', errors='replace').splitlines()[0]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
