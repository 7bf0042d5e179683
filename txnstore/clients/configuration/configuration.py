"""The configuration of a client: read once from what the user gave, checked, and frozen.

    configuration = producer_configuration(({"bootstrap.servers": "sqlite:///log.db", "linger.ms": "20"},), {})
    configuration["linger.ms"]  # 20.0

Errors are confluent-kafka's.  No secret is in any of them, nor in the configuration's own text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from txnstore.clients.configuration.keys import KEYS, KEYS_BY_ALIAS, ConfigurationError, Key, User, shown
from txnstore.clients.configuration.rules import (
    Rules,
    apply_admin_rules,
    apply_consumer_rules,
    apply_producer_rules,
)
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.db.cluster.membership import addresses_of, split_urls
from txnstore.db.opening import check_schema_name
from txnstore.db.url import DatabaseUrl
from txnstore.errors import InvalidUrl, WrongCluster

_logger: Final = logging.getLogger("txnstore")

_TOPIC_DEFAULTS: Final = "default.topic.config"
#: SQLAlchemy writes it sqlite://, SQLite's users expect this.
_MEMORY_URLS: Final = frozenset({"sqlite://:memory:", "sqlite:///:memory:", "sqlite+pysqlite://:memory:"})
#: Of more than 4300 digits Python makes no text, and no key takes half as many bits.
_BITS_MAX: Final = 1024


class Configuration(Mapping[str, Any]):
    """A client's settings in force: what was given, over the defaults.

    A value is looked up by any of its key's names.  Times are numbers of milliseconds, names one of a few words in one
    spelling (`acks` is -1 for `all`, `auto.offset.reset` is earliest, latest or error, `partition.assignment.strategy`
    a tuple of names); what was not given and has no default is None.  Keys that mean nothing here have no value.
    """

    __slots__ = ("_given", "_values", "url")

    def __init__(self, values: Mapping[str, Any], given: frozenset[str], url: DatabaseUrl) -> None:
        """Use `producer_configuration` and its siblings instead."""
        self._values = MappingProxyType(dict(values))
        self._given = given
        self.url = url
        """The database, or the first of several: the controller; it shows no password."""

    def __getitem__(self, name: str) -> Any:
        """Return the value of the key; KeyError if there is no such key."""
        values = self._values
        return values[name] if name in values else values[KEYS_BY_ALIAS[name].name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def was_given(self, name: str) -> bool:
        """Return whether the user set the key."""
        return KEYS_BY_ALIAS[name].name in self._given

    def without(self, *names: str) -> Configuration:
        """Return the same, but without values for these keys."""
        values = {name: None if name in names else value for name, value in self._values.items()}
        return Configuration(values, self._given - set(names), self.url)

    @property
    def logger(self) -> logging.Logger:
        """The user's logger, or ours."""
        logger: logging.Logger = self._values["logger"] or _logger
        return logger

    def __repr__(self) -> str:
        shown_values = {name: self._values[name] for name in sorted(self._given) if not KEYS[name].secret}
        return f"Configuration({str(self.url)!r}, {shown_values!r})"


def producer_configuration(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Configuration:
    """Return the configuration of `Producer(*arguments, **keywords)`.

    Raises:
        TypeError: the one positional argument is not a dict.
        KafkaException: `_INVALID_ARG`: a key is unknown, a value is not one that its key takes, keys do not go
            together, or the database's URL cannot be understood.
    """
    return _configure(User.PRODUCER, apply_producer_rules, arguments, keywords)


def consumer_configuration(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Configuration:
    """Return the configuration of `Consumer(*arguments, **keywords)`.

    Raises:
        TypeError, KafkaException: as `producer_configuration`.
        ValueError: there is no `group.id`.
    """
    return _configure(User.CONSUMER, apply_consumer_rules, arguments, keywords)


def admin_configuration(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Configuration:
    """Return the configuration of `AdminClient(*arguments, **keywords)`.

    Raises:
        TypeError, KafkaException: as `producer_configuration`.
    """
    return _configure(User.BOTH, apply_admin_rules, arguments, keywords)


def _configure(user: User, rules: Rules, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Configuration:
    settings = _settings(arguments, keywords)
    try:
        given = {key.name: value for key, value in _parsed(settings, user)}
        values = {name: key.default for name, key in KEYS.items() if not key.ignored} | {
            name: value for name, value in given.items() if not KEYS[name].ignored
        }
        logger = values["logger"] or _logger
        rules(values, given, logger)
        url = _database_url(values)
    except (ConfigurationError, InvalidUrl) as error:
        # Whatever led to this may hold a secret: it is not chained.
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, str(error))) from None
    _report(logger, user, given)
    return Configuration(values, frozenset(given), url)


def _settings(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[Any, Any]:
    """Return what was given as one dict: keywords over the dict, and both over the defaults for topics."""
    if len(arguments) > 1:
        raise TypeError("expected tuple containing single dict")
    if not (isinstance(arguments[0], dict) if arguments else keywords):
        raise TypeError("expected configuration dict")
    settings: dict[Any, Any] = dict(arguments[0]) if arguments else {}
    settings |= keywords
    topic_defaults = settings.pop(_TOPIC_DEFAULTS, None)
    if topic_defaults is None:
        return settings
    if not isinstance(topic_defaults, dict):
        raise TypeError(f"{_TOPIC_DEFAULTS} takes a dict, not {type(topic_defaults).__name__}")
    return topic_defaults | settings


def _parsed(settings: Mapping[Any, Any], user: User) -> Iterator[tuple[Key, Any]]:
    for name, value in settings.items():
        key = KEYS_BY_ALIAS.get(name) if isinstance(name, str) else None
        if key is None or (key.only_user and key.user is not user):
            raise ConfigurationError(_unknown(str(name)))
        if isinstance(value, int) and value.bit_length() > _BITS_MAX:
            raise ConfigurationError(f'Invalid value for configuration property "{key.error_name}"')
        parsed = key.kind.parse(key.error_name, value)
        # Text that is empty counts as not given.
        if parsed is not None:
            yield key, parsed


def _unknown(name: str) -> str:
    text = f'No such configuration property: "{shown(name)}"'
    # "bootstrap_servers" is as near to "bootstrap.servers" as can be.
    near = get_close_matches(name.lower().replace("_", "."), KEYS_BY_ALIAS.keys() - {name}, n=1, cutoff=0.75)
    return f'{text} (did you mean "{near[0]}"?)' if near else text


def _database_url(values: dict[str, Any]) -> DatabaseUrl:
    check_schema_name(values["txnstore.schema"])
    text = values["bootstrap.servers"]
    if text is None:
        raise InvalidUrl(
            "bootstrap.servers is not set: it takes the URL of the database that holds the log, for example"
            " sqlite:///path/to/file.db"
        )
    if text in _MEMORY_URLS:
        text = values["bootstrap.servers"] = "sqlite://"
    try:
        addresses = [address.lasting() for address in addresses_of(split_urls(text))]
    except (InvalidUrl, WrongCluster) as error:
        raise InvalidUrl(f"bootstrap.servers: {error}") from None
    if len(addresses) > 1 and any(address.url.is_in_memory for address in addresses):
        raise InvalidUrl(
            "bootstrap.servers: a database in memory is seen by one client only and cannot be one of several"
        )
    values["bootstrap.servers"] = ",".join(address.text for address in addresses)
    return addresses[0].url


def _report(logger: logging.Logger, user: User, given: Mapping[str, Any]) -> None:
    """Log which keys have no effect: names, never values."""
    ignored = sorted(name for name in given if KEYS[name].ignored)
    if ignored:
        logger.debug("configuration properties without a meaning for a database: %s", ", ".join(ignored))
    if user is User.BOTH:
        return
    for name in given:
        if KEYS[name].user not in (user, User.BOTH):
            logger.warning(
                "configuration property %s is a %s property and is ignored by this %s",
                name,
                KEYS[name].user.name.lower(),
                user.name.lower(),
                extra={"event": "setting_without_effect", "setting": name},
            )
