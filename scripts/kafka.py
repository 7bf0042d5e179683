"""A real Kafka broker, for as long as a command runs or until it is ended: the program behind scripts/kafka."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from typing import NoReturn

from tests.tools.kafka_broker import KafkaBroker
from tests.tools.kafka_jars import NoKafkaError

#: EX_UNAVAILABLE of sysexits.h.
UNAVAILABLE = 69


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


def main(command: list[str]) -> int:
    """Run the broker, and the command if there is one; return the exit code."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    try:
        broker = KafkaBroker()
    except NoKafkaError as error:
        print(f"No Kafka: {' '.join(str(error).split())}")
        return UNAVAILABLE
    with closing(broker):
        if command:
            environment = {**os.environ, "TXNSTORE_TEST_KAFKA_BOOTSTRAP": broker.bootstrap}
            return subprocess.run(command, check=False, env=environment).returncode
        print(broker.bootstrap, flush=True)
        while (code := broker.wait(1.0)) is None:
            pass
    print(f"The Kafka broker has ended by itself: {code}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
