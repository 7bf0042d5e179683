"""The time as a statement asks for it: the database server's clock, or the store's own `Clock`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import bindparam
from sqlalchemy.sql.functions import FunctionElement


class server_now_ms(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it stands for
    """Milliseconds since 1970 at the moment the statement runs.

    The database server's clock, so that all clients of a store agree; a store that was opened with a `Clock` uses
    that one.
    """

    type = BigInteger()
    inherit_cache = True
    name = "server_now_ms"


@compiles(server_now_ms)
def _compile_server_now_ms(element: server_now_ms, compiler: SQLCompiler, **keywords: Any) -> str:
    """Render the clock of the store that runs the statement; it hangs on the store's own dialect object."""
    clock = getattr(compiler.dialect, "clock", None)
    if clock is None:
        return "CAST(extract(epoch from pg_catalog.clock_timestamp()) * 1000 AS BIGINT)"
    value: Any = bindparam("server_now_ms", callable_=clock.now_ms, type_=BigInteger(), unique=True)
    return str(compiler.process(value, **keywords))
