"""What is wrong with a trace file, said so that a person can mend it."""

from __future__ import annotations

from dataclasses import dataclass, field


class TraceError(Exception):
    """A trace that cannot be read or written: ``path:line: what, allowed``; line 0 is the file."""

    def __init__(self, path: object, line: int, message: str) -> None:
        where = f"{path}:{line}" if line else str(path)
        super().__init__(f"{where}: {message}")
        self.path, self.line, self.message = str(path), line, message


class BadRecord(ValueError):
    """A record that cannot be taken; its message says what is wrong and what is allowed."""


@dataclass
class BadLines:
    """Raises the first bad line of ``path``, or with ``skip`` collects all of them."""

    path: str
    skip: bool = False
    found: list[str] = field(default_factory=list)

    def report(self, line: int, message: str) -> None:
        """Raise ``TraceError``, or note it and go on."""
        error = TraceError(self.path, line, message)
        if not self.skip:
            raise error
        self.found.append(str(error))
