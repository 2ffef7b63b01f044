"""``prefixlab trace generate``: files that read back as the trace, and errors in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from experiments.cli_generate import generate, guessed_format, settings
from traces.arrivals import poisson, with_arrivals
from traces.generators import generate as make
from traces.identity import identify
from traces.native import read_native


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(generate)
    return CliRunner().invoke(app, list(arguments))


def test_native_file_reads_back_as_the_same_requests(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl.gz"
    words = ("agentic", "--seed", "3", "--set", "sessions=4", "--set", "turns=5")
    result = run(
        *words,
        "--set",
        "generation_prompt_tokens=2",
        "--arrivals",
        "poisson",
        "--rate",
        "0.5",
        "--out",
        str(out),
    )
    assert result.exit_code == 0, result.output
    parameters = {"sessions": 4, "turns": 5, "generation_prompt_tokens": 2}
    want = with_arrivals(make("agentic", parameters, 3), poisson(0.5, 3))
    got = read_native(str(out))
    assert got.ids == want.ids
    for column in ("arrival_ns", "prompt_tokens", "output_tokens", "think_ns", "after"):
        assert getattr(got, column).tolist() == getattr(want, column).tolist(), column
    assert got.generation_prompt_tokens.tolist() == [2] * 20
    a, b = identify(got), identify(want)
    for i in range(20):
        for j in range(i):
            assert a.common(i, j) == b.common(i, j)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        assert run("chat", "--set", "sessions=20", "--out", str(tmp_path / name)).exit_code == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_mooncake_by_name_shares_whole_blocks(tmp_path: Path) -> None:
    out = tmp_path / "t.mooncake.jsonl"
    words = ("prefix_tokens=1024", "suffix_tokens=100", "repeats=2")
    sets = [word for key in words for word in ("--set", key)]
    result = run("shared_prefix", *sets, "--arrivals", "fixed", "--rate", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["input_length"] == 1124 and second["timestamp"] == 500
    assert first["hash_ids"][:2] == second["hash_ids"][:2]
    assert first["hash_ids"][2] != second["hash_ids"][2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("agentik",), "nearest: agentic"),
        (("chat", "--set", "sesions=3"), "nearest: sessions"),
        (("chat", "--set", "sessions"), "allowed: key=value"),
        (("chat", "--set", "sessions=1", "--set", "sessions=2"), "stands twice"),
        (("chat", "--set", "sessions=[1"), "allowed: a number"),
        (("chat", "--arrivals", "poison"), "nearest: poisson"),
        (("chat", "--arrivals", "fixed", "--rate", "0"), "rate is 0.0"),
        (("chat", "--format", "mooncak"), "nearest: mooncake"),
    ],
)
def test_errors_name_the_nearest_choice(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "t.jsonl"
    result = run(*words, "--out", str(out))
    assert result.exit_code == 2
    assert message in result.output
    assert not out.exists()


def test_settings_are_yaml_scalars() -> None:
    got = settings(["a=3", "b=0.5", "c=true", "d=null", "e=word"])
    assert got == {"a": 3, "b": 0.5, "c": True, "d": None, "e": "word"}


def test_format_is_guessed_from_the_name() -> None:
    assert guessed_format(Path("x.mooncake.jsonl.zst")) == "mooncake"
    assert guessed_format(Path("x.jsonl")) == "native"
