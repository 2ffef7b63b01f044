"""Moving states between slots, and as int8: to the bit, and nothing beside what was named."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

from kernels import checks, int8, state  # noqa: E402

RUNNABLE = checks.runnable()
VECTORS = Path(__file__).parents[2] / "shared/golden/sglang_int8_vectors.json"


def filled(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pool_of(values, slots, strided, device):
    """NaN everywhere but in ``slots``; ``strided``: a layer of a pool of three."""
    whole = torch.full((9, 3, *values.shape[1:]), torch.nan, dtype=values.dtype, device=device)
    pool = whole[:, 1] if strided else whole[:, 1].contiguous()
    pool[slots] = values.to(device)
    return pool


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (4, 7, 33), (2, 64, 40)])
def test_gather_scatter_and_copy(shape, strided, backend, device):
    values, slots = filled(3, *shape), torch.tensor([6, 0, 3], device=device)
    source = pool_of(values, slots, strided, device)
    with_padding = torch.tensor([3, state.PAD, 6], device=device)
    found = state.gather(source, with_padding, backend=backend)
    assert torch.equal(found.cpu(), torch.stack([values[2], torch.zeros(shape), values[0]]))
    target = pool_of(values[:0], slots[:0], strided, device)
    to = torch.tensor([8, 2, 1], device=device)
    state.copy(source, target, with_padding, to, backend=backend)
    assert torch.equal(target[[8, 1]].cpu(), values[[2, 0]])
    assert target[[0, 2, 3, 4, 5, 6, 7]].isnan().all()
    state.scatter(target, with_padding, found, backend=backend)
    assert torch.equal(target[[3, 6]].cpu(), values[[2, 0]]) and target[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_to_a_narrower_pool_rounds_to_nearest_even(dtype, backend, device):
    values = torch.cat([filled(1, 4000) * 3, torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, 0.0]])], 1)
    target = torch.zeros(2, values.shape[1], dtype=dtype, device=device)
    state.scatter(target, torch.tensor([1], device=device), values.to(device), backend=backend)
    assert torch.equal(target[1].cpu(), values[0].to(dtype)) and not target[0].any()


def test_states_of_two_shapes_are_refused():
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="allowed is"):
        state.copy(torch.zeros(2, 3), torch.zeros(2, 4), one, one)
    with pytest.raises(ValueError, match="contiguous"):
        state.gather(torch.zeros(2, 4, 3).transpose(1, 2), one)


def vectors():
    return json.loads(VECTORS.read_text()) if VECTORS.exists() else []


@pytest.mark.skipif(not VECTORS.exists(), reason="the recorded vectors are not beside the project")
@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("case", vectors())
def test_int8_is_sglangs_to_the_bit(case, backend, device):
    dtype = getattr(torch, case["dtype"])
    given = torch.tensor(case["state"], dtype=dtype, device=device)
    found = int8.quantise(given, backend=backend)
    back = int8.dequantise(found, backend=backend)
    assert found.values.tolist() == case["q"]
    assert found.scale.dtype == dtype and found.scale.tolist() == case["scale"]
    assert back.dtype == dtype and back.tolist() == case["dequant"]


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strided", [False, True])
def test_int8_over_slots(strided, dtype, backend, device):
    values, slots = filled(2, 3, 17, 40, dtype=dtype, seed=5), torch.tensor([4, 1], device=device)
    pool = pool_of(values, slots, strided, device)
    saved = int8.Int8(
        torch.full((6, 3, 17, 40), 99, dtype=torch.int8, device=device),
        torch.full((6, 3, 1, 40), torch.nan, dtype=dtype, device=device),
    )
    read = torch.tensor([4, int8.PAD, 1], device=device)
    kept = torch.tensor([5, 2, 0], device=device)
    int8.save(pool, read, saved, kept, backend=backend)
    expected = int8.quantise_torch(values)
    assert torch.equal(saved.values[[5, 0]].cpu(), expected[0])
    assert torch.equal(saved.scale[[5, 0]].cpu(), expected[1])
    assert (saved.values[1:5] == 99).all() and saved.scale[1:5].isnan().all()
    target = pool_of(values[:0], slots[:0], strided, device)
    int8.restore(
        saved, kept, target, torch.tensor([3, 7, int8.PAD], device=device), backend=backend
    )
    assert torch.equal(target[3].cpu(), int8.dequantise_torch(*expected)[0])
    assert target[[0, 1, 2, 4, 5, 6, 8]].isnan().all()
    if dtype == torch.float32:
        gap = (target[3].cpu() - values[0]).abs()
        assert (gap <= expected[1][0] * 0.5001).all() and gap.max() > 0
