"""The commands that write a topic to a Parquet file, and bring it back."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated, Final

import typer

from txnstore.cli.options import FORMS, Schema, Url, complete_topic, examples, opened, parse_time, patient_limits
from txnstore.cli.output import (
    TRY_AGAIN_LATER,
    CommandFailed,
    duration_text,
    error_text,
    exit_code,
    hint,
    records_were,
    say,
)
from txnstore.cli.progress import progress_bar
from txnstore.clients.model.errors import KafkaException
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.late_import import import_late

EXPORT_EXAMPLES: Final = examples(
    "txnstore export orders --parquet orders.parquet",
    "txnstore export orders --parquet 2026-01.parquet --since 2026-01-01T00:00 --before 2026-02-01T00:00",
)
LOAD_EXAMPLES: Final = examples(
    "txnstore load orders.parquet",
    "txnstore load orders.parquet --topic orders-of-then",
)

_MISSING: Final = "archives need the package pyarrow: pip install 'txnstore[parquet]'"
_BROKEN: Final = "archives need the package pyarrow, and it cannot be used"
#: What a topic takes, at most; it may have begun to refuse more after its records had come.
_LIMITS_MAX: Final = {
    "message.timestamp.before.max.ms": 2**63 - 1,
    "message.timestamp.after.max.ms": 2**63 - 1,
    "max.message.bytes": 2**31 - 1,
}
_COMPRESSIONS: Final = ("none", "snappy", "gzip", "lz4", "zstd")


def _time(text: str | None) -> int | None:
    return None if text is None else parse_time(text)


def export(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="The topic.")],
    *,
    parquet: Annotated[
        Path, typer.Option("--parquet", metavar="FILE", show_default=False, help="The file; it appears once complete.")
    ],
    partitions: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, show_default=False, help="A partition; repeatable; default: all."),
    ] = None,
    from_offset: Annotated[int, typer.Option("--from", metavar="OFFSET", min=0, help="The first offset.")] = 0,
    until_offset: Annotated[
        int | None,
        typer.Option("--until", metavar="OFFSET", min=0, show_default=False, help="The offset after the last one."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", show_default=False, help=f"Begin with the first record since {FORMS}."),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(
            "--before",
            metavar="TIME",
            show_default=False,
            help="End before the first record of this time.",
        ),
    ] = None,
    compression: Annotated[
        str, typer.Option("--compression", metavar="CODEC", help=f"One of {', '.join(_COMPRESSIONS)}.")
    ] = "zstd",
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file, but never a link or a device.")
    ] = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Write the committed records of a topic to a Parquet file.

    It goes up to the last stable offset of this moment, in the order of partitions and offsets. The file appears under
    its name once all of it is on disk. Spark, pandas and DuckDB read it; `txnstore load` brings it back.
    """
    if until_offset is not None and until_offset < from_offset:
        raise typer.BadParameter(f"{until_offset} is before --from {from_offset}", param_hint="--until")
    since_ms, before_ms = _time(since), _time(before)
    if since_ms is not None and before_ms is not None and before_ms < since_ms:
        raise typer.BadParameter(f"{before} is before --since {since}", param_hint="--before")
    archiving = _needing_pyarrow("archiving")
    selection = archiving.RecordSelection(
        partitions or (), from_offset, until_offset, since_ms=since_ms, before_ms=before_ms
    )
    if compression not in _COMPRESSIONS:
        raise typer.BadParameter(f"one of {', '.join(_COMPRESSIONS)}", param_hint="--compression")
    with opened(url, schema, limits=patient_limits()) as cluster, progress_bar("exporting") as bar:
        try:
            done = archiving.export(
                cluster, topic, parquet, selection, compression=compression, replaces=force, told=bar.show
            )
        except OSError as error:
            is_replaced = isinstance(error, FileExistsError) and parquet.is_file() and not parquet.is_symlink()
            how = "; --force replaces it" if is_replaced else ""
            raise CommandFailed(f"{parquet}: {error.strerror or error}{how}") from None
    for number, (start, end) in done.contents.ranges.items():
        say(f"{topic}-{number}: offsets {start} to {end - 1}" if start < end else f"{topic}-{number}: nothing")
    hint(f"{records_were(done.record_count)} written to {parquet}")


def load(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="What `txnstore export` wrote.")],
    *,
    topic: Annotated[
        str | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            show_default=False,
            autocompletion=complete_topic,
            help="The topic to write to; default: the one of the file.",
        ),
    ] = None,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Produce the records of an exported file to a topic, each once.

    They get new offsets, and keep partition, timestamp, key, value and headers. Whatever stops it, the same call goes
    on where it was; once it is complete, it writes nothing. A topic that would delete some for their age, or that is to
    have a size, is refused; one that is made for them keeps them.
    """
    loading = _needing_pyarrow("loading")
    settings = {"bootstrap.servers": url, "txnstore.schema": schema}
    lifted: dict[str, int] = {}
    try:
        with opened(url, schema) as cluster, progress_bar("loading") as bar:
            try:
                name = topic or loading.topic_in(file)
                done = loading.load(cluster, file, settings, name, told=bar.show, told_of_limit=lifted.__setitem__)
            except OSError as error:
                raise CommandFailed(f"{file}: {error.strerror or error}") from None
            except KafkaException as error:
                raise CommandFailed(f"{error_text(error)}; {_way_on(error, name)}", code=exit_code(error)) from None
        before = f"; {done.record_count_before} by earlier calls" if done.record_count_before else ""
        hint(f"{records_were(done.record_count)} written to {done.topic}{before}")
    finally:
        # Whatever has stopped it: the next call finds the topic there.
        for limit, value in lifted.items():
            if limit == "retention.ms":
                why = f"some records are older than {duration_text(value)}"
            else:
                why = f"its records may take more than {value} bytes"
            hint(f"{name} was made with {limit}=-1: {why}, the {limit} of the archive")


def _way_on(error: KafkaException, topic: str) -> str:
    """Return what makes the same command go on after an error."""
    if exit_code(error) == TRY_AGAIN_LATER:
        return "the same command goes on"
    for setting, largest in _LIMITS_MAX.items():
        if setting in error_text(error):
            alter = f"txnstore topics alter {topic} --config {setting}={largest}"
            return f"after `{alter}` the same command goes on"
    return "once that is put right, the same command goes on"


def _needing_pyarrow(name: str) -> ModuleType:
    try:
        return import_late(f"txnstore.moving.{name}")
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "pyarrow"
        raise CommandFailed(_MISSING if is_missing else f"{_BROKEN}: {error}") from None
