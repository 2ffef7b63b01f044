"""Mamba-1's selective scan and linear attention, and how errors in a state travel."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

from kernels import affine, checks, linear, scan  # noqa: E402

RUNNABLE = checks.runnable()
PER_TOKEN = ("u", "dt", "B", "C")


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """In this mode torch fills every new tensor with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(tokens, channels=10, n=16, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    return {
        "u": normal(tokens, channels),
        "dt": normal(tokens, channels),
        "A": -torch.rand(channels, n, generator=g).to(dtype) * 8 - 0.1,
        "B": normal(tokens, n),
        "C": normal(tokens, n),
        "D": normal(channels),
        "dt_bias": normal(channels) - 2,
    }


def judge(given, **options):
    wide = {k: v.double() for k, v in given.items()}
    options = {k: v.double() if torch.is_tensor(v) else v for k, v in options.items()}
    return scan.prefill_naive(**wide, softplus=True, **options)


def run(given, backend, device, **options):
    given = {k: checks.poisoned(v) if k in PER_TOKEN else v for k, v in given.items()}
    given = {k: v.to(device) for k, v in given.items()}
    options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
    return scan.prefill(**given, softplus=True, backend=backend, **options)


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize(
    "case,shape",
    [
        ({"lengths": [1]}, (1, 1)),
        ({"lengths": [9, 0, 23], "chunk": 16, "states_at": [(2, 23), (2, 1), (0, 9)]}, (10, 16)),
        ({"lengths": [37], "starts": [5], "chunk": 16, "states_at": [(0, 20), (0, 16)]}, (70, 5)),
    ],
)
def test_prefill_is_the_recurrence(case, shape, backend, device):
    given = inputs(sum(case["lengths"]), *shape)
    first = torch.randn(len(case["lengths"]), *shape, generator=torch.Generator().manual_seed(1))
    expected = judge(given, initial=first, **{k: v for k, v in case.items() if k != "chunk"})
    for mine, right in zip(
        run(given, backend, device, initial=first, **case), expected, strict=True
    ):
        assert checks.error(mine, right) < 5e-6


@pytest.mark.parametrize("backend,device", RUNNABLE)
def test_narrow_inputs(backend, device):
    given = inputs(20, dtype=torch.bfloat16)
    found, expected = run(given, backend, device, lengths=[20]), judge(given, lengths=[20])
    assert (
        checks.error(found.y, expected[0]) < 5e-3 and checks.error(found.last, expected[1]) < 5e-3
    )


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("cut", [16, 21])
def test_a_resumed_scan_is_the_whole_to_the_bit(cut, backend, device):
    given = inputs(40)
    whole = run(given, backend, device, lengths=[40], chunk=16, states_at=[(0, cut)])
    rest = {k: v[cut:] if k in PER_TOKEN else v for k, v in given.items()}
    again = run(
        rest, backend, device, lengths=[40 - cut], starts=[cut], chunk=16, initial=whole.states
    )
    assert torch.equal(again.y, whole.y[cut:]) and torch.equal(again.last, whole.last)


@pytest.mark.parametrize("backend,device", RUNNABLE)
def test_update_continues_a_prefill_beside_padding(backend, device):
    given = inputs(12)
    expected = judge(given, lengths=[12])
    first = {k: v[:9] if k in PER_TOKEN else v for k, v in given.items()}
    pool = torch.full((3, 2, 10, 16), torch.nan, device=device)[:, 1]
    pool[2] = run(first, backend, device, lengths=[9]).last[0]
    slots = torch.tensor([2, scan.PAD], device=device)
    for t in range(9, 12):
        now = {k: v[[t, t]] if k in PER_TOKEN else v for k, v in given.items()}
        now["u"][1] = torch.nan
        now = {k: v.to(device) for k, v in now.items()}
        y = scan.update(pool, slots, **now, softplus=True, backend=backend)
        assert checks.error(y[0], expected[0][t]) < 5e-6 and not y[1].any()
    assert checks.error(pool[2], expected[1][0]) < 5e-6 and pool[:2].isnan().all()


def attention_by_definition(q, k, v, decay):
    state, out = torch.zeros(v.shape[1], v.shape[2], k.shape[2], dtype=v.dtype), []
    for t in range(len(q)):
        state = decay[:, None, None] * state + torch.einsum("hv,hk->hvk", v[t], k[t])
        out.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(out), state


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("gated", [True, False])
def test_linear_attention_is_its_definition(gated, backend, device):
    g = torch.Generator().manual_seed(2)
    q, k = (torch.randn(45, 3, 9, generator=g) for _ in range(2))
    v, decay = torch.randn(45, 3, 12, generator=g), torch.tensor([0.5, 0.97, 1.0])
    factors = decay.double() if gated else torch.ones(3, dtype=torch.float64)
    y, state = attention_by_definition(q.double(), k.double(), v.double(), factors)
    decay = decay.to(device) if gated else None
    on = [each.to(device) for each in (q, k, v)]
    found = linear.prefill(*(each[:40] for each in on), decay, lengths=[40], backend=backend)
    assert checks.error(found.y, y[:40]) < 5e-6
    pool, slot = found.last, torch.tensor([0], device=device)
    for t in range(40, 45):
        now = (each[t : t + 1] for each in on)
        step = linear.update(pool, slot, *now, decay, backend=backend)
        assert checks.error(step[0], y[t]) < 1e-5
    assert checks.error(pool[0], state) < 5e-6


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("factor,after", [(0.9, 0.00121577), (1.1, 0.0672750)])
def test_an_error_in_a_state_is_multiplied_by_all_later_factors(factor, after, backend, device):
    """0.01 becomes 0.0012 with factor 0.9 and 0.067 with 1.1 after 20 tokens."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(20, 2, 4, generator=g).to(device) for _ in range(3))
    first = torch.randn(1, 2, 4, 4, generator=g).to(device)
    decay = torch.full((2,), factor, device=device)
    right, wrong = (
        linear.prefill(q, k, v, decay, lengths=[20], initial=each, backend=backend).last
        for each in (first, first + 0.01)
    )
    assert torch.allclose(wrong - right, torch.full_like(right, after), rtol=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_steps_compose_associatively(seed):
    g = torch.Generator().manual_seed(seed)
    one, two, three = (
        (torch.randn(7, generator=g).double(), torch.randn(7, generator=g).double())
        for _ in range(3)
    )
    left = affine.compose(affine.compose(one, two), three)
    right = affine.compose(one, affine.compose(two, three))
    state = torch.randn(7, generator=g).double()
    by_hand = state
    for a, b in (one, two, three):
        by_hand = a * by_hand + b
    for a, b in (left, right):
        assert torch.allclose(a * state + b, by_hand, rtol=1e-13, atol=1e-14)
    assert not torch.allclose(affine.compose(two, one)[1], affine.compose(one, two)[1])


@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_a_scan_is_every_prefix_composed(length):
    g = torch.Generator().manual_seed(length)
    a, b = (torch.randn(length, 3, generator=g).double() for _ in range(2))
    found, step = affine.scan(a, b), (torch.ones(3).double(), torch.zeros(3).double())
    for t in range(length):
        step = affine.compose(step, (a[t], b[t]))
        for mine, right in zip(found, step, strict=True):
            assert torch.allclose(mine[t], right, rtol=1e-12, atol=1e-12)
