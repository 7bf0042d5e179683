"""The rules between configuration keys: what follows from what, and what does not go together.

The refusals are librdkafka's, in its words.  One default is not: `enable.idempotence` is true unless another key that
was given speaks against it, as in Java's producer (KIP-679).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from txnstore.clients.configuration.keys import ConfigurationError

#: How many batches a producer may have under way with idempotence: as many as a partition remembers.
IN_FLIGHT_MAX: Final = 5
_IN_FLIGHT_DEFAULT: Final = 1_000_000
#: A member that sends so many heartbeats in a session survives the loss of some.
_HEARTBEATS_IN_A_SESSION: Final = 3
_SET_BY_THE_STORE: Final = ("session.timeout.ms", "heartbeat.interval.ms")

Values = dict[str, Any]
Rules = Callable[[Values, Mapping[str, Any], logging.Logger], None]


def apply_producer_rules(values: Values, given: Mapping[str, Any], logger: logging.Logger) -> None:
    """Complete the values of a producer; `given` are those that the user set.

    Raises:
        ConfigurationError: they do not go together.
    """
    _default(values, "allow.auto.create.topics", True)
    _check_two_phase_commit(values, given)
    if values["txnstore.transaction.group"] and not values["transactional.id"]:
        raise _refusal("`txnstore.transaction.group` requires `transactional.id`")
    if values["txnstore.transaction.token"] is not None:
        if values["transactional.id"]:
            raise _refusal(
                "`transactional.id` and `txnstore.transaction.token` belong to different producers: set only one of"
                " them"
            )
        if given.get("enable.idempotence") is False:
            raise _refusal("`txnstore.transaction.token` requires `enable.idempotence=true`")
        values["enable.idempotence"] = True
    elif values["transactional.id"]:
        if given.get("enable.idempotence") is False:
            raise _refusal("`transactional.id` requires `enable.idempotence=true`")
        values["enable.idempotence"] = True
    elif "enable.idempotence" not in given:
        values["enable.idempotence"] = _allows_idempotence(values)
    if values["enable.idempotence"]:
        _check_idempotence(values)
    elif values["enable.gapless.guarantee"]:
        raise _refusal("`enable.gapless.guarantee` requires `enable.idempotence` to be enabled")
    _default(values, "max.in.flight", IN_FLIGHT_MAX if values["enable.idempotence"] else _IN_FLIGHT_DEFAULT)
    _set_message_timeout(values, given, logger)


def apply_consumer_rules(values: Values, given: Mapping[str, Any], logger: logging.Logger) -> None:
    """Complete the values of a consumer; `given` are those that the user set.

    Raises:
        ConfigurationError: they do not go together.
        ValueError: no group is named; as confluent-kafka, not with a Kafka error.
    """
    if not values["group.id"]:
        raise ValueError("Failed to create consumer: group.id must be set")
    _default(values, "allow.auto.create.topics", False)
    if values["txnstore.delivery.order"] == "commit" and values["isolation.level"] == "read_uncommitted":
        raise ConfigurationError(
            "Failed to create consumer: `txnstore.delivery.order=commit` requires `isolation.level=read_committed`:"
            " what is not committed has no place in that order"
        )
    if values["txnstore.delivery.atomic"] and values["txnstore.delivery.order"] != "commit":
        raise ConfigurationError(
            "Failed to create consumer: `txnstore.delivery.atomic=true` requires `txnstore.delivery.order=commit`: in"
            " offset order a partition may hold back what another one shows"
        )
    if values["max.poll.interval.ms"] < values["session.timeout.ms"]:
        raise ConfigurationError("Failed to create consumer: `max.poll.interval.ms` must be >= `session.timeout.ms`")
    if values["group.protocol"] == "consumer":
        _check_consumer_protocol(given)
    if "cooperative-sticky" in values["partition.assignment.strategy"] != ("cooperative-sticky",):
        names = ",".join(values["partition.assignment.strategy"])
        raise ConfigurationError(
            f"Failed to create consumer: All partition.assignment.strategy ({names}) assignors must have the same"
            " protocol type, online migration between assignors with different protocol types is not supported"
        )
    if "fetch.max.bytes" in given and values["fetch.max.bytes"] < values["message.max.bytes"]:
        raise ConfigurationError("Failed to create consumer: `fetch.max.bytes` must be >= `message.max.bytes`")
    values["fetch.max.bytes"] = max(values["fetch.max.bytes"], values["message.max.bytes"])
    _limit_heartbeat(values, given, logger)


def apply_admin_rules(values: Values, given: Mapping[str, Any], logger: logging.Logger) -> None:
    """Complete the values of an admin client: all of its keys go together."""
    _default(values, "allow.auto.create.topics", False)


def _default(values: Values, name: str, value: Any) -> None:
    if values[name] is None:
        values[name] = value


def _refusal(text: str) -> ConfigurationError:
    return ConfigurationError(f"Failed to create producer: {text}")


def _allows_idempotence(values: Values) -> bool:
    in_flight = values["max.in.flight"]
    refusing = (
        values["acks"] != -1,
        values["retries"] == 0,
        in_flight is not None and in_flight > IN_FLIGHT_MAX,
        values["queuing.strategy"] != "fifo",
    )
    return not any(refusing)


def _check_idempotence(values: Values) -> None:
    in_flight = values["max.in.flight"]
    if in_flight is not None and in_flight > IN_FLIGHT_MAX:
        raise _refusal(f"`max.in.flight` must be set <= {IN_FLIGHT_MAX} when `enable.idempotence` is true")
    if values["retries"] < 1:
        raise _refusal("`retries` must be set >= 1 when `enable.idempotence` is true")
    if values["acks"] != -1:
        raise _refusal("`acks` must be set to `all` when `enable.idempotence` is true")
    if values["queuing.strategy"] != "fifo":
        raise _refusal("`queuing.strategy` must be set to `fifo` when `enable.idempotence` is true")


def _check_two_phase_commit(values: Values, given: Mapping[str, Any]) -> None:
    if not values["transaction.two.phase.commit.enable"]:
        return
    if not values["transactional.id"]:
        raise _refusal("`transaction.two.phase.commit.enable` requires `transactional.id`")
    if "transaction.timeout.ms" in given:
        # KIP-939: such transactions never time out; the key's default still bounds how long calls wait.
        raise _refusal("`transaction.timeout.ms` and `transaction.two.phase.commit.enable` cannot both be set")


def _set_message_timeout(values: Values, given: Mapping[str, Any], logger: logging.Logger) -> None:
    """Settle how long a message may wait: in a transaction no longer than that, and always longer than it lingers."""
    timeout_ms, linger_ms = values["message.timeout.ms"], values["linger.ms"]
    if values["transactional.id"]:
        transaction_timeout_ms = values["transaction.timeout.ms"]
        if "message.timeout.ms" not in given:
            values["message.timeout.ms"] = transaction_timeout_ms
            _limit_linger(values, logger)
            return
        if timeout_ms > transaction_timeout_ms:
            raise _refusal("`message.timeout.ms` must be set <= `transaction.timeout.ms`")
    if 0 < timeout_ms <= linger_ms:
        if "linger.ms" in given:
            raise _refusal("`message.timeout.ms` must be greater than `linger.ms`")
        values["linger.ms"] = max(0.0, timeout_ms - 0.1)


def _limit_linger(values: Values, logger: logging.Logger) -> None:
    """Let records of a transaction leave while they have time to; librdkafka accepts the keys and lets them expire."""
    linger_ms, transaction_timeout_ms = values["linger.ms"], values["transaction.timeout.ms"]
    if linger_ms < transaction_timeout_ms:
        return
    values["linger.ms"] = transaction_timeout_ms / 2
    logger.warning(
        "linger.ms %g is not shorter than transaction.timeout.ms %d: records linger for %g ms",
        linger_ms,
        transaction_timeout_ms,
        values["linger.ms"],
        extra={"event": "setting_changed", "setting": "linger.ms"},
    )


def _check_consumer_protocol(given: Mapping[str, Any]) -> None:
    for name in _SET_BY_THE_STORE:
        if name in given:
            raise ConfigurationError(
                f"Failed to create consumer: `{name}` is not supported for `group.protocol=consumer` or share"
                " consumer. It is defined broker side"
            )
    if "partition.assignment.strategy" in given:
        raise ConfigurationError(
            "Failed to create consumer: `partition.assignment.strategy` is not supported for"
            " `group.protocol=consumer`. Use `group.remote.assignor` instead"
        )


def _limit_heartbeat(values: Values, given: Mapping[str, Any], logger: logging.Logger) -> None:
    """Send heartbeats often enough for the session; librdkafka would lose its membership over and over again."""
    interval_ms, session_ms = values["heartbeat.interval.ms"], values["session.timeout.ms"]
    if interval_ms < session_ms:
        return
    values["heartbeat.interval.ms"] = max(1, session_ms // _HEARTBEATS_IN_A_SESSION)
    if "heartbeat.interval.ms" in given:
        logger.warning(
            "heartbeat.interval.ms %d is not shorter than session.timeout.ms %d: heartbeats are sent every %d ms",
            interval_ms,
            session_ms,
            values["heartbeat.interval.ms"],
            extra={"event": "setting_changed", "setting": "heartbeat.interval.ms"},
        )
