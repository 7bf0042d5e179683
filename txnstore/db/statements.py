"""Statements that run all the time: rendered once by SQLAlchemy Core, then sent on the driver's own cursor.

    _LOCK: Final = HotStatement(select(groups.c.generation).where(...).with_for_update())
    row = _LOCK.row(connection, {"of_group_id": group_id})

Core stays what every statement is written in, but its way through an execution takes ten times as long as the driver
and SQLite need for a small one.  So only what differs from one execution to the next is done at each: values are put
in order, and rows get names.  It is the same database transaction as that of `connection.execute`, errors are the same
`DBAPIError`, and listeners for statements on the engine hear of these: they go Core's way then.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, Self

from sqlalchemy import (
    ARRAY,
    BindParameter,
    ColumnElement,
    Connection,
    Dialect,
    Insert,
    LargeBinary,
    and_,
    any_,
    bindparam,
    column,
    func,
    insert,
    select,
    tuple_,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import visitors
from sqlalchemy.sql.base import Executable
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Boolean, TypeDecorator, TypeEngine
from sqlalchemy.util import LRUCache

#: The values of one execution, in the order of their places in the text.
Values = tuple[Any, ...]

#: A text is kept for each length of a statement's lists, for so many lengths; longer lists, and more lengths, go Core's
#: way.
_LISTED_MAX: Final = 1_000
_TEXTS_MAX: Final = 64
#: INSERTs of several rows with more values than this are repeated by the driver: psycopg keeps what it has made of a
#: text only up to here.
_INSERTED_VALUES_MAX: Final = 50
#: From so many executions on they are one statement, on a server and of a statement that allows it.
_AT_ONCE_FROM: Final = 20
#: Longer lists are filled up to a length that has its text already.
_FILLED_ABOVE: Final = 4
#: An array as PostgreSQL writes it.
_NO_VALUES: Final = "{}"
_INTEGERS: Final = {int}
_TEXTS: Final = {str}
_ESCAPED: Final = re.compile(r'["\\]')
_NO_PARAMETERS: Final[Mapping[str, Any]] = MappingProxyType({})
_NAMED_PLACE: Final = re.compile(r"%\((\w+)\)s")
_KINDS: Final[dict[tuple[Any, ...], _EngineKind]] = {}


class HotStatement:
    """One statement of SQLAlchemy Core, rendered at its first execution for all engines that render alike.

    An INSERT takes a value for every column that neither it nor the database gives one.  A list of values
    (`bindparam(..., expanding=True)`) may have any length.  What the database refuses is a `DBAPIError`, as of
    `connection.execute`.
    """

    def __init__(self, statement: Executable, *, may_be_listed: bool = False) -> None:
        """Run `statement`, which is not changed any more.

        `may_be_listed` says of a statement that its executions for many parameters concern different rows, with small
        values: a server is then sent one statement for many of them, with a list of each value.
        """
        self.statement: Any = statement
        if isinstance(statement, Insert) and not list(statement.exported_columns):
            # A key that the database gives out is not asked for.
            self.statement = statement.inline()
        self._is_plain_insert = type(statement) is Insert and statement.select is None
        self._may_be_listed = may_be_listed
        self._at_once: dict[_EngineKind, tuple[Sequence[str], HotStatement]] = {}
        self.execution_options: Mapping[str, Any] = self.statement.get_execution_options()
        """Those of the statement, which our dialects look at."""
        self._renderings: dict[_EngineKind, _Renderings] = {}

    def rows(self, connection: Connection, parameters: Mapping[str, Any] = _NO_PARAMETERS) -> list[Any]:
        """Run it and return its rows as tuples with names; all of them are read."""
        found = self.rendered(connection.dialect, parameters)
        if found is None:
            return list(connection.execute(self.statement, parameters))
        values = found.values_from(parameters, connection.dialect)
        return found.named(run_on_driver(connection, found.text, values, self).rows)

    def row(self, connection: Connection, parameters: Mapping[str, Any] = _NO_PARAMETERS) -> Any:
        """Run it and return its only row; None if there is none."""
        rows = self.rows(connection, parameters)
        assert len(rows) <= 1, "more than one row where one was wanted"
        return rows[0] if rows else None

    def values(self, connection: Connection, parameters: Mapping[str, Any] = _NO_PARAMETERS) -> list[Any]:
        """Run it and return the first column of its rows."""
        return [row[0] for row in self.rows(connection, parameters)]

    def value(self, connection: Connection, parameters: Mapping[str, Any] = _NO_PARAMETERS) -> Any:
        """Run it and return the first column of its only row; None if there is none."""
        row = self.row(connection, parameters)
        return None if row is None else row[0]

    def run(self, connection: Connection, parameters: Mapping[str, Any] = _NO_PARAMETERS) -> int:
        """Run it, which returns no rows, and return how many it has hit."""
        found = self.rendered(connection.dialect, parameters)
        if found is None:
            return connection.execute(self.statement, parameters).rowcount
        return run_on_driver(connection, found.text, found.values_from(parameters, connection.dialect)).hit

    def run_each(self, connection: Connection, each: Sequence[Mapping[str, Any]]) -> int:
        """Run it once for each of the parameters, at least one, in order; return how many rows it has hit in all."""
        if len(each) == 1:
            return self.run(connection, each[0])
        if (
            self._may_be_listed
            and len(each) >= _AT_ONCE_FROM
            and connection.dialect.name == "postgresql"
            and (_reads_nulls(connection) or not any(None in parameters.values() for parameters in each))
        ):
            return self._run_at_once(connection, each)
        found = self.rendered(connection.dialect, each[0])
        assert found is not None, "a statement with a list of values is run once"
        values = [found.values_from(parameters, connection.dialect) for parameters in each]
        if self._is_plain_insert and len(values) * len(values[0]) <= _INSERTED_VALUES_MAX:
            return run_on_driver(connection, found.text_of_rows(len(values)), tuple(chain.from_iterable(values))).hit
        return run_on_driver(connection, found.text, values).hit

    def _run_at_once(self, connection: Connection, each: Sequence[Mapping[str, Any]]) -> int:
        kind = _kind_of(connection.dialect)
        found = self._at_once.get(kind)
        if found is None:
            found = self._at_once[kind] = _at_once(self.statement, connection.dialect)
        names, statement = found
        return statement.run(connection, {name: _array([parameters[name] for parameters in each]) for name in names})

    def rendered(self, dialect: Dialect, parameters: Mapping[str, Any] = _NO_PARAMETERS) -> Rendered | None:
        """Return what is sent; None: it is for Core to render, because a list is too long to be kept."""
        kind = _kind_of(dialect)
        found = self._renderings.get(kind)
        if found is None:
            found = self._renderings[kind] = _Renderings(self.statement, dialect)
        return found.find(parameters)


@dataclass(slots=True)
class Rendered:
    """The text of a statement for one kind of engine, and how values come into it and rows out of it."""

    text: str
    names: Sequence[str]
    """Of the parameters, in the order of their places in the text."""

    processors: Mapping[str, Callable[[Any], Any]]
    """What makes of some parameters what the driver takes."""

    bound: Mapping[str, Any]
    """The values that stand in the statement itself."""

    times: Collection[str]
    """The parameters that the engine's clock is asked for at each execution."""

    listed: Mapping[str, Sequence[str]]
    """The names of the single values of each list."""

    make_row: Callable[[Any], Any] | None
    """Makes a row; None: the statement returns none."""

    _texts_of_rows: dict[int, str] = field(default_factory=dict)
    _is_direct: bool = False
    _take: Callable[[Mapping[str, Any]], Values] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.names) == 1:
            (only,) = self.names
            self._take = lambda parameters: (parameters[only],)
        else:
            self._take = itemgetter(*self.names) if self.names else lambda _: ()
        self._is_direct = not (self.processors or self.bound or self.times or self.listed)

    def values_from(self, parameters: Mapping[str, Any], dialect: Any) -> Values:
        """Return the values in the order of their places, for an execution on the engine of this dialect."""
        if self._is_direct:
            return self._take(parameters)
        all_of_them = {**self.bound, **parameters}
        for name in self.times:
            all_of_them[name] = dialect.clock.now_ms()
        for name, names in self.listed.items():
            all_of_them.update(zip(names, _flat(parameters[name]), strict=True))
        for name, process in self.processors.items():
            all_of_them[name] = process(all_of_them[name])
        return self._take(all_of_them)

    def named(self, rows: list[Any]) -> list[Any]:
        """Return the driver's rows as tuples with names."""
        assert self.make_row is not None, "the statement returns no rows"
        return list(map(self.make_row, rows))

    def text_of_rows(self, count: int) -> str:
        """Return the text of an INSERT of so many rows."""
        text = self._texts_of_rows.get(count)
        if text is None:
            head, values, row = self.text.rpartition(" VALUES ")
            text = self._texts_of_rows[count] = f"{head}{values}{', '.join([row] * count)}"
        return text


class are_among(FunctionElement[bool]):  # noqa: N801 - reads as the SQL it stands for
    """Whether what stands in several columns is in a list of tuples.

    SQLite looks for no row by its key in a list that stands there by itself: it reads the whole table.  So there it is
    selected from.
    """

    type = Boolean()
    inherit_cache = True

    def __init__(self, name: str, *columns: ColumnElement[Any]) -> None:
        """Look for it among the tuples of the parameter `name`."""
        super().__init__(tuple_(*columns).in_(bindparam(name, expanding=True)))

    def self_group(self, against: Any = None) -> Self:
        """Return it as it is: it is a condition."""
        del against
        return self


@compiles(are_among)
def _compile_are_among(element: are_among, compiler: SQLCompiler, **options: Any) -> str:
    (in_places,) = element.clauses
    text: str = compiler.process(in_places, **options)
    if compiler.dialect.name != "sqlite":
        return text
    columns, _, places = text.partition(" IN ")
    return f"{columns} IN (SELECT * FROM {places})"  # noqa: S608 - all of it is the compiler's


class begins_with(FunctionElement[bool]):  # noqa: N801 - reads as the SQL it stands for
    """Whether a text begins with another one, which stands in the statement.

    SQLite finds a range of a key, whose order is that of bytes there, and for LIKE it reads all of the table.  On
    PostgreSQL the order of texts is that of some language.
    """

    type = Boolean()
    inherit_cache = True

    def __init__(self, text: ColumnElement[str], beginning: str) -> None:
        """Look for `beginning`, which ends with a character that has a successor."""
        after = beginning[:-1] + chr(ord(beginning[-1]) + 1)
        super().__init__(text.startswith(beginning), and_(text >= beginning, text < after))

    def self_group(self, against: Any = None) -> Self:
        """Return it as it is: both forms are conditions."""
        del against
        return self


@compiles(begins_with)
def _compile_begins_with(element: begins_with, compiler: SQLCompiler, **options: Any) -> str:
    is_like, is_in_range = element.clauses
    return f"({compiler.process(is_in_range if compiler.dialect.name == 'sqlite' else is_like, **options)})"


class is_listed(FunctionElement[bool]):  # noqa: N801 - reads as the SQL it stands for
    """Whether what stands in some columns is in a list, which may be long.

    On SQLite each value of the list has a place in the text, on PostgreSQL all of them are an array: a server takes
    longer to read a text with hundreds of places than to find what it asks for.
    """

    type = Boolean()
    inherit_cache = True

    def __init__(self, name: str, *columns: ColumnElement[Any]) -> None:
        """Look for it among values, or among tuples where there are several columns; see `parameters`."""
        self._name = name
        arrays = [_place_of_array(f"{name}_{place}", each.type) for place, each in enumerate(columns)]
        if len(columns) == 1:
            places: BindParameter[Any] = bindparam(name, expanding=True)
            super().__init__(columns[0].in_(places), columns[0] == any_(arrays[0]))
        else:
            given = func.unnest(*arrays).table_valued(*(f"column_{place}" for place in range(len(arrays))))
            of_arrays = select(*given.render_derived(name="given").c)
            super().__init__(are_among(name, *columns), tuple_(*columns).in_(of_arrays))
        self._arrays = [f"{name}_{place}" for place in range(len(columns))]

    def parameters(self, values: Collection[Any]) -> dict[str, Any]:
        """Return the parameters of the statement that stand for this list.

        Of a list with places a value may be there several times: so a few texts do for all lengths.
        """
        in_places = list(values)
        of_columns = [in_places] if len(self._arrays) == 1 else map(list, zip(*in_places, strict=True))
        arrays = dict.fromkeys(self._arrays, _NO_VALUES) | dict(
            zip(self._arrays, map(_array, of_columns), strict=False)
        )
        if len(in_places) > _FILLED_ABOVE:
            in_places += repeat(in_places[-1], (1 << (len(in_places) - 1).bit_length()) - len(in_places))
        return {self._name: in_places, **arrays}

    def self_group(self, against: Any = None) -> Self:
        """Return it as it is: both forms are conditions."""
        del against
        return self


@compiles(is_listed)
def _compile_is_listed(element: is_listed, compiler: SQLCompiler, **options: Any) -> str:
    in_places, in_arrays = element.clauses
    return compiler.process(in_arrays if compiler.dialect.name == "postgresql" else in_places, **options)


class _EngineKind:
    """Engines that render every statement alike; their clocks may differ."""


class _Renderings:
    """A statement as it is rendered for engines of one kind: once, or once for each length of its lists."""

    def __init__(self, statement: Any, dialect: Dialect) -> None:
        self._statement = statement
        self._dialect = dialect
        compiled = self._compile(statement)
        #: The names of the values that come with each execution.
        self._asked = {name for bind, name in compiled.bind_names.items() if bind.required}
        self._lists = sorted({compiled.bind_names[bind] for bind in compiled.post_compile_params})
        self._only = None if self._lists else self._render(compiled, {})
        self._by_lengths: dict[tuple[int, ...], Rendered] = {}

    def find(self, parameters: Mapping[str, Any]) -> Rendered | None:
        """Return the text for the lists of these parameters; None if one is too long."""
        if self._only is not None:
            return self._only
        lengths = tuple(len(parameters[name]) for name in self._lists)
        found = self._by_lengths.get(lengths)
        if found is None and sum(lengths) <= _LISTED_MAX and len(self._by_lengths) < _TEXTS_MAX:
            lists = {name: parameters[name] for name in self._lists}
            # Core wants to see values for all of it; only how many there are matters.
            given = _given(self._statement, parameters)
            found = self._render(self._compile(given, render_postcompile=True), lists)
            self._by_lengths[lengths] = found
        return found

    def _compile(self, statement: Any, **options: Any) -> Any:
        return _compiled(statement, self._dialect, **options)

    def _render(self, compiled: Any, lists: Mapping[str, Sequence[Any]]) -> Rendered:
        text, names = str(compiled), compiled.positiontup
        if names is None:
            names = _NAMED_PLACE.findall(text)
            text = _NAMED_PLACE.sub("%s", text)
        binds = {name: bind for bind, name in compiled.bind_names.items() if name not in lists}
        listed = {name: [each for each, _ in _places(name, values)] for name, values in lists.items()}
        processors = {name: _bind_processor(bind.type, self._dialect) for name, bind in binds.items()}
        for bind, name in compiled.bind_names.items():
            if name in lists:
                types = _types_of_item(bind.type)
                for each, number in _places(name, lists[name]):
                    processors[each] = _bind_processor(types[number], self._dialect)
        return Rendered(
            text,
            names,
            {name: process for name, process in processors.items() if process is not None},
            {name: bind.value for name, bind in binds.items() if name not in self._asked and bind.callable is None},
            # Nothing else of ours is asked for as late as that.
            {name for name, bind in binds.items() if bind.callable is not None},
            listed,
            self._row_maker(),
        )

    def _row_maker(self) -> Callable[[Any], Any] | None:
        columns = list(self._statement.exported_columns)
        if not columns:
            return None
        # A column without a name of its own is read by its place.
        make_type: Any = namedtuple  # noqa: PYI024 - the names are known at run time
        names = [str(getattr(column, "name", "_")) for column in columns]
        make = make_type("Row", names, rename=True)._make
        processors = {
            place: process
            for place, column in enumerate(columns)
            if (process := _result_processor(column.type, self._dialect)) is not None
        }
        if not processors:
            return make  # type: ignore[no-any-return]  # of a class that is made at run time

        def make_processed(row: Any) -> Any:
            values = list(row)
            for place, process in processors.items():
                values[place] = process(values[place])
            return make(values)

        return make_processed


def _given(statement: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the statement with values, which Core gives to no statement that writes."""
    if not statement.is_dml:
        return statement.params(parameters)

    def give(bind: BindParameter[Any]) -> None:
        if bind.key in parameters:
            bind.value, bind.required = parameters[bind.key], False

    return visitors.cloned_traverse(statement, _NO_PARAMETERS, {"bindparam": give})


def _compiled(statement: Any, dialect: Dialect, **options: Any) -> Any:
    columns = None
    if isinstance(statement, Insert) and statement.select is None:
        columns = [each.key for each in statement.table.c if not (each.computed or each.identity)]
    return statement.compile(dialect=dialect, column_keys=columns, compile_kwargs=options)


def _at_once(statement: Any, dialect: Dialect) -> tuple[Sequence[str], HotStatement]:
    """Return what does the same for a list of each value, and the names of these."""
    names_of = _compiled(statement, dialect).bind_names
    types = {name: bind.type for bind, name in names_of.items() if bind.required}
    values = (_place_of_array(name, type_) for name, type_ in types.items())
    columns = (column(name, type_) for name, type_ in types.items())
    given = func.unnest(*values).table_valued(*columns).render_derived(name="given")
    if isinstance(statement, Insert) and statement.select is None:
        listed: Any = insert(statement.table).from_select(list(types), select(*given.c))
    else:
        # A value that the statement waits for is a column of what is given.
        def take(element: Any, **_: Any) -> Any:
            return given.c[element.key] if isinstance(element, BindParameter) and element.required else None

        listed = visitors.replacement_traverse(statement, _NO_PARAMETERS, take)
    return list(types), HotStatement(listed.execution_options(**statement.get_execution_options()))


class _WrittenArray(TypeDecorator[Any]):
    """An array that comes as PostgreSQL writes it, see `_array`."""

    impl = ARRAY
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> None:
        """Leave it as it is."""
        del dialect


def _place_of_array(name: str, type_: TypeEngine[Any]) -> BindParameter[Any]:
    return bindparam(name, type_=_WrittenArray(type_))


def _reads_nulls(connection: Connection) -> bool:
    """Return whether the server takes NULL in an array for one: as `array_nulls` of a caller's connection may not."""
    return getattr(connection.connection.driver_connection, "reads_nulls_in_arrays", False)


def _array(values: list[Any]) -> str:
    """Return an array as PostgreSQL writes it: the driver makes one in ten times the time."""
    types = set(map(type, values))
    if types == _INTEGERS:
        return f"{{{str(values)[1:-1]}}}"
    if types == _TEXTS and not _ESCAPED.search("".join(values)):
        between = '","'
        return f'{{"{between.join(values)}"}}'
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: str | int | None) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    assert isinstance(value, int), "texts and numbers alone are sent in arrays"
    return str(int(value))


def _kind_of(dialect: Any) -> _EngineKind:
    """Return what the engine of this dialect is of: all that our dialects, and those of SQLAlchemy, render by."""
    try:
        return dialect.txnstore_kind  # type: ignore[no-any-return]  # set below
    except AttributeError:
        renders_by = (
            type(dialect),
            getattr(dialect, "store_schema", None),
            getattr(dialect, "clock", None) is None,
            getattr(dialect, "server_version_info", None),
            getattr(dialect, "_backslash_escapes", None),
        )
        found: _EngineKind = dialect.__dict__.setdefault("txnstore_kind", _KINDS.setdefault(renders_by, _EngineKind()))
        return found


def _flat(values: Sequence[Any]) -> Sequence[Any]:
    """Return the single values of a list of values or of tuples."""
    return tuple(chain.from_iterable(values)) if values and isinstance(values[0], tuple) else values


def _places(name: str, values: Sequence[Any]) -> list[tuple[str, int]]:
    """Return the names that SQLAlchemy gives the single values of a list, and their places in their tuples."""
    if values and isinstance(values[0], tuple):
        return [
            (f"{name}_{item}_{place + 1}", place) for item, value in enumerate(values, 1) for place in range(len(value))
        ]
    return [(f"{name}_{item}", 0) for item in range(1, len(values) + 1)]


def _types_of_item(type_: Any) -> Sequence[TypeEngine[Any]]:
    return getattr(type_, "types", None) or (type_,)


# Bytes are what both drivers take and give.


def _bind_processor(type_: TypeEngine[Any], dialect: Dialect) -> Callable[[Any], Any] | None:
    return None if isinstance(type_, LargeBinary) else type_.dialect_impl(dialect).bind_processor(dialect)


def _result_processor(type_: TypeEngine[Any], dialect: Dialect) -> Callable[[Any], Any] | None:
    return None if isinstance(type_, LargeBinary) else type_.dialect_impl(dialect).result_processor(dialect, None)


# --- compiled by Core -------------------------------------------------------------------------------------------------

#: How many statements all engines keep together, and each engine for itself.
_COMPILED_MAX: Final = 1_000
_compiled_for_all: Final[MutableMapping[Any, Any]] = LRUCache(_COMPILED_MAX)


class CompiledStatements(MutableMapping[Any, Any]):
    """What Core has compiled for an engine, its option `compiled_cache`: shared by all engines that render alike.

    Core by itself keeps it for one engine, and each store would compile the same hundred statements again.  What asks
    the clock of one store stays with its engine.
    """

    def __init__(self) -> None:
        """Begin with what others have compiled."""
        self._own: MutableMapping[Any, Any] = LRUCache(_COMPILED_MAX)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the compiled statement of Core's key, which begins with a dialect."""
        found = _compiled_for_all.get(_key_for_all(key))
        return self._own.get(key, default) if found is None else found

    def __getitem__(self, key: Any) -> Any:
        """Return the same."""
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __setitem__(self, key: Any, compiled: Any) -> None:
        """Keep it, for all engines unless it is this one's alone."""
        if any(bind.callable is not None for bind in compiled.binds.values()):
            self._own[key] = compiled
        else:
            _compiled_for_all[_key_for_all(key)] = compiled

    def __delitem__(self, key: Any) -> None:
        """Forget what this engine alone has compiled."""
        del self._own[key]

    def __iter__(self) -> Iterator[Any]:
        """Return the keys of what this engine alone has compiled."""
        return iter(self._own)

    def __len__(self) -> int:
        """Return how much that is."""
        return len(self._own)


def _key_for_all(key: Any) -> Any:
    dialect, *rest = key
    return (_kind_of(dialect), *rest)


# --- on the driver's cursor ------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What the driver said to a statement."""

    rows: list[Any]
    """All of them; empty if the statement returns none."""

    hit: int
    """How many rows it has hit, over all of its executions."""


def run_on_driver(
    connection: Connection, text: str, values: Values | list[Values] = (), statement: HotStatement | None = None
) -> Answer:
    """Run a statement in the driver's own words, once for each item if the values are a list.

    `statement` is what the text was rendered from, for its execution options.
    """
    if has_listeners(connection):
        result = connection.exec_driver_sql(
            text, values, {**(statement.execution_options if statement else {}), "preserve_rowcount": True}
        )
        return Answer([tuple(row) for row in result] if result.returns_rows else [], result.rowcount)
    pooled: Any = connection.connection
    cursor: Any = None
    try:
        # A cursor of our own connection that is read to its end here needs no looking after.
        new_cursor = getattr(pooled.dbapi_connection, "passing_cursor", None)
        cursor = pooled.cursor() if new_cursor is None else new_cursor()
        if isinstance(values, list):
            connection.dialect.do_executemany(cursor, text, values)
        else:
            # Of a context our dialects take nothing but its options.
            context: Any = statement
            connection.dialect.do_execute(cursor, text, values, context)
        answer = Answer(cursor.fetchall() if cursor.description else [], cursor.rowcount)
    except BaseException as error:  # noqa: BLE001 - it is raised again
        _raise(connection, error, text, cursor)
    cursor.close()
    return answer


@contextmanager
def heard(connection: Connection, text: str) -> Iterator[None]:
    """Tell the listeners of a statement that is run within, past Core and its cursors."""
    if not has_listeners(connection):
        yield
        return
    dispatch: Any = connection.dispatch
    for listener in dispatch.before_cursor_execute:
        listener(connection, None, text, (), None, False)
    yield
    for listener in dispatch.after_cursor_execute:
        listener(connection, None, text, (), None, False)


def has_listeners(connection: Connection) -> bool:
    """Return whether somebody listens for statements, or has them logged: Core tells them."""
    listens: Any = connection
    if not (listens._has_events or listens.engine._has_events or listens._echo):  # noqa: SLF001 - what Core asks itself
        return False
    dispatch: Any = connection.dispatch
    return bool(dispatch.before_cursor_execute or dispatch.after_cursor_execute or listens._echo)  # noqa: SLF001


def _raise(connection: Any, error: BaseException, text: str, cursor: Any) -> NoReturn:
    """Raise what Core raises, after it has looked whether the connection is lost."""
    if not connection.in_transaction():
        # Core rolls back what it has not seen begin.
        connection.begin()
    said = text if isinstance(error, connection.dialect.loaded_dbapi.Error) else None
    connection._handle_dbapi_exception(error, said, None, cursor, None)  # noqa: SLF001 - there is no other way to it
    raise AssertionError("it always raises")
