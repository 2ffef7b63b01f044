"""The decoder: against a definition in float64, and reuse against a full prefill."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")

from torch.nn.functional import silu  # noqa: E402

from executor.batch import Decode, Prefill  # noqa: E402
from executor.decoder import Decoder, random_weights  # noqa: E402
from executor.layers.attention import SelfAttention  # noqa: E402
from executor.layers.common import Numerics, rms_norm  # noqa: E402
from executor.layers.mamba2 import Mamba2  # noqa: E402
from executor.pools import Int8Pool, KvPool, StatePool  # noqa: E402
from kernels import checks, conv, ssd  # noqa: E402
from sim.models import load  # noqa: E402

EXACT = Numerics(row_block=64, backend="torch")
BLOCK = 16
LENGTH = 200
LIMIT = 5e-6  # logits, fp32 on a CPU


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["nano", "tiny"])
def model(request):
    return load(request.param)


@pytest.fixture(scope="module")
def weights(model):
    return random_weights(model, seed=3)


def decoder(model, weights, numerics=EXACT):
    return Decoder(weights, StatePool(model, 12), KvPool(model, 64, BLOCK), numerics)


def prompt(model, length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, model.vocab_size, length)


def blocks(first, length):
    return list(range(first, first - (-length // BLOCK)))


def chunk(tokens, start, end, slot=0, first=0, **more):
    return Prefill(tokens[start:end], start, slot, blocks(first, end), **more)


def by_definition(weights, tokens):
    """The whole sequence at once in float64, by the kernels' naive definitions."""
    x = weights.embedding[torch.from_numpy(tokens)].double()
    for layer in weights.layers:
        wide = {k: v.double() for k, v in vars(layer).items() if torch.is_tensor(v)}
        normed = rms_norm(x, wide["norm"])
        if isinstance(layer, Mamba2):
            x = x + mamba_by_definition(layer, wide, normed)
        elif isinstance(layer, SelfAttention):
            x = x + attention_by_definition(layer.shape, wide, normed)
        else:
            x = x + torch.relu(normed @ wide["up"].T).square() @ wide["down"].T
    return rms_norm(x, weights.norm.double()) @ weights.head.double().T


def mamba_by_definition(layer, wide, x):
    inner, shared = layer.heads * layer.width, layer.groups * layer.columns
    gate, u, dt = (x @ wide["inp"].T).split([inner, inner + 2 * shared, layer.heads], 1)
    y = conv.prefill_naive(u, wide["taps"], wide["tap_bias"], lengths=[len(x)])[0]
    values, b, c = y.split([inner, shared, shared], 1)
    shape = (len(x), layer.groups, layer.columns)
    y = ssd.prefill_naive(
        values.reshape(len(x), layer.heads, layer.width), dt, wide["A"], b.reshape(shape),
        c.reshape(shape), wide["D"], dt_bias=wide["dt_bias"], softplus=True, lengths=[len(x)],
    )[0].flatten(1) * silu(gate)  # fmt: skip
    assert layer.groups == 1
    return rms_norm(y, wide["gate_norm"]) @ wide["out"].T


def attention_by_definition(shape, wide, x):
    d, share = shape.head_dim, shape.num_query_heads // shape.num_kv_heads
    sizes = [shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = (x @ wide["qkv"].T).view(len(x), -1, d).split(sizes, 1)
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
    mask = torch.ones(len(x), len(x)).tril() == 0
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ wide["out"].T


def test_prefill_and_decode_are_the_definition(model, weights):
    tokens = prompt(model, 70)
    right = by_definition(weights, tokens)
    made = decoder(model, weights)
    assert checks.error(made.step([chunk(tokens, 0, 64)])[0], right[63]) < LIMIT
    for at in range(64, 70):
        logits = made.step(decodes=[Decode(int(tokens[at]), at, 0, blocks(0, at + 1))])
        assert checks.error(logits[0], right[at]) < LIMIT
    assert right[-1].std() > 0.1  # logits that say something


def whole(model, weights, tokens, saves=()):
    made = decoder(model, weights)
    logits = made.step([chunk(tokens, 0, len(tokens), saves=saves)])
    return made, logits


@pytest.mark.parametrize("cut", [64, 128, 3, 100, 199])
def test_a_restored_checkpoint_gives_a_full_prefill(cut, model, weights):
    """States to the bit where both runs leave one; without a save that holds on the grid."""
    tokens = prompt(model)
    made, right = whole(model, weights, tokens, [(cut, 5)])
    made.states.copy([5], [7])
    found = made.step([chunk(tokens, cut, LENGTH, slot=7)])
    assert checks.error(found, right) < LIMIT
    assert torch.equal(made.states.ssm[7], made.states.ssm[0])
    assert torch.equal(made.states.conv[7], made.states.conv[0])
    silent, _ = whole(model, weights, tokens)
    if cut % 64 == 0:
        assert torch.equal(silent.states.ssm[0], made.states.ssm[0])
    assert checks.error(made.states.ssm[7], silent.states.ssm[0]) < LIMIT


def test_a_state_may_be_read_where_it_lies(model, weights):
    tokens = prompt(model)
    made, right = whole(model, weights, tokens, [(128, 5)])
    kept = made.states.ssm[5].clone()
    found = made.step([chunk(tokens, 128, LENGTH, slot=7, source=5)])
    assert checks.error(found, right) < LIMIT and torch.equal(made.states.ssm[5], kept)


def test_chunked_prefill_with_decodes_beside_it(model, weights):
    """Each chunk shares its step with another sequence's decode; both come out as alone."""
    tokens, other = prompt(model), prompt(model, 40, seed=1)
    _, right = whole(model, weights, tokens)
    beside = decoder(model, weights)
    beside.step([chunk(other, 0, 30, slot=2, first=30)])
    alone = decoder(model, weights)
    alone.step([chunk(other, 0, 30, slot=2, first=30)])
    for i, (start, end) in enumerate([(0, 64), (64, 192), (192, 197), (197, 200)]):
        token = Decode(int(other[30 + i]), 30 + i, 2, blocks(30, 31 + i))
        found = beside.step([chunk(tokens, start, end, samples=end == LENGTH)], [token])
        assert torch.equal(found[-1:], alone.step(decodes=[token]))
    assert checks.error(found[:1], right) < LIMIT
    assert torch.equal(beside.states.ssm[2], alone.states.ssm[2])


def test_a_batch_of_prefills_is_each_alone(model, weights):
    one, two = prompt(model, 90), prompt(model, 33, seed=1)
    both = decoder(model, weights)
    logits = both.step([chunk(one, 0, 90, slot=0), chunk(two, 0, 33, slot=1, first=20)])
    for i, (tokens, first) in enumerate(((one, 0), (two, 20))):
        alone = decoder(model, weights)
        found = alone.step([chunk(tokens, 0, len(tokens), slot=i, first=first)])
        assert checks.error(logits[i : i + 1], found) < LIMIT
        assert torch.equal(both.states.ssm[i], alone.states.ssm[i])


def test_fork_with_copy_on_write(model, weights):
    """Two continuations of one prefix, the second in a copy of the last, partly filled block."""
    tokens = prompt(model, 70)
    ends = [np.concatenate([tokens, prompt(model, 20, seed)]) for seed in (1, 2)]
    made = decoder(model, weights)
    made.step([chunk(tokens, 0, 70)])
    made.states.copy([0], [1])
    own = [*blocks(0, 64), 40, 41]
    made.kv.copy([4], [40])
    found = made.step([chunk(ends[0], 70, 90, slot=0), Prefill(ends[1][70:], 70, 1, own)])
    for row, tokens in zip(found, ends, strict=True):
        assert checks.error(row[None], whole(model, weights, tokens)[1]) < LIMIT


def test_preemption_and_resume(model, weights):
    """States and blocks of a preempted sequence go to others; it starts again and ends the same."""
    tokens, other = prompt(model), prompt(model, 100, seed=1)
    _, right = whole(model, weights, tokens)
    made = decoder(model, weights)
    made.step([chunk(tokens, 0, 150, samples=False)])
    made.step([chunk(other, 0, 100)])
    made.step([chunk(tokens, 0, 120, slot=3, first=20, samples=False)])
    found = made.step([chunk(tokens, 120, LENGTH, slot=3, first=20)])
    assert checks.error(found, right) < LIMIT


FAULTS = ("shifted position", "stale slot", "missing conv window", "swapped layers", "wrong block")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hit_that_restores_the_wrong_state_is_caught(fault, model, weights):
    tokens = prompt(model)
    made, right = whole(model, weights, tokens, [(128, 5), (127, 6)])
    states = made.states
    given = chunk(tokens, 128, LENGTH, slot=7)
    if fault == "shifted position":
        states.copy([6], [7])
    elif fault == "stale slot":
        made.step([chunk(prompt(model, 128, seed=8), 0, 128, slot=7, first=30)])
    else:
        states.copy([5], [7])
    if fault == "missing conv window":
        states.conv[7] = 0
    elif fault == "swapped layers":
        states.ssm[7] = states.ssm[7].flip(0)
    elif fault == "wrong block":
        made.kv.copy([2], [3])
    assert checks.error(made.step([given]), right) > 20 * LIMIT


def test_int8_checkpoints_restore_within_the_formula(model, weights):
    """At the restore half a step; later the product of the decays of each head shrinks it."""
    tokens = prompt(model)
    made, right = whole(model, weights, tokens, [(128, 5)])
    cold = Int8Pool(made.states, 3)
    cold.save([5], [1])
    cold.restore([1], [7])
    gap = (made.states.ssm[7] - made.states.ssm[5]).abs()
    assert (gap <= cold.ssm.scale[1] * 0.5001).all() and gap.max() > 0
    assert torch.equal(made.states.conv[7], made.states.conv[5])
    found = made.step([chunk(tokens, 128, LENGTH, slot=7)])
    assert 0 < checks.error(found, right) < 0.05


def test_all_rows_at_once_agrees(model, weights):
    tokens = prompt(model)
    fast = decoder(model, weights, Numerics(backend="torch")).step([chunk(tokens, 0, LENGTH)])
    assert checks.error(fast, whole(model, weights, tokens)[1]) < LIMIT


def test_weights_come_from_the_seed(model, weights):
    again, other = random_weights(model, seed=3), random_weights(model, seed=4)
    assert torch.equal(again.head, weights.head) and not torch.equal(other.head, weights.head)


def test_errors_say_what_is_allowed(model, weights):
    made, tokens = decoder(model, weights), prompt(model, 40)
    with pytest.raises(ValueError, match="2 blocks for 40 tokens: allowed is 3"):
        made.step([Prefill(tokens, 0, 0, [0, 1])])
    with pytest.raises(ValueError, match=r"slots \[0\] are written twice"):
        made.step([chunk(tokens, 0, 40), chunk(tokens, 0, 40, first=20)])
    with pytest.raises(ValueError, match=r"slots \[12\]: allowed are 0 to 11"):
        made.states.copy([0], [12])
    with pytest.raises(ValueError, match="executed"):
        random_weights(load("jamba-reasoning-3b"))
