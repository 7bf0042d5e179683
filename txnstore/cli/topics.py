"""The commands about topics: made, listed, described, changed and deleted."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Final

import typer
from sqlalchemy import Connection, bindparam, func, select

from txnstore.cli.options import Json, Schema, Url, complete_topic, examples, key_values, opened
from txnstore.cli.output import (
    Column,
    each_described,
    headline,
    hint,
    list_text,
    say,
    show_facts,
    show_rows,
    size_text,
    tell_and_exit,
    time_text,
)
from txnstore.clients.admin.configs import known_topic_config
from txnstore.clients.brokers import reads_at_leaders
from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.schema import partition_heads, partitions, producer_states, record_batches, topics
from txnstore.errors import TopicAlreadyExists
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.cluster_topics import change, delete_topics
from txnstore.log.topics import (
    Topic,
    change_topic_configs,
    create_topic,
    find_topics,
    get_topic,
    grow_topic,
    list_topics,
    lock_topic_configs,
)

_OFFSETS: Final = (
    select(
        partitions.c.topic_id,
        func.sum(partition_heads.c.next_offset - partition_heads.c.log_start_offset),
    )
    .join(partition_heads, partition_heads.c.partition_id == partitions.c.partition_id)
    .group_by(partitions.c.topic_id)
)
_OPEN: Final = (
    select(producer_states.c.partition_id, func.count())
    .where(producer_states.c.transaction_first_offset >= 0)
    .group_by(producer_states.c.partition_id)
)
_CREATED: Final = select(topics.c.created_ms).where(topics.c.topic_id == bindparam("of_topic_id"))
_SIZES: Final = (
    select(
        record_batches.c.partition_id,
        func.count(),
        func.sum(record_batches.c.size_bytes),
        func.max(record_batches.c.max_timestamp_ms),
    )
    .where(record_batches.c.partition_id.in_(bindparam("partition_ids", expanding=True)))
    .group_by(record_batches.c.partition_id)
)


def list_topic_rows(cluster: Cluster, left_out: LeftOut) -> list[dict[str, Any]]:
    """Return a row for each topic, by name; databases that are left out are not counted."""
    found, offsets, open_in = cluster.controller.read(lambda connection: (_topics(connection), *_counts(connection)))
    for store in cluster.stores(left_out):
        if store is cluster.controller:
            continue
        with cluster.leaving_out(store.database_id, left_out):
            more_offsets, more_open_in = store.read(_counts)
            open_in |= more_open_in
            for topic_id, count in more_offsets.items():
                offsets[topic_id] = offsets.get(topic_id, 0) + count
    return [
        {
            "topic": topic.name,
            "partitions": len(topic.partition_ids),
            "offsets": offsets.get(topic.topic_id, 0),
            "open_transactions": sum(open_in.get(partition_id, 0) for partition_id in topic.partition_ids),
            "config": dict(sorted(topic.config.items())),
        }
        for topic in found
    ]


def _topics(connection: Connection) -> list[Topic]:
    return find_topics(connection, list_topics(connection))


def _counts(connection: Connection) -> tuple[dict[int, int], dict[int, int]]:
    offsets = {topic_id: int(count) for topic_id, count in connection.execute(_OFFSETS)}
    return offsets, _open_transactions(connection)


def _open_transactions(connection: Connection) -> dict[int, int]:
    return {row[0]: int(row[1]) for row in connection.execute(_OPEN)}


def describe_topic(cluster: Cluster, connection: Connection, name: str) -> dict[str, Any]:
    """Return everything about one topic, which `connection` to the controller knows.

    Raises:
        UnknownTopicOrPartition: there is no topic of this name.
        TxnStoreError: a database that holds a partition cannot be reached.
    """
    topic = get_topic(connection, name)
    read = reads_at_leaders(cluster, cluster.controller, connection)
    # One call for everything, so what is said of one database's partitions is of one snapshot.
    states = read(topic.partition_ids, _states)
    described = []
    for number, partition_id in enumerate(topic.partition_ids):
        of, open_count, (count, size_bytes, last_ms) = states[partition_id]
        described.append(
            {
                "partition": number,
                "log_start_offset": of.log_start_offset,
                "last_stable_offset": of.last_stable_offset,
                "high_watermark": of.high_watermark,
                "open_transactions": open_count,
                "batches": count,
                "size_bytes": size_bytes,
                "last_timestamp_ms": last_ms,
                **({} if cluster.is_alone else {"database": cluster.label_of(topic.leaders[number])}),
            }
        )
    return {
        "topic": topic.name,
        "topic_uuid": topic.topic_uuid,
        "created_ms": connection.execute(_CREATED, {"of_topic_id": topic.topic_id}).scalar_one(),
        "config": dict(sorted(topic.config.items())),
        "partitions": described,
    }


def _states(
    connection: Connection, partition_ids: list[int]
) -> dict[int, tuple[Bounds, int, tuple[int, int, int | None]]]:
    """Return the bounds of each partition, how many transactions are open there, and what its batches take."""
    bounds = read_bounds(connection, partition_ids)
    open_in = _open_transactions(connection)
    sizes = _sizes(connection, partition_ids)
    nothing = (0, 0, None)
    return {number: (of, open_in.get(number, 0), sizes.get(number, nothing)) for number, of in bounds.items()}


def _sizes(connection: Connection, partition_ids: list[int]) -> dict[int, tuple[int, int, int | None]]:
    rows = connection.execute(_SIZES, {"partition_ids": partition_ids})
    return {partition_id: (count, int(size), last) for partition_id, count, size, last in rows}


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
    typer.Option(
        "--config", "-c", metavar="NAME=VALUE", help="A setting, for example retention.ms=86400000; repeatable."
    ),
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
        bool, typer.Option("--if-not-exists", help="Leave a topic that already exists as it is.")
    ] = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Create topics: all of them, or none if something is wrong with one."""
    texts = _known(key_values(config or [], form="NAME=VALUE", once=True))

    def work(connection: Connection) -> list[str]:
        count = partitions or read_store_settings(connection)["num.partitions"]
        done = []
        for topic in dict.fromkeys(topics):
            try:
                create_topic(connection, topic, partition_count=count, config=texts)
            except TopicAlreadyExists:
                if not if_not_exists:
                    raise
                done.append(f"topic {topic} already exists")
            else:
                done.append(f"topic {topic} was created with {_partitions(count)}")
        return done

    with opened(url, schema) as cluster:
        for line in change(cluster, work):
            say(line)


@app.command(name="list", epilog=examples("txnstore topics list", "txnstore topics list --json | jq -r '.[].topic'"))
def list_(*, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """List the topics: their partitions, how many offsets their logs span, and the settings that were given."""
    left_out: LeftOut = {}
    with opened(url, schema) as cluster:
        show_rows(list_topic_rows(cluster, left_out), _COLUMNS, as_json=as_json)
    tell_and_exit(left_out.values())


@app.command(name="describe", epilog=examples("txnstore topics describe orders"))
def describe(topics: _Topics, *, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """Describe topics: their settings, and for each partition the bounds and the size of its log."""
    with opened(url, schema) as cluster:
        found = cluster.controller.read(
            lambda connection: [describe_topic(cluster, connection, topic) for topic in topics]
        )
        columns = _PARTITION_COLUMNS if cluster.is_alone else (*_PARTITION_COLUMNS, Column("database", "DATABASE"))
    for facts in each_described(found, as_json=as_json):
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
    partitions: Annotated[int | None, typer.Option("--partitions", "-p", min=1, help="The new total.")] = None,
    config: _Config = None,
    reset: Annotated[
        list[str] | None,
        typer.Option("--reset", metavar="NAME", help="A setting that goes back to its default; repeatable."),
    ] = None,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Give a topic more partitions or other settings: everything that was asked for, or nothing."""
    changes: dict[str, str | None] = {**_known(key_values(config or [], form="NAME=VALUE", once=True))}
    for name in reset or ():
        if name in changes:
            raise typer.BadParameter(f"{name} is both set and reset", param_hint="--reset")
        changes[name] = None
    if partitions is None and not config and not reset:
        raise typer.BadParameter("say what to change: --partitions, --config or --reset")

    def work(connection: Connection) -> None:
        locked = lock_topic_configs(connection, topic)
        change_topic_configs(connection, locked, changes)
        if partitions is not None:
            grow_topic(connection, topic, partition_count=partitions)

    with opened(url, schema) as cluster:
        change(cluster, work)
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
            headline("this deletes for good:")
            for facts in found:
                say(f"  {facts['topic']}: {_partitions(len(facts['partitions']))}, {_offsets(facts)} offsets")
            typer.confirm("Delete?", abort=True, err=True)
        delete_topics(cluster, names)
    for facts in found:
        say(f"topic {facts['topic']} was deleted")


def _offsets(facts: dict[str, Any]) -> int:
    return sum(each["high_watermark"] - each["log_start_offset"] for each in facts["partitions"])


def _partitions(count: int) -> str:
    return "1 partition" if count == 1 else f"{count} partitions"


def _known(config: dict[str, str]) -> dict[str, str]:
    """Return the settings; the user is told of those that have no effect in a database."""
    logger = logging.getLogger("txnstore.cli.topics")
    logger.setLevel(logging.INFO)
    handler = _MeaninglessSettings()
    logger.addHandler(handler)
    try:
        return known_topic_config("", config, logger)
    finally:
        logger.removeHandler(handler)
