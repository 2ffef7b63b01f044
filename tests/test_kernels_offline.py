"""Kernels at full size compiled for compute capability 9.0, with no GPU: nothing spills much.

No test on a CPU would show it: a tile too large still computes right, several times slower.
"""

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
triton = pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

from kernels import config, full_size  # noqa: E402

OPERATIONS = full_size.operations(full_size.Sizes())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
    ),
]
# Bytes of stack a thread. Exact fp32 products have no tensor units to run on and are for checks.
BOUND = {"ssd_prefill_fp32": 512}
DEFAULT_BOUND = 64
SHARED_BYTES = 227 * 1024  # what one block may have on that device


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Compiled here and now, not found in a cache of another run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_kernel_spills_beyond_the_bound(name):
    from kernels import offline

    found = offline.usage(OPERATIONS[name])
    assert found
    for each in found:
        assert each.stack_bytes <= BOUND.get(name, DEFAULT_BOUND), each
        assert 0 < each.registers <= 255 and each.shared_bytes <= SHARED_BYTES, each


def test_the_bound_is_exceeded_by_a_tile_too_large(monkeypatch):
    from kernels import offline

    rows = {"ssd_prefill": [{"BLOCK_P": 64, "num_warps": 8, "num_stages": 1}]}
    table = {**config.table(offline.HOPPER[0]), **rows}
    monkeypatch.setattr(config, "table", lambda device: table)
    (found,) = offline.usage(OPERATIONS["ssd_prefill"])
    assert found.stack_bytes > DEFAULT_BOUND
