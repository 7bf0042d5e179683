"""This file is how the commands talk: lines, errors as one line, and the codes that the program exits with."""

from __future__ import annotations

from typing import Final

from rich.console import Console

from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.errors import Recovery, TxnStoreError

#: What is wrong stays wrong until somebody changes something.
FAILED: Final = 1
#: EX_TEMPFAIL of sysexits.h.
TRY_AGAIN_LATER: Final = 75

#: Errors after which the same call may be made again.
_MAY_PASS: Final = frozenset({Recovery.RETRY, Recovery.RESOLVE})
_MAY_PASS_CODES: Final = frozenset({KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._MSG_TIMED_OUT})

_console: Final = Console(highlight=False, markup=False, soft_wrap=True)
_errors: Final = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


class CommandFailed(Exception):
    """A command cannot do what it was asked for; its text is what the user reads."""

    def __init__(self, message: str, *, code: int = FAILED) -> None:
        """Exit with `code` after the message."""
        super().__init__(message)
        self.code = code


def say(line: str) -> None:
    """Print one line of result."""
    _console.print(printable(line))


def headline(line: str) -> None:
    """Print one line above results; it stands out on a terminal."""
    _console.print(printable(line), style="bold")


def hint(line: str) -> None:
    """Print one line that is no result: to the standard error, so that a pipe does not get it."""
    _errors.print(printable(line))


def report(error: Exception) -> None:
    """Print an error as one line, whatever characters the database put into it."""
    _errors.print(printable(f"txnstore: {error_text(error)}"), style="red")


def error_text(error: Exception) -> str:
    """Return what an error says, without the codes that programs go by."""
    if isinstance(error, KafkaException):
        kafka_error = error.args[0]
        if isinstance(kafka_error, KafkaError):
            return kafka_error.str()
    return str(error)


def exit_code(error: Exception) -> int:
    """Return what the program exits with after an error."""
    if isinstance(error, CommandFailed):
        return error.code
    if isinstance(error, TxnStoreError):
        return TRY_AGAIN_LATER if error.recovery in _MAY_PASS else FAILED
    kafka_error = error.args[0] if error.args else None
    if isinstance(kafka_error, KafkaError) and (
        kafka_error.retriable() or any(kafka_error == code for code in _MAY_PASS_CODES)
    ):
        return TRY_AGAIN_LATER
    return FAILED


def printable(text: str) -> str:
    """Return the text without what could move a terminal's cursor or forge a line."""
    return "".join(character if character.isprintable() else " " for character in text)
