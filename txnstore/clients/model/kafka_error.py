"""This file is the error as confluent-kafka has it: KafkaError, a value, and KafkaException, which carries it."""

from __future__ import annotations

import builtins
import operator
from typing import Final, SupportsIndex

from txnstore.clients.model.error_codes import ErrorCodes, error_code

_CODE_MAX = 2**31 - 1
#: What the calls that all clients have say once their client is closed, as in confluent-kafka.
HANDLE_CLOSED_TEXT: Final = "Handle has been closed"


class KafkaError(ErrorCodes):
    """An error code with its text and with what it means for the client; it compares like its code.

    `error == KafkaError._STATE` and `error == -172` are the same question.  Every code of the table is a class
    attribute.  An error is always true, `NO_ERROR` included: test `error is None` or its code.

    Args:
        error: the code, Kafka's number; one that is in no table is kept.
        reason: the text; default: the code's own.
        fatal: whether the client is finished: close it and make a new one.
        retriable: whether the same call may be made again.
        txn_requires_abort: whether the transaction has to be aborted before anything else.

    Raises:
        TypeError: the code is no integer, or the reason is neither text nor None.
        OverflowError: the code does not fit into 32 bits.
    """

    __slots__ = ("_code", "_fatal", "_reason", "_retriable", "_txn_requires_abort")

    def __init__(
        self,
        error: SupportsIndex,
        reason: builtins.str | None = None,
        fatal: bool = False,
        retriable: bool = False,
        txn_requires_abort: bool = False,
    ) -> None:
        number = operator.index(error)
        if not -_CODE_MAX - 1 <= number <= _CODE_MAX:
            raise OverflowError(f"error code {number} does not fit into 32 bits")
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"argument 2 must be str or None, not {type(reason).__name__}")
        self._code = number
        self._reason = reason
        self._fatal = bool(fatal)
        self._retriable = bool(retriable)
        self._txn_requires_abort = bool(txn_requires_abort)

    def code(self) -> int:
        """Return the number."""
        return self._code

    def name(self) -> builtins.str:
        """Return the code's name, for example `_STATE`."""
        return error_code(self._code).name

    def str(self) -> builtins.str:
        """Return the reason, or the code's own text if none was given."""
        return error_code(self._code).text if self._reason is None else self._reason

    def fatal(self) -> bool:
        """Return whether the client is finished."""
        return self._fatal

    def retriable(self) -> bool:
        """Return whether the same call may be made again."""
        return self._retriable

    def txn_requires_abort(self) -> bool:
        """Return whether the transaction has to be aborted before anything else."""
        return self._txn_requires_abort

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> builtins.str:
        fatal = "FATAL," if self._fatal else ""
        return f'KafkaError{{{fatal}code={self.name()},val={self._code},str="{self.str()}"}}'

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash(self._code)

    def __eq__(self, other: object) -> bool:
        code = _code_of(other)
        return NotImplemented if code is None else self._code == code

    def __ne__(self, other: object) -> bool:
        code = _code_of(other)
        return NotImplemented if code is None else self._code != code

    def __lt__(self, other: KafkaError | int) -> bool:
        code = _code_of(other)
        return NotImplemented if code is None else self._code < code

    def __le__(self, other: KafkaError | int) -> bool:
        code = _code_of(other)
        return NotImplemented if code is None else self._code <= code

    def __gt__(self, other: KafkaError | int) -> bool:
        code = _code_of(other)
        return NotImplemented if code is None else self._code > code

    def __ge__(self, other: KafkaError | int) -> bool:
        code = _code_of(other)
        return NotImplemented if code is None else self._code >= code

    def __reduce__(self) -> tuple[type[KafkaError], tuple[int, builtins.str | None, bool, bool, bool]]:
        return type(self), (self._code, self._reason, self._fatal, self._retriable, self._txn_requires_abort)


def _code_of(other: object) -> int | None:
    """Return the number that an error is compared by; None for what is neither an error nor a number."""
    if isinstance(other, KafkaError):
        return other.code()
    return other if isinstance(other, int) else None


class KafkaException(Exception):
    """What the clients raise; `args[0]` is the `KafkaError`, and the text of both is the same."""
