# What `_bulk.c` and the files in C beside it hold; `bulk.py` says whether it is there.
from array import array
from collections.abc import Callable, Iterator, Sequence, Sized
from types import MethodDescriptorType
from typing import Any, Generic, Self, TypeAlias, TypeVar, final

from txnstore.clients.model.errors import KafkaError
from txnstore.model import Header

_M = TypeVar("_M")
_Column: TypeAlias = tuple[bytes, array[int], tuple[int, ...]] | None

SOURCES: int
INTERFACE: int

class MessageFields:
    _source: tuple[Any, ...]
    _record: tuple[int, int, Any, Any, Any]
    _details: tuple[KafkaError | None, float, int, int]

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> list[tuple[str, bytes | None]] | None: ...
    def error(self) -> KafkaError | None: ...
    def timestamp(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...

@final
class Messages(Iterator[_M], Generic[_M]):
    def __new__(
        cls,
        message_type: type[_M],
        source: tuple[Any, ...],
        details: tuple[KafkaError | None, float, int, int],
        index: int,
        count: int,
        first_offset: int,
        offsets: list[int] | None,
        timestamp_ms: int,
        timestamps_ms: list[int] | bytes | None,
        keys: _Column,
        values: _Column,
        headers: list[Sequence[Header]] | None,
    ) -> Messages[_M]: ...
    def __next__(self) -> _M: ...
    @property
    def taken_offset(self) -> int: ...

class Outlet:
    polled_at: float
    lease_ends_at: float
    def __new__(cls, events: Sized, clock_id: int) -> Self: ...
    def open(self, messages: Messages[Any], last_offset: int, is_timed: bool, /) -> None: ...
    def close(self, /) -> None: ...

class Polls:
    _outlet: Outlet
    def poll(self, timeout: float = -1) -> Any: ...

#: None where the processor does not do it.
crc32: Callable[[bytes | bytearray | memoryview, int], int] | None

def own_method(kind: type, method: MethodDescriptorType, /) -> MethodDescriptorType: ...
def ascends(numbers: array[int], /) -> bool: ...
def bounds(numbers: Sequence[int], /) -> tuple[int, int] | None: ...
def pack_differences(numbers: Sequence[int], base: int, /) -> str | None: ...
def unpack_sums(text: str, base: int, count: int, /) -> bytes | None: ...
def pack_cells(cells: Sequence[bytes | None], size_bytes_max: int, /) -> tuple[bytes, list[int], bytes] | None: ...
def survey(
    sizes_bytes: Sequence[int],
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    timestamps_ms: Sequence[int],
    packed_headers: Sequence[str | None],
    /,
) -> tuple[int, int, int, int, int, bool] | None: ...

class QueueFields:
    places: list[Any]
    size_bytes: int
    notify_at_bytes: int

class AccumulatorFields:
    queues: dict[Any, Any]
    _unassigned: dict[Any, Any]
    gate: Any
    record_count: int
    size_bytes: int
    records_max: int
    size_bytes_max: int
    _batch_places_max: int

@final
class Intake:
    def __new__(
        cls,
        accumulator: Any,
        lock: Any,
        entries: dict[str, Any],
        ticks: Any,
        monotonic: Callable[[], float],
        choose: Callable[[str, bytes | None, int, float], int] | None,
        key_hash: Callable[[bytes], int] | None,
        is_empty_keyless: bool,
        open_stage: Any,
        record_bytes_max: int,
    ) -> Intake: ...
    def add(
        self, topic: Any, value: Any, key: Any, partition: Any, callback: Any, timestamp: Any, headers: str | None, /
    ) -> bool: ...

@final
class Deliveries(Iterator[tuple[Any, _M]], Generic[_M]):
    def __new__(
        cls,
        message_type: type[_M],
        callbacks: Iterator[Any],
        sources: tuple[Any, ...] | list[Any],
        offset: int,
        timestamps_ms: list[int] | int,
        keys: list[bytes | None],
        values: list[bytes | None],
        queued_seconds: list[float],
        error: KafkaError | None,
        done_seconds: float,
    ) -> Deliveries[_M]: ...
    def __next__(self) -> tuple[Any, _M]: ...
