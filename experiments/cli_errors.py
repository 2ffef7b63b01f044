"""How commands fail: one line on standard error and exit status 2, never a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import typer

from traces.errors import TraceError

P = ParamSpec("P")
R = TypeVar("R")


class UsageError(Exception):
    """Something a command was given cannot be; the message says what, and what is allowed."""


@contextmanager
def executor_extra() -> Iterator[None]:
    """Imports of the executor; without torch, the extra to install is told."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise UsageError(
            f"this needs {error.name}, which is not installed; pip install 'prefixlab[executor]'"
        ) from None


USER_ERRORS: tuple[type[Exception], ...] = (UsageError, TraceError)


def tells_errors(command: Callable[P, R], *also: type[Exception]) -> Callable[P, R]:
    """``command``, with ``USER_ERRORS``, ``also`` and failing files told in one line."""

    @wraps(command)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (*USER_ERRORS, *also) as e:
            message = str(e)
        except OSError as e:
            message = f"{e.filename or 'file'}: {e.strerror or e}"
        text = f"error: {message}".encode("utf-8", "backslashreplace").decode()
        typer.echo(text, err=True)
        raise typer.Exit(2)

    return told
