"""The command that moves a store to another database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Final

import typer

from txnstore.cli.options import Json, Schema, examples, patient_limits
from txnstore.cli.output import Column, CommandFailed, error_text, exit_code, hint, say, show_json, show_rows
from txnstore.cli.progress import progress_bar
from txnstore.db.closing import Move, MoveState, read_move
from txnstore.db.cluster.membership import split_urls
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.opening import open_store
from txnstore.db.roles.grants import list_grants
from txnstore.db.roles.rights import Kind
from txnstore.db.store import Store
from txnstore.errors import StoreCopied, TxnStoreError
from txnstore.moving.move import Moved, cancel, move, name_of

EXAMPLES: Final = examples(
    "txnstore copy sqlite:///shop.db postgresql://alice@db.example/shop",
    "txnstore copy --cancel sqlite:///shop.db",
)

_COLUMNS: Final = (Column("table", "TABLE"), Column("rows", "ROWS"), Column("digest", "DIGEST"))


def copy(
    from_url: Annotated[str, typer.Argument(metavar="FROM", show_default=False, help="The database of the store.")],
    to_url: Annotated[
        str | None,
        typer.Argument(metavar="[TO]", show_default=False, help="An empty database, on a server or in a file."),
    ] = None,
    *,
    stop: Annotated[
        bool,
        typer.Option("--cancel", help="Reopen FROM, which an unfinished copy has closed; TO stays closed for good."),
    ] = False,
    even_if_damaged: Annotated[
        bool,
        typer.Option("--even-if-damaged", help="Move the store also if `txnstore verify` finds something wrong in it."),
    ] = False,
    as_json: Json = False,
    schema: Schema = DEFAULT_SCHEMA,
    to_schema: Annotated[
        str | None,
        typer.Option("--to-schema", metavar="NAME", show_default=False, help="The schema in TO; default: as --schema."),
    ] = None,
) -> None:
    """Move a store to another database, with all that it holds; clients go on there where they were.

    FROM is closed for writers meanwhile and stays closed: who still writes to it is told where it went. Everything
    is compared before TO is opened. Whatever stops it, the same command goes on from there. Your own tables in FROM,
    as of an application that uses the outbox, stay there: move them first, in the same pause. So do the rights of
    roles: it says which to grant in TO. Put passwords into PGPASSWORD or ~/.pgpass: others on this machine can see a
    command line.
    """
    for url, what in ((from_url, "FROM"), (to_url, "TO")):
        if url is not None and len(split_urls(url)) > 1:
            raise typer.BadParameter("a store of several databases cannot be copied: give one URL", param_hint=what)
    if stop:
        if to_url is not None:
            raise typer.BadParameter("only FROM is opened again: leave out TO", param_hint="--cancel")
        with _opened(from_url, schema) as source:
            was_closed = cancel(source)
            say(f"{source.url}: {'open again' if was_closed else 'open already: no copy has closed it'}")
        return
    if to_url is None:
        raise typer.BadParameter("where to? Give TO", param_hint="TO")
    with ExitStack() as stack:
        source = stack.enter_context(_opened(from_url, schema))
        target = stack.enter_context(_opened(to_url, to_schema or schema, create=True))
        with _told_how_far(source, target), progress_bar("looking") as bar:
            moved = move(source, target, told=bar.show_step, even_if_damaged=even_if_damaged)
        _show(moved, source, target, as_json=as_json)
        _tell_of_roles(source, target)


def _opened(url: str, schema: str, *, create: bool = False) -> Store:
    return open_store(url, schema=schema, limits=patient_limits(), create=create, moving=True)


@contextmanager
def _told_how_far(source: Store, target: Store) -> Iterator[None]:
    """Say of what stops the copy which side is closed by then, and what to do: the error itself knows of neither."""
    try:
        yield
    except StoreCopied:
        # The same command does not go on with it, and what else does depends on which one it is a copy of.
        raise
    except (KeyboardInterrupt, TxnStoreError) as error:
        told = _how_far(source, target)
        if told is None:
            raise
        if isinstance(error, KeyboardInterrupt):
            hint(told)
            raise
        raise CommandFailed(f"{error}; {told}", code=exit_code(error)) from None


def _how_far(source: Store, target: Store) -> str | None:
    """Return what is closed, and what opens it; None: nothing is closed that the copy would have opened."""
    try:
        found = source.read(read_move)
    except TxnStoreError:
        state = "perhaps closed"
    else:
        if found is None or found.state is MoveState.ARRIVING:
            return None
        if found.state is MoveState.GONE:
            return _how_far_behind(source, target, found)
        state = "closed"
    return (
        f"{source.url} is {state} now, and the copy is not complete; the same command goes on with it, and"
        f" `txnstore copy --cancel {_arguments(source)}` opens it again{_left_out(source)}"
    )


def _arguments(store: Store) -> str:
    """Return by which arguments a command finds the store; its password is not shown."""
    return f"{store.url}" if store.schema == DEFAULT_SCHEMA else f"{store.url} --schema {store.schema}"


def _left_out(store: Store) -> str:
    """Return that the URL has more than is shown of it, if it has."""
    has_options = store.url.url.query or store.url.secret_options
    return " (with the options of its URL, which are left out here)" if has_options else ""


def _how_far_behind(source: Store, target: Store, gone: Move) -> str | None:
    """Return the same once the source has gone."""
    try:
        arriving = target.read(read_move)
    except TxnStoreError:
        state = "perhaps not open yet"
    else:
        if arriving is None or arriving.uuid != gone.uuid:
            return None
        state = "not open yet"
    return (
        f"the store has left {source.url} for good, and {target.url} is {state}: run the same command again, which"
        " opens it"
    )


def _tell_of_roles(source: Store, target: Store) -> None:
    """Say which roles may use the source and not yet the target: they are the server's, and their rights no rows."""
    if source.backend.name != "postgresql" or target.backend.name != "postgresql":
        return
    try:
        there, here = list_grants(target), list_grants(source)
    except TxnStoreError as error:
        # The store has moved all the same.
        hint(f"roles of {source.url} do not go along, and which of them lack rights is not known: {error_text(error)}")
        return
    missing = [grant for grant in here if grant not in there]
    if missing:
        named = "; ".join(
            f"{grant.role}, {'the owner' if grant.kind is Kind.OWNER else f'a {grant.kind}'}"
            + (f" limited to {grant.bounds}" if grant.bounds else "")
            for grant in missing
        )
        hint(f"roles of {source.url} do not go along, grant them there (`txnstore roles grant`): {named}")


def _show(moved: Moved, source: Store, target: Store, *, as_json: bool) -> None:
    rows = [
        {"table": name, "rows": digest.row_count, "digest": f"{digest.sum_:032x}"}
        for name, digest in moved.tables.items()
    ]
    if as_json:
        show_json(
            {
                "store_uuid": moved.store_uuid,
                "from": name_of(source),
                "to": name_of(target),
                "was_there": moved.was_there,
                "tables": rows,
            }
        )
        return
    if rows:
        show_rows([row for row in rows if row["rows"]], _COLUMNS, as_json=False)
        say("")
    if moved.was_there:
        say(f"the store {moved.store_uuid} has already moved to {target.url}; nothing was changed")
    else:
        say(f"the store {moved.store_uuid} lives in {target.url} now; give its URL to all clients")
