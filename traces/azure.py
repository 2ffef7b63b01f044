"""Azure LLM inference CSV: arrivals and lengths, nothing shared. Source: AzurePublicDataset."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from traces.columns import Columns
from traces.errors import BadLines, BadRecord, TraceError
from traces.fields import MAX_TOKENS
from traces.files import lines
from traces.trace import Trace

NAMES = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00)?")
_COUNT = re.compile(r"[0-9]{1,10}")


def read_azure(path: str, *, sort: bool = False, skip_bad: bool = False) -> Trace:
    """Read ``path``; time counts from the first request (with ``sort`` from the earliest).

    Raises ``TraceError``; with ``skip_bad`` bad lines are listed in ``notes["skipped"]`` instead.
    """
    bad = BadLines(path, skip_bad)
    rows = lines(path, bad)
    number, text = next(rows, (0, ""))
    header = [name.strip() for name in text.split(",")]
    missing = [name for name in NAMES if name not in header]
    if missing:
        raise TraceError(path, number, f"header lacks {missing[0]}, allowed: {','.join(NAMES)}")
    places = [header.index(name) for name in NAMES]
    columns = Columns(sort)
    for number, text in rows:
        try:
            _take(columns, text.split(","), len(header), places)
        except BadRecord as e:
            bad.report(number, str(e))
    if not columns.ids and not bad.found:
        raise TraceError(path, number, "no request after the header, allowed: at least one")
    first = min(columns.arrival, default=0)
    for i, t in enumerate(columns.arrival):
        columns.arrival[i] = t - first
    return columns.build(format="azure", skipped=tuple(bad.found))


def _take(columns: Columns, cells: list[str], width: int, places: list[int]) -> None:
    if len(cells) != width:
        raise BadRecord(f"{len(cells)} cells, allowed: {width} as in the header (a cut line?)")
    time, prompt, output = (cells[i].strip() for i in places)
    arrival = _nanoseconds(time)
    lengths = _tokens(NAMES[1], prompt, 1), _tokens(NAMES[2], output, 0)
    columns.add(str(len(columns.ids)), *lengths, arrival=arrival)


def _nanoseconds(text: str) -> int:
    """Nanoseconds since 1970."""
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
        if moment.year < 1970:
            raise ValueError
    except ValueError:
        raise BadRecord(
            f"TIMESTAMP is {text[:40]!r}, allowed: YYYY-MM-DD HH:MM:SS.fffffff from 1970 on"
        ) from None
    return int(moment.timestamp()) * 1_000_000_000 + int((match[2] or "0").ljust(9, "0"))


def _tokens(name: str, text: str, low: int) -> int:
    if not _COUNT.fullmatch(text) or not low <= int(text) <= MAX_TOKENS:
        raise BadRecord(f"{name} is {text[:40]!r}, allowed: an integer from {low} to {MAX_TOKENS}")
    return int(text)
