"""Every trace format on fixtures: what is read, and prefix identity against plain arrays."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments.cli_trace import app
from traces.content import canonical
from traces.errors import TraceError
from traces.identity import identify
from traces.mooncake import write_mooncake
from traces.native import write_native
from traces.registry import READERS, detect, read_trace, sources
from traces.shared import shared_lengths
from traces.token_tree import TokenTree
from traces.trace import Trace

FIXTURES = Path(__file__).parent / "fixtures"
SECOND = 1_000_000_000
ALL = {
    "weka": ("weka", 8),
    "weka/conv_a.json": ("weka", 6),
    "weka/conv_b.json": ("weka", 2),
    "bailian.jsonl": ("bailian", 5),
    "tokens_agentic.jsonl": ("tokens", 4),
    "tokens_marconi.jsonl": ("tokens", 9),
    "rag/0_trace.jsonl": ("rag", 5),
    "chat/trace.jsonl": ("chat", 4),
}
relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
run_cli = CliRunner().invoke


def fixture(name: str, **options: object) -> Trace:
    if name.startswith("chat"):
        pytest.importorskip("tokenizers")
    return read_trace(str(FIXTURES / name), **options)


def shared(trace: Trace, outputs: bool = False) -> list[int]:
    found: list[int] = shared_lengths(trace, identify(trace), outputs).tolist()
    return found


def columns(trace: Trace) -> list[object]:
    names = [n for n in vars(trace) if n != "notes"]
    return [v.tolist() if isinstance(v := getattr(trace, n), np.ndarray) else v for n in names]


def jsonl(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(f"{json.dumps(r)}\n" for r in rows), "utf-8")
    return str(path)


# --- all of them ------------------------------------------------------------------------------


def test_the_fixtures_cover_the_formats() -> None:
    tested_elsewhere = {"native", "mooncake", "azure"}
    assert {name for name, _ in ALL.values()} | tested_elsewhere == READERS.keys()


@pytest.mark.parametrize("name", list(ALL))
def test_a_format_is_detected_and_can_be_named(name: str) -> None:
    format, requests = ALL[name]
    assert detect(str(FIXTURES / name)) == format
    assert len(fixture(name)) == requests
    assert columns(fixture(name)) == columns(fixture(name, format=format))
    assert fixture(name).notes["format"] == format


@pytest.mark.parametrize("name", list(ALL))
def test_native_holds_all_of_it(name: str, tmp_path: Path) -> None:
    trace = fixture(name)
    write_native(trace, str(tmp_path / "t.jsonl"))
    assert columns(read_trace(str(tmp_path / "t.jsonl"))) == columns(canonical(trace))


@pytest.mark.parametrize("name", ["weka", "bailian.jsonl"])
def test_a_mooncake_file_of_the_same_blocks_shares_the_same(name: str, tmp_path: Path) -> None:
    trace = fixture(name)
    block = trace.notes["block_tokens"]
    assert isinstance(block, int)
    write_mooncake(trace, str(tmp_path / "t.jsonl"), block_tokens=block)
    again = read_trace(str(tmp_path / "t.jsonl"), block_tokens=block)
    assert again.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert shared(again) == shared(trace)


@pytest.mark.parametrize("name", list(ALL))
def test_the_commands_read_it(name: str, tmp_path: Path) -> None:
    format, requests = ALL[name]
    fixture(name)  # skips where a package is missing
    source, out = str(FIXTURES / name), str(tmp_path / "t.jsonl.gz")
    for option in ([], ["--format", format]):
        found = run_cli(app, ["stats", source, "--json", *option])
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["requests"] == requests
    converted = run_cli(app, ["convert", source, out])
    assert converted.exit_code == 0 and f"{requests} requests" in converted.output
    fleet = ["generate", "fleet", "--set", f"path={source}", "--out", out]
    made = run_cli(app, [*fleet, "--arrivals", "poisson", "--rate", "0.5"])
    assert made.exit_code == 0 and f"{requests} requests" in made.output


@pytest.mark.parametrize(
    ("name", "format"), [(n, f) for n in ALL for f in READERS if f != ALL[n][0]]
)
def test_a_file_in_the_wrong_format_is_refused_in_words(name: str, format: str) -> None:
    with pytest.raises(TraceError, match=r"allowed: |cannot be read"):
        read_trace(str(FIXTURES / name), format)


def test_mooncake_records_can_name_their_block_size(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}
    path = jsonl(tmp_path / "t", [{**row, "block_size": 16}, row])
    assert read_trace(path).notes["block_tokens"] == 16
    assert shared(read_trace(path)) == [0, 40]
    with pytest.raises(TraceError, match=r"t:1: block_size is 16, allowed: 32"):
        read_trace(path, block_tokens=32)
    jsonl(tmp_path / "t", [{**row, "block_size": 16}, {**row, "block_size": 8}])
    with pytest.raises(TraceError, match=r"t:2: block_size is 8, allowed: 16"):
        read_trace(path)


def test_the_files_a_trace_is_made_from() -> None:
    found = {name: [Path(p).name for p in sources(str(FIXTURES / name))] for name in ALL}
    assert found["weka"] == ["conv_a.json", "conv_b.json"]
    assert found["bailian.jsonl"] == ["bailian.jsonl"]
    assert found["chat/trace.jsonl"] == ["trace.jsonl", "tokenizer.json", "tokenizer_config.json"]
    assert found["rag/0_trace.jsonl"][0] == "0_trace.jsonl" and len(found["rag/0_trace.jsonl"]) == 6


def test_options_of_a_format_are_set_by_name() -> None:
    source = str(FIXTURES / "bailian.jsonl")
    found = run_cli(app, ["stats", source, "--json", "--set", "hashes=content"])
    assert found.exit_code == 0
    wrong = run_cli(app, ["stats", source, "--set", "hashes=chain"])
    assert wrong.exit_code == 2
    assert "option hashes is 'chain', allowed: chained, content" in wrong.stderr


# --- WEKA -------------------------------------------------------------------------------------


def test_a_sub_agent_counts_from_its_start_and_is_waited_for_if_over() -> None:
    trace = fixture("weka")
    assert trace.session_names == ("conv_a", "conv_a/agent_001", "conv_a/agent_002", "conv_b")
    sessions = [trace.session_names[s] for s in trace.session.tolist()]
    assert [s.removeprefix("conv_") for s in sessions] == [
        "a", "a/agent_001", "a/agent_002", "a/agent_001", "a", "a", "b", "b",
    ]  # fmt: skip
    # agent_001 begins at 3.5 s, ends at 10.5 s, before the main turn at 12 s; agent_002 goes on
    assert [trace.after_of(i) for i in range(8)] == [[], [0], [0], [1], [0, 3], [4], [], [6]]
    assert trace.think_ns.tolist() == [int(s * SECOND) for s in (0, 1.5, 2, 2, 1.5, 5, 0, 3)]
    assert shared(trace) == [0, 0, 128, 128, 192, 128, 0, 128]


def test_a_conversation_alone_is_as_in_its_folder() -> None:
    both, second = fixture("weka"), fixture("weka/conv_b.json")
    assert second.prompt_tokens.tolist() == both.prompt_tokens.tolist()[6:]
    assert shared(second) == shared(both)[6:]


@st.composite
def conversations(draw: st.DrawFn) -> list[list[tuple[float, int, int, list[int]]]]:
    """Turns (t, in, out, ids) of conversations, with ids chained as prefix trees are."""
    out = []
    for _ in range(draw(st.integers(1, 3))):
        paths: list[list[int]] = [[]]
        fresh, now, turns = 1, 0.0, []
        for _ in range(draw(st.integers(1, 6))):
            path = draw(st.sampled_from(paths))
            path = path[: draw(st.integers(0, len(path)))]
            new = list(range(fresh, fresh + draw(st.integers(0, 4))))
            fresh += len(new)
            paths.append(path + new)
            now += draw(st.integers(0, 400)) / 4
            size = 4 * len(path + new) + draw(st.integers(0, 3))
            turns.append((now, max(size, 1), draw(st.integers(0, 9)), path + new))
        out.append(turns)
    return out


@given(conversations())
@relaxed
def test_both_forms_of_weka_say_the_same(
    tmp_path: Path, talks: list[list[tuple[float, int, int, list[int]]]]
) -> None:
    folder, rows = tmp_path / "json", list[object]()
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for k, talk in enumerate(talks):
        rows.append({"trace": f"c{k}", "block_size": 4})
        requests = []
        for t, size, output, ids in talk:
            both = {"t": t, "in": size, "out": output, "api_time": 0.5, "think_time": 1.25}
            rows.append({**both, "s": "", "h": [[i, 1] for i in ids]})
            requests.append({**both, "type": "n", "hash_ids": ids})
        whole = {"id": f"c{k}", "block_size": 4, "hash_id_scope": "local", "requests": requests}
        (folder / f"c{k}.json").write_text(json.dumps(whole, indent=k % 2 or None))
    flat = read_trace(jsonl(tmp_path / "t.rle.jsonl", rows))
    trace = read_trace(str(folder))
    assert columns(trace) == columns(flat)
    naive = [ids for talk in talks for _, _, _, ids in talk]
    owner = [k for k, talk in enumerate(talks) for _ in talk]
    for i, ids in enumerate(naive):
        earlier = (naive[j] for j in range(i) if owner[j] == owner[i])
        assert shared(trace)[i] == 4 * max((lcp(ids, other) for other in earlier), default=0)


def test_ids_of_a_global_scope_are_shared_between_conversations(tmp_path: Path) -> None:
    request = {"t": 0, "type": "n", "in": 9, "out": 1, "hash_ids": [5, 6]}
    for k in range(2):
        whole = {"id": f"c{k}", "block_size": 4, "hash_id_scope": "global", "requests": [request]}
        (tmp_path / f"{k}.json").write_text(json.dumps(whole))
    assert shared(read_trace(str(tmp_path))) == [0, 8]


# --- token ids --------------------------------------------------------------------------------


def lcp(a: Sequence[int], b: Sequence[int]) -> int:
    """The oracle: how many leading items are equal, one by one."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


ids = st.lists(st.integers(0, 2), min_size=1, max_size=12)
talks = st.lists(
    st.tuples(ids, st.lists(st.integers(0, 2), max_size=6), st.booleans()), min_size=1, max_size=8
)


@given(talks)
@relaxed
def test_identity_of_token_ids_equals_plain_arrays(
    tmp_path: Path, rows: list[tuple[list[int], list[int], bool]]
) -> None:
    records = [
        {"input_tok_ids": p, **({"output_tok_ids": o} if known else {"output_toks": len(o)})}
        for p, o, known in rows
    ]
    trace = read_trace(jsonl(tmp_path / "t", records))
    prefixes = identify(trace)
    whole = [p + o if known else p for p, o, known in rows]
    for i, (prompt, _, _) in enumerate(rows):
        before = range(i)
        assert shared(trace)[i] == max((lcp(prompt, rows[j][0]) for j in before), default=0)
        assert shared(trace, True)[i] == max((lcp(prompt, whole[j]) for j in before), default=0)
        for j in before:
            assert prefixes.common(i, j) == lcp(whole[i], whole[j])
    names: dict[int, tuple[int, ...]] = {}
    for i, sequence in enumerate(whole):
        for n, name in enumerate(prefixes.ids(i, np.arange(1, len(sequence) + 1)).tolist(), 1):
            assert names.setdefault(name, tuple(sequence[:n])) == tuple(sequence[:n])
    assert len(names) == len({tuple(s[:n]) for s in whole for n in range(1, len(s) + 1)})


def test_long_prompts_are_taken_in_bulk() -> None:
    tree, rng = TokenTree(), np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, 400_000)
    assert tree.add(tokens) == [(0, 400_000)]
    other = tokens.copy()
    other[300_000] = -1
    runs = tree.add(other)
    assert [n for _, n in runs] == [300_000, 100_000] and runs[0] == (0, 300_000)
    assert sum(n for _, n in tree.add(tokens)) == 400_000


def test_marconi_turns_share_the_output_before_them() -> None:
    trace = fixture("tokens_marconi.jsonl")
    rows = [json.loads(x) for x in (FIXTURES / "tokens_marconi.jsonl").read_text().splitlines()]
    assert trace.output_known.all()
    assert trace.arrival_ns.tolist() == [int(r["ts"] * SECOND) for r in rows]
    for i, row in enumerate(rows):
        before = trace.after_of(i)
        assert len(before) == (row["turn_id"] > 0)
        for j in before:
            both = trace.prompt_tokens[j] + trace.output_tokens[j]
            assert identify(trace).common(i, j) == both


def test_agentic_requests_follow_the_tool_before_them() -> None:
    trace = fixture("tokens_agentic.jsonl")
    assert [trace.after_of(i) for i in range(4)] == [[], [0], [], [2]]
    assert trace.think_ns.tolist() == [0, 1_500_000_000, 0, 250_000_000]
    assert trace.arrival_ns.tolist() == [0, -1, 2 * SECOND, -1]
    assert trace.session_names == ("a", "b")
    assert shared(trace) == [0, 40, 40, 0]  # the last one has lengths only


# --- Bailian ----------------------------------------------------------------------------------


def test_bailian_chats_wait_for_their_parent() -> None:
    trace = fixture("bailian.jsonl")
    assert trace.ids == ("0", "1", "5", "7", "9")
    assert [trace.after_of(i) for i in range(5)] == [[], [], [0], [2], []]
    assert [trace.session_names[s] for s in trace.session.tolist()] == ["0", "1", "0", "0", "9"]
    assert trace.arrival_ns.tolist()[2] == 61_114_000_000
    assert trace.notes["parents_outside"] == 1
    # the parent's last block was padded and does not come back: 48 of its 50 tokens
    assert shared(trace) == [0, 32, 48, 96, 16]


def test_bailian_appends_are_inferred_on_request() -> None:
    trace = fixture("bailian.jsonl", infer_appends="on")
    assert shared(trace, True)[2:4] == [80, 120]  # parent's prompt and output


def test_appends_of_weka_and_native_files_are_inferred_on_request(tmp_path: Path) -> None:
    off, on = fixture("weka"), fixture("weka", infer_appends="on")
    assert shared(off, True)[3:5] == [128, 192]
    # two sub-agents have the same first blocks, and the longer one, 140 + 5, is taken for the
    # parent of agent_001's second prompt; the main one's is 200 + 20
    assert shared(on, True)[3:5] == [145, 220]
    write_native(off, str(tmp_path / "t"))
    again = read_trace(str(tmp_path / "t"), infer_appends="on")
    assert again.output_known.all() and again.notes["infer_appends"] == "on"
    write_native(fixture("tokens_marconi.jsonl"), str(tmp_path / "t"))
    told = read_trace(str(tmp_path / "t"), infer_appends="on")
    assert columns(told) == columns(read_trace(str(tmp_path / "t")))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=7))
@relaxed
def test_bailian_blocks_equal_hashing_plain_arrays(
    tmp_path: Path, prompts: list[list[int]]
) -> None:
    """Blocks of 4: full ones by prefix, a partial one only where the whole prompt is equal."""
    names: dict[tuple[int, ...], int] = {}
    rows = []
    for k, p in enumerate(prompts):
        cuts = [tuple(p[: n + 4]) for n in range(0, len(p), 4)]
        tail = [(*c, -1) if len(c) % 4 else c for c in cuts]
        hashes = [names.setdefault(c, len(names)) for c in tail]
        rows.append(
            {"chat_id": k, "timestamp": k, "input_length": len(p), "output_length": 1,
             "hash_ids": hashes}
        )  # fmt: skip
    path = jsonl(tmp_path / "t", rows)
    for hashes in ("chained", "content"):
        trace = read_trace(path, block_tokens=4, hashes=hashes)
        for i, p in enumerate(prompts):
            found = [(lcp(p, q), p == q) for q in prompts[:i]]
            whole = [n if equal else n // 4 * 4 for n, equal in found]
            assert shared(trace)[i] == max(whole, default=0)


def test_hashes_that_are_not_chained_are_refused_or_taken_as_content(tmp_path: Path) -> None:
    rows = [
        {"chat_id": k, "timestamp": k, "input_length": 48, "output_length": 1, "hash_ids": h}
        for k, h in enumerate([[1, 2, 3], [2, 1, 3], [2, 1, 4], [1, 1, 1], [1, 1, 2]])
    ]
    path = jsonl(tmp_path / "t", rows)
    with pytest.raises(TraceError, match=r"t:2: id 2 follows nothing .*option hashes content"):
        read_trace(path)
    assert shared(read_trace(path, hashes="content")) == [0, 0, 32, 16, 32]


# --- RAG --------------------------------------------------------------------------------------


def test_a_passage_is_shared_only_behind_the_same_pieces() -> None:
    trace = fixture("rag/0_trace.jsonl")
    assert trace.arrival_ns.tolist() == [int(s * SECOND) for s in (27, 30, 30.5, 82, 90)]
    assert [trace.after_of(i) for i in range(5)] == [[], [], [0], [], []]
    system, other = 512 + 512 + 437, 512 + 512
    assert shared(trace) == [0, system, system + 84 + 286, other, other + 447 + 84 + 163]


@given(
    st.lists(
        st.tuples(*[st.lists(st.integers(0, 4), max_size=3)] * 2, st.integers(0, 2)),
        min_size=1,
        max_size=6,
    )
)
@relaxed
def test_rag_pieces_equal_plain_arrays(
    tmp_path: Path, rows: list[tuple[list[int], list[int], int]]
) -> None:
    size = [3, 1, 0, 2, 5]
    jsonl(tmp_path / "1_x.jsonl", [{"x_id": i, "token_length": n} for i, n in enumerate(size)])
    records, arrays = [], list[list[object]]()
    for k, (system, passages, extra) in enumerate(rows):
        pieces = system + passages
        whole: list[object] = [(i, n) for i in pieces for n in range(size[i])]
        whole += [("own", k, n) for n in range(max(extra, not whole))]
        arrays.append(whole)
        records.append(
            {"timestamp": str(k), "input_length": len(whole), "output_length": 1,
             "hash_ids": {"sys_prompt": system, "passages_ids": passages}}
        )  # fmt: skip
    trace = read_trace(jsonl(tmp_path / "0_trace.jsonl", records))
    keys: dict[object, int] = {}
    plain = [[keys.setdefault(x, len(keys)) for x in a] for a in arrays]
    for i, a in enumerate(plain):
        assert shared(trace)[i] == max((lcp(a, b) for b in plain[:i]), default=0)


def test_lengths_can_lie_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text((FIXTURES / "rag/0_trace.jsonl").read_text())
    trace = read_trace(str(path), lengths=str(FIXTURES / "rag"))
    assert columns(trace) == columns(fixture("rag/0_trace.jsonl"))


# --- chat -------------------------------------------------------------------------------------


def test_chat_answers_and_generation_prompts() -> None:
    trace = fixture("chat/trace.jsonl")
    assert [trace.after_of(i) for i in range(4)] == [[], [], [0], []]
    assert trace.think_ns.tolist() == [0, 0, 1_500_000_000, 0]
    assert trace.arrival_ns.tolist() == [0, 250_000_000, -1, 900_500_000]
    # <|im_start|>, "as" + "s" + "i" + "s" + "t" + "a" + "n" + "t", newline
    assert trace.generation_prompt_tokens.tolist() == [10] * 4
    assert trace.output_known.tolist() == [True, True, False, True]
    assert shared(trace)[2:] == [60, 60]
    assert shared(trace, True)[2] == 60 + 12  # the answer and its <|im_end|>


def test_reasoning_that_is_not_kept_ends_sharing_at_the_generation_prompt() -> None:
    kept = fixture("chat/trace.jsonl")
    trap = fixture("chat/trace.jsonl", chat_template=str(FIXTURES / "chat/thinking.jinja"))
    think = int(trap.generation_prompt_tokens[0] - kept.generation_prompt_tokens[0])
    assert think > 0
    assert shared(trap, True)[2] == 60  # neither "<think>" nor the answer behind it comes back
    assert trap.prompt_tokens.tolist() == [n + think for n in kept.prompt_tokens.tolist()]


TEMPLATE = """{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- generation -%}
{{ m.content.split('</think>')[-1] if loop.index0 < last.user else m.content }}
{%- endgeneration -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def test_reasoning_dropped_from_history_is_not_shared(tmp_path: Path) -> None:
    """A template as models that think have them: what was thought leaves with the next turn."""
    pytest.importorskip("tokenizers")
    (tmp_path / "x.jinja").write_text(TEMPLATE)
    first = [{"role": "system", "content": "x"}, {"role": "user", "content": "hello"}]
    answer = {"role": "assistant", "content": "<think>hm</think>yes"}
    then = [*first, answer, {"role": "user", "content": "and?"}]
    rows = [{"messages": first, "output": answer}, {"messages": then, "output": "no"}]
    options = {"tokenizer": str(FIXTURES / "chat"), "chat_template": str(tmp_path / "x.jinja")}
    trace = read_trace(jsonl(tmp_path / "t", rows), **options)
    # a token a letter, but "th" and "in" are one, twice each; then <|im_end|>
    assert trace.output_tokens[0] == len("<think>hm</think>yes") - 4 + 1
    # all of the first prompt with its generation prompt, but not the answer, which is "yes" now
    assert shared(trace, True)[1] == trace.prompt_tokens[0]


def test_every_answer_of_a_conversation_is_a_request_with_turns_all(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    talk = [("human", "hello"), ("gpt", "the answer"), ("human", "and?"), ("gpt", "as said")]
    row = {"conversations": [{"from": who, "value": text} for who, text in talk]}
    options = {"tokenizer": str(FIXTURES / "chat"), "turns": "all"}
    trace = read_trace(jsonl(tmp_path / "t", [row, row]), **options)
    assert [trace.after_of(i) for i in range(4)] == [[], [0], [], [2]]
    assert trace.session_names == ("line 1", "line 2")
    assert shared(trace, True)[1] == trace.prompt_tokens[0] + trace.output_tokens[0]
    last = read_trace(str(tmp_path / "t"), **{**options, "turns": "last"})
    assert len(last) == 2 and last.prompt_tokens[0] == trace.prompt_tokens[1]


def test_batch_files_and_replies(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    reply = {"choices": [{"message": {"role": "assistant", "content": "the"}}]}
    rows = [
        {"custom_id": "one", "method": "POST", "body": body},
        {"custom_id": "two", "body": body, "response": {"status_code": 200, "body": reply}},
    ]
    trace = read_trace(jsonl(tmp_path / "t", rows), tokenizer=str(FIXTURES / "chat"))
    assert trace.ids == ("one", "two")
    assert trace.output_tokens.tolist() == [9, 3]  # "t", "he", <|im_end|>


def test_chat_identity_equals_tokens_one_by_one(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(FIXTURES / "chat/tokenizer.json"))
    rng = random.Random(5)
    words = ["hello", "the", " the", "as", "in", "ll", "use", "\n", "é"]
    rows, texts = [], []
    for _ in range(300):  # more than one batch
        said = [
            {"role": r, "content": "".join(rng.choices(words, k=rng.randrange(1, 3)))}
            for r in ("user", "assistant", "user")[: rng.choice([1, 3])]
        ]
        rows.append({"messages": said, "output_length": 1})
        shown = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in said)
        texts.append(f"{shown}<|im_start|>assistant\n")
    path = jsonl(tmp_path / "t", rows)
    trace = read_trace(path, tokenizer=str(FIXTURES / "chat"), chat_template="chatml")
    plain = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
    assert trace.prompt_tokens.tolist() == [len(p) for p in plain]
    naive = [max((lcp(p, q) for q in plain[:i]), default=0) for i, p in enumerate(plain)]
    assert shared(trace) == naive
