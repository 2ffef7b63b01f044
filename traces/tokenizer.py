"""Text to token ids, with a local tokenizer file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from traces.chat_template import HINT
from traces.errors import TraceError
from traces.token_tree import Tokens


def tokenizer_file(path: str, given: str | None = None) -> Path:
    """Where the tokenizer of the trace at ``path`` is, or should be."""
    place = Path(given) if given is not None else Path(path).parent
    return place / "tokenizer.json" if place.is_dir() else place


class Tokenizer:
    """A tokenizer file in the hands of the ``tokenizers`` package, an extra. ``special`` are the
    ids of special tokens. Raises ``TraceError`` where the package or the file is not there."""

    def __init__(self, path: str, file: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise TraceError(
                path, 0, "format chat needs the package tokenizers, which is not installed,"
                f" allowed: {HINT} (or token ids, format tokens)"
            ) from None  # fmt: skip
        try:
            self._tokenizer = Loaded.from_file(str(file))
        except Exception as e:  # the package raises plain exceptions
            raise TraceError(
                file, 0, f"no tokenizer file ({str(e)[:80]}), allowed: a tokenizer.json"
            ) from None
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = np.array([i for i, token in added.items() if token.special], np.int64)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of each text, special tokens in it recognised and none added."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(e.ids, np.int64) for e in found]
