"""Record random cases with vLLM's real code; runs in the environment that has vLLM, not ours.

    python record_vllm.py --driver DRIVER.py --first 0 --count 100 [--asynchronous]

One JSON object a line on standard output: {"seed", "case", "result"}, or {"seed", "error"} where
vLLM itself raises.  The version is the one that the driver finds on ORACLE_VLLM_PATH.
"""

import argparse
import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fuzz_vllm import random_case


def load(path: str) -> ModuleType:
    """Import the driver from its file."""
    spec = importlib.util.spec_from_file_location("vllm_driver", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(driver: ModuleType, seed: int, asynchronous: bool) -> dict[str, Any]:
    """Run one seed; an exception of vLLM's becomes an error line."""
    case = random_case(seed, driver.V().version, asynchronous)
    try:
        return {"seed": seed, "case": case, "result": driver.run_case(case)}
    except Exception as error:
        return {"seed": seed, "case": case, "error": f"{type(error).__name__}: {error}"[:300]}


def main() -> int:
    """Record the seeds [first, first + count)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--asynchronous", action="store_true")
    args = parser.parse_args()
    lines = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to standard output
        driver = load(args.driver)
        for seed in range(args.first, args.first + args.count):
            row = record(driver, seed, args.asynchronous)
            print(json.dumps(row, separators=(",", ":")), file=lines, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
