"""The gated delta rule against the recurrence in float64: both backends, poisoned memory."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

from kernels import checks, gdn  # noqa: E402

RUNNABLE = checks.runnable()


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """In this mode torch fills every new tensor with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(tokens, heads=4, keys=2, k=8, v=10, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    return {
        "q": normal(tokens, keys, k),
        "k": normal(tokens, keys, k),
        "v": normal(tokens, heads, v),
        "g": -torch.rand(tokens, heads, generator=g).to(dtype),
        "beta": torch.rand(tokens, heads, generator=g).to(dtype),
    }


def judge(given, **options):
    wide = {k: v.double() for k, v in given.items()}
    options = {k: v.double() if torch.is_tensor(v) else v for k, v in options.items()}
    return gdn.prefill_naive(**wide, **options)


def run(given, backend, device, **options):
    given = {k: checks.poisoned(v).to(device) for k, v in given.items()}
    options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
    return gdn.prefill(**given, backend=backend, **options)


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize(
    "case,shape",
    [
        ({"lengths": [1]}, (1, 1, 1, 1)),
        (
            {"lengths": [9, 0, 23], "chunk": 16, "states_at": [(2, 23), (2, 1), (0, 9)]},
            (4, 2, 8, 10),
        ),
        ({"lengths": [37], "starts": [5], "chunk": 16, "states_at": [(0, 20)]}, (2, 2, 33, 17)),
    ],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_prefill_is_the_recurrence(normalise, case, shape, backend, device):
    given = inputs(sum(case["lengths"]), *shape)
    if not normalise:
        given["k"] *= shape[2] ** -0.5
    first = torch.randn(
        len(case["lengths"]), shape[0], shape[3], shape[2],
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    options = {"initial": first, "normalise": normalise}
    right = judge(given, **options, **{k: v for k, v in case.items() if k != "chunk"})
    for mine, exact in zip(run(given, backend, device, **options, **case), right, strict=True):
        assert checks.error(mine, exact) < 1e-5


@pytest.mark.skipif(("torch", "cpu") not in RUNNABLE, reason="kernels have no float64")
def test_the_chunked_form_is_exact_in_float64():
    given = {k: v.double() for k, v in inputs(100).items()}
    options = {"lengths": [70, 30], "states_at": [(0, 45), (1, 30)]}
    for mine, right in zip(
        gdn.prefill(**given, backend="torch", chunk=32, **options),
        judge(given, **options),
        strict=True,
    ):
        assert checks.error(mine, right) < 1e-12


@pytest.mark.parametrize("backend,device", RUNNABLE)
def test_narrow_inputs(backend, device):
    given = inputs(20, dtype=torch.bfloat16)
    found, right = run(given, backend, device, lengths=[20]), judge(given, lengths=[20])
    assert checks.error(found.y, right[0]) < 5e-3 and checks.error(found.last, right[1]) < 5e-3


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("cut", [16, 19])
def test_a_resumed_scan_is_the_whole_to_the_bit(cut, backend, device):
    given = inputs(24, heads=1, keys=1)
    whole = run(given, backend, device, lengths=[24], chunk=16, states_at=[(0, cut)])
    rest = {k: v[cut:] for k, v in given.items()}
    again = run(
        rest, backend, device, lengths=[24 - cut], starts=[cut], chunk=16, initial=whole.states
    )
    assert torch.equal(again.y, whole.y[cut:]) and torch.equal(again.last, whole.last)


@pytest.mark.parametrize("backend,device", RUNNABLE)
def test_update_continues_a_prefill_beside_padding(backend, device):
    given = inputs(12)
    right = judge(given, lengths=[12])
    first = {k: v[:9] for k, v in given.items()}
    pool = torch.full((3, 2, 4, 10, 8), torch.nan, device=device)[:, 1]
    pool[2] = run(first, backend, device, lengths=[9]).last[0]
    slots = torch.tensor([2, gdn.PAD], device=device)
    for t in range(9, 12):
        now = {k: v[[t, t]].to(device) for k, v in given.items()}
        now["v"][1] = torch.nan
        y = gdn.update(pool, slots, **now, backend=backend)
        assert checks.error(y[0], right[0][t]) < 1e-5 and not y[1].any()
    assert checks.error(pool[2], right[1][0]) < 1e-5 and pool[:2].isnan().all()


@pytest.mark.parametrize("backend,device", RUNNABLE)
@pytest.mark.parametrize("strength,growth", [(0.5, 0.5), (1.0, 0.0), (2.3, -1.3)])
def test_an_error_along_a_key_is_multiplied_by_one_minus_beta(strength, growth, backend, device):
    """Ungated, without normalised keys: beta |k|^2 above 2 makes an error grow."""
    key = torch.zeros(1, 1, 8)
    key[..., 3] = 1.0
    given = {
        "q": key, "k": key, "v": torch.randn(1, 1, 5, generator=torch.Generator().manual_seed(0)),
        "g": torch.zeros(1, 1), "beta": torch.full((1, 1), strength),
    }  # fmt: skip
    first, off = torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8)
    off[..., 3] = 0.01
    clean, wrong = (
        run(given, backend, device, lengths=[1], initial=each, normalise=False).last.cpu()
        for each in (first, off)
    )
    assert torch.allclose(wrong - clean, off * growth, atol=1e-6)


def test_shapes_are_named():
    with pytest.raises(ValueError, match="3 key heads: allowed are divisors of 4, nearest is 2"):
        gdn.prefill(**inputs(4, heads=4, keys=3), lengths=[4])
