"""Compare the simulator with vLLM's real code on random cases, recorded while you wait.

    python tools/parity_live.py --driver DRIVER.py --python ENV/bin/python \\
        --wheel-dir UNPACKED_0_33 --wheel-dir UNPACKED_0_28 --seed 0 --count 1000 --async 0.3

The driver runs vLLM's scheduler and cache manager on a CPU, in an environment of its own
(docs/parity.md says how to set it up); each wheel gets processes of its own.  `--count` cases per
wheel are recorded, the `--async` share of them asynchronous: seeds `--seed` and up of each kind.
One line per difference, a line per wheel and kind, a total.  Exit status: 0 when all agree, 1 on a
difference, 2 when a recording process failed or nothing was compared.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Compare = Callable[[dict[str, Any], dict[str, Any]], list[str]]


@dataclass(frozen=True)
class Slice:
    """Seeds [first, first + count) of one kind, to record with one unpacked wheel."""

    wheel: str
    asynchronous: bool
    first: int
    count: int

    @property
    def label(self) -> str:
        """What a report line calls the slice's wheel and kind."""
        return f"{Path(self.wheel).name} {'async' if self.asynchronous else 'sync'}"


@dataclass
class Tally:
    """What a slice came to: cases compared, cases that differ, cases where vLLM raised."""

    compared: int = 0
    differ: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add another tally to this one."""
        self.compared += other.compared
        self.differ += other.differ
        self.skipped += other.skipped
        self.failures += other.failures


def slices(args: argparse.Namespace) -> list[Slice]:
    """Cut the seeds of every wheel and kind into one part per job."""
    some = round(args.count * args.asynchronous)
    out = []
    for wheel in args.wheel_dir:
        for asynchronous, count in ((False, args.count - some), (True, some)):
            edges = [args.seed + count * i // args.jobs for i in range(args.jobs + 1)]
            out += [Slice(wheel, asynchronous, a, b - a) for a, b in pairwise(edges) if b > a]
    return out


def recorded(part: Slice, args: argparse.Namespace, tally: Tally) -> Iterator[dict[str, Any]]:
    """Yield the rows that the recording process prints; a failure of it lands in the tally."""
    command = [args.python, str(HERE / "record_vllm.py"), "--driver", args.driver]
    command += ["--first", str(part.first), "--count", str(part.count)]
    command += ["--asynchronous"] if part.asynchronous else []
    env = {**os.environ, "ORACLE_VLLM_PATH": part.wheel}
    rows = 0
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as p:
        assert p.stdout is not None
        for line in p.stdout:
            rows += 1
            yield json.loads(line)
    if p.returncode or rows != part.count:
        tally.failures.append(
            f"{part.label}: recording ended with status {p.returncode} after {rows} of "
            f"{part.count} cases from seed {part.first}"
        )


def check(part: Slice, args: argparse.Namespace, compare: Compare) -> Tally:
    """Record and compare one slice."""
    tally = Tally()
    for row in recorded(part, args, tally):
        if "error" in row:
            tally.skipped += 1
            continue
        tally.compared += 1
        differences = differences_of(row, compare)
        tally.differ += bool(differences)
        for text in differences:
            print(f"{row['case']['name']}: {text}", flush=True)
        if differences and args.keep:
            keep(row, Path(args.keep))
    return tally


def differences_of(row: dict[str, Any], compare: Compare) -> list[str]:
    """Compare one case; where the simulator raises, that is the difference."""
    try:
        return compare(row["case"], row["result"])
    except Exception as error:
        return [f"the simulator raised {type(error).__name__}: {error}"]


def keep(row: dict[str, Any], folder: Path) -> None:
    """Write a case that differs, in the format that `prefixlab parity` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"case": row["case"], "result": row["result"]}, separators=(",", ":"))
    (folder / f"{row['case']['name']}.json").write_text(text)


def arguments() -> argparse.Namespace:
    """Parse the command line; the environment gives defaults for paths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    env = os.environ
    parser.add_argument("--driver", default=env.get("ORACLE_VLLM_DRIVER"), help="the driver's file")
    parser.add_argument("--python", default=env.get("ORACLE_VLLM_PYTHON", sys.executable))
    parser.add_argument("--wheel-dir", action="append", help="unpacked wheel; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=200, help="cases per wheel")
    parser.add_argument("--async", dest="asynchronous", type=float, default=0.25, metavar="SHARE")
    parser.add_argument("--jobs", type=int, default=1, help="recording processes at a time")
    parser.add_argument("--keep", help="folder for the cases that differ")
    args = parser.parse_args()
    args.wheel_dir = args.wheel_dir or env.get("ORACLE_VLLM_PATH", "").split(os.pathsep)
    if not args.driver or not all(args.wheel_dir):
        parser.error("give --driver (or ORACLE_VLLM_DRIVER) and --wheel-dir (or ORACLE_VLLM_PATH)")
    for path in (args.driver, *args.wheel_dir):
        if not Path(path).exists():
            parser.error(f"{path} does not exist")
    if not 0 <= args.asynchronous <= 1 or args.jobs < 1 or args.count < 1:
        parser.error("--async is a share from 0 to 1; --jobs and --count are at least 1")
    return args


def main() -> int:
    """Check every slice and print the totals."""
    args = arguments()
    sys.path.insert(0, str(HERE.parent))
    from sim.vllm.parity import compare

    totals: dict[str, Tally] = {}
    parts = slices(args)
    with ThreadPoolExecutor(args.jobs) as pool:
        for part, tally in zip(
            parts, pool.map(lambda p: check(p, args, compare), parts), strict=True
        ):
            totals.setdefault(part.label, Tally()).add(tally)
    total = Tally()
    for label, tally in totals.items():
        print(f"{label}: {tally.compared} compared, {tally.differ} differ, {tally.skipped} skipped")
        total.add(tally)
    print(f"total: {total.compared} compared, {total.differ} differ, {total.skipped} skipped")
    if not total.compared:
        total.failures.append("nothing was compared")
    for failure in total.failures:
        print(failure, file=sys.stderr)
    return 2 if total.failures else int(total.differ > 0)


if __name__ == "__main__":
    sys.exit(main())
