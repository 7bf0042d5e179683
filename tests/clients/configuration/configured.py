"""Configurations of a producer and a consumer, and the text in which one is refused."""

from __future__ import annotations

import pytest

from txnstore.clients.configuration.configuration import (
    Configuration,
    consumer_configuration,
    producer_configuration,
)
from txnstore.clients.model.errors import KafkaError, KafkaException

URL = "sqlite:///log.db"
TRANSACTIONAL = {"transactional.id": "x"}
SECRET = "s3kr1t-never-shown"


def producer(**settings: object) -> Configuration:
    return producer_configuration(({"bootstrap.servers": URL},), settings)


def consumer(**settings: object) -> Configuration:
    return consumer_configuration(({"bootstrap.servers": URL, "group.id": "g"},), settings)


def refusal_of(make, settings: dict) -> str:
    with pytest.raises(KafkaException) as raised:
        make(**settings)
    error = raised.value.args[0]
    assert error.code() == KafkaError._INVALID_ARG
    assert not error.fatal()
    assert not error.retriable()
    text: str = error.str()
    return text
