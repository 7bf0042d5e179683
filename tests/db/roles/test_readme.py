"""The commands of the README of `txnstore/db/roles`, run as they stand there."""

from __future__ import annotations

from typer.testing import CliRunner

from tests.tools.readmes import block_of
from txnstore.cli.program import NAMES, program_with


def test_the_commands_do_what_is_said(bare):
    block = block_of(__file__, "Least privilege", "sh")
    names = {"shop_upkeep": bare.roles["upkeep"], "shop_web": bare.roles["worker"], "partner": bare.roles["reader"]}
    printed = []
    for command in block.commands:
        words = [names.get(word, word) for word in command]
        environment = {"TXNSTORE_URL": bare.server.url(bare.name), "COLUMNS": "200"}
        done = CliRunner().invoke(program_with(NAMES), words[1:], prog_name="txnstore", env=environment)
        assert done.exit_code == 0, done.output
        printed.append(done.output)
    listed = printed[4]
    assert [words.split()[:2] for words in listed.splitlines()[1:]] == [
        ["postgres", "owner"],
        [names["shop_upkeep"], "coordinator"],
        [names["shop_web"], "consumer"],
        [names["shop_web"], "producer"],
    ]
    assert "ENABLE ROW LEVEL SECURITY" in printed[3]
    assert printed[5].startswith("BEGIN;")
