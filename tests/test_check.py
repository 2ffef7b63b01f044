"""`prefixlab check`: shipped policies hold, broken ones and broken engines are caught."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments.cli import app
from sim import policies
from sim.check.case import from_data, to_data
from sim.check.checker import Report, hosts_of, search
from sim.check.hosts import HOSTS, Host
from sim.check.replayed import replayed
from sim.pool.engine import PoolEngine
from sim.vllm.hit import Hit

BROKEN = Path(__file__).parent / "broken_policies"
PAIRS = [(name, host.name) for name in policies.names() for host in hosts_of(policies.load(name))]


# ---------------------------------------------------------------- policies
@pytest.mark.parametrize(("name", "host"), PAIRS)
def test_shipped_policies_hold_on_every_engine(name: str, host: str) -> None:
    report = search(HOSTS[host], name, examples=15)
    assert report.violation is None, report.violation
    assert report.examples == 15 and report.steps > 100
    assert name == "none" or report.hits > 0


@pytest.mark.parametrize(
    ("name", "host", "invariants"),
    [
        ("hits_too_far", "pool", {"answers"}),
        ("leaks", "pool", {"bytes"}),
        ("evicts_locked", "pool", {"answers"}),
        ("peeks_ahead", "pool", {"future"}),
        ("overfills", "pool", {"answers", "bytes"}),
        ("remembers_runs", "pool", {"same"}),
        ("remembers_runs", "vllm-0.33", {"same"}),
        ("remembers_runs", "sglang-0.5.23", {"same"}),
    ],
)
def test_broken_policies_are_caught_by_a_small_case(
    name: str, host: str, invariants: set[str]
) -> None:
    report = search(HOSTS[host], str(BROKEN / f"{name}.py"))
    assert report.violation is not None and report.case is not None
    assert report.violation.invariant in invariants
    assert len(report.case.requests) <= 3


# ---------------------------------------------------------------- engines
def broken(host: str, spoil: Any) -> Host:
    """The host, every engine of which is spoilt before it runs."""
    whole = HOSTS[host]

    def build(*given: Any) -> Any:
        engine = whole.build(*given)
        spoil(engine)
        return engine

    return replace(whole, build=build)


def reach_further(engine: PoolEngine) -> None:
    """A lookup answers one token more than it found, where there is one."""
    look = engine.cache.lookup

    def lookup(r: Any) -> Hit:
        hit = look(r)
        more = min(hit.tokens + 1, r.known - 1) if hit.tokens else 0
        return replace(hit, tokens=more, matched=more)

    engine.cache.lookup = lookup  # type: ignore[method-assign]


def forget_a_block(engine: Any) -> None:
    """A block that should be free again is not, once."""
    pool, release = engine.cache.pool, engine.cache.pool.release

    def once(blocks: Any) -> None:
        pool.release = release
        release(list(blocks)[1:])

    pool.release = once


def evict_what_is_read(engine: PoolEngine) -> None:
    """States that requests resumed from count as free."""
    states, use = engine.cache.states, engine.cache.states.use  # type: ignore[union-attr]

    def used(state: Any, *given: Any) -> None:
        use(state, *given)
        state.node.state = None  # gone, though a request reads it
        states.count -= 1

    states.use = used  # type: ignore[method-assign]


def take_too_much(engine: PoolEngine) -> None:
    """The cache believes in twice the memory."""
    engine.cache.capacity *= 2  # type: ignore[union-attr]


def keep_the_state_of_the_chunk(engine: Any) -> None:
    """States are published one block later than they were left."""
    publish = engine.cache.events.state_published

    def later(r: Any, position: int) -> None:
        block = engine.cache.shape.block
        publish(r, position + block if position + block < r.prompt else position)

    engine.cache.events.state_published = later


@pytest.mark.parametrize(
    ("policy", "host", "spoil", "invariants"),
    [
        ("oracle", "pool", reach_further, {"hit"}),
        ("align", "vllm-0.33", forget_a_block, {"bytes", "held"}),
        ("marconi", "pool", evict_what_is_read, {"bytes", "raises", "locked"}),
        ("marconi", "pool", take_too_much, {"bytes"}),
        ("align", "vllm-0.28", keep_the_state_of_the_chunk, {"state"}),
    ],
)
def test_broken_engines_are_caught(
    policy: str, host: str, spoil: Any, invariants: set[str]
) -> None:
    report = search(broken(host, spoil), policy, examples=40)
    assert report.violation is not None and report.violation.invariant in invariants


# ---------------------------------------------------------------- cases
def found(name: str, host: str = "pool") -> Report:
    return search(HOSTS[host], str(BROKEN / f"{name}.py"))


def test_the_same_search_finds_the_same_case() -> None:
    first, second = found("leaks"), found("leaks")
    assert first.case == second.case and first.examples == second.examples


def test_a_case_survives_json_and_breaks_again() -> None:
    report = found("peeks_ahead")
    assert report.case is not None and report.violation is not None
    data = json.loads(json.dumps(to_data(report.case, "future", "x")))
    assert from_data(data) == report.case
    again = replayed(from_data(data))
    assert again is not None and again.invariant == report.violation.invariant
    assert replayed(replace(report.case, policy="marconi")) is None
    with pytest.raises(ValueError, match="operation 'fly'"):
        replayed(replace(report.case, operations=("fly",)))
    with pytest.raises(ValueError, match="no engine is called"):
        replayed(replace(report.case, engine="tgi"))
    with pytest.raises(ValueError, match="'check' is missing"):
        from_data({key: value for key, value in data.items() if key != "check"})


# ---------------------------------------------------------------- the command
def test_the_command_keeps_a_case_that_run_and_parity_replay(tmp_path: Path) -> None:
    given = ["check", str(BROKEN / "leaks.py"), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 1, result.output
    assert "breaks bytes" in result.output and "request 1: prompt" in result.output
    (case,) = tmp_path.glob("*.json")
    result = CliRunner().invoke(app, ["parity", str(case)])
    assert result.exit_code == 1 and "bytes are conserved" in result.output
    data = json.loads(case.read_text())
    data["policies"] = [{"name": "marconi"}]
    case.write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["parity", str(case)])
    assert result.exit_code == 0 and "1 cases, 0 differ" in result.output
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["run", str(case), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert len(pd.read_parquet(out / "requests.parquet")) == len(data["trace"]["requests"])


@pytest.mark.parametrize("host", ["vllm-0.33", "vllm-0.28", "sglang-0.5.23", "sglang-0.5.18"])
def test_cases_of_every_engine_run(host: str, tmp_path: Path) -> None:
    spoilt = broken(host, lambda engine: setattr(engine, "check", lambda: 1 / 0))
    report = search(spoilt, "semantic-only", examples=3)
    assert report.case is not None
    path = tmp_path / "case.json"
    path.write_text(json.dumps(to_data(report.case)))
    result = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "o")])
    assert result.exit_code == 0, result.output


def test_the_command_prints_what_holds() -> None:
    given = ["check", "path-capped", "--examples", "5", "--set", "cap=1",
             "--engine", "sglang-0.5.23"]  # fmt: skip
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "holds" in result.output and "0.5.18" not in result.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["marcony"], "did you mean marconi"),
        (["absent.py"], "no such policy file"),
        (["align", "--engine", "pool"], "cannot run on pool"),
        (["align", "--engine", "tgi"], "no engine is called 'tgi'"),
        (["path-capped", "--set", "cap"], "expected parameter=value"),
        (["path-capped", "--set", "capp=1"], "no parameter 'capp'"),
        (["marconi", "--examples", "0"], "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_checked_is_refused(given: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["check", *given])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert said in result.output


def test_a_policy_file_that_cannot_be_read_names_its_line(tmp_path: Path) -> None:
    for text, said in (("x = 1\nraise KeyError('k')\n", ":2: KeyError"), ("x = (\n", ":1: Syntax")):
        path = tmp_path / "p.py"
        path.write_text(text)
        result = CliRunner().invoke(app, ["check", str(path)])
        assert result.exit_code == 2 and said in result.output
