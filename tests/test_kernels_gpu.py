"""On a GPU: every Triton kernel at full size against the torch reference on the same device."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

from kernels import checks, full_size  # noqa: E402
from kernels.full_size import Sizes  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
EXACT = {"ssd_prefill_fp32": 1e-5, "state": 0.0}


@pytest.mark.parametrize("name", full_size.operations(Sizes()))
def test_triton_agrees_with_torch(name):
    found, right = (
        full_size.operations(Sizes(device="cuda", backend=backend))[name]()
        for backend in ("triton", "torch")
    )
    for mine, exact in zip(found, right, strict=True):
        assert checks.error(mine, exact) <= EXACT.get(name, checks.TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("name", full_size.operations(Sizes()))
def test_two_runs_give_the_same_bits(name):
    one, two = (
        full_size.operations(Sizes(device="cuda", backend="triton"))[name]() for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
