"""The SQL that lets roles of PostgreSQL do what their kind does, or takes that from them, and what was granted.

A row that belongs to a transaction is seen by each role that sees its transactional id, to the last partition and
group: one that saw only some of them would complete the transaction without the others.
"""

# ruff: noqa: S608 - what is put into the text is quoted by this file, or in it
from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sqlalchemy import Connection, text

from txnstore.db.names import RECORDS_VIEW, VERSION_TABLE, VIEWS, identifier, literal
from txnstore.db.postgresql.commit_function import JOURNAL_NUMBERS, NAME, NAME_WITHIN
from txnstore.db.postgresql.producer_ids import GUARD
from txnstore.db.postgresql.segments import SEGMENT_TABLES
from txnstore.db.roles.rights import BELONGING, BOUNDED, CALLS_FUNCTIONS, VIEWS_OF, WRITTEN, Kind, Per, Right, rights_of
from txnstore.db.schema import databases, metadata
from txnstore.db.statements import run_on_driver
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest

#: Stands for everything, alone or after a prefix of names.
ANY: Final = "*"
#: The first version in which a view can ask with the rights of its reader.
_HAS_INVOKER_VIEWS: Final = 150_000
_IDENTIFIER_BYTES: Final = 63
_POLICY_PREFIX: Final = "txnstore"
_DIGEST_LENGTH: Final = 16


@dataclass(frozen=True, slots=True)
class RoleScope:
    """What a role is limited to: names, or prefixes followed by `*`; what is not named is refused."""

    topics: Sequence[str] = ()
    group_ids: Sequence[str] = ()
    transactional_ids: Sequence[str] = ()

    def __str__(self) -> str:
        """Return them for people."""
        parts = {"topics": self.topics, "groups": self.group_ids, "transactional ids": self.transactional_ids}
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)


class Grant(NamedTuple):
    """What was granted, as the policies of the table of topics say."""

    kind: str
    role: str
    bounds: str


# --- what is there ---------------------------------------------------------------------------------------------------

_ROLE: Final = text("SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = :role")
_OWNER: Final = text(
    "SELECT pg_catalog.pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class c"
    " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = :schema AND c.relname = 'topics'"
)
_POLICIES: Final = text(
    "SELECT c.relname, p.polname, pg_catalog.pg_get_userbyid(role.oid),"
    " pg_catalog.obj_description(p.oid, 'pg_policy')"
    " FROM pg_catalog.pg_policy p JOIN pg_catalog.pg_class c ON c.oid = p.polrelid"
    " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    " CROSS JOIN pg_catalog.unnest(p.polroles) AS role(oid)"
    " WHERE n.nspname = :schema ORDER BY 3, 2, 1"
)
_OTHERS: Final = text(
    "SELECT DISTINCT pg_catalog.pg_get_userbyid(one.grantee) FROM pg_catalog.pg_class c"
    " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    " CROSS JOIN pg_catalog.aclexplode(c.relacl) AS one"
    " WHERE n.nspname = :schema AND c.relkind IN ('r', 'p', 'v') AND one.grantee NOT IN (0, c.relowner) ORDER BY 1"
)


def list_grants(store: Store) -> list[Grant]:
    """Return who was granted what with `grant`, by role; the tables' owner comes first."""

    def work(connection: Connection) -> list[Grant]:
        owner = connection.execute(_OWNER, {"schema": store.schema}).scalar_one()
        policies = _our_policies(connection, store.schema)
        return [
            Grant(Kind.OWNER, owner, ""),
            *(
                Grant(kind, role, about or "")
                for table, name, role, about in policies
                if table == "topics" and (kind := kind_of_policy(name)) is not None
            ),
        ]

    return store.read(work)


def _our_policies(connection: Connection, schema: str) -> list[tuple[str, str, str, str | None]]:
    found = connection.execute(_POLICIES, {"schema": schema}).all()
    return [(*row,) for row in found if kind_of_policy(row[1]) is not None]


def kind_of_policy(policy: str) -> Kind | None:
    """Return the kind of role that a policy of this name was made for; None: `grant` did not make it."""
    found = re.match(rf"{_POLICY_PREFIX}_({'|'.join(Kind)})_", policy)
    return None if found is None else Kind(found[1])


def views_for(kind: Kind, server_version: int, *, is_limited: bool) -> Sequence[str]:
    """Return the views that a role of a kind is given; before PostgreSQL 15 a view shows the rows of its owner."""
    return () if is_limited and server_version < _HAS_INVOKER_VIEWS else VIEWS_OF.get(kind, ())


# --- what is to be done -----------------------------------------------------------------------------------------------


def grant(store: Store, kind: Kind, role: str, bounds: RoleScope | None = None) -> list[str]:
    """Return the statements that let a role do what its kind does, within bounds if there are any.

    They replace what the role was granted as one of this kind, and leave what it is besides.

    Raises:
        InvalidRequest: there is no such role, or this cannot be granted to it.
        TxnStoreError: the database cannot be read.
    """
    if bounds is not None:
        _check_bounds(kind, bounds)

    def work(connection: Connection) -> list[str]:
        _check_role(connection, store.schema, role, otherwise="make it first: CREATE ROLE ... LOGIN")
        if bounds is not None and connection.execute(databases.select()).fetchmany(2)[1:]:
            raise InvalidRequest(
                "the store has several databases, and a role that does not see all of a transaction there could end it"
                " without the rest: grant to the role without limits, or keep what has limits in a store of its own"
            )
        version = _server_version(connection)
        known = {name for _, _, name, _ in _our_policies(connection, store.schema)}
        others = [name for (name,) in connection.execute(_OTHERS, {"schema": store.schema}) if name not in known]
        statements = _Statements(store.schema, role)
        if kind is Kind.OWNER:
            return list(statements.own())
        warned = (
            [
                f"-- From now on {_comment_of(name)} sees no row: it has rights that were not granted this way."
                for name in others
                if name != role
            ]
            if bounds is not None
            else []
        )
        return [*statements.grant(kind, bounds, version), *warned]

    return store.read(work)


def revoke(store: Store, role: str) -> list[str]:
    """Return the statements that take everything from a role that `grant` may have given to it.

    Raises:
        InvalidRequest: there is no such role, or the tables are its own.
        TxnStoreError: the database cannot be read.
    """

    def work(connection: Connection) -> list[str]:
        _check_role(connection, store.schema, role, otherwise="there is nothing to take from it")
        policies = connection.execute(_POLICIES, {"schema": store.schema}).all()
        ours = _our_policies(connection, store.schema)
        # Policies of others are a reason to leave row-level security on, as are bounds of other roles.
        is_needed = len(policies) > len(ours) or any(
            about for table, _, name, about in ours if table == "topics" and name != role
        )
        return list(
            _Statements(store.schema, role).revoke(
                [(table, policy) for table, policy, name, _ in ours if name == role],
                _server_version(connection),
                is_needed=is_needed,
            )
        )

    return store.read(work)


def apply(store: Store, statements: Iterable[str]) -> None:
    """Run the statements in one database transaction.

    Raises:
        PermissionDenied: the tables, or the role, are not this user's to say so about.
        TxnStoreError: the database refuses or cannot be reached; nothing was changed.
    """
    wanted = [statement for statement in statements if not statement.startswith("--")]

    def work(connection: Connection) -> None:
        for statement in wanted:
            run_on_driver(connection, statement.replace("%", "%%"))

    store.write(work)


def printed(statements: Iterable[str]) -> str:
    """Return the statements as a script for psql, one database transaction.

    Names in policies are looked up when those are made: nobody's functions come before PostgreSQL's own.
    """
    lines = [each if each.startswith("--") else f"{each};" for each in statements]
    return "\n".join(["BEGIN;", "SET LOCAL search_path = pg_catalog, pg_temp;", *lines, "COMMIT;", ""])


def _check_bounds(kind: Kind, bounds: RoleScope) -> None:
    if kind not in BOUNDED:
        raise InvalidRequest(f"a role of the kind {kind} sees all topics: only producers and consumers have limits")
    for name in (*bounds.topics, *bounds.group_ids, *bounds.transactional_ids):
        if not name or not name.isprintable() or ANY in name[:-1]:
            raise InvalidRequest("a limit is a name, a prefix followed by *, or * alone")


def _check_role(connection: Connection, schema: str, role: str, *, otherwise: str) -> None:
    """Refuse a role that nothing can be granted to, or taken from; `otherwise` is what follows if there is none."""
    is_superuser = connection.execute(_ROLE, {"role": role}).scalar_one_or_none()
    if is_superuser is None:
        raise InvalidRequest(f"the server has no role {role[:_IDENTIFIER_BYTES]!r}; {otherwise}")
    if is_superuser:
        raise InvalidRequest(f"the role {role!r} is a superuser: nothing limits it, and nothing is granted to it")
    if connection.execute(_OWNER, {"schema": schema}).scalar_one_or_none() == role:
        raise InvalidRequest(f"the tables are the role's own: {role!r} may do everything; give them to another owner")


def _server_version(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SELECT pg_catalog.current_setting('server_version_num')").scalar_one())


@dataclass(frozen=True, slots=True)
class _Statements:
    """The SQL about one role and the tables in one schema."""

    schema: str
    role: str

    def own(self) -> Iterator[str]:
        """Make the role the owner of all that is there."""
        to_role = f"OWNER TO {identifier(self.role)}"
        yield f"ALTER SCHEMA {identifier(self.schema)} {to_role}"
        for table in (*_our_tables(), *SEGMENT_TABLES, VERSION_TABLE):
            yield f"ALTER TABLE {self._named(table)} {to_role}"
        for view in VIEWS:
            yield f"ALTER VIEW {self._named(view)} {to_role}"
        for function in (NAME_WITHIN, NAME, GUARD):
            yield f"ALTER FUNCTION {self._named(function)} {to_role}"

    def grant(self, kind: Kind, bounds: RoleScope | None, server_version: int) -> Iterator[str]:
        """Give the rights of the kind, and a policy for each table whose rows belong to somebody."""
        to_role = f"TO {identifier(self.role)}"
        yield f"GRANT USAGE ON SCHEMA {identifier(self.schema)} {to_role}"
        rights_by_table = rights_of(kind)
        for table, rights in rights_by_table.items():
            yield f"GRANT {', '.join(map(_rendered, rights))} ON {self._named(table)} {to_role}"
        if kind in CALLS_FUNCTIONS:
            for function in (NAME, NAME_WITHIN):
                yield f"GRANT EXECUTE ON FUNCTION {self._named(function)} {to_role}"
        yield from self._grant_views(kind, bounds, server_version)
        policy = _policy_name(kind, self.role)
        yield from self._make_policies(policy, bounds, rights_by_table)
        # What `list_grants` tells.
        about = "NULL" if bounds is None else literal(str(bounds) or "nothing")
        yield f"COMMENT ON POLICY {identifier(policy)} ON {self._named('topics')} IS {about}"
        if bounds is not None:
            # A role with rights on a segment sees nothing by its name: policies are those of the whole.
            for table in (*BELONGING, *SEGMENT_TABLES):
                yield f"ALTER TABLE {self._named(table)} ENABLE ROW LEVEL SECURITY"

    def _grant_views(self, kind: Kind, bounds: RoleScope | None, server_version: int) -> Iterator[str]:
        shown = views_for(kind, server_version, is_limited=bounds is not None)
        for view in VIEWS_OF.get(kind, ()):
            if view not in shown:
                # An earlier grant without limits is taken back.
                yield f"REVOKE ALL ON {self._named(view)} FROM {identifier(self.role)}"
                yield f"-- Before PostgreSQL 15 a view shows the rows of its owner: not for {_comment_of(self.role)}."
                continue
            if bounds is not None:
                # A reader of the view needs rights on its tables, and sees its own share of them.
                yield f"ALTER VIEW {self._named(view)} SET (security_invoker = true)"
            yield f"GRANT SELECT ON {self._named(view)} TO {identifier(self.role)}"

    def _make_policies(
        self, policy: str, bounds: RoleScope | None, rights_by_table: Mapping[str, Sequence[Right]]
    ) -> Iterator[str]:
        for table, (per, column) in BELONGING.items():
            rights = rights_by_table.get(table, ())
            if not rights:
                continue
            yield f"DROP POLICY IF EXISTS {identifier(policy)} ON {self._named(table)}"
            command, condition = _command_of(rights), self._condition(bounds, per, column)
            using = "" if command == "INSERT" else f" USING ({condition})"
            if bounds is not None and table in WRITTEN:
                condition = f"({condition}) AND ({self._condition_for_writing(bounds, table)})"
            check = "" if command == "SELECT" else f" WITH CHECK ({condition})"
            to_role = f"TO {identifier(self.role)}"
            yield f"CREATE POLICY {identifier(policy)} ON {self._named(table)} FOR {command} {to_role}{using}{check}"

    def revoke(self, policies: Iterable[tuple[str, str]], server_version: int, *, is_needed: bool) -> Iterator[str]:
        """Take all rights and policies of the role; turn row-level security off if nobody needs it any more."""
        from_role = f"FROM {identifier(self.role)}"
        for function in (NAME, NAME_WITHIN):
            yield f"REVOKE ALL ON FUNCTION {self._named(function)} {from_role}"
        for table in (*VIEWS, *_our_tables(), *SEGMENT_TABLES, VERSION_TABLE):
            yield f"REVOKE ALL ON {self._named(table)} {from_role}"
        yield f"REVOKE ALL ON SCHEMA {identifier(self.schema)} {from_role}"
        for table, policy in policies:
            yield f"DROP POLICY {identifier(policy)} ON {self._named(table)}"
        if not is_needed:
            for table in (*BELONGING, *SEGMENT_TABLES):
                yield f"ALTER TABLE {self._named(table)} DISABLE ROW LEVEL SECURITY"
            if server_version >= _HAS_INVOKER_VIEWS:
                yield f"ALTER VIEW {self._named(RECORDS_VIEW)} RESET (security_invoker)"

    def _named(self, name: str) -> str:
        return f"{identifier(self.schema)}.{identifier(name)}"

    def _condition(self, bounds: RoleScope | None, per: Per, column: str) -> str:
        """Return what holds for the rows of a table that are within the bounds.

        Which partitions that are is asked once a statement, and looked up for each row: the statement's own condition
        finds the rows by their index, as without it.
        """
        if bounds is None:
            return "true"
        names = {
            Per.GROUP: bounds.group_ids,
            Per.TRANSACTIONAL_ID: bounds.transactional_ids,
            Per.TOPIC: bounds.topics,
            Per.ELSEWHERE: (),
        }
        if per in names:
            return _is_one_of(column, names[per])
        inner = _is_one_of("topic.name", bounds.topics)
        if inner in {"true", "false"}:
            return inner
        if per is Per.TOPIC_ID:
            return f"{column} IN (SELECT topic.topic_id FROM {self._named('topics')} AS topic WHERE {inner})"
        return (
            f"{column} IN (SELECT part.partition_id FROM {self._named('partitions')} AS part"
            f" JOIN {self._named('topics')} AS topic ON topic.topic_id = part.topic_id WHERE {inner})"
        )

    def _condition_for_writing(self, bounds: RoleScope, table: str) -> str:
        """Return what has to hold, besides, of the rows that a role with limits writes."""
        per, name = WRITTEN[table]
        column = f"{identifier(table)}.{name}"
        if per is Per.SEEN_GROUP:
            # By the group's own policy: the limits of a consumer come with another grant than those of a producer.
            return f"EXISTS (SELECT FROM {self._named('groups')} AS seen WHERE seen.group_id = {column})"
        if per is Per.DRAW:
            numbers = literal(self._named(JOURNAL_NUMBERS))
            return f"{column} IS NULL OR {column} = pg_catalog.currval(CAST({numbers} AS pg_catalog.regclass))"
        return self._condition(bounds, per, column)


def _our_tables() -> list[str]:
    return [str(table.name) for table in metadata.tables.values()]


def _rendered(right: Right) -> str:
    if isinstance(right, str):
        return right
    name, columns = right
    return f"{name} ({', '.join(map(identifier, columns))})"


def _command_of(rights: Sequence[Right]) -> str:
    """Return what a policy is for: one right, or all; the rights of the table still say which."""
    names = {right if isinstance(right, str) else right[0] for right in rights}
    return names.pop() if len(names) == 1 else "ALL"


def _is_one_of(column: str, names: Sequence[str]) -> str:
    if ANY in names:
        return "true"
    whole = [literal(name) for name in names if not name.endswith(ANY)]
    parts = [f"{column} IN ({', '.join(whole)})"] if whole else []
    parts += [
        f"pg_catalog.starts_with({column}, {literal(name.removesuffix(ANY))})" for name in names if name.endswith(ANY)
    ]
    return " OR ".join(parts) or "false"


def _policy_name(kind: Kind, role: str) -> str:
    name = f"{_POLICY_PREFIX}_{kind}_{role}"
    if len(name.encode()) > _IDENTIFIER_BYTES:
        name = f"{_POLICY_PREFIX}_{kind}_{hashlib.sha256(role.encode()).hexdigest()[:_DIGEST_LENGTH]}"
    return name


def _comment_of(name: str) -> str:
    """Return a name that ends no line."""
    return ascii(name)
