"""Compare the simulator with vLLM's and SGLang's real code on random cases, recorded meanwhile.

    python tools/parity_live.py --seed 0 --count 1000 --async 0.3 [--engine vllm|sglang] \\
        --driver DRIVER.py --python ENV/bin/python --wheel-dir UNPACKED_0_33 \\
        --sglang-drivers FOLDER --sglang-python ENV/bin/python --sglang-wheel-dir UNPACKED_0_5_23

The drivers run each engine's scheduler and cache on a CPU, in environments of their own
(docs/parity.md says how to set them up); each wheel gets processes of its own.  `--count` cases
per wheel are recorded, the `--async` share of them asynchronous (vLLM) or concurrent (SGLang):
seeds `--seed` and up of each kind.  Without `--engine` every engine with a wheel takes part.
One line per difference, a line per wheel and kind, a total.  Exit status: 0 when all agree, 1 on a
difference, 2 when a recording process failed or nothing was compared.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from parity_sources import Row, Source, sglang_sources, vllm_sources


@dataclass(frozen=True)
class Slice:
    """Seeds [first, first + count) of one kind, to record with one source."""

    source: Source
    kind: str
    first: int
    count: int

    @property
    def label(self) -> str:
        """What a report line calls the slice's wheel and kind."""
        return f"{self.source.engine} {self.source.version} {self.kind}"


@dataclass
class Tally:
    """What a slice came to: cases compared, cases that differ, cases with nothing to compare."""

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

    def line(self, label: str) -> str:
        """The report line."""
        return f"{label}: {self.compared} compared, {self.differ} differ, {self.skipped} skipped"


def slices(args: argparse.Namespace) -> list[Slice]:
    """Cut the seeds of every source and kind into one part per job."""
    some = round(args.count * args.asynchronous)
    out = []
    for source in args.sources:
        for kind, count in zip(source.kinds, (args.count - some, some), strict=True):
            edges = [args.seed + count * i // args.jobs for i in range(args.jobs + 1)]
            out += [Slice(source, kind, a, b - a) for a, b in pairwise(edges) if b > a]
    return out


def check(part: Slice, folder: str | None) -> Tally:
    """Record and compare one slice; cases that differ are written to the folder, if any."""
    tally = Tally()
    try:
        for row in part.source.rows(part.kind, part.first, part.count):
            check_row(part.source, row, tally, folder)
    except RuntimeError as error:
        tally.failures.append(f"{part.label}: {error}")
    return tally


def check_row(source: Source, row: Row, tally: Tally, folder: str | None) -> None:
    """Compare one recorded row and add it to the tally."""
    if not source.tells(row):
        tally.skipped += 1
        return
    tally.compared += 1
    differences = differences_of(source, row)
    tally.differ += bool(differences)
    for text in differences:
        print(f"{row['case']['name']}: {text}", flush=True)
    if differences and folder:
        keep(row, Path(folder))


def differences_of(source: Source, row: Row) -> list[str]:
    """Compare one case; where the simulator raises, that is the difference."""
    try:
        return source.differences(row)
    except Exception as error:
        return [f"the simulator raised {type(error).__name__}: {error}"]


def keep(row: Row, folder: Path) -> None:
    """Write a case that differs, in the format that `prefixlab parity` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in row.items() if k != "seed"}
    text = json.dumps(kept, separators=(",", ":"))
    (folder / f"{row['case']['name']}.json").write_text(text)


def parser() -> argparse.ArgumentParser:
    """The command line; the environment gives defaults for paths."""
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    env = os.environ
    out.add_argument("--engine", choices=["vllm", "sglang"], help="this engine only")
    out.add_argument("--driver", default=env.get("ORACLE_VLLM_DRIVER"), help="vLLM's driver")
    out.add_argument("--python", default=env.get("ORACLE_VLLM_PYTHON", sys.executable))
    out.add_argument("--wheel-dir", action="append", help="unpacked vLLM wheel; may be repeated")
    out.add_argument(
        "--sglang-drivers",
        default=env.get("ORACLE_SGLANG_DRIVERS"),
        help="folder with sglang-VERSION/oracle_sglang.py",
    )
    out.add_argument("--sglang-python", default=env.get("ORACLE_SGLANG_PYTHON", sys.executable))
    out.add_argument(
        "--sglang-wheel-dir", action="append", help="unpacked SGLang wheel; may be repeated"
    )
    out.add_argument("--seed", type=int, default=0, help="first seed")
    out.add_argument("--count", type=int, default=200, help="cases per wheel")
    out.add_argument("--async", dest="asynchronous", type=float, default=0.25, metavar="SHARE")
    out.add_argument("--jobs", type=int, default=1, help="recording processes at a time")
    out.add_argument("--keep", help="folder for the cases that differ")
    return out


def arguments() -> argparse.Namespace:
    """Parse the command line and check that every path is there."""
    line = parser()
    args = line.parse_args()
    args.wheel_dir = args.wheel_dir or _paths("ORACLE_VLLM_PATH")
    args.sglang_wheel_dir = args.sglang_wheel_dir or _paths("ORACLE_SGLANG_PATH")
    sources = vllm_sources(args) + sglang_sources(args)
    args.sources = [s for s in sources if args.engine in (None, s.engine)]
    if not args.sources:
        line.error("give --wheel-dir (or ORACLE_VLLM_PATH) or --sglang-wheel-dir "
                   "(or ORACLE_SGLANG_PATH)")  # fmt: skip
    for source in args.sources:
        if not source.version:
            line.error(f"{source.wheel}: no {source.engine}-VERSION.dist-info; unpack a wheel")
        if not Path(source.driver).is_file():
            line.error(f"{source.driver or 'no driver given'}: no such driver of {source.engine}")
    if not 0 <= args.asynchronous <= 1 or args.jobs < 1 or args.count < 1:
        line.error("--async is a share from 0 to 1; --jobs and --count are at least 1")
    return args


def _paths(name: str) -> list[str]:
    return [p for p in os.environ.get(name, "").split(os.pathsep) if p]


def main() -> int:
    """Check every slice and print the totals."""
    args = arguments()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    totals: dict[str, Tally] = {}
    parts = slices(args)
    with ThreadPoolExecutor(args.jobs) as pool:
        tallies = pool.map(lambda part: check(part, args.keep), parts)
        for part, tally in zip(parts, tallies, strict=True):
            totals.setdefault(part.label, Tally()).add(tally)
    total = Tally()
    for label, tally in totals.items():
        print(tally.line(label))
        total.add(tally)
    print(total.line("total"))
    if not total.compared:
        total.failures.append("nothing was compared")
    for failure in total.failures:
        print(failure, file=sys.stderr)
    return 2 if total.failures else int(total.differ > 0)


if __name__ == "__main__":
    sys.exit(main())
