"""Attention through a block table against its definition in float64; KV elsewhere is NaN."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

from kernels import attention, checks  # noqa: E402

RUNNABLE = checks.runnable()


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """In this mode torch fills every new tensor with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def world(contexts, heads, keys, d, tokens=16, dtype=torch.float32, seed=0):
    """Pools that are NaN but for the contexts, whose blocks lie in no order; unused columns of the
    table are padding."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-c // tokens) for c in contexts]
    pools = [torch.full((sum(counts) + 3, tokens, keys, d), torch.nan, dtype=dtype) for _ in "kv"]
    free = torch.randperm(sum(counts) + 3, generator=g).tolist()
    table = torch.full((len(contexts), max(counts, default=0) + 1), -1, dtype=torch.int32)
    for s, context in enumerate(contexts):
        for column in range(counts[s]):
            table[s, column] = block = free.pop()
            filled = min(tokens, context - column * tokens)
            for pool in pools:
                pool[block, :filled] = torch.randn(filled, keys, d, generator=g).to(dtype)
    return (*pools, table), torch.randn(sum(contexts), heads, d, generator=g).to(dtype)


def wide(tensors):
    return [t.double() if t.is_floating_point() else t for t in tensors]


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize(
    "starts,lengths",
    [((0,), (1,)), ((0, 0), (21, 40)), ((33, 0, 7), (20, 0, 5)), ((100,), (3,))],
)
@pytest.mark.parametrize("heads,keys,d", [(4, 1, 32), (2, 2, 5), (6, 2, 17)])
def test_prefill_over_a_cached_prefix(heads, keys, d, starts, lengths, backend, device):
    contexts = [a + b for a, b in zip(starts, lengths, strict=True)]
    pools, q = world(contexts, heads, keys, d)
    q = q[: sum(lengths)]
    right = attention.prefill_naive(*wide([q, *pools]), lengths=lengths, starts=starts)
    given = [each.to(device) for each in (checks.poisoned(q), *pools)]
    found = attention.prefill(*given, lengths=lengths, starts=starts, backend=backend)
    assert checks.error(found, right) < 5e-6


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("heads,keys,d,tokens", [(4, 1, 32, 16), (6, 2, 17, 5), (2, 2, 8, 64)])
def test_decode_beside_padding(heads, keys, d, tokens, backend, device):
    contexts = [1, 70, 0, 16]
    pools, q = world(contexts, heads, keys, d, tokens)
    q = q[:4].clone()
    q[2] = torch.nan
    given = [each.to(device) for each in (q, *pools, torch.tensor(contexts))]
    found = attention.decode(*given, backend=backend)
    for s in (0, 1, 3):
        one = [q[s : s + 1], *pools[:2], pools[2][s : s + 1]]
        right = attention.prefill_naive(*wide(one), lengths=[1], starts=[contexts[s] - 1])
        assert checks.error(found[s : s + 1], right) < 5e-6
    assert not found[2].any()


@pytest.mark.parametrize("backend,device", RUNNABLE)
def test_narrow_pools(backend, device):
    pools, q = world([50], 4, 2, 16, dtype=torch.bfloat16)
    right = attention.prefill_naive(*wide([q, *pools]), lengths=[50], starts=[0])
    given = [each.to(device) for each in (q, *pools)]
    found = attention.prefill(*given, lengths=[50], backend=backend)
    assert checks.error(found, right) < checks.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("backend,device", RUNNABLE)
def test_write_then_read(backend, device):
    """Keys written token by token and at once are read alike; a padding token goes nowhere."""
    pools, q = world([20], 2, 1, 8, tokens=8)
    k_pool, v_pool, table = (each.to(device) for each in pools)
    fresh = [torch.full_like(pool, torch.nan) for pool in (k_pool, v_pool)]
    places = torch.tensor(
        [int(table[0, p // 8]) * 8 + p % 8 for p in range(20)] + [attention.PAD], device=device
    )
    rows = torch.cat([places[:-1], places[:1]])
    new = [pool.flatten(0, 1)[rows].clone() for pool in (k_pool, v_pool)]
    attention.write(*fresh, *new, places, backend=backend)
    for mine, right in zip(fresh, (k_pool, v_pool), strict=True):
        assert torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0))
    whole, again = (
        attention.prefill(q.to(device), *each, table, lengths=[20], backend=backend)
        for each in ((k_pool, v_pool), fresh)
    )
    assert torch.equal(whole, again)


def test_shapes_are_named():
    pools, q = world([5], 4, 2, 8)
    with pytest.raises(ValueError, match="2 lengths, 1 starts: allowed is one"):
        attention.prefill(q, *pools, lengths=[2, 3], starts=[0])
    with pytest.raises(ValueError, match="2 key heads: allowed are divisors of 3"):
        attention.prefill(q[:, :3], *pools, lengths=[5])
