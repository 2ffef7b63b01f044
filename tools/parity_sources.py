"""Where the live comparison gets its recordings: an engine, an unpacked wheel, its recorder."""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
# SGLang stops with these when running requests lock a whole pool of states; so does the simulator.
CRASHES = ("Can not alloc mamba cache", "Can not alloc int8", "Not enough space for mamba cache")


@dataclass(frozen=True)
class Source:
    """One unpacked wheel and what it takes to record with it.

    ``kinds``: the plain kind of case and the overlapping one.
    """

    engine: str
    wheel: str
    python: str
    driver: str
    version: str
    kinds: tuple[str, str]

    def command(self, kind: str, first: int, count: int) -> list[str]:
        """The recording process for the seeds [first, first + count) of a kind."""
        out = [self.python, str(HERE / f"record_{self.engine}.py"), "--driver", self.driver]
        out += ["--first", str(first), "--count", str(count)]
        if self.engine == "sglang":
            return [*out, "--version", self.version, "--mode", kind]
        return out + (["--asynchronous"] if kind == "async" else [])

    def environment(self) -> dict[str, str]:
        """The variables of the recording process."""
        name = "SGLANG_WHEEL_DIR" if self.engine == "sglang" else "ORACLE_VLLM_PATH"
        return {**os.environ, name: self.wheel}

    def rows(self, kind: str, first: int, count: int) -> Iterator[Row]:
        """Yield the rows that the recording process prints.

        :raises RuntimeError: the process failed or printed fewer rows than asked for.
        """
        seen, command = 0, self.command(kind, first, count)
        with subprocess.Popen(
            command, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                seen += 1
                yield json.loads(line)
        if process.returncode or seen != count:
            raise RuntimeError(
                f"recording ended with status {process.returncode} after {seen} of {count} "
                f"{kind} cases from seed {first}"
            )

    def tells(self, row: Row) -> bool:
        """Whether there is something to compare: a recording, or a crash that is simulated."""
        return "error" not in row or (
            self.engine == "sglang" and any(text in row["error"] for text in CRASHES)
        )

    def differences(self, row: Row) -> list[str]:
        """Compare the simulator with one row."""
        if self.engine == "sglang":
            return crash_differences(row) if "error" in row else sglang_differences(row)
        from sim.vllm.parity import compare

        return compare(row["case"], row["result"])


def sglang_differences(row: Row) -> list[str]:
    """Compare one recorded SGLang case."""
    from sim.sglang.parity import compare

    return compare(row["case"], row["oracle"], row["sglang"])


def crash_differences(row: Row) -> list[str]:
    """Replay a case in which SGLang stopped; the simulator has to stop with the same words."""
    from sim.sglang.parity import Replay
    from sim.sglang.pools import EngineCrashError

    try:
        Replay(row["case"], row["sglang"]).run()
    except EngineCrashError as error:
        same = str(error) in row["error"]
        return [] if same else [f"SGLang stopped: {row['error']}; the simulator: {error}"]
    return [f"SGLang stopped: {row['error']}; the simulator did not"]


def version_of(engine: str, wheel: str) -> str:
    """Return the version of the package in an unpacked wheel, "" if it is not there."""
    found = sorted(Path(wheel).glob(f"{engine}-*.dist-info"))
    return found[0].name.removeprefix(f"{engine}-").removesuffix(".dist-info") if found else ""


def vllm_sources(args: argparse.Namespace) -> list[Source]:
    """One source per vLLM wheel; the driver serves every version."""
    return [
        Source(
            "vllm", wheel, args.python, args.driver or "", version_of("vllm", wheel),
            ("sync", "async"),
        )
        for wheel in args.wheel_dir
    ]  # fmt: skip


def sglang_sources(args: argparse.Namespace) -> list[Source]:
    """One source per SGLang wheel; every version has a driver of its own in a folder."""
    out = []
    for wheel in args.sglang_wheel_dir:
        version = version_of("sglang", wheel)
        driver = Path(args.sglang_drivers or "") / f"sglang-{version}" / "oracle_sglang.py"
        kinds = ("serial", "concurrent")
        out.append(Source("sglang", wheel, args.sglang_python, str(driver), version, kinds))
    return out
