"""The values of configuration keys, read from what users give: a class for each type, with librdkafka's error texts.

Whatever the value's own type, it is its text that is read: `5`, `"5"` and `" 5"` are the same number, `True` is the
same as `"true"` and not a number.  The texts name a key as librdkafka does (`queue.buffering.max.ms` for `linger.ms`),
and repeat a value only if it stands where one of a few words is expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from txnstore.errors import InvalidRequest
from txnstore.transactions.tokens import TransactionToken

#: At most so much of somebody else's text is repeated in an error.
_SHOWN_CHARACTERS_MAX: Final = 80

_DECIMAL: Final = re.compile(r"[+-]?[0-9]+(?:\.0*)?")
_HEXADECIMAL: Final = re.compile(r"[+-]?0[xX][0-9a-fA-F]+")
_TRUE: Final = frozenset({"true", "t", "1"})
_FALSE: Final = frozenset({"false", "f", "0"})


class ConfigurationError(ValueError):
    """The value is not one that the key takes; the text is for the user."""


class Kind(Protocol):
    """The type of a key's value."""

    def parse(self, key: str, value: object) -> Any:
        """Return what `value` stands for; `key` is the name for error texts.

        Raises:
            ConfigurationError: it is not a value of this type.
        """
        ...


def shown(value: object) -> str:
    """Return `value` as text that may stand in a message: short, on one line, without control characters."""
    text = str(value)
    if len(text) > _SHOWN_CHARACTERS_MAX:
        text = f"{text[:_SHOWN_CHARACTERS_MAX]}..."
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _text_of(key: str, value: object, kind: str) -> str:
    if value is None or value == "":
        raise ConfigurationError(f'{kind}onfiguration property "{key}" cannot be set to empty value')
    return str(value)


def _check_range(key: str, number: float, low: int, high: int) -> None:
    if not low <= number <= high:
        raise ConfigurationError(
            f'Configuration property "{key}" value {number:g} is outside allowed range {low}..{high}'
            if isinstance(number, float)
            else f'Configuration property "{key}" value {shown(number)} is outside allowed range {low}..{high}'
        )


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number within a range; `words` are other names for numbers."""

    low: int
    high: int
    words: Mapping[str, int] = field(default_factory=dict)

    def parse(self, key: str, value: object) -> int:
        """Return the number; `5.0` and `0x5` are 5, but `5.5`, `5ms`, `True` and `1_000` are refused."""
        text = _text_of(key, value, "Integer c").strip()
        number = self.words.get(text.lower())
        if number is not None:
            return number
        if _DECIMAL.fullmatch(text) and len(text) <= _SHOWN_CHARACTERS_MAX:
            number = int(text.partition(".")[0])
        elif _HEXADECIMAL.fullmatch(text) and len(text) <= _SHOWN_CHARACTERS_MAX:
            number = int(text, 16)
        else:
            raise ConfigurationError(f'Invalid value for configuration property "{key}"')
        _check_range(key, number, self.low, self.high)
        return number


@dataclass(frozen=True, slots=True)
class Float:
    """A number within a range."""

    low: int
    high: int

    def parse(self, key: str, value: object) -> float:
        """Return the number; NaN is refused."""
        text = _text_of(key, value, "Float c").strip()
        try:
            number = float(int(text, 16) if _HEXADECIMAL.fullmatch(text) else text)
        except (ValueError, OverflowError):
            raise ConfigurationError(f'Invalid value for configuration property "{key}"') from None
        if math.isnan(number) or "_" in text:
            raise ConfigurationError(f'Invalid value for configuration property "{key}"')
        _check_range(key, number, self.low, self.high)
        return number


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    def parse(self, key: str, value: object) -> bool:
        """Return the truth value: true, t, 1 or false, f, 0 in any case."""
        text = _text_of(key, value, "Bool c").lower()
        if text not in _TRUE | _FALSE:
            raise ConfigurationError(f'Expected bool value for "{key}": true or false')
        return text in _TRUE


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words, in any case; `words` says what each one stands for."""

    words: Mapping[str, str]

    def parse(self, key: str, value: object) -> str:
        """Return what the word stands for."""
        text = _text_of(key, value, "C")
        word = self.words.get(text.lower())
        if word is None:
            raise ConfigurationError(f'Invalid value "{shown(text)}" for configuration property "{key}"')
        return word


@dataclass(frozen=True, slots=True)
class Flags:
    """Several of a few words, with commas between them."""

    words: frozenset[str]

    def parse(self, key: str, value: object) -> tuple[str, ...]:
        """Return the words; the tuple is empty if the text is."""
        names = tuple(name.strip() for name in str(value or "").split(",") if name.strip())
        for name in names:
            if name not in self.words:
                raise ConfigurationError(f'Invalid value "{shown(name)}" for configuration property "{key}"')
        return names


@dataclass(frozen=True, slots=True)
class Name:
    """One of a few names, spelt exactly."""

    names: frozenset[str]

    def parse(self, key: str, value: object) -> str:
        """Return the name."""
        text = "(null)" if value is None or value == "" else str(value)
        if text not in self.names:
            raise ConfigurationError(f'Invalid value for configuration property "{key}": {shown(text)}')
        return text


@dataclass(frozen=True, slots=True)
class Text:
    """Any text; nothing and empty text are the same: not set."""

    length_max: int | None = None

    def parse(self, key: str, value: object) -> str | None:
        """Return the text, or None.

        Text that goes into the database holds no NUL and no half of a surrogate pair: no database keeps them.
        """
        if value is None or value == "":
            return None
        text = str(value)
        if self.length_max is not None:
            if len(text) > self.length_max:
                raise ConfigurationError(
                    f'Invalid value for configuration property "{key}": longer than {self.length_max} characters'
                )
            if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigurationError(
                    f'Invalid value for configuration property "{key}": a NUL or half of a surrogate pair'
                )
        return text


@dataclass(frozen=True, slots=True)
class Names:
    """Several names with commas between them."""

    names: frozenset[str]
    default: tuple[str, ...]
    refusal: str
    """What the error says before the name that is not one of them."""

    def parse(self, key: str, value: object) -> tuple[str, ...]:
        """Return the names in their order, each once; the default if the text is empty."""
        names = tuple(dict.fromkeys(name.strip() for name in str(value or "").split(",") if name.strip()))
        for name in names:
            if name not in self.names:
                raise ConfigurationError(f"{self.refusal}: {shown(name)}")
        return names or self.default


@dataclass(frozen=True, slots=True)
class Callback:
    """A function of the application; `error` is what confluent-kafka raises for something else, with this text."""

    error: type[Exception]
    text: str

    def parse(self, key: str, value: object) -> Callable[..., Any]:
        """Return the function."""
        if not callable(value):
            raise self.error(self.text.format(key=key))
        return value


@dataclass(frozen=True, slots=True)
class Instance:
    """An object with a method of this name, or None."""

    method: str
    about: str

    def parse(self, key: str, value: object) -> Any:
        """Return the object."""
        if value is not None and not callable(getattr(value, self.method, None)):
            raise TypeError(f"{key} takes {self.about}, not {type(value).__name__}")
        return value


@dataclass(frozen=True, slots=True)
class Token:
    """What `Producer.transaction_token()` returned."""

    def parse(self, key: str, value: object) -> TransactionToken:
        """Return what the token says."""
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError(f"{key} takes the bytes that transaction_token() returned, not {type(value).__name__}")
        try:
            return TransactionToken.parse(bytes(value))
        except InvalidRequest as error:
            raise ConfigurationError(f'Invalid value for configuration property "{key}": {error}') from None


@dataclass(frozen=True, slots=True)
class Refused:
    """A key that cannot be set from Python; `instead` says what to do."""

    instead: str

    def parse(self, key: str, value: object) -> Any:
        """Refuse any value."""
        raise ConfigurationError(f'Configuration property "{key}" cannot be set from Python; {self.instead}')
