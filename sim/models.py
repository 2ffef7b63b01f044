"""Models by name, by preset file, or from a Nemotron-H checkpoint's ``config.json``."""

from __future__ import annotations

import json
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from sim.dtypes import SSM_DTYPES, item_bytes, one_of
from sim.hf_config import nemotron_h
from sim.model import Attention, Model, Moe, StateShape

PRESETS = files("sim").joinpath("data/models")


class UnknownModel(ValueError):
    """No preset of that name; the message names the nearest ones."""


@cache
def names() -> tuple[str, ...]:
    """Every preset's name, sorted."""
    return tuple(
        sorted(p.name.removesuffix(".yaml") for p in PRESETS.iterdir() if "yaml" in p.name)
    )


def load(name: str) -> Model:
    """A preset by name, else a ``.yaml`` preset, a ``config.json`` or a folder that holds one.

    Raises ``UnknownModel`` if there is no such name or file, ``ValueError`` (``path: what,
    allowed``) on a file that does not describe a model.
    """
    if name in names():
        return _preset(name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read(path)
    near = get_close_matches(name.lower(), names(), 4, 0.4)
    hint = f"nearest are {', '.join(near)}" if near else f"known are {', '.join(names())}"
    raise UnknownModel(f"unknown model {name!r}: {hint}; or give a .yaml preset or a config.json")


@cache
def _preset(name: str) -> Model:
    return from_yaml(PRESETS.joinpath(f"{name}.yaml").read_text("utf-8"), f"{name}.yaml")


def _read(path: Path) -> Model:
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error
    if path.suffix in (".yaml", ".yml"):
        return from_yaml(text, str(path))
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    return checked(nemotron_h(config, str(path)), str(path))


def from_yaml(text: str, where: str) -> Model:
    """A preset's text as a model. Raises ``ValueError`` naming ``where`` and the field."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ValueError(f"{where}{line}: not YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be fields of one model, found {type(data).__name__}")
    return checked(_model(data, where), where)


def _model(data: dict[str, Any], where: str) -> Model:
    ffn = dict(data.pop("ffn", None) or {})
    kind = ffn.pop("kind", "dense" if ffn else "none")
    if kind == "moe":
        data["moe"] = _part(Moe, ffn, where, "ffn")
    elif ffn:
        renamed = {"intermediate": "ffn_intermediate", "matrices": "ffn_matrices"}
        data |= {_known(key, renamed, where, "ffn"): value for key, value in ffn.items()}
    state = data.get("state")
    if state is not None:
        args = dict(_mapping(state, where, "state"))
        data["state"] = StateShape(str(args.pop("family", "")), args)
    if data.get("attention") is not None:
        data["attention"] = _part(Attention, data["attention"], where, "attention")
    else:
        data.setdefault("attention", None)
    data.setdefault("state", None)
    model: Model = _part(Model, data, where, "model")
    return model


def _mapping(value: Any, where: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {what} is {value!r}, must be a mapping")
    return value


def _known(key: str, allowed: dict[str, str], where: str, what: str) -> str:
    return allowed[_name(key, tuple(allowed), where, what)]


def _name(key: str, allowed: tuple[str, ...], where: str, what: str) -> str:
    try:
        return one_of("field", key, allowed)
    except ValueError as error:
        raise ValueError(f"{where}: {what}: {error}") from None


def _part(cls: type[Any], data: Any, where: str, what: str) -> Any:
    allowed = tuple(f.name for f in fields(cls))
    for key in _mapping(data, where, what):
        _name(str(key), allowed, where, what)
    try:
        return cls(**data)
    except TypeError as error:
        raise ValueError(f"{where}: {what}: {str(error).split('() ')[-1]}") from error


def checked(model: Model, where: str) -> Model:
    """``model`` if it makes sense. Raises ``ValueError`` naming ``where`` and the field."""
    try:
        problems = _problems(model)
    except ValueError as error:
        problems = [str(error)]
    if problems:
        raise ValueError(f"{where}: {problems[0]}")
    return model


def _problems(model: Model) -> list[str]:
    found = []
    if set(model.pattern) - set("M*-E") or not set(model.pattern) & set("M*"):
        found.append(f"pattern {model.pattern!r}: allowed letters are M * - E, with an M or a *")
    for letter, part in (("M", model.state), ("*", model.attention)):
        if (letter in model.pattern) != (part is not None):
            field = "state" if letter == "M" else "attention"
            found.append(f"pattern and {field}: {letter} layers need it, others must not have it")
    found += [
        f"{what} is {value!r}, must be a whole number from {low} up"
        for what, value, low in _counts(model)
        if not isinstance(value, int) or value < low
    ]
    one_of("ssm_dtype", model.ssm_dtype, SSM_DTYPES[1:])
    for dtype in (model.dtype, model.conv_dtype):
        item_bytes(dtype)
    if model.attention is not None:
        one_of("attention kind", model.attention.kind, ("gqa", "mla"))
    return found


def _counts(model: Model) -> list[tuple[str, Any, int]]:
    counts: list[tuple[str, Any, int]] = [
        ("hidden_size", model.hidden_size, 1),
        ("vocab_size", model.vocab_size, 0),
        ("max_model_len", model.max_model_len, 2),
        ("ffn_intermediate", model.ffn_intermediate, 0),
    ]
    if model.attention is not None:
        names = ("num_query_heads", "num_kv_heads", "head_dim")
        counts += [(f"attention {n}", getattr(model.attention, n), 1) for n in names]
    if model.state is not None:
        counts += [(f"state {key}", value, 1) for key, value in model.state.args.items()]
    return counts
