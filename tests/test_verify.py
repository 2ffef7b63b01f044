"""`prefixlab verify`: reuse gives what a full prefill gives; planted faults are caught."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")

from typer.testing import CliRunner  # noqa: E402

from executor.kernel_backend import KernelBackend, tokens_of  # noqa: E402
from executor.resident import MissingStateError  # noqa: E402
from executor.verify import Verdict, Watched, compare  # noqa: E402
from experiments.cli import app  # noqa: E402
from experiments.verify import (  # noqa: E402
    engines_of,
    point_of,
    random_trace,
    setup_of,
    verify,
)
from sim import policies  # noqa: E402
from sim.loop import replay  # noqa: E402
from sim.records import Records  # noqa: E402

PAIRS = [(p, e) for p in policies.names() for e in engines_of(p)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("policy", "engine"), PAIRS)
def test_reuse_gives_what_a_full_prefill_gives(policy: str, engine: str) -> None:
    (verdict,) = verify(policy, engine, range(1, 2), "nano", "cpu").verdicts
    assert verdict.holds, verdict
    assert verdict.requests == 7 and verdict.logits > 200
    assert policy == "none" or (verdict.hits > 0 and verdict.states > verdict.hits)
    assert policy == "none" or verdict.exact > 0


def replayed(spoil=None, policy="semantic-only", engine="vllm-0.33", seed=1) -> Verdict:
    trace = random_trace(seed)
    made, setup = setup_of(point_of(policy, engine, seed, "nano"), trace, seed, "cpu")
    watched = Watched(setup, spoil)
    replay(made, trace, watched, Records(trace), host_ns=1000, leap=False)
    return compare(watched)


def kept_slot(backend: KernelBackend, request: int, hit: int) -> int:
    return backend.resident.source(request, hit).slot


def shifted_position(backend: KernelBackend, request: int, hit: int) -> None:
    """The state of one token less, computed afresh."""
    tokens = tokens_of(backend.setup.trace, request, backend.setup.model.vocab_size)
    _, places = backend._of(request)
    from executor.batch import Prefill

    slot = backend.resident.slots.take()
    backend.decoder.step([Prefill(tokens[: hit - 1], 0, slot, places[: hit - 1], samples=False)])
    backend.decoder.states.copy([slot], [kept_slot(backend, request, hit)])
    backend.resident.slots.give(slot)


def stale_slot(backend: KernelBackend, request: int, hit: int) -> None:
    """Another request's state, which happens to lie in some other slot."""
    own = kept_slot(backend, request, hit)
    other = next(r.slot for q, r in backend.resident.running.items() if q != request)
    backend.decoder.states.copy([other], [own])


def missing_conv_window(backend: KernelBackend, request: int, hit: int) -> None:
    backend.decoder.states.conv[kept_slot(backend, request, hit)] = 0


def swapped_layers(backend: KernelBackend, request: int, hit: int) -> None:
    slot = kept_slot(backend, request, hit)
    pool = backend.decoder.states.ssm
    pool[slot] = pool[slot].flip(0)


def wrong_kv(backend: KernelBackend, request: int, hit: int) -> None:
    _, places = backend._of(request)
    for pool in (backend.decoder.kv.k, backend.decoder.kv.v):
        pool[:, places[hit // 2]] = pool[:, places[0]]


@pytest.mark.parametrize(
    "fault", [shifted_position, stale_slot, missing_conv_window, swapped_layers, wrong_kv]
)
@pytest.mark.parametrize("engine", ["vllm-0.33", "sglang-0.5.23"])
def test_a_hit_that_restores_the_wrong_state_is_caught(fault, engine: str) -> None:
    verdict = replayed(fault, engine=engine)
    assert not verdict.holds and verdict.logits_error > 1e-4


def test_a_hit_on_a_state_that_was_dropped_is_caught() -> None:
    def forget(backend: KernelBackend, request: int, hit: int) -> None:
        backend.resident.kept.clear()

    with pytest.raises(MissingStateError, match="no state is kept"):
        replayed(forget)


def test_what_the_traces_go_through() -> None:
    """Over a few seeds: prompts cut into chunks, preemptions, and states restored into copies."""
    chunked = preempted = 0
    for seed in range(3, 9):
        trace = random_trace(seed)
        made, setup = setup_of(point_of("align", "vllm-0.33", seed, "nano"), trace, seed, "cpu")
        records = Records(trace)
        watched = Watched(setup)
        replay(made, trace, watched, records, host_ns=1000, leap=False)
        assert compare(watched).holds
        preempted += sum(records.preemptions)
        chunked += sum(len(k.state.cuts) > 1 for k, _, _ in watched.states)
    assert chunked > 10
    assert preempted > 0


def test_equal_text_is_equal_tokens() -> None:
    trace = random_trace(0)
    for a in range(len(trace)):
        tokens = tokens_of(trace, a, 512)
        assert len(tokens) == trace.prompt_tokens[a] + trace.output_tokens[a]
        assert tokens.min() >= 0 and tokens.max() < 512
    assert (tokens_of(trace, 0, 512) == tokens_of(trace, 0, 512)).all()


def test_the_command() -> None:
    given = ["verify", "semantic-only", "--traces", "1", "--engine", "sglang-0.5.23"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "holds" in result.output and "vllm" not in result.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["oracle"], "nothing to verify"),
        (["marcony"], "did you mean marconi"),
        (["align", "--device", "tpu"], "nearest is cpu"),
        (["align", "--model", "jamba-reasoning-3b"], "executed are"),
        (["align", "--model", "nemo"], "nemo"),
    ],
)
def test_what_cannot_be_verified_is_refused(given: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["verify", *given])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert said in result.output
