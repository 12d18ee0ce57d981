"""How a decorated management command ends: return codes, and an orderly stop by a signal."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError

from django_fencing.calls import Entry
from django_fencing.exceptions import (
    FencingError,
    InvalidResource,
    LeaseLost,
    LockHeld,
    OnceMismatch,
    StoreUnavailable,
)

# As sysexits.h has them: EX_TEMPFAIL, EX_PROTOCOL, EX_UNAVAILABLE, EX_DATAERR, EX_USAGE.
RETURN_CODES: dict[type[FencingError], int] = {
    LockHeld: 75,
    LeaseLost: 76,
    StoreUnavailable: 69,
    OnceMismatch: 65,
    InvalidResource: 64,
}


class CommandCall(Entry):
    """
    A call of a command's handle().

    A SIGTERM that nobody else handles is raised in the main thread as KeyboardInterrupt. After
    the work is undone it becomes SystemExit(143), and Ctrl-C at the command line SystemExit(130).
    """

    def __init__(self, command: BaseCommand) -> None:
        self._command = command

    def answered(self, locked: Callable[[], Any]) -> Any:
        """Raise CommandError with its return code for the errors in RETURN_CODES."""
        try:
            with _terminable():
                return locked()
        except tuple(RETURN_CODES) as error:
            codes = (code for kind, code in RETURN_CODES.items() if isinstance(error, kind))
            raise CommandError(_line(error), returncode=next(codes)) from error
        except _Terminated as stop:
            self._end(signal.SIGTERM, stop)
        except KeyboardInterrupt as stop:
            if not getattr(self._command, "_called_from_command_line", False):
                raise
            self._end(signal.SIGINT, stop)

    def skipped(self, held: LockHeld) -> None:
        """Say in one line on stderr that the command did nothing."""
        self._say(f"Skipped: {_line(held)}")

    def replayed(self, kept: Any, key: str) -> Any:
        """Say in one line on stderr that the command did nothing, and return what it printed."""
        self._say(f"Skipped: {key!r} was done before.")
        return kept

    def _say(self, line: str) -> None:
        self._command.stderr.write(line, style_func=self._command.style.WARNING)

    def _end(self, number: signal.Signals, stop: KeyboardInterrupt) -> NoReturn:
        self._command.stderr.write(f"Stopped by {number.name}.")
        raise SystemExit(128 + number) from stop


class _Terminated(KeyboardInterrupt):
    """A SIGTERM. Database drivers cancel their query at a KeyboardInterrupt, as they should."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise _Terminated at the first SIGTERM; the second ends the process as ever."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    try:
        signal.signal(signal.SIGTERM, stop)
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
