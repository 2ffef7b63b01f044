"""Bad token, chat, RAG, Bailian and WEKA files: ``path:line: what, allowed``, or skipped."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments.cli_trace import app
from traces.errors import TraceError
from traces.registry import detect, read_trace

FIXTURES = Path(__file__).parent / "fixtures"
run_cli = CliRunner().invoke


def bailian(chat: object, t: object, **more: object) -> dict[str, object]:
    row = {"chat_id": chat, "parent_chat_id": -1, "timestamp": t, "input_length": 20}
    return {**row, "output_length": 2, "hash_ids": [1, 2], **more}


def tokens(t: object, **more: object) -> dict[str, object]:
    return {"input_tokens": [1, 2, 3], "output_tokens": [4], "ts": t, **more}


def rag(t: object, **more: object) -> dict[str, object]:
    row = {"timestamp": t, "input_length": 600, "output_length": 1}
    return {**row, "hash_ids": {"sys_prompt": [100], "passages_ids": [0]}, **more}


def chat(t: object, **more: object) -> dict[str, object]:
    return {"timestamp": t, "messages": [{"role": "user", "content": "hi"}], "output": "x", **more}


#: format -> a good line for a time
GOOD: dict[str, Callable[[int], dict[str, object]]] = {
    "bailian": lambda t: bailian(t, t),
    "tokens": tokens,
    "rag": lambda t: rag(str(t)),
    "chat": chat,
}
BAD: list[tuple[str, object, str]] = [
    ("bailian", bailian(6, None), "timestamp is missing"),
    ("bailian", bailian(6, "6"), "timestamp is '6'"),
    ("bailian", bailian(6, 4), "time goes back"),
    ("bailian", bailian(5, 6), "'5' stands twice"),
    ("bailian", bailian("x", 6), "chat_id is 'x'"),
    ("bailian", bailian(6, 6, parent_chat_id=6), "parent_chat_id is 6 itself"),
    ("bailian", bailian(6, 6, parent_chat_id=-2), "parent_chat_id is -2"),
    ("bailian", bailian(6, 6, hash_ids=[1]), "1 hash_ids for 20 tokens in blocks of 16"),
    ("bailian", bailian(6, 6, hash_ids=[3, 2]), "id 2 follows 3 here but 1 earlier"),
    ("bailian", bailian(6, 6, hash_ids=[3, 2]), "option hashes content"),
    ("bailian", bailian(6, 6, input_length=21), "block 2 has 5 tokens here but 4 earlier"),
    ("bailian", bailian(6, 6, output_length=None), "output_length is None"),
    ("tokens", tokens(4), "time goes back"),
    ("tokens", tokens(None), "no time, though others have one"),
    ("tokens", tokens(6, timestamp=6000), "ts and timestamp both stand here"),
    ("tokens", tokens(6, input_tokens=[]), "a prompt of no tokens"),
    ("tokens", tokens(6, input_tokens=[1, -1]), "input_tokens holds -1"),
    ("tokens", tokens(6, input_tokens=[1, 2.5]), "input_tokens holds 2.5"),
    ("tokens", tokens(6, input_tokens=[2**31]), f"input_tokens holds {2**31}"),
    ("tokens", tokens(6, input_tokens="123"), "input_tokens is '123'"),
    ("tokens", tokens(6, num_input_tokens=4), "num_input_tokens is 4 but there are 3 ids"),
    ("tokens", tokens(6, output_token_ids=[4]), "output_tokens and output_token_ids both"),
    ("tokens", {"input_tokens": [1], "ts": 6}, "num_output_tokens is missing"),
    ("tokens", tokens(6, delay=3), "a delay on a request that has no session"),
    ("tokens", tokens(6, delay=3, session_id="s"), "is the first of its session"),
    ("tokens", tokens(6, session_id=[1]), "session_id is [1]"),
    ("tokens", tokens(6, generation_prompt_tokens=4), "generation_prompt_tokens is 4"),
    ("tokens", tokens(6, request_id="0"), "'0' stands twice"),
    ("tokens", {"sub_requests": [], "ts": 6}, "sub_requests is []"),
    ("tokens", {"sub_requests": [{"input_toks": 0}], "ts": 6}, "input_toks is 0"),
    ("rag", rag("4"), "time goes back"),
    ("rag", rag("soon"), "timestamp is 'soon'"),
    ("rag", rag("-1"), "timestamp is -1.0"),
    ("rag", rag("nan"), "timestamp is nan"),
    ("rag", rag(None), "timestamp is missing"),
    ("rag", rag("6", input_length=595), "input_length is 595, allowed: 596, its pieces"),
    ("rag", rag("6", hash_ids=[1]), "hash_ids is [1], allowed: an object of lists"),
    ("rag", rag("6", hash_ids={"sysprompt": [1]}), "unknown piece 'sysprompt'"),
    ("rag", rag("6", hash_ids={"sys_prompt": [9999]}), "no length is known of piece 9999"),
    ("rag", rag("6", hash_ids={"sys_prompt": 1}), "sys_prompt is 1"),
    ("chat", chat(4), "time goes back"),
    ("chat", chat(6, messages=[]), "messages is []"),
    ("chat", chat(6, messages="hi"), "messages is hi"),
    ("chat", chat(6, messages=["hi"]), "messages[0] is hi"),
    ("chat", chat(6, messages=[{"content": "hi"}]), "messages[0] has role None"),
    ("chat", chat(6, messages=[{"role": "user", "content": 3}]), "messages[0] has content 3"),
    (
        "chat",
        chat(6, messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "allowed: text, or parts of text",
    ),
    ("chat", chat(6, output=None), "output_length is missing"),
    ("chat", chat(6, output=None, output_length=-1), "output_length is -1"),
    ("chat", chat(6, output=[1]), "output is [1]"),
    ("chat", chat(6, output=None, response={}), "response has no message"),
    ("chat", chat(6, delay=1), "a delay on a request that has no session"),
]
for name in GOOD:
    BAD += [(name, '{"cut": 1, "li', "not JSON"), (name, "[1]", "[1] is no record")]
    BAD += [(name, "[" * 100_000, "not JSON")]


def options(name: str, folder: Path) -> dict[str, object]:
    if name == "chat":
        pytest.importorskip("tokenizers")
        return {"tokenizer": str(FIXTURES / "chat")}
    return {"lengths": str(FIXTURES / "rag")} if name == "rag" else {}


def write(path: Path, rows: list[object]) -> str:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return str(path)


@pytest.mark.parametrize(("name", "line", "message"), BAD, ids=lambda v: str(v)[:40])
def test_a_bad_record_is_named_or_skipped(
    tmp_path: Path, name: str, line: object, message: str
) -> None:
    path = write(tmp_path / "t", [GOOD[name](5), line, GOOD[name](9)])
    assert detect(path) == name
    given = options(name, tmp_path)
    with pytest.raises(TraceError) as caught:
        read_trace(path, **given)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)
    assert re.search(r"allowed: \S", str(caught.value))
    trace = read_trace(path, skip_bad=True, **given)
    assert trace.notes["skipped"] == (str(caught.value),)
    assert len(trace) == 2


@pytest.mark.parametrize("name", list(GOOD))
def test_sort_orders_by_time(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "t", [GOOD[name](t) for t in (5, 3, 9, 0)])
    trace = read_trace(path, sort=True, **options(name, tmp_path))
    assert (trace.arrival_ns[1:] > trace.arrival_ns[:-1]).all()


# --- WEKA, where a file is one document ---------------------------------------------------------


def weka(**more: object) -> dict[str, object]:
    row = {"t": 0.0, "type": "n", "in": 9, "out": 1, "hash_ids": [1, 2]}
    return {**row, "api_time": 1.0, "think_time": 0.0, **more}


def talk(*requests: object, **more: object) -> dict[str, object]:
    return {"id": "c", "block_size": 4, "requests": list(requests), **more}


agent = {"t": 1.0, "type": "subagent", "agent_id": "a"}
WRONG: list[tuple[object, str, str]] = [
    (talk(weka(), weka(t=None)), ":1: requests[1]: t is missing", "one"),
    (talk(weka(), weka(t=-1)), ":1: requests[1]: t is -1", "one"),
    (talk(weka(), weka(hash_ids=[1])), ":1: requests[1]: hash_ids has 1 blocks", "one"),
    (talk(weka(), weka(hash_ids=[1, "2"])), ":1: requests[1]: hash_ids holds '2'", "one"),
    (talk(weka(), weka(hash_ids=[1, 0])), ":1: requests[1]: hash_ids holds 0", "one"),
    (talk(weka(), weka(hash_ids=[3, 2])), ":1: requests[1]: id 2 follows 3", "one"),
    (talk(weka(), weka(hash_ids=None)), ":1: requests[1]: hash_ids is None", "one"),
    (talk(weka(), 7), ":1: requests[1]: 7 is no request", "one"),
    (talk(weka(), agent), ":1: requests[1]: a sub-agent without agent_id, t or requests", "one"),
    (
        talk(weka(), {**agent, "requests": [weka(**{"in": 0})]}),
        ":1: requests[1].requests[0]: in is 0",
        "one",
    ),
    (talk(weka(), {**agent, "t": 4e9, "requests": [weka(t=4e9)]}), "s in all", "one"),
    (talk(weka(), block_size=0), ":1: block_size is 0", "none"),
    (talk(weka(), id=None), ":1: conversation None stands twice", "none"),
    (talk(weka(), hash_id_scope="file"), ":1: hash_id_scope is 'file'", "none"),
    ({"requests": {}, "block_size": 4}, ":1: no list of requests", "none"),
    ('{"id": "c", "requests": [{]', ":1: not JSON", "none"),
    ('{"id": "c", "block_size": 4,\n"requests": [\n{"t": 0,', ":3: not JSON", "none"),
]


@pytest.mark.parametrize(("whole", "message", "left"), WRONG, ids=lambda v: str(v)[:40])
def test_a_bad_conversation_is_named_or_skipped(
    tmp_path: Path, whole: object, message: str, left: str
) -> None:
    path = write(tmp_path / "t.json", [whole])
    with pytest.raises(TraceError) as caught:
        read_trace(path, "weka")
    found = str(caught.value)
    assert found.startswith(path) and "allowed: " in found and message in found
    trace = read_trace(path, "weka", skip_bad=True)
    assert len(trace) == (left == "one")
    assert trace.notes["skipped"] == (found,)


def test_the_line_of_a_bad_request_in_a_long_document(tmp_path: Path) -> None:
    text = json.dumps(talk(weka(), weka(t=1.0), weka(out=-1)), indent=1)
    path = tmp_path / "t.json"
    path.write_text(f"\n{text}\n")
    line = [k for k, x in enumerate(path.read_text().splitlines(), 1) if x == "  {"][2]
    with pytest.raises(TraceError, match=rf"t\.json:{line}: requests\[2\]: out is -1"):
        read_trace(str(path))


def test_a_folder_tells_which_file_is_bad(tmp_path: Path) -> None:
    write(tmp_path / "a.json", [talk(weka(), id="a")])
    write(tmp_path / "b.json", [talk(weka(out=-1), weka(), id="b")])
    write(tmp_path / "c.json", [talk(weka(), id="c", block_size=8)])
    with pytest.raises(TraceError, match=r"b\.json:1: requests\[0\]: out is -1"):
        read_trace(str(tmp_path))
    trace = read_trace(str(tmp_path), skip_bad=True)
    assert trace.ids == ("a/0", "b/1")
    skipped = trace.notes["skipped"]
    assert isinstance(skipped, tuple) and "c.json:1: block_size is 8, allowed: 4" in skipped[1]


def test_a_folder_without_conversations(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"a folder without conversations, allowed: one with \.json"
    ):
        read_trace(str(tmp_path))


# --- what the RAG and chat formats need besides the trace ---------------------------------------


def test_rag_without_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [rag("1")])
    with pytest.raises(TraceError, match=r"no lengths of pieces in .*, allowed: JSONL files"):
        read_trace(path)
    side = tmp_path / "1_x.jsonl"
    for rows, message in [
        ([{"x_id": 1, "token_length": -1}], ":1: token_length is -1"),
        ([{"x_id": 1, "token_length": 3}, {"x_id": 1, "token_length": 4}], ":2: piece 1 has 4"),
        ([{"token_length": 3}], ":1: 0 ids, allowed: one key that ends in _id"),
    ]:
        write(side, list(rows))
        with pytest.raises(TraceError, match=f"1_x.jsonl{message}"):
            read_trace(path)


def test_chat_without_its_packages_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    path, tokenizer = write(tmp_path / "t", [chat(1)]), str(FIXTURES / "chat")
    for package in ("jinja2", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
        result = run_cli(app, ["stats", path, "--set", f"tokenizer={tokenizer}"])
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert f"the package {package}, which is not installed" in result.stderr
        assert "allowed: pip install 'prefixlab[tokenizers]'" in result.stderr


def test_chat_needs_a_tokenizer_and_a_template(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path, good = write(tmp_path / "t", [chat(1)]), FIXTURES / "chat/tokenizer.json"
    broken, bare = tmp_path / "broken.json", tmp_path / "bare"
    broken.write_text("{}")
    bare.mkdir()
    (bare / "tokenizer.json").write_text(good.read_text())
    jinja = tmp_path / "x.jinja"
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "no tokenizer.json beside it, allowed: the option tokenizer"),
        ({"tokenizer": "none"}, "option tokenizer is 'none'"),
        ({"tokenizer": 3}, "option tokenizer is 3, allowed: a path"),
        ({"tokenizer": str(broken)}, "broken.json: no tokenizer file"),
        ({"tokenizer": str(bare)}, "no chat template beside"),
        ({"tokenizer": str(bare), "chat_template": "lama"}, "option chat_template is 'lama'"),
        ({"tokenizer": str(bare), "turns": "every"}, "option turns is 'every', allowed: last, all"),
        ({"tokenizer": str(bare), "chat_template": str(broken)}, "no chat template beside"),
    ]
    for chosen, message in cases:
        with pytest.raises(TraceError, match=re.escape(message)):
            read_trace(path, **chosen)
    for text, message in [
        ("{% for m in %}", "the chat template is wrong at its line 1"),
        ("{{ raise_exception('no tools') }}", "t:1: the chat template refuses this (no tools)"),
        ("{{ messages[0].nope.x }}", "t:1: the chat template refuses this"),
        ("{{ add_generation_prompt }}", "generation prompt does not stand at the end"),
        ("", "t:1: the prompt has no tokens"),
    ]:
        jinja.write_text(text)
        with pytest.raises(TraceError, match=re.escape(message)):
            read_trace(path, tokenizer=str(bare), chat_template=str(jinja))
    assert len(read_trace(path, tokenizer=str(bare), chat_template="chatml")) == 1


# --- never a traceback --------------------------------------------------------------------------

SOURCES = [
    "weka/conv_a.json", "bailian.jsonl", "tokens_agentic.jsonl", "tokens_marconi.jsonl",
    "rag/0_trace.jsonl",
]  # fmt: skip
SOURCES += ["chat/trace.jsonl"] if find_spec("tokenizers") else []
VALUES = ["null", "-1", "0", "1e400", "NaN", '"x"', "[]", "{}", "true", "[[1]]", str(2**70), "[{}]"]


def mangled(text: str, at: int, value: str, cut: int) -> str:
    """``text`` with one JSON number or string replaced, or cut short."""
    places = [m.span() for m in re.finditer(r'-?\d+(?:\.\d+)?|"[^"]*"', text)]
    start, end = places[at % len(places)]
    changed = text[:start] + value + text[end:]
    return changed[: len(changed) - cut]


@given(st.sampled_from(SOURCES), st.integers(0, 400), st.sampled_from(VALUES), st.integers(0, 1))
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example("weka/conv_a.json", 3, "NaN", 0)
def test_a_mangled_file_is_read_or_refused_in_words(
    tmp_path: Path, source: str, at: int, value: str, cut: int
) -> None:
    name = detect(str(FIXTURES / source))
    path = tmp_path / Path(source).name
    path.write_text(mangled((FIXTURES / source).read_text(), at, value, cut * at), "utf-8")
    given = options(name, tmp_path)
    try:
        read_trace(str(path), name, **given)
    except TraceError as e:
        assert str(e).startswith(str(path)) and "allowed" in str(e)
    read_trace(str(path), name, skip_bad=True, **given)
