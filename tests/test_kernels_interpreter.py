"""Runs the kernel tests again with Triton's interpreter in place of the torch references.

The variable counts when a kernel module is imported, so this needs a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

HERE = Path(__file__).parent
FILES = [
    f"test_kernels_{name}.py"
    for name in ("ssd", "conv", "state", "scan", "gdn", "attention", "backend")
]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="this is the process that it starts")
def test_all_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-vv", "-W", "ignore", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in FILES)],
        cwd=HERE.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert len(re.findall(r"triton-cpu.* PASSED", done.stdout)) > 80
    assert "torch-cpu" not in done.stdout
