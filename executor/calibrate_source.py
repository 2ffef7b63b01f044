"""Which sources a timing belongs to: SHA-256 by part, comments and docstrings aside (no torch).

The walk below is our own, not ``ast.dump``, whose text differs between versions of Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
KERNELS = ("attention", "conv", "int8", "ssd", "state")
SHARED = ("backend.py", "config.py", "segments.py", "tiles.py")
LAYERS = ("batch.py", "decoder.py", "pools.py")


@cache
def kernel_hashes() -> dict[str, str]:
    """Of each kernel the executor runs, what they share, their configurations, and its layers."""
    kernels, executor = ROOT / "kernels", ROOT / "executor"
    parts = {name: sorted((kernels / name).glob("*.py")) for name in KERNELS}
    parts = {name: [f for f in files if f.stem != "naive"] for name, files in parts.items()}
    parts["shared"] = [kernels / name for name in SHARED]
    parts["configs"] = sorted((kernels / "configs").glob("*.yaml"))
    parts["layers"] = [executor / n for n in LAYERS] + sorted((executor / "layers").glob("*.py"))
    return {name: _hash([f for f in files if f.is_file()]) for name, files in parts.items()}


def _hash(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        text = file.read_text("utf-8")
        digest.update(f"{file.name}\n{code(text) if file.suffix == '.py' else text}\n".encode())
    return digest.hexdigest()


def code(text: str) -> str:
    """What a Python source does, as text: without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            node.body = body[1:]  # type: ignore[attr-defined]
    return "".join(_walk(tree))


def _is_text(node: ast.AST) -> bool:
    value = getattr(node, "value", None)
    is_constant = isinstance(node, ast.Expr) and isinstance(value, ast.Constant)
    return is_constant and isinstance(getattr(value, "value", None), str)


def _walk(node: object) -> Iterator[str]:
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if value is not None and value != [] and name not in ("type_comment", "kind"):
                yield f" {name}="
                yield from _walk(value)
        yield ")"
    elif isinstance(node, list):
        for each in node:
            yield from _walk(each)
    else:
        yield repr(node)
