"""The causal convolution against its definition in float64; windows are raw inputs, to the bit."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

from kernels import checks, conv  # noqa: E402

RUNNABLE = checks.runnable()


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """In this mode torch fills every new tensor with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CASES = {
    "one token": {"lengths": [1], "states_at": [(0, 1)]},
    "shorter than the window": {"lengths": [2, 1, 0, 5], "states_at": [(0, 1), (3, 2)]},
    "resumed": {"lengths": [37, 3], "starts": [100, 7], "states_at": [(0, 101), (1, 10), (0, 130)]},
    "nothing at all": {"lengths": [0, 0]},
}


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("channels,width,windows", [(5, 4, True), (130, 4, False), (33, 2, True)])
def test_prefill_is_the_definition(name, channels, width, windows, backend, device):
    case = CASES[name]
    u, weight, bias = (
        normal(sum(case["lengths"]), channels),
        normal(channels, width),
        normal(channels),
    )
    first = normal(len(case["lengths"]), width - 1, channels, seed=3) if windows else None
    wide = None if first is None else first.double()
    right = conv.prefill_naive(u.double(), weight.double(), bias.double(), initial=wide, **case)
    given = [each.to(device) for each in (checks.poisoned(u, 4, 40), weight, bias)]
    first = first if first is None else first.to(device)
    found = conv.prefill(*given, initial=first, backend=backend, **case)
    assert checks.error(found.y, right[0]) < 1e-6
    for mine, exact in zip(found[1:], right[1:], strict=True):
        assert torch.equal(mine.cpu(), exact.float())


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_without_activation(dtype, backend, device):
    u, weight = normal(40, 12, dtype=dtype), normal(12, 4, dtype=dtype)
    right = conv.prefill_naive(u.double(), weight.double(), lengths=[40], silu=False)
    found = conv.prefill(u.to(device), weight.to(device), lengths=[40], silu=False, backend=backend)
    assert checks.error(found.y, right[0]) < checks.TOLERANCE[dtype]


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("cut", [1, 2, 31])
def test_any_cut_and_updates_give_the_same_bits(cut, backend, device):
    u, weight, bias = (e.to(device) for e in (normal(40, 32), normal(32, 4), normal(32)))
    whole = conv.prefill(u, weight, bias, lengths=[40], states_at=[(0, cut)], backend=backend)
    rest = conv.prefill(
        u[cut:], weight, bias, lengths=[40 - cut], starts=[cut],
        initial=whole.windows, backend=backend,
    )  # fmt: skip
    assert torch.equal(rest.y, whole.y[cut:]) and torch.equal(rest.last, whole.last)
    pool = torch.full((4, 2, 3, 32), torch.nan, device=device)[:, 1]
    pool[2] = whole.windows[0]
    slots = torch.tensor([conv.PAD, 2], device=device)
    for t in range(cut, 40):
        both = torch.stack([torch.full_like(u[t], torch.nan), u[t]])
        y = conv.update(pool, slots, both, weight, bias, backend=backend)
        assert not y[0].any()
        assert checks.error(y[1], whole.y[t]) < 1e-6
    assert torch.equal(pool[2], whole.last[0]) and pool[[0, 1, 3]].isnan().all()


def test_shapes_are_named():
    with pytest.raises(ValueError, match=r"initial has shape \(1, 4, 8\): allowed is \(1, 3, 8\)"):
        conv.prefill(normal(3, 8), normal(8, 4), lengths=[3], initial=torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match=r"windows of \(2, 8\): allowed is \(3, 8\)"):
        conv.update(torch.zeros(5, 2, 8), torch.zeros(1).long(), normal(1, 8), normal(8, 4))
