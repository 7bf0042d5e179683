"""Spark works on one database: several, and one of several, are refused before anything is done."""

from __future__ import annotations

import pytest

from txnstore.db.opening import open_store
from txnstore.errors import InvalidConfiguration
from txnstore.log.topics import create_topic
from txnstore.spark import sink_task
from txnstore.spark.sink_options import SinkColumns, sink_options
from txnstore.spark.sink_run import SinkRun
from txnstore.spark.source_options import read_source_options
from txnstore.spark.source_readers import TxnStoreReader
from txnstore.spark.source_schema import source_schema
from txnstore.spark.stores import store_address, store_at


def test_several_databases_are_refused_by_spark(site):
    with pytest.raises(InvalidConfiguration, match="several databases"):
        store_address({"url": ",".join(site.urls[:2])})
    site.open(*site.urls[:2]).close()
    for url in site.urls[:2]:
        with pytest.raises(InvalidConfiguration, match="one of several databases"):
            store_at(store_address({"url": url}))


def test_a_topic_in_a_database_that_joins_beneath_a_query_is_said_to_be_there(site):
    first = site.urls[0]
    with open_store(first) as store:
        store.write(lambda connection: create_topic(connection, "orders"))
    given = {"url": first, "subscribePattern": ".*"}
    options = read_source_options(given, streaming=False)
    reader = TxnStoreReader(options, source_schema(include_headers=options.include_headers))
    reader.partitions()
    with site.open(*site.urls[:2]) as cluster:
        spread = {"txnstore.placement": "roundrobin"}
        cluster.controller.write(lambda c: create_topic(c, "payments", partition_count=2, config=spread))
    with pytest.raises(InvalidConfiguration, match=r"payments-\d is in another database, which has joined"):
        reader.partitions()
    written = sink_options({"url": first, "topic": "payments"}, is_stream=False)
    run = SinkRun("id", "sink", "run")
    attempt = sink_task._Attempt(store_at(store_address(given)), run, 0, SinkColumns(value=0), written)
    with pytest.raises(InvalidConfiguration, match=r"payments-\d is in another database"):
        attempt._find_topics(["payments"])
