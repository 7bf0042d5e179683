"""The commands about roles of PostgreSQL: what each may do with the tables, printed as SQL or done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import typer

from txnstore.cli.options import Json, Schema, Url, about, examples, patient_limits
from txnstore.cli.output import Column, say, show_rows
from txnstore.db.cluster.membership import split_urls
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.opening import open_store
from txnstore.db.roles import grants
from txnstore.db.roles.rights import Kind
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest

_HELP: Final = "Let roles of PostgreSQL do what they are for and no more, or take that from them."

app = typer.Typer(name="roles", no_args_is_help=True, help=_HELP)

_COLUMNS: Final = (Column("role", "ROLE"), Column("kind", "KIND"), Column("bounds", "LIMITED TO"))

_Role = Annotated[str, typer.Argument(metavar="ROLE", show_default=False, help="A role of the server; it must exist.")]
_Apply = Annotated[bool, typer.Option("--apply", help="Run the SQL, as one transaction, instead of printing it.")]
_Limits = list[str] | None


def _limit(name: str, what: str) -> typer.models.OptionInfo:
    """Return a repeatable option that limits a role."""
    option: typer.models.OptionInfo = typer.Option(
        name, metavar="NAME", show_default=False, help=f"{what}, or a prefix followed by *; repeatable."
    )
    return option


@app.command(
    name="list",
    epilog=examples("txnstore roles list", "txnstore roles list --json"),
)
def list_(*, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """List who was granted what by `roles grant`, and who owns the tables."""
    rows: list[dict[str, object]] = []

    def add(store: Store) -> None:
        rows.extend(
            {"role": each.role, "kind": each.kind, "bounds": each.bounds or None} for each in grants.list_grants(store)
        )

    _each(url, schema, add)
    show_rows(rows, _COLUMNS, as_json=as_json)


@app.command(
    name="grant",
    epilog=examples(
        "txnstore roles grant coordinator shop_upkeep --apply",
        "txnstore roles grant producer shop_web --topic orders --topic 'shop.*' --transactional-id 'web-*'",
        "txnstore roles grant consumer shop_web --topic 'shop.*' --group billing --apply",
    ),
)
def grant(
    kind: Annotated[Kind, typer.Argument(show_default=False, help="What the role is for.")],
    role: _Role,
    *,
    topics: Annotated[_Limits, _limit("--topic", "A topic that it may use (and no others)")] = None,
    group_ids: Annotated[_Limits, _limit("--group", "A group that it may use")] = None,
    transactional_ids: Annotated[_Limits, _limit("--transactional-id", "A transactional id that it may use")] = None,
    apply: _Apply = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Let a role do what its kind does: prints the SQL, or runs it with --apply, as the owner of the tables.

    A producer writes records and a consumer reads them, as a member of groups; a role may be both, granted one after
    the other. A coordinator does all that clients do. A monitor sees all but payloads. An owner migrates.
    With any of --topic, --group and --transactional-id a producer or consumer uses nothing but what is named, by
    row-level security: a role with rights on the tables that were not granted here no longer sees any rows.
    The same again changes nothing; a grant of the same kind takes the place of the earlier one. After `migrate` to a
    newer version, grant again.
    """
    named = (topics, group_ids, transactional_ids)
    bounds = None if not any(named) else grants.RoleScope(*(tuple(names or ()) for names in named))
    done = f"the role {role} is {_article(kind)} {kind}{_within(bounds)}"
    _print_or_apply(url, schema, lambda store: grants.grant(store, kind, role, bounds), done=done, apply=apply)


@app.command(
    name="revoke",
    epilog=examples("txnstore roles revoke shop_web", "txnstore roles revoke shop_web --apply"),
)
def revoke(role: _Role, *, apply: _Apply = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """Take from a role all that `roles grant` has given to it: prints the SQL, or runs it with --apply.

    Connections that are open lose it at once. Row-level security is turned off with the last role that is limited.
    """
    done = f"the role {role} may no longer do anything with the tables"
    _print_or_apply(url, schema, lambda store: grants.revoke(store, role), done=done, apply=apply)


def _print_or_apply(
    url: str | None, schema: str, statements: Callable[[Store], list[str]], *, done: str, apply: bool
) -> None:
    def work(store: Store) -> None:
        wanted = statements(store)
        if not apply:
            typer.echo(grants.printed(wanted), nl=False)
            return
        grants.apply(store, wanted)
        for statement in wanted:
            if statement.startswith("-- "):
                say(statement.removeprefix("-- "))
        say(f"{store.url}: {done}")

    _each(url, schema, work)


def _each(url: str | None, schema: str, work: Callable[[Store], None]) -> None:
    assert url is not None
    urls = split_urls(url)
    for each in urls:
        with about(each, urls), open_store(each, schema=schema, limits=patient_limits(), create=False) as store:
            if store.backend.name != "postgresql":
                raise InvalidRequest(
                    f"{store.url} has no roles: the owner and mode of an SQLite file say who may use it"
                )
            work(store)


def _article(kind: Kind) -> str:
    return "an" if kind is Kind.OWNER else "a"


def _within(bounds: grants.RoleScope | None) -> str:
    return "" if bounds is None else f", limited to {bounds}"
