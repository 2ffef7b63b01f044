"""Text files, plain or compressed (gzip, zstd), read by line and written at once."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from traces.errors import BadLines, TraceError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def lines(path: str, bad: BadLines) -> Iterator[tuple[int, str]]:
    """Line number and text of every line that is not blank; bad ones go to ``bad``.

    Raises ``TraceError`` where the file cannot be opened or holds nothing.
    """
    seen = False
    for number, raw in _raw_lines(path, bad):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as e:
            seen = True
            bad.report(
                number, f"byte {raw[e.start]:#04x} at {e.start} is not UTF-8, allowed: UTF-8"
            )
            continue
        if text:
            seen = True
            yield number, text
    if not seen:
        raise TraceError(path, 0, "empty, allowed: at least one record")


def _raw_lines(path: str, bad: BadLines) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _open(path) as stream:
            for number, raw in enumerate(stream, 1):
                yield number, raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        bad.report(number + 1, f"gzip data end early or are damaged ({e}), allowed: a whole file")
    except OSError as e:
        raise TraceError(path, 0, f"cannot be read: {e.strerror or e}") from None
    except Exception as e:
        if type(e).__name__ != "ZstdError":
            raise
        bad.report(number + 1, f"zstd data end early or are damaged ({e}), allowed: a whole file")


def _open(path: str) -> IO[bytes]:
    with open(path, "rb") as f:
        magic = f.read(4)
    if magic[:2] == GZIP:
        return cast(IO[bytes], gzip.open(path, "rb"))
    if magic == ZSTD:
        import zstandard  # an import of 10 ms that few files need

        return io.BufferedReader(_Whole(zstandard.open(path, "rb"), path))
    return open(path, "rb")


class _Whole(io.RawIOBase):
    """A zstd stream that says so when its last frame is cut; the library just ends."""

    def __init__(self, stream: IO[bytes], path: str) -> None:
        self._stream = stream
        self._path = path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = cast(memoryview, buffer)
        data = self._stream.read(len(view))
        view[: len(data)] = data
        if not data:
            _check_frame(self._path)
        return len(data)


def _check_frame(path: str) -> None:
    import zstandard

    with open(path, "rb") as f:
        decoder = zstandard.ZstdDecompressor().decompressobj()
        while chunk := f.read(1 << 20):
            while chunk:
                decoder.decompress(chunk)
                if not decoder.eof:
                    break
                chunk = decoder.unused_data
                decoder = zstandard.ZstdDecompressor().decompressobj()
                if not chunk:
                    return
    raise EOFError("zstd frame without an end")


def write_lines(path: str, texts: Iterable[str]) -> None:
    """Write lines to ``path`` (``.gz`` and ``.zst`` compress), whole or not at all.

    The same lines give the same bytes. Raises ``TraceError`` where the file cannot be written.
    """
    data = "".join(f"{text}\n" for text in texts).encode()
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as e:
        raise TraceError(path, 0, f"cannot be written: {e.strerror or e}") from None
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(_packed(path, data))
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, target)
    except BaseException as e:
        Path(name).unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise TraceError(path, 0, f"cannot be written: {e.strerror or e}") from None
        raise


def _packed(path: str, data: bytes) -> bytes:
    if path.endswith(".gz"):
        return gzip.compress(data, mtime=0)
    if path.endswith(".zst"):
        import zstandard

        return zstandard.ZstdCompressor(level=9).compress(data)
    return data
