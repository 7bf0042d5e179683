"""The README's recipe "one with block over two databases" runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
HEADING = "### One `with` block over two databases"


def test_the_recipe_moves_the_money_and_tells_the_log(url, tables):
    text = README.read_text()
    assert HEADING in text
    section = text.partition(HEADING)[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    program = found[1]
    assert len(program.splitlines()) <= 20
    for table in tables:
        table.watching.execute("INSERT INTO account VALUES ('ada', 100)")
    addresses = {"LOG_URL": url, "CHECKING": _plain(tables[0].url), "SAVINGS": _plain(tables[1].url)}
    exec(compile(program, "README.md", "exec"), addresses)
    assert [table.balances() for table in tables] == [{"ada": 90}, {"ada": 110}]
    assert [table.our_gids() for table in tables] == [[], []]


def _plain(url):
    return url.replace("postgresql+psycopg://", "postgresql://")
