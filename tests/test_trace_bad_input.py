"""Bad files: every reader says ``path:line: what, allowed``, or skips and lists."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from traces.errors import TraceError
from traces.registry import READERS, options_of, read_trace

HEAD = {"format": "prefixlab-trace", "version": 1, "segments": [4, 5]}
V0 = {"format": "radix-segments-v0", "segments": [4, 5]}
WEKA = {"trace": "x", "block_size": 4}


def native(id: object, t: object, **more: object) -> dict[str, object]:
    return {"id": id, "arrival_ns": t, "prompt": [0], "output_tokens": 2, **more}


def v0(t: object, **more: object) -> dict[str, object]:
    return {"t": t, "s": 0, "in": 6, "out": 2, "seg": [0], **more}


def mooncake(t: object, **more: object) -> dict[str, object]:
    return {"timestamp": t, "input_length": 600, "output_length": 2, "hash_ids": [1, 2], **more}


def weka(t: object, **more: object) -> dict[str, object]:
    return {"s": "", "t": t, "in": 10, "out": 2, "h": [[1, 2]], "api_time": 1.0, **more}


def azure(t: int, prompt: object = 3, output: object = 4) -> str:
    return f"2023-11-16 18:15:{t:02d}.6805900,{prompt},{output}"


#: format -> two good leading lines (a header counts), and a good line to come after
GOOD: dict[str, tuple[list[object], object]] = {
    "native": ([HEAD, native("a", 5)], native("z", 9)),
    "v0": ([V0, v0(5)], v0(9)),
    "mooncake": ([mooncake(5)], mooncake(9)),
    "weka": ([WEKA, weka(5)], weka(9)),
    "azure": (["TIMESTAMP,ContextTokens,GeneratedTokens", azure(5)], azure(9)),
}
BAD: list[tuple[str, object, str]] = [
    ("native", native("b", "soon"), "arrival_ns is 'soon'"),
    ("native", native("b", 5.5), "arrival_ns is 5.5"),
    ("native", native("b", True), "arrival_ns is True"),
    ("native", native("b", -7), "arrival_ns is -7"),
    ("native", native("b", 4), "time goes back from 5 to 4 ns"),
    ("native", native("a", 6), "'a' stands twice"),
    ("native", native(None, 6), "id is missing"),
    ("native", native([], 6), "id is []"),
    ("native", native("b", 6, prompt=[2]), "prompt holds 2, allowed: integers from 0 to 1"),
    ("native", native("b", 6, prompt=[-1]), "prompt holds -1"),
    ("native", native("b", 6, prompt=[]), "prompt is empty"),
    ("native", native("b", 6, prompt="01"), "prompt is '01'"),
    ("native", native("b", 6, output_tokens=-2), "output_tokens is -2"),
    ("native", native("b", 6, output=[1]), "output_tokens is 2 but output has 5"),
    ("native", native("b", 6, after=["c"]), "waits for 'c'"),
    ("native", native("b", 6, after=["b"]), "waits for 'b'"),
    ("native", native("b", 6, after="a"), 'after is "a"'),
    ("native", native("b", 6, think_ns=-1), "think_ns is -1"),
    ("native", native("b", 6, generation_prompt_tokens=5), "generation_prompt_tokens is 5"),
    ("native", native("b", 6, prioritty=1), "unknown key 'prioritty', nearest 'priority'"),
    ("native", native("b", 6, session=[1]), "session is [1]"),
    ("native", native("b", 6, priority=1.5), "priority is 1.5"),
    ("v0", v0("1"), "t is '1'"),
    ("v0", v0(-1.0), "t is -1.0"),
    ("v0", v0(4.5), "time goes back"),
    ("v0", v0(6, seg=[0, 1]), "in is 6 but seg has 9 tokens"),
    ("v0", v0(6, seg=[1, 0], **{"in": 9}), "id 0 follows 1 here but nothing earlier"),
    ("v0", v0(6, seg=[7]), "seg holds 7"),
    ("v0", v0(6, out=None), "out is None"),
    ("v0", v0(6, **{"in": 0}), "in is 0"),
    ("mooncake", mooncake("6"), "timestamp is '6'"),
    ("mooncake", mooncake(-6), "timestamp is -6"),
    ("mooncake", mooncake(4), "time goes back"),
    ("mooncake", mooncake(1e300), "timestamp is 1e+300"),
    ("mooncake", mooncake(None), "timestamp is missing"),
    ("mooncake", mooncake(6, input_length=-1), "input_length is -1"),
    ("mooncake", mooncake(6, input_length=600.0), "input_length is 600.0"),
    ("mooncake", mooncake(6, output_length="2"), "output_length is '2'"),
    ("mooncake", mooncake(6, input_tokens=599), "input_length is 600 but input_tokens is 599"),
    ("mooncake", mooncake(6, hash_ids=[1]), "1 hash_ids for 600 tokens in blocks of 512"),
    ("mooncake", mooncake(6, hash_ids=None), "hash_ids is None"),
    ("mooncake", mooncake(6, hash_ids=[1, "x"]), "hash_ids holds 'x'"),
    ("mooncake", mooncake(6, hash_ids=[1, True]), "hash_ids holds True"),
    ("mooncake", mooncake(6, hash_ids=[1, -2]), "hash_ids holds -2"),
    ("mooncake", mooncake(6, hash_ids=[3, 2]), "id 2 follows 3 here but 1 earlier"),
    ("mooncake", mooncake(6, hash_ids=[1, 1]), "id 1 follows 1 here but nothing earlier"),
    ("mooncake", mooncake(6, hash_ids=[5, 5]), "id 5 stands twice"),
    ("mooncake", mooncake(6, input_length=700), "block 2 has 188 tokens here but 88 earlier"),
    (
        "mooncake",
        mooncake(6, input_length=1025, hash_ids=[1, 2, 3]),
        "block 2 has 512 tokens here but 88 earlier",
    ),
    ("mooncake", mooncake(6, delay=3), "delay on a request that has no session_id"),
    ("mooncake", mooncake(6, delay=3, session_id="s"), "is the first of its session"),
    ("mooncake", mooncake(6, wait_for=["1"]), "wait_for is not read"),
    ("mooncake", mooncake(6, request_id="0"), "'0' stands twice"),
    ("weka", weka("6"), "t is '6'"),
    ("weka", weka(-6), "t is -6"),
    ("weka", weka(None), "t is missing"),
    ("weka", weka(4), "t goes back from 5.0 to 4.0"),
    ("weka", weka(6, out=-1), "out is -1"),
    ("weka", weka(6, think_time=-1), "think_time is -1"),
    ("weka", weka(6, h=[[1, 3]]), "h has 3 blocks, allowed: 2"),
    ("weka", weka(6, h=[[1, 2, 3]]), "h holds [1, 2, 3]"),
    ("weka", weka(6, h=[[0, 2]]), "h holds [0, 2]"),
    ("weka", weka(6, h={}), "h is {}"),
    ("weka", weka(6, h=[[3, 1], [2, 1]]), "id 2 follows 3 here but 1 earlier"),
    ("weka", weka(6, h=[[2, 2]]), "id 2 follows 0 here but 1 earlier"),
    ("weka", weka(6, h=[[9, 1], [9, 1]]), "id 9 stands twice"),
    ("weka", {"trace": "x", "block_size": 4}, "'x' stands twice"),
    ("weka", {"trace": "y", "block_size": 8}, "block_size is 8, allowed: 4"),
    ("azure", azure(6, -3), "ContextTokens is '-3'"),
    ("azure", azure(6, 0), "ContextTokens is '0'"),
    ("azure", azure(6, 3, "x"), "GeneratedTokens is 'x'"),
    ("azure", azure(6, 3, "٣"), "GeneratedTokens is '٣'"),
    ("azure", azure(4), "time goes back"),
    ("azure", "2023-13-16 18:15:06.68,3,4", "TIMESTAMP is '2023-13-16"),
    ("azure", "yesterday,3,4", "TIMESTAMP is 'yesterday'"),
    ("azure", "2023-11-16 18:15:06.68,3", "2 cells, allowed: 3"),
]
for name in ("native", "v0", "mooncake", "weka"):
    BAD += [(name, '{"cut": 1, "li', "not JSON"), (name, "[1]", "[1] is no record")]
    BAD += [(name, "[" * 100_000, "not JSON"), (name, '{"t": NaN, "s"', "not JSON")]


def text(line: object) -> str:
    return line if isinstance(line, str) else json.dumps(line)


def write(path: Path, lines: list[object]) -> str:
    path.write_text("".join(f"{text(line)}\n" for line in lines), "utf-8")
    return str(path)


@pytest.mark.parametrize(("name", "line", "message"), BAD, ids=lambda v: str(v)[:50])
def test_a_bad_record_is_named_or_skipped(
    tmp_path: Path, name: str, line: object, message: str
) -> None:
    before, after = GOOD[name]
    path = write(tmp_path / "t", [*before, line, after])
    number = len(before) + 1
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{number}: ")
    assert message in str(caught.value)
    assert re.search(r"allowed: \S", str(caught.value))
    if name == "weka" and isinstance(line, dict) and "trace" in line:
        return  # a bad header leaves what follows without a conversation
    trace = read_trace(path, skip_bad=True)
    assert trace.notes["skipped"] == (str(caught.value),)
    assert len(trace) == 2


def test_requests_under_a_bad_weka_header_are_skipped_too(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [WEKA, weka(1), {"trace": "x", "block_size": 4}, weka(0)])
    trace = read_trace(path, skip_bad=True)
    skipped = trace.notes["skipped"]
    assert isinstance(skipped, tuple)
    assert len(trace) == 1
    assert [s.split(": ")[1] for s in skipped] == [
        "conversation 'x' stands twice, allowed",
        "no conversation to belong to, allowed",
    ]


@pytest.mark.parametrize("name", list(GOOD))
def test_the_good_lines_are_good(tmp_path: Path, name: str) -> None:
    before, after = GOOD[name]
    trace = read_trace(write(tmp_path / "t", [*before, after]))
    assert len(trace) == 2
    assert trace.notes["skipped"] == ()


@pytest.mark.parametrize("format", [None, *READERS])
@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"")])
def test_an_empty_file_is_refused(tmp_path: Path, format: str | None, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="empty, allowed: at least one record"):
        read_trace(str(path), format)


@pytest.mark.parametrize("name", ["native", "v0", "azure"])
def test_a_header_without_requests_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "t", GOOD[name][0][:1])
    with pytest.raises(TraceError, match="no request after the header"):
        read_trace(path)


@pytest.mark.parametrize("name", list(GOOD))
def test_bytes_that_are_not_utf8(tmp_path: Path, name: str) -> None:
    before, after = GOOD[name]
    path = tmp_path / "t"
    good = "".join(f"{text(line)}\n" for line in before).encode()
    path.write_bytes(good + b'{"\xff": 1}\n' + text(after).encode())
    with pytest.raises(TraceError, match=rf":{len(before) + 1}: byte 0xff at 2 is not UTF-8"):
        read_trace(str(path))
    assert len(read_trace(str(path), skip_bad=True)) == 2


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("name", list(GOOD))
@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_truncated_compressed_files(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    before, after = GOOD[name]
    whole = pack("".join(f"{text(line)}\n" for line in [*before, after]).encode())
    path = tmp_path / "t"
    path.write_bytes(whole[:-5])
    with pytest.raises(TraceError, match=r"t:?\d*: .*end early or are damaged.*allowed"):
        read_trace(str(path))


@pytest.mark.parametrize("name", list(GOOD))
def test_damaged_gzip_files(tmp_path: Path, name: str) -> None:
    before, after = GOOD[name]
    whole = bytearray(gzip.compress("".join(f"{text(x)}\n" for x in [*before, after]).encode()))
    whole[15:25] = b"\xff" * 10
    path = tmp_path / "t"
    path.write_bytes(whole)
    with pytest.raises(TraceError):
        read_trace(str(path))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({**HEAD, "version": 2}, "version is 2, allowed: an integer from 1 to 1"),
        ({**HEAD, "segments": [4, 0]}, "segment 1 has 0 tokens"),
        ({**HEAD, "segments": [4, -1]}, "segments holds -1"),
        ({**HEAD, "segments": None}, "segments is None"),
        ({**HEAD, "sort": 1}, "unknown key 'sort'"),
        ({**HEAD, "notes": 3}, "notes is 3"),
        ({**HEAD, "format": "radix-segments-v9"}, "format is 'radix-segments-v9'"),
    ],
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_bad_native_headers(tmp_path: Path, header: object, message: str, skip_bad: bool) -> None:
    path = write(tmp_path / "t", [header, native("a", 1)])
    with pytest.raises(TraceError, match=re.escape(f"{path}:1: header: {message}")):
        read_trace(path, skip_bad=skip_bad)


def test_azure_needs_its_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t", ["TIMESTAMP,ContextTokens", "1,2"])
    with pytest.raises(TraceError, match=r":1: header lacks GeneratedTokens"):
        read_trace(path, "azure")


def test_unknown_content_format_and_options(tmp_path: Path) -> None:
    path = write(tmp_path / "t", ["hello"])
    with pytest.raises(TraceError, match=r":1: no known format .* native, mooncake, weka, azure"):
        read_trace(path)
    with pytest.raises(TraceError, match="format 'moncake', nearest 'mooncake'"):
        read_trace(path, "moncake")
    with pytest.raises(
        TraceError, match="option 'blocktokens' of mooncake, nearest 'block_tokens'"
    ):
        read_trace(path, "mooncake", blocktokens=3)
    for option, value in [("block_tokens", 0), ("tail", "round"), ("sort", "yes")]:
        with pytest.raises(TraceError, match=f"option {option} is {value!r}, allowed: "):
            read_trace(path, "mooncake", **{option: value})
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(str(tmp_path / "none"))
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(str(tmp_path))


def test_yaml_words_for_off_and_on(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [mooncake(5)])
    for value, word in [(True, "on"), (False, "off"), ("on", "on")]:
        assert read_trace(path, infer_appends=value).notes["infer_appends"] == word


@pytest.mark.parametrize("name", ["native", "v0", "mooncake", "azure"])
def test_sort_orders_by_time_and_keeps_equals_in_place(tmp_path: Path, name: str) -> None:
    assert "sort" in options_of("native" if name == "v0" else name)
    make: dict[str, Callable[[int, int], object]] = {
        "native": lambda i, t: native(str(i), t, output_tokens=i),
        "v0": lambda i, t: v0(t, out=i),
        "mooncake": lambda i, t: mooncake(t, output_length=i),
        "azure": lambda i, t: azure(t, 3, i),
    }
    times = [5, 3, 5, 3, 9, 0]
    head = GOOD[name][0][:1] if name != "mooncake" else []
    path = write(tmp_path / "t", [*head, *(make[name](i, t) for i, t in enumerate(times))])
    trace = read_trace(path, sort=True)
    assert trace.output_tokens.tolist() == [5, 1, 3, 0, 2, 4]
    assert (trace.arrival_ns[1:] >= trace.arrival_ns[:-1]).all()


def test_sort_keeps_turns_behind_what_they_wait_for(tmp_path: Path) -> None:
    lines: list[object] = [
        mooncake(9, session_id="a"),
        mooncake(9, session_id="a", delay=1),
        mooncake(2, session_id="b"),
        {**mooncake(0, session_id="b", delay=5)},
    ]
    del lines[3]["timestamp"]  # type: ignore[attr-defined]
    trace = read_trace(write(tmp_path / "t", lines), sort=True)
    assert [trace.after_of(i) for i in range(4)] == [[], [0], [], [2]]
    assert trace.ids == ("2", "3", "0", "1")
