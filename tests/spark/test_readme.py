"""The README of the data source: its programs read and write as they are printed."""

from __future__ import annotations

import pytest

from tests.tools.readmes import blocks_run_by
from txnstore import Consumer, Producer

pytestmark = pytest.mark.slow

PATHS = {"sqlite:////data/log.db": "sqlite:///{folder}/log.db", "/data/checkpoints": "{folder}/checkpoints"}


def test_the_programs_read_and_write(spark, tmp_path, capsys):
    url = f"sqlite:///{tmp_path}/log.db"
    with Producer({"bootstrap.servers": url}) as producer:
        producer.produce("settlements", "seven")
    names = {"spark": spark}
    for block in blocks_run_by(__file__):
        program = block.text
        for path, place in PATHS.items():
            program = program.replace(path, place.format(folder=tmp_path))
        exec(compile(program, "README.md", "exec"), names)
    names["query"].processAllAvailable()
    names["query"].stop()
    assert "seven" in capsys.readouterr().out
    with Consumer({"bootstrap.servers": url, "group.id": "test", "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe(["refunds", "copies"])
        found = sorted((message.topic(), message.value()) for message in consumer.consume(2, timeout=60))
    assert found == [("copies", b"seven"), ("refunds", b"SEVEN")]
