"""Tools for tests, ours and those of applications: fresh stores, a clock to turn by hand, crashes and cut connections.

Add to the `conftest.py` at the top of your tests:

    pytest_plugins = ("txnstore.testing.plugin",)
"""

from __future__ import annotations
