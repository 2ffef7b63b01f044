"""Record random cases with SGLang's real code; runs in the environment that has SGLang, not ours.

    SGLANG_WHEEL_DIR=UNPACKED python record_sglang.py --driver DRIVER.py --version 0.5.23 \\
        --mode serial --first 0 --count 100 [--out DIR]

One JSON object a line on standard output: {"case", "sglang", "oracle"}, or {"case", "sglang",
"error"} where SGLang itself raises or comes to no end.  With `--out` the rows go to compressed
batches in that folder instead: `batch-FIRST.json.gz`, and `errors-FIRST.json.gz` for those that
raise.  Batches that exist already are left alone, so that an interrupted recording can go on.
"""

import argparse
import contextlib
import gzip
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fuzz_sglang import MODES, VERSIONS, random_case

Row = dict[str, Any]
ITERATIONS = 20_000  # an engine that is not done by then never will be
BATCH = 50


def load(path: str) -> ModuleType:
    """Import the driver from its file."""
    spec = importlib.util.spec_from_file_location("sglang_driver", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(driver: ModuleType, case: Row, version: str) -> Row:
    """Run one case; an exception of SGLang's becomes an error row."""
    row: Row = {"case": case, "sglang": version}
    try:
        oracle = driver.run_case(case, check_state=False, max_iters=ITERATIONS)
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}"[:300]}
    if oracle["iterations"] > ITERATIONS:
        return {**row, "error": f"no end within {ITERATIONS} iterations"}
    return {**row, "oracle": without_stale_matches(oracle)}


def without_stale_matches(oracle: Row) -> Row:
    """Set what a one-token request matched to nothing.

    Its key is empty and nothing is looked up; the driver of 0.5.18 then repeats the figure of the
    lookup before.
    """
    for request in oracle["requests"]:
        for admission in request["admissions"]:
            if admission["fill_len"] == 1:
                admission["matched_kv"] = 0
    return oracle


def rows(driver: ModuleType, args: argparse.Namespace, first: int, count: int) -> Iterator[Row]:
    """Yield the rows of the seeds [first, first + count)."""
    for seed in range(first, first + count):
        case = random_case(seed, args.version, args.mode)
        yield record(driver, case, args.version)


def write_batches(driver: ModuleType, args: argparse.Namespace) -> None:
    """Write the seeds in batches to the folder `--out`."""
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    end = args.first + args.count
    for first in range(args.first, end, BATCH):
        if (folder / f"batch-{first:05}.json.gz").exists():
            continue
        batch = list(rows(driver, args, first, min(BATCH, end - first)))
        failed = [row for row in batch if "error" in row]
        if failed:
            write(folder / f"errors-{first:05}.json.gz", failed)
        write(folder / f"batch-{first:05}.json.gz", [r for r in batch if "error" not in r])


def write(path: Path, batch: list[Row]) -> None:
    """Write rows compressed, complete or not at all; the same rows give the same bytes."""
    text = json.dumps(batch, separators=(",", ":"))
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(gzip.compress(text.encode(), mtime=0))
    unfinished.rename(path)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--driver", required=True)
    parser.add_argument("--version", choices=VERSIONS, required=True)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--out", help="folder for compressed batches")
    return parser.parse_args()


def main() -> int:
    """Record the seeds [first, first + count)."""
    args, lines = arguments(), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # the engine may log to standard output
        driver = load(args.driver)
        if args.out:
            write_batches(driver, args)
            return 0
        for row in rows(driver, args, args.first, args.count):
            print(json.dumps(row, separators=(",", ":")), file=lines, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
