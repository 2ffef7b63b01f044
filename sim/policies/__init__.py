"""One file per checkpoint policy; a policy's name is its file's name with ``-`` for ``_``.

Nothing is registered: the loader looks into this folder, so adding a policy touches no other
file. A policy may also live in any ``path/to/file.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import pkgutil
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from sim.policy import Policy

NOT_POLICIES = ("base",)


def names() -> list[str]:
    """Shipped policies, by name."""
    found = (m.name for m in pkgutil.iter_modules(__path__) if m.name not in NOT_POLICIES)
    return sorted(name.replace("_", "-") for name in found)


def load(name: str, /, **parameters: Any) -> Policy:
    """The policy ``name`` (or of a ``.py`` file) with ``parameters``.

    Raises ``ValueError`` for an unknown policy or parameter, with the nearest known one.
    """
    module = _from_file(Path(name)) if name.endswith(".py") else _shipped(name)
    policy: Any = module.Policy
    known = [f.name for f in dataclasses.fields(policy)]
    for key in parameters:
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"policy {name} has no parameter {key!r}; {has}{_near(key, known)}")
    made: Policy = policy(**parameters)
    return made


def _shipped(name: str) -> ModuleType:
    if name not in names():
        raise ValueError(
            f"no policy is called {name!r}; shipped are {', '.join(names())}{_near(name, names())}"
        )
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{path}: no such policy file")
    spec = importlib.util.spec_from_file_location(f"policy_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}{_line(error, path)}: {type(error).__name__}: {error}") from None
    if not hasattr(module, "Policy"):
        raise ValueError(f"{path}: no class Policy in it")
    return module


def _line(error: Exception, path: Path) -> str:
    """``:line`` of the file at which loading it failed, where that is known."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f":{lines[-1]}" if lines else ""


def _near(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""
