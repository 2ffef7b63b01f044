"""Chat templates: messages to the text that a server tokenises, the generation prompt apart.

Jinja templates as Hugging Face repositories have them: ``messages``, ``tools``, ``bos_token``,
``eos_token`` and ``add_generation_prompt`` are known to them, and ``raise_exception`` and
``strftime_now`` (always 1970-01-01, so that the same file gives the same trace). They run in
Jinja's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traces.errors import BadRecord, TraceError

HINT = "pip install 'prefixlab[tokenizers]'"
BESIDE = ("chat_template.jinja", "tokenizer_config.json")
SHIPPED = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
}
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    """``history`` is what later prompts can share; ``generation`` asks for the answer."""

    history: str
    generation: str


@dataclass(frozen=True)
class ChatTemplate:
    """``apply`` is the compiled template; ``known`` what it is told besides the messages."""

    apply: Callable[..., str]
    known: Mapping[str, Any]

    def render(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """The prompt of ``messages``. Raises ``BadRecord`` where the template refuses them."""
        history, whole = (self._text(messages, tools, asks) for asks in (False, True))
        if not whole.startswith(history):
            raise BadRecord(
                "the chat template's generation prompt does not stand at the end, allowed:"
                " a template that appends it"
            )
        return Rendered(history, whole[len(history) :])

    def answer(
        self, messages: Sequence[Message], tools: Any, prompt: Rendered, answer: Message
    ) -> str:
        """What was generated: all that the template appends for ``answer``, or its content where
        the template makes something else of the prompt (drops reasoning, say)."""
        whole = self._text([*messages, answer], tools, False)
        start = prompt.history + prompt.generation
        return whole[len(start) :] if whole.startswith(start) else str(answer.get("content") or "")

    def _text(self, messages: Sequence[Message], tools: Any, asks: bool) -> str:
        try:
            return self.apply(
                messages=messages, tools=tools, add_generation_prompt=asks, **self.known
            )
        except Exception as e:  # a template can raise anything
            raise BadRecord(
                f"the chat template refuses this ({str(e)[:80]}), allowed: messages it knows"
            ) from None


def load(given: str | None, tokenizer: Path, trace: str) -> ChatTemplate:
    """The template ``given``: a shipped name, a ``.jinja`` file or a ``tokenizer_config.json``;
    None is what lies beside ``tokenizer``. Raises ``TraceError``."""
    source = SHIPPED.get(given or "")
    config = _config(tokenizer.with_name(BESIDE[1]))
    if source is None:
        source, config = _source(given, tokenizer, config, trace)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return ChatTemplate(
        _compiled(source, trace), {name: _token(config.get(name)) for name in names}
    )


def _source(
    given: str | None, tokenizer: Path, config: dict[str, Any], trace: str
) -> tuple[str, dict[str, Any]]:
    place = Path(given) if given is not None else tokenizer.with_name(BESIDE[0])
    if given is not None and not place.is_file():
        raise TraceError(
            trace, 0, f"option chat_template is {given!r}, allowed: a .jinja file, a"
            f" tokenizer_config.json, or {', '.join(SHIPPED)}"
        )  # fmt: skip
    if place.is_file() and place.suffix != ".json":
        return _read(place), config
    if place.is_file():
        config = _config(place)
    source = _chosen(config.get("chat_template"))
    if source is None:
        raise TraceError(
            trace, 0, f"no chat template beside {tokenizer}, allowed: the option chat_template"
            f" (a .jinja file, a tokenizer_config.json, or {', '.join(SHIPPED)})"
        )  # fmt: skip
    return source, config


def _chosen(value: Any) -> str | None:
    """A template, or the default one of several."""
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as e:
        raise TraceError(
            path, getattr(e, "lineno", 0), f"not JSON ({e}), allowed: one object"
        ) from None
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise TraceError(path, 0, f"cannot be read ({e}), allowed: UTF-8 text") from None


def _token(value: Any) -> str:
    """A special token as text; configurations write it plain or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _compiled(source: str, trace: str) -> Callable[..., str]:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise TraceError(
            trace,
            0,
            f"chat templates need the package jinja2, which is not installed, allowed: {HINT}",
        ) from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime
    try:
        render: Callable[..., str] = environment.from_string(_plain(source)).render
        return render
    except TemplateError as e:
        line = getattr(e, "lineno", None)
        raise TraceError(
            trace, 0, f"the chat template is wrong at its line {line} ({e}), allowed: Jinja"
        ) from None  # fmt: skip


def _plain(source: str) -> str:
    """``source`` with its marks of generated text, which are no Jinja, as blocks that always
    hold."""
    begun = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", source)
    return re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", begun)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> str:
    raise ValueError(message)


def _strftime(format: str) -> str:
    return datetime.fromtimestamp(0, UTC).strftime(format)
