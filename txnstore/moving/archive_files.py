"""Archives: the format of the Parquet files that topics are exported to, and how a file comes to be, whole or not.

A row is a record.  A row group is what is in memory at once, when it is written and when it is read.  The file's own
metadata say what is in it: which archive it is, the topic with its settings, and the ranges of offsets.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from txnstore.errors import InvalidRequest

#: The columns, by the names of the view `records`; timestamps are points in time for readers of the file.
SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("timestamp_type", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        # As a list of pairs: a name may come several times, and the order counts.
        pa.field(
            "headers",
            pa.list_(pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])),
            nullable=False,
        ),
        pa.field("producer_id", pa.int64(), nullable=False),
        pa.field("producer_epoch", pa.int32(), nullable=False),
        pa.field("is_transactional", pa.bool_(), nullable=False),
    ]
)
#: Where the file says what it is.
_METADATA: Final = b"txnstore.archive"
#: Where it says, once all is written, how batches were compressed.
_CODEC: Final = b"txnstore.codec"
#: Of what stands there, and of the columns.
_FORMAT_VERSION: Final = 1

#: What file systems say that have no hard links.
_HAS_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


@dataclass(frozen=True, slots=True)
class Contents:
    """What an archive says of itself."""

    archive_id: str
    """Another one for each export: a load that goes on knows by it what it has loaded."""

    topic: str
    partition_count: int
    config: Mapping[str, str]
    """The topic's settings that were set, as text."""

    ranges: Mapping[int, tuple[int, int]]
    """By partition number, the first offset, and the one after the last, between which all records are here."""

    codec: str = "none"
    """How batches of the topic were compressed; none if none was.  What is loaded may be too large without."""

    def to_metadata(self) -> dict[bytes, bytes]:
        """Return what the file's metadata hold."""
        told = {
            "version": _FORMAT_VERSION,
            "archive_id": self.archive_id,
            "topic": self.topic,
            "partition_count": self.partition_count,
            "config": dict(self.config),
            "ranges": {str(number): list(range_) for number, range_ in self.ranges.items()},
        }
        return {_METADATA: json.dumps(told).encode()}

    @classmethod
    def of(cls, file: pq.ParquetFile, name: str) -> Contents:
        """Return what a file says.

        Raises:
            InvalidRequest: it is a Parquet file, and no archive, or one of another version.
        """
        metadata = file.metadata.metadata or {}
        text = metadata.get(_METADATA)
        if text is None:
            raise InvalidRequest(f"{name} is not an archive: `txnstore export` did not make it")
        try:
            told = json.loads(text)
            if told["version"] != _FORMAT_VERSION:
                raise InvalidRequest(
                    f"{name} is an archive of version {str(told['version'])[:40]}, and this txnstore reads version"
                    f" {_FORMAT_VERSION}: load it with the one that wrote it"
                )
            ranges = {int(number): (int(start), int(end)) for number, (start, end) in told["ranges"].items()}
            config = {str(key): str(value) for key, value in told["config"].items()}
            # Ids of groups and of transactions are made of it.
            archive_id = str(uuid.UUID(told["archive_id"]))
            codec = metadata.get(_CODEC, b"none").decode()
            return cls(archive_id, str(told["topic"]), int(told["partition_count"]), config, ranges, codec)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            raise InvalidRequest(
                f"{name} is not an archive: it does not say of itself what `txnstore export` writes"
            ) from None


def write_codec(writer: pq.ParquetWriter, codec: str) -> None:
    """Write how batches were compressed, before the archive is complete."""
    writer.add_key_value_metadata({_CODEC: codec.encode()})


def new_archive_id() -> str:
    """Return what a new archive is called."""
    return str(uuid.uuid4())


@contextmanager
def writing(path: Path, contents: Contents, *, compression: str, replaces: bool = True) -> Iterator[pq.ParquetWriter]:
    """Write an archive; it stands under its name once all is written and on disk, and does not stand there before.

    A file of the name is only replaced if it is a regular one, and with `replaces`.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    _check_target(path, replaces=replaces)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    schema = SCHEMA.with_metadata(contents.to_metadata())
    try:
        # The name is new, so nobody's link leads elsewhere; a log is its owner's alone, as a store in a file is.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - it has no path to open again
            with pq.ParquetWriter(file, schema, compression=compression) as writer:
                yield writer
            file.flush()
            os.fsync(file.fileno())
        _name(partial, path, replaces=replaces)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _check_target(path: Path, *, replaces: bool) -> None:
    """Refuse what must not be replaced: a link or a device would be gone, and a file of our own be in its place."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise FileExistsError(errno.EEXIST, "this is there, and not a regular file")
    if not replaces:
        raise FileExistsError(errno.EEXIST, "this file is there already")


def _name(partial: Path, path: Path, *, replaces: bool) -> None:
    if not replaces:
        try:
            # It fails where somebody has made such a file meanwhile.
            path.hardlink_to(partial)
        except FileExistsError:
            _check_target(path, replaces=False)
            raise
        except OSError as error:
            if error.errno not in _HAS_NO_LINKS:
                raise
        else:
            return
    _check_target(path, replaces=replaces)
    partial.replace(path)


def _sync_folder(folder: Path) -> None:
    """Let the name outlive the loss of power, where folders are files."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[pq.ParquetFile]:
    """Open an archive.

    Raises:
        OSError: the file cannot be read.
        InvalidRequest: it is no Parquet file, or has not all of an archive's columns.
    """
    with path.open("rb") as source:
        try:
            file = pq.ParquetFile(source)
        except pa.ArrowInvalid as error:
            raise InvalidRequest(f"{path} is not a Parquet file, or was cut off: {error}") from None
        with file:
            if not SCHEMA.equals(file.schema_arrow.remove_metadata()):
                raise InvalidRequest(f"{path} is not an archive: it has other columns than `txnstore export` writes")
            yield file


def row_group_rows(file: pq.ParquetFile, number: int, rows_at_once: int) -> Iterator[dict[str, Any]]:
    """Return the rows of a row group, by their columns' names; a few are objects at once.

    Raises:
        InvalidRequest: the file is damaged there.
    """
    columns = ["partition", "timestamp", "key", "value", "headers"]
    try:
        for batch in file.iter_batches(rows_at_once, row_groups=[number], columns=columns):
            milliseconds = batch.column("timestamp").cast(pa.int64())
            yield from batch.set_column(
                batch.schema.get_field_index("timestamp"), "timestamp", milliseconds
            ).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidRequest(f"row group {number} of the archive is damaged: {error}") from None
