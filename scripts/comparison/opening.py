"""The sides of a run: empty databases, and a Kafka broker as its users run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

from scripts.bench import databases
from scripts.comparison.sides import KAFKA, OURS, POSTGRESQL, SQLITE, Side
from tests.tools.kafka_broker import KafkaBroker

NAMES: Final = {"sqlite": SQLITE, "postgresql": POSTGRESQL}

#: A client has two, and there are a hundred and some.
CONNECTIONS_MAX: Final = 400
#: Kafka's default backoff costs each small transaction 100 ms; what its client has to say is not for the table.
CONFIGURATION_OF_KAFKA: Final = {"retry.backoff.ms": 1, "log_level": 4}


@contextmanager
def opened_sides(names: Sequence[str] | None, *, with_kafka: bool) -> Iterator[list[Side]]:
    """Give the sides; servers and files are gone afterwards.

    Raises:
        NoKafkaError: there is no Java, or no jars.
    """
    with databases(list(names or NAMES), connections_max=CONNECTIONS_MAX) as urls:
        sides = [Side(NAMES[name], OURS, url) for name, url in urls]
        if not with_kafka:
            yield sides
            return
        with closing(KafkaBroker.as_users_run_it()) as broker:
            yield [Side(KAFKA, "confluent_kafka", broker.bootstrap, CONFIGURATION_OF_KAFKA), *sides]
