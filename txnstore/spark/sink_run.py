"""The runs of queries and jobs that write, and what they are known by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from txnstore.errors import InvalidRequest
from txnstore.model import NAME_BYTES_MAX, OFFSET_MAX, is_storable_text
from txnstore.transactions.coordinator import check_transactional_id
from txnstore.transactions.recovery import SINK_OF_JOB

#: A run's id stands in one entry of an index with a query's and a group's, each of up to NAME_BYTES_MAX.
RUN_ID_BYTES_MAX: Final = 180
#: What the ids of sinks begin with that are queries.
_SINK_OF_QUERY: Final = "query:"


@dataclass(frozen=True, slots=True)
class SinkRun:
    """One run of a query, or one job, that writes; it can be pickled and holds no credentials."""

    transactional_id: str
    """What it writes under; runs of one transactional id fence each other."""

    sink_id: str
    """What its batches are remembered under, whatever the transactional id."""

    run_id: str
    query_id: str | None = None
    """Of an application's version: the streaming query that it is written in, if any."""

    @property
    def query_sink_id(self) -> str | None:
        """What those of an application's versions are remembered under that this query has written."""
        return None if self.query_id is None else f"by:{self.query_id}:{self.sink_id}"

    @property
    def is_of_query(self) -> bool:
        """Whether Spark numbers its batches: an application may well come with an old version."""
        return self.sink_id.startswith(_SINK_OF_QUERY)

    def __post_init__(self) -> None:
        """Refuse what cannot be stored.

        Raises:
            InvalidRequest: a name is not text, is empty or too long, or has characters that no database keeps.
        """
        check_transactional_id(self.transactional_id)
        check_names(self.sink_id, self.run_id)
        if self.query_sink_id is not None:
            check_names(self.query_sink_id, self.run_id)


def check_names(sink_or_query_id: object, run_id: object) -> None:
    """Refuse what is not the id of a query or a run.

    Raises:
        InvalidRequest: a name is not text, is empty or too long, or has characters that no database keeps.
    """
    for what, name, bytes_max in (
        ("query", sink_or_query_id, NAME_BYTES_MAX),
        ("run", run_id, RUN_ID_BYTES_MAX),
    ):
        if not isinstance(name, str) or not is_storable_text(name) or not 0 < len(name.encode()) <= bytes_max:
            raise InvalidRequest(f"the id of a {what} is text of 1 to {bytes_max} bytes of UTF-8")


def run_of_query(query_id: str, run_id: str, transactional_id: str | None = None) -> SinkRun:
    """Return a run of a streaming query; `query_id` and `run_id` are Spark's, `transactional_id` the user's own name.

    Another query id under the same transactional id is a new query, which begins at any batch id.
    """
    return SinkRun(transactional_id or f"spark-query-{query_id}", sink_id_of_query(query_id), run_id)


def run_of_job(
    job_id: str, *, app_id: str | None = None, topic: str | None = None, transactional_id: str | None = None
) -> SinkRun:
    """Return a batch write; with an `app_id` its batch id is the application's version of the data.

    A version is written once to each `topic`, None being those that a column names.
    """
    if app_id is None:
        return SinkRun(transactional_id or f"spark-job-{job_id}", f"{SINK_OF_JOB}{job_id}", job_id)
    # No topic has a colon in its name.
    name = f"{topic or ''}:{app_id}"
    return SinkRun(transactional_id or f"spark-app-{name}", f"app:{name}", job_id)


def sink_id_of_query(query_id: str) -> str:
    """Return what the batches of a streaming query are remembered under."""
    return f"{_SINK_OF_QUERY}{query_id}"


def check_batch_id(batch_id: object) -> None:
    """Refuse what is not the number of a batch.

    Raises:
        InvalidRequest: it is not a whole number from 0 to 2**63 - 1.
    """
    check_number(batch_id, "a batch id")


def check_number(number: object, what: str) -> None:
    """Refuse what is not a whole number from 0 to 2**63 - 1; `what` it is, for the error.

    Raises:
        InvalidRequest: it is not.
    """
    if type(number) is not int or not 0 <= number <= OFFSET_MAX:
        raise InvalidRequest(f"{what} is a whole number from 0 to {OFFSET_MAX}, not {number!r:.40}")
