"""The command that relays topics to or from a Kafka cluster, and the outbox into the log."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from txnstore.cli.maintenance import stop_at_signals
from txnstore.cli.options import Schema, UrlArgument, UrlBesideArgument, examples, key_values, one_url
from txnstore.cli.output import FAILED, TRY_AGAIN_LATER, CommandFailed, exit_code, report, say
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.opening import open_store
from txnstore.db.portions import Portions
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.relay.errors import Failing, RelayFailed
from txnstore.relay.from_kafka import FromKafka
from txnstore.relay.kafka_cluster import KafkaCluster
from txnstore.relay.options import OnGap, RelayOptions, RelayStart
from txnstore.relay.outbox_loop import outbox_beside, relay_outbox
from txnstore.relay.positions import forget_relay
from txnstore.relay.to_kafka import ToKafka

EXAMPLES: Final = examples(
    "txnstore relay sqlite:///shop.db",
    "txnstore relay sqlite:///shop.db --to kafka.example:9092 --topic orders",
    "txnstore relay --from kafka.example:9092 --topic payments --config-file kafka.properties --once",
    "txnstore relay sqlite:///shop.db --forget old-name",
)

#: What goes with `--forget`.
_FORGETS: Final = {"url", "url_option", "schema", "forget", "topic"}
#: What says how topics are copied, and means nothing to the outbox.
_COPIES: Final = {"topic", "name", "start", "on_gap", "config", "config_file"}
#: A round reads several partitions at once.
_POOL_SIZE: Final = 10
#: How long a relay that is to end may wait for Kafka: librdkafka gives up only after a minute.
STOP_SECONDS = 5.0
_log = logging.getLogger(__name__)


def relay(
    context: typer.Context,
    url: UrlArgument = None,
    *,
    url_option: UrlBesideArgument = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="BOOTSTRAP", help="Copy topics to this Kafka cluster: host:port,...")
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="BOOTSTRAP", help="Copy topics of this Kafka cluster into the store."),
    ] = None,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", "-t", metavar="TOPIC", help="Only this topic; repeatable.")
    ] = None,
    outbox: Annotated[
        bool,
        typer.Option("--outbox", help="With --to or --from: also move rows of the outbox into their topics."),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Relays of the same name share positions; default: the identity of the store or cluster read.",
        ),
    ] = None,
    start: Annotated[
        RelayStart,
        typer.Option(
            "--start",
            help="Where to begin in a topic that this relay has not read yet; topics and partitions that appear while"
            " it runs are read from their first record.",
        ),
    ] = RelayStart.EARLIEST,
    on_gap: Annotated[
        OnGap,
        typer.Option("--on-gap", help="If records were deleted before they were copied: stop, or go on after them."),
    ] = OnGap.ERROR,
    once: Annotated[bool, typer.Option("--once", help="Stop at the present ends of the partitions.")] = False,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-X", metavar="KEY=VALUE", help="A setting of the Kafka clients; repeatable."),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config-file",
            metavar="FILE",
            help="A file with such settings, one a line; for passwords, which a command line would show.",
        ),
    ] = None,
    forget: Annotated[
        str | None,
        typer.Option(
            "--forget",
            metavar="NAME",
            help="Only forget the positions of the relay of this name, which was given up; with --topic, those in these"
            " topics. Started again, one from Kafka begins anew; one to Kafka goes on where Kafka says.",
        ),
    ] = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    r"""Move the rows of the outbox into their topics; or copy topics to or from Kafka, each record once.

    Goes on until stopped by Ctrl-C. The Kafka side needs the package confluent-kafka: txnstore\[kafka].
    """
    url = one_url(context, url, url_option)
    if to is not None and from_ is not None:
        raise typer.BadParameter("give only one direction: --to or --from")
    bootstrap = to or from_
    if forget is not None:
        if _are_given(context, context.params.keys() - _FORGETS):
            raise typer.BadParameter("--forget goes with --topic and nothing else")
        _forget(url, schema, forget, topic or [])
        return
    if bootstrap is None and _are_given(context, _COPIES):
        raise typer.BadParameter("--topic, --name, --start, --on-gap, --config and --config-file need --to or --from")
    settings = _settings(config or [], config_file)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    options = RelayOptions(name=name, topics=tuple(topic or ()), start=start, on_gap=on_gap, once=once)
    try:
        cluster = None if bootstrap is None else KafkaCluster(bootstrap, settings)
        with open_store(url, schema=schema, create=False, pool_size=_POOL_SIZE) as store:
            stop = threading.Event()
            stop_at_signals(stop)
            if cluster is None or (once and outbox):
                moved_count = drain_outbox(store, Portions(stop=stop)) if once else relay_outbox(store, stop)
                say(f"{moved_count} rows of the outbox were moved")
            # One that was told to end meanwhile begins nothing in Kafka.
            if cluster is not None and not (stop.is_set() and once and outbox):
                copier = ToKafka(store, cluster, options) if to is not None else FromKafka(store, cluster, options)
                with (
                    ends_soon(stop, os._exit) as failing,
                    outbox_beside(store, stop, failing) if outbox and not once else nullcontext(),
                ):
                    count = copier.run(stop, failing)
                say(f"{count} records were {'shipped' if to is not None else 'copied'}")
    except RelayFailed as error:
        raise _command_failed(error) from None


def _command_failed(error: RelayFailed) -> CommandFailed:
    return CommandFailed(str(error), code=TRY_AGAIN_LATER if error.may_pass else FAILED)


def _are_given(context: typer.Context, parameters: Collection[str]) -> bool:
    """Return whether one of the parameters is on the command line, be it with the value that it has anyway."""
    sources = [context.get_parameter_source(parameter) for parameter in parameters]
    return any(source is not None and source.name == "COMMANDLINE" for source in sources)


def _forget(url: str, schema: str, relay: str, topics: Sequence[str]) -> None:
    with open_store(url, schema=schema, create=False) as store:
        try:
            count = store.write(lambda connection: forget_relay(connection, relay, topics))
        except RelayFailed as error:
            raise CommandFailed(str(error), code=FAILED) from None
    say(f"the positions in {count} partitions were forgotten")


@contextmanager
def ends_soon(stop: threading.Event, end_process: Callable[[int], object]) -> Iterator[Failing]:
    """End the process if the body goes on for long after it was to end, in whatever it is.

    It is to end once `stop` is set, or it has told of an error to what comes with the context, which sets `stop`; the
    error is then reported here, and says what the process ends with.  A relay may be killed anywhere: the next one goes
    on from what was committed.
    """
    is_over = threading.Event()
    errors: list[Exception] = []

    told: list[Exception] = []

    def fail(error: Exception) -> None:
        # On its way out it may pass several that tell of it.
        if not any(error is other for other in told):
            told.append(error)
            errors.append(_command_failed(error) if isinstance(error, RelayFailed) else error)
        stop.set()

    def watch() -> None:
        stop.wait()
        if not is_over.wait(STOP_SECONDS):
            _log.warning(
                "neither Kafka nor the store has answered: the relay ends in the middle of its work, and the next one"
                " goes on from what was committed",
                extra={"event": "relay_ended_early"},
            )
            # Perhaps nobody reads any more what it says.
            with suppress(OSError, SystemExit):
                for error in errors:
                    report(error)
            # A supervisor would start it again and again for what stays wrong.
            end_process(FAILED if FAILED in map(exit_code, errors) else TRY_AGAIN_LATER)

    threading.Thread(target=watch, name="txnstore-relay-end", daemon=True).start()
    try:
        yield fail
    finally:
        is_over.set()
        stop.set()


def _settings(texts: list[str], file: Path | None) -> dict[str, str]:
    """Return the settings of a file and of the command line, which wins."""
    lines: list[str] = []
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError):
            raise typer.BadParameter(f"{file} cannot be read", param_hint="--config-file") from None
        lines = [line for line in lines if line and not line.startswith("#")]
    settings: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        key, equals, value = (part.strip() for part in line.partition("="))
        # Not the line itself: it may be a password.
        if not key or not equals:
            raise typer.BadParameter(f"setting {number} is not KEY=VALUE", param_hint="--config-file")
        settings[key] = value
    return settings | key_values(texts)
