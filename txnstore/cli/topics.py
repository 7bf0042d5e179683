"""This file is the commands about topics: made, listed, described, changed and deleted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from sqlalchemy import Connection

from txnstore.cli.completion import complete_topic
from txnstore.cli.options import Json, Schema, Url, examples, opened
from txnstore.cli.output import Column, list_text, show_facts, show_json, show_rows, size_text, time_text
from txnstore.cli.terminal import headline, hint, say
from txnstore.cli.topic_facts import describe_topic, list_topic_rows
from txnstore.clients.admin.configs import known_topic_config
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.settings import read_store_settings
from txnstore.errors import TopicAlreadyExists
from txnstore.log.cluster_topics import refuse_if_in_use
from txnstore.log.deleting import purge_soon
from txnstore.log.topics import (
    change_topic_configs,
    create_topic,
    delete_topic,
    find_topics,
    grow_topic,
    lock_topic_configs,
)

app: Final = typer.Typer(name="topics", no_args_is_help=True, help="Make, list, describe, change and delete topics.")

_COLUMNS: Final = (
    Column("topic", "TOPIC"),
    Column("partitions", "PARTITIONS"),
    Column("offsets", "OFFSETS"),
    Column("open_transactions", "OPEN TRANSACTIONS"),
    Column("config", "CONFIG", lambda config: list_text([f"{name}={value}" for name, value in config.items()])),
)
_FACTS: Final = (
    Column("topic", "topic"),
    Column("topic_uuid", "uuid"),
    Column("created_ms", "created", time_text),
    Column("config", "config", lambda config: list_text([f"{name}={value}" for name, value in config.items()])),
)
_PARTITION_COLUMNS: Final = (
    Column("partition", "PARTITION"),
    Column("log_start_offset", "LOG START"),
    Column("last_stable_offset", "LAST STABLE"),
    Column("high_watermark", "HIGH WATERMARK"),
    Column("open_transactions", "OPEN TRANSACTIONS"),
    Column("batches", "BATCHES"),
    Column("size_bytes", "SIZE", size_text),
    Column("last_timestamp_ms", "LAST TIMESTAMP", time_text),
)

_Topic = Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="The topic.")]
_Topics = Annotated[list[str], typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="The topics.")]
_Config = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="NAME=VALUE", help="A setting, as retention.ms=86400000; repeatable."),
]


class _MeaninglessSettings(logging.Handler):
    """Tells the user of settings that are kept and have no effect."""

    def emit(self, record: logging.LogRecord) -> None:
        hint(record.getMessage())


@app.command(
    name="create",
    epilog=examples(
        "txnstore topics create orders --partitions 3",
        "txnstore topics create audit --config cleanup.policy=compact --config retention.ms=-1",
    ),
)
def create(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC", help="Their names.")],
    *,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", min=1, help="How many; default: the store's num.partitions.")
    ] = None,
    config: _Config = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="A topic that is there already is left as it is.")
    ] = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Create topics: all of them, or none if there is something wrong with one."""
    texts = _known(_pairs(config or ()))

    def work(connection: Connection) -> list[str]:
        count = partitions or read_store_settings(connection)["num.partitions"]
        done = []
        for topic in topics:
            try:
                create_topic(connection, topic, partition_count=count, config=texts)
            except TopicAlreadyExists:
                if not if_not_exists:
                    raise
                done.append(f"topic {topic} was there already")
            else:
                done.append(f"topic {topic} was created with {_partitions(count)}")
        return done

    with opened(url, schema) as cluster:
        lines = cluster.controller.write(work)
        cluster.publish()
        for line in lines:
            say(line)


@app.command(name="list", epilog=examples("txnstore topics list", "txnstore topics list --json | jq -r '.[].topic'"))
def list_(*, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """List the topics: their partitions, how many offsets there are between the ends of their logs, what was set."""
    with opened(url, schema) as cluster:
        show_rows(list_topic_rows(cluster), _COLUMNS, as_json=as_json)


@app.command(name="describe", epilog=examples("txnstore topics describe orders"))
def describe(topics: _Topics, *, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """Describe topics: their settings, and for each partition the bounds and the size of its log."""
    with opened(url, schema) as cluster:
        found = cluster.controller.read(
            lambda connection: [describe_topic(cluster, connection, topic) for topic in topics]
        )
        columns = _PARTITION_COLUMNS if cluster.is_alone else (*_PARTITION_COLUMNS, Column("database", "DATABASE"))
    if as_json:
        show_json(found)
        return
    for number, facts in enumerate(found):
        if number:
            say("")
        show_facts(facts, _FACTS)
        show_rows(facts["partitions"], columns, as_json=False)


@app.command(
    name="alter",
    epilog=examples(
        "txnstore topics alter orders --partitions 6",
        "txnstore topics alter orders --config retention.ms=3600000 --reset max.message.bytes",
    ),
)
def alter(
    topic: _Topic,
    *,
    partitions: Annotated[int | None, typer.Option("--partitions", "-p", min=1, help="How many, in all.")] = None,
    config: _Config = None,
    reset: Annotated[
        list[str] | None, typer.Option("--reset", metavar="NAME", help="A setting that gets its default; repeatable.")
    ] = None,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Give a topic more partitions or other settings: everything that was asked for, or nothing."""
    changes: dict[str, str | None] = {**_known(_pairs(config or ()))}
    for name in reset or ():
        if name in changes:
            raise typer.BadParameter(f"{name} is set and reset at once", param_hint="--reset")
        changes[name] = None
    if partitions is None and not config and not reset:
        raise typer.BadParameter("say what to change: --partitions, --config or --reset")

    def work(connection: Connection) -> None:
        locked = lock_topic_configs(connection, topic)
        change_topic_configs(connection, locked, changes)
        if partitions is not None:
            grow_topic(connection, topic, partition_count=partitions)

    with opened(url, schema) as cluster:
        cluster.controller.write(work)
        cluster.publish()
    if partitions is not None:
        say(f"topic {topic} has {_partitions(partitions)} now")
    for name, value in changes.items():
        say(f"topic {topic}: {name} " + ("has its default again" if value is None else f"is {value} now"))


@app.command(name="delete", epilog=examples("txnstore topics delete orders", "txnstore topics delete orders --yes"))
def delete(
    topics: _Topics,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Delete topics, their records and what groups have committed for them: all of them, or none."""
    with opened(url, schema) as cluster:
        names = list(dict.fromkeys(topics))
        found = cluster.controller.read(
            lambda connection: [describe_topic(cluster, connection, name) for name in names]
        )
        if not yes:
            headline("this deletes for ever:")
            for facts in found:
                say(f"  {facts['topic']}: {_partitions(len(facts['partitions']))}, {_offsets(facts)} offsets")
            typer.confirm("Delete?", abort=True)

        if not cluster.is_alone:
            for topic in cluster.controller.read(lambda connection: find_topics(connection, names)):
                refuse_if_in_use(cluster, topic.partition_ids)

        def work(connection: Connection) -> None:
            # By name, so that two who delete the same ones do not wait for each other.
            for facts in sorted(found, key=lambda facts: str(facts["topic"])):
                delete_topic(connection, facts["topic"])

        cluster.controller.write(work, wakes_readers=True)
        cluster.publish()
        purge_soon(cluster.controller)
    for facts in found:
        say(f"topic {facts['topic']} was deleted")


def _offsets(facts: dict[str, Any]) -> int:
    return sum(each["high_watermark"] - each["log_start_offset"] for each in facts["partitions"])


def _partitions(count: int) -> str:
    return "1 partition" if count == 1 else f"{count} partitions"


def _known(config: dict[str, str]) -> dict[str, str]:
    """Return the settings; the user is told of those that mean nothing for a database."""
    logger = logging.getLogger("txnstore.cli.topics")
    logger.setLevel(logging.INFO)
    handler = _MeaninglessSettings()
    logger.addHandler(handler)
    try:
        return known_topic_config("", config, logger)
    finally:
        logger.removeHandler(handler)


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE as a dict."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--config")
        if name in pairs:
            raise typer.BadParameter(f"{name} was given twice", param_hint="--config")
        pairs[name] = value
    return pairs
