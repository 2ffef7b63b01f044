"""RAG component traces (RAGPulse): a prompt is named piece by piece, not as prefixes.

A record lists ids of its system prompt, passages, history, web search results and question, which
stand in the prompt in this order. How long each piece is, files beside the trace say: one
``{"..._id": 7, "token_length": 84}`` a line. Prefixes follow from the order of the pieces, so a
passage is shared only where everything before it is shared. Tokens of ``input_length`` beyond
the pieces are shared with nothing. Turns of a session wait for the one before.
Source: flashserve/RAGPulse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traces.columns import Columns
from traces.errors import BadLines, BadRecord, TraceError
from traces.fields import MAX_TOKENS, integer, integers, nanoseconds, parse_object, string
from traces.files import lines
from traces.trace import Trace

PIECES = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
SECOND = 1_000_000_000
MAX_ID = 2**62
_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def read_rag(
    path: str, *, lengths: str | None = None, sort: bool = False, skip_bad: bool = False
) -> Trace:
    """Read ``path``; ``lengths`` is the file or folder that says how long pieces are (default:
    the folder of ``path``).

    Raises ``TraceError``; with ``skip_bad`` bad lines of the trace are listed in
    ``notes["skipped"]`` instead.
    """
    bad = BadLines(path, skip_bad)
    records = [(number, text) for number, text in lines(path, bad)]
    reader = _Reader(_lengths(path, lengths), Columns(sort))
    for number, text in records:
        try:
            reader.take(parse_object(text))
        except BadRecord as e:
            bad.report(number, str(e))
    return reader.columns.build(format="rag", skipped=tuple(bad.found))


@dataclass
class _Reader:
    """``length`` of every piece; ``address`` of those seen."""

    length: dict[int, int]
    columns: Columns
    address: dict[int, int] = field(default_factory=dict)
    fresh: int = 0
    last: dict[str, int] = field(default_factory=dict)

    def take(self, record: dict[str, Any]) -> None:
        """Append one request; nothing changes if it is bad."""
        prompt, output = integer(record, "input_length", 1), integer(record, "output_length")
        arrival, session = _seconds(record), string(record, "session_id")
        ids = self._ids(record)
        covered = sum(map(self.length.__getitem__, ids))
        if covered > prompt:
            raise BadRecord(f"input_length is {prompt}, allowed: {covered}, its pieces, or more")
        id = str(len(self.columns.ids))
        self.columns.check(id, arrival)
        before = self.last.get(session) if session is not None else None
        row = self.columns.add(
            id,
            prompt,
            output,
            [(self._place(i), self.length[i]) for i in ids if self.length[i]],
            arrival=arrival,
            session=session,
            after=() if before is None else (before,),
        )
        if session is not None:
            self.last[session] = row

    def _ids(self, record: dict[str, Any]) -> list[int]:
        pieces = record.get("hash_ids")
        if type(pieces) is not dict:
            raise BadRecord(f"hash_ids is {str(pieces)[:40]}, allowed: an object of lists")
        for name in pieces:
            if name not in PIECES:
                raise BadRecord(f"unknown piece {name!r}, allowed: {', '.join(PIECES)}")
        ids = [i for name in PIECES if name in pieces for i in integers(pieces, name, MAX_ID)]
        missing = next((i for i in ids if i not in self.length), None)
        if missing is not None:
            raise BadRecord(
                f"no length is known of piece {missing}, allowed: ids of the files beside the"
                " trace (or the option lengths)"
            )
        return ids

    def _place(self, piece: int) -> int:
        if piece not in self.address:
            self.address[piece] = self.fresh
            self.fresh += self.length[piece] + 1
        return self.address[piece]


def _seconds(record: dict[str, Any]) -> int:
    """The time, which the publisher writes as a string."""
    value = record.get("timestamp")
    if isinstance(value, str):
        value = _number(value)
    found = nanoseconds({"timestamp": value}, "timestamp", SECOND)
    if found is None:
        raise BadRecord("timestamp is missing, allowed: seconds from the start")
    return found


def _number(text: str) -> int | float:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise BadRecord(f"timestamp is {text[:40]!r}, allowed: seconds") from None


def _lengths(path: str, given: str | None) -> dict[int, int]:
    """Tokens by piece, from all files that have them."""
    out: dict[int, int] = {}
    for file in length_files(path, given):
        _take_lengths(str(file), out)
    if not out:
        place = given if given is not None else Path(path).parent
        raise TraceError(
            path, 0, f"no lengths of pieces in {place}, allowed: JSONL files with token_length"
            " there, or where the option lengths says"
        )  # fmt: skip
    return out


def length_files(path: str, given: str | None = None) -> list[Path]:
    """The files that say how long the pieces of the trace at ``path`` are."""
    place = Path(given) if given is not None else Path(path).parent
    if not place.is_dir():
        return [place]
    found = sorted(p for p in place.iterdir() if p.name.endswith(_ENDINGS))
    return [p for p in found if p != Path(path) and _has_lengths(p)]


def _has_lengths(file: Path) -> bool:
    try:
        _, text = next(lines(str(file), BadLines(str(file))))
        return "token_length" in parse_object(text)
    except (TraceError, BadRecord):
        return False


def _take_lengths(file: str, out: dict[int, int]) -> None:
    bad = BadLines(file)
    for number, text in lines(file, bad):
        try:
            record = parse_object(text)
            piece = integer(record, _id_name(record), 0, MAX_ID)
            tokens = integer(record, "token_length", 0, MAX_TOKENS)
            if out.setdefault(piece, tokens) != tokens:
                raise BadRecord(f"piece {piece} has {tokens} tokens here but {out[piece]} earlier")
        except BadRecord as e:
            bad.report(number, f"{e}" if "allowed" in str(e) else f"{e}, allowed: one length")


def _id_name(names: Iterable[str]) -> str:
    found = [name for name in names if name.endswith("_id")]
    if len(found) != 1:
        raise BadRecord(f"{len(found)} ids, allowed: one key that ends in _id")
    return found[0]
