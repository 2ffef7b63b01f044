"""The SSD scan against the recurrence in float64: both backends, odd sizes, poisoned memory."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

from kernels import checks, ssd  # noqa: E402

RUNNABLE = checks.runnable()


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """In this mode torch fills every new tensor with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(tokens, heads=3, p=8, groups=1, n=16, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "x": normal(tokens, heads, p),
        "dt": normal(tokens, heads),
        "A": -torch.rand(heads, generator=g, dtype=torch.float64).to(dtype) * 4 - 0.1,
        "B": normal(tokens, groups, n),
        "C": normal(tokens, groups, n),
        "D": normal(heads),
        "dt_bias": normal(heads) - 2,
    }


def judge(given, **options):
    wide = {k: v.double() for k, v in given.items()}
    options = {k: v.double() if torch.is_tensor(v) else v for k, v in options.items()}
    return ssd.prefill_naive(**wide, softplus=True, **options)


def run(given, backend, device, poison=True, **options):
    given = {k: v.to(device) for k, v in given.items()}
    if poison:
        given = {k: checks.poisoned(v) if k in "x dt B C" else v for k, v in given.items()}
    options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
    return ssd.prefill(**given, softplus=True, backend=backend, **options)


def close(found, expected, dtype=torch.float32):
    for mine, right in zip(found, expected, strict=True):
        assert checks.error(mine, right) < checks.TOLERANCE[dtype]


CASES = {
    "one token": {"lengths": [1]},
    "one ragged chunk": {"lengths": [37]},
    "whole chunks": {"lengths": [64], "chunk": 32},
    "batch with an empty sequence": {"lengths": [17, 0, 33], "chunk": 16},
    "resumed off the grid": {"lengths": [30, 40], "starts": [20, 0], "chunk": 32},
    "states off the grid": {
        "lengths": [50, 20],
        "chunk": 32,
        "states_at": [(1, 20), (0, 1), (0, 33), (0, 50), (1, 7)],
    },
    "states of resumed": {
        "lengths": [45],
        "starts": [100],
        "chunk": 16,
        "states_at": [(0, 104), (0, 112)],
    },
}


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("name", CASES)
def test_prefill_is_the_recurrence(name, backend, device):
    case = CASES[name]
    given = inputs(sum(case["lengths"]))
    first = torch.randn(len(case["lengths"]), 3, 8, 16, generator=torch.Generator().manual_seed(9))
    expected = judge(given, initial=first, **{k: v for k, v in case.items() if k != "chunk"})
    close(run(given, backend, device, initial=first, **case), expected)


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (4, 17, 2, 5), (6, 32, 3, 33), (2, 70, 1, 64)])
def test_odd_sizes(shape, backend, device):
    given = inputs(41, *shape)
    close(run(given, backend, device, lengths=[41], chunk=32), judge(given, lengths=[41]))


@pytest.mark.parametrize("backend,device", RUNNABLE)
def test_slow_and_fast_heads(backend, device):
    given = inputs(60, heads=4)
    given["dt_bias"] = torch.tensor([-12.0, -7.0, 3.0, 30.0])
    given["dt"] = given["dt"] * 0.1
    found, expected = run(given, backend, device, lengths=[60]), judge(given, lengths=[60])
    for head in range(4):
        assert checks.error(found.last[:, head], expected[1][:, head]) < 5e-6


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(dtype, backend, device):
    given = inputs(70, heads=2, p=16, dtype=dtype)
    close(run(given, backend, device, lengths=[70]), judge(given, lengths=[70]), dtype)


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("cut", [32, 96, 50])
def test_a_resumed_scan_is_the_whole_to_the_bit(cut, backend, device):
    """On the grid always; off it, where the whole run leaves a state there too."""
    given, wanted = inputs(130, heads=2), [(0, cut), (0, 130)]
    whole = run(given, backend, device, lengths=[130], chunk=32, states_at=wanted)
    per_token = ("x", "dt", "B", "C")
    rest = {k: v[cut:] if k in per_token else v for k, v in given.items()}
    again = run(
        rest, backend, device, lengths=[130 - cut], starts=[cut], chunk=32,
        initial=whole.states[:1], states_at=[(0, 130)],
    )  # fmt: skip
    assert torch.equal(again.y, whole.y[cut:])
    assert torch.equal(again.last, whole.last) and torch.equal(again.states[0], whole.states[1])
    if cut % 32 == 0:
        silent = run(given, backend, device, lengths=[130], chunk=32)
        assert torch.equal(silent.y, whole.y) and torch.equal(silent.last, whole.last)


@pytest.mark.parametrize("backend,device", RUNNABLE)
def test_a_sequence_does_not_see_its_neighbours(backend, device):
    given = inputs(48)
    alone = run({k: v[:20] if k in "x dt B C" else v for k, v in given.items()},
                backend, device, lengths=[20], chunk=16)  # fmt: skip
    both = run(given, backend, device, lengths=[20, 28], chunk=16)
    assert torch.equal(alone.y, both.y[:20]) and torch.equal(alone.last[0], both.last[0])


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("shape", [(3, 8, 1, 16), (4, 17, 2, 5), (2, 64, 1, 128)])
@pytest.mark.parametrize("strided", [False, True])
def test_update_is_the_recurrence(shape, strided, backend, device):
    heads, p, _, n = shape
    given = inputs(4, *shape, seed=3)
    pool = torch.full((7, 2, heads, p, n), torch.nan)[:, 1] if strided else None
    pool = torch.full((7, heads, p, n), torch.nan) if pool is None else pool
    slots = torch.tensor([5, ssd.PAD, 0, 3])
    live = slots >= 0
    pool[slots[live]] = torch.randn(3, heads, p, n, generator=torch.Generator().manual_seed(4))
    before = pool.clone()
    given["x"][1] = torch.nan
    dt = torch.nn.functional.softplus(given["dt"].double() + given["dt_bias"])
    where = {k: v.to(device) for k, v in given.items()}
    held = pool.to(device) if device != "cpu" else pool
    y = ssd.update(held, slots.to(device), **where, softplus=True, backend=backend)
    for row in (0, 2, 3):
        right, state = ssd.update_naive(
            before[slots[row]].double(), given["x"][row].double(), dt[row], given["A"].double(),
            given["B"][row].double(), given["C"][row].double(), given["D"].double(),
        )  # fmt: skip
        assert checks.error(y[row], right) < 5e-6
        assert checks.error(held[slots[row]], state) < 5e-6
    assert not y[1].any()
    assert held[[1, 2, 4, 6]].isnan().all()


@pytest.mark.parametrize("backend,device", RUNNABLE)
def test_updates_continue_a_prefill(backend, device):
    given = inputs(40, heads=2)
    whole = judge(given, lengths=[40])
    first = {k: v[:35] if k in "x dt B C" else v for k, v in given.items()}
    pool = run(first, backend, device, lengths=[35]).last.repeat(3, 1, 1, 1)
    for t in range(35, 40):
        row = {k: (v[t : t + 1] if k in "x dt B C" else v).to(device) for k, v in given.items()}
        y = ssd.update(
            pool, torch.tensor([1], device=device), **row, softplus=True, backend=backend
        )
        assert checks.error(y[0], whole[0][t]) < 1e-5
    assert checks.error(pool[1], whole[1][0]) < 5e-6


@pytest.mark.skipif(("torch", "cpu") not in RUNNABLE, reason="kernels have no float64")
def test_the_chunked_form_is_exact_in_float64():
    given = inputs(100, 4, 8, 2, 16, dtype=torch.float64)
    options = {"lengths": [70, 30], "states_at": [(0, 45), (1, 30)]}
    close(run(given, "torch", "cpu", chunk=32, **options), judge(given, **options), torch.float64)


@pytest.mark.slow
@pytest.mark.skipif(("torch", "cpu") not in RUNNABLE, reason="compiles the torch reference")
def test_compiled_reference_agrees(monkeypatch):
    """``aot_eager`` traces as inductor would, without its compile time."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: real(f, backend="aot_eager", **k))
    given = inputs(40)
    close(run(given, "compiled", "cpu", lengths=[40]), judge(given, lengths=[40]))


@pytest.mark.parametrize(
    "change,words",
    [
        ({"lengths": [9]}, "add up to 9: allowed is 10"),
        ({"lengths": [10], "chunk": 48}, "chunk 48.*nearest is 32"),
        ({"lengths": [10], "states_at": [(0, 11)]}, "state at 11.*nearest is 10"),
        ({"lengths": [10], "states_at": [(1, 3)]}, "state of sequence 1"),
        ({"lengths": [10], "states_at": [(0, 3), (0, 3)]}, "named twice"),
        ({"lengths": [10], "starts": [-1]}, "starts"),
        ({"lengths": [10], "initial": torch.zeros(2, 3, 8, 16)}, "2 initial states: allowed is 1"),
        (
            {"lengths": [10], "initial": torch.zeros(1, 3, 8, 15)},
            r"initial has shape.*\(1, 3, 8, 16\)",
        ),
        ({"lengths": [10], "backend": "cuda"}, "backend 'cuda'.*nearest is 'torch'"),
    ],
)
def test_errors_name_what_is_allowed(change, words):
    with pytest.raises(ValueError, match=words):
        ssd.prefill(**inputs(10), **change)
