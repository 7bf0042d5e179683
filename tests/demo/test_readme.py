"""The READMEs' calls of the demonstration are calls that it understands; `test_demo.py` runs it."""

from __future__ import annotations

import sys

import pytest

from scripts.demo import read_arguments
from tests.tools.readmes import blocks_run_by

CALLS = [command for block in blocks_run_by(__file__) for command in block.commands]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_call_is_understood(monkeypatch, call):
    monkeypatch.setattr(sys, "argv", call)
    assert call[0] == "scripts/demo"
    arguments = vars(read_arguments())
    for name in (word.removeprefix("--").replace("-", "_") for word in call if word.startswith("--")):
        assert name in arguments
