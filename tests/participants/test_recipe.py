"""The recipe "one with block over two databases", and the recovery after it, run as they are printed."""

from __future__ import annotations

import os

import pytest

from tests.participants.bank import DATABASES
from tests.tools.readmes import block_of
from txnstore import cli


@pytest.fixture
def addresses(url, tables):
    """The names that the README gives to the URLs of the log and of both databases."""
    named = {"LOG_URL": url, **dict(zip(("CHECKING", "SAVINGS"), (table.url for table in tables), strict=True))}
    return {name: address.replace("postgresql+psycopg://", "postgresql://") for name, address in named.items()}


def test_the_recipe_moves_the_money_and_tells_the_log(addresses, tables):
    program = block_of(__file__, "One `with` block over two databases").text
    assert len(program.splitlines()) <= 20
    for table in tables:
        table.watching.execute("INSERT INTO account VALUES ('ada', 100)")
    exec(compile(program, "README.md", "exec"), addresses)
    assert [table.balances() for table in tables] == [{"ada": 90}, {"ada": 110}]
    assert [table.our_gids() for table in tables] == [[], []]


@pytest.mark.slow
def test_the_commands_of_the_recovery_end_what_is_left(addresses, tables, monkeypatch, capsys):
    assert len(tables) == len(DATABASES)
    for name, address in addresses.items():
        monkeypatch.setenv(name, address)
    maintain, *others = block_of(__file__, "Recovery", "sh").commands
    printed = []
    for program, *arguments in ([*maintain, "--once"], *others):
        assert program == "txnstore"
        with pytest.raises(SystemExit) as ended:
            cli.main([os.path.expandvars(argument) for argument in arguments])
        assert not ended.value.code
        printed.append(capsys.readouterr().out)
    assert "0 branches" in printed[0]
    assert "0 committed, 0 rolled back" in printed[-1]
