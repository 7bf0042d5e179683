"""The bar that shows how far a command is."""

from __future__ import annotations

import pytest
from rich.progress import Progress

from txnstore.cli import progress
from txnstore.cli.progress import progress_bar


@pytest.fixture
def shown(monkeypatch):
    """What a bar has shown: of what, how much, of how many."""
    shown = []

    class Bar(Progress):
        def update(self, task_id, **values):
            super().update(task_id, **values)
            shown.append((self.tasks[0].description, self.tasks[0].completed, self.tasks[0].total))

    monkeypatch.setattr(progress, "Progress", Bar)
    return shown


def test_the_bar_begins_anew_with_each_step(shown):
    with progress_bar("looking") as bar:
        bar.show_step("copying", 3, 10)
        bar.show_step("copying", 9, 10)
        bar.show_step("comparing", 1, 20)
    assert shown == [("copying", 3, 10), ("copying", 9, 10), ("comparing", 1, 20)]


@pytest.mark.parametrize(("is_terminal", "is_shown"), [(True, True), (True, False), (False, True)])
def test_it_is_for_who_looks_at_a_terminal(monkeypatch, capsys, is_terminal, is_shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    with progress_bar("writing", total=2048, in_bytes=True, is_shown=is_shown) as bar:
        bar.advance(1024)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("writing" in err, "1.0/2.0 kB" in err) == (is_terminal and is_shown,) * 2
