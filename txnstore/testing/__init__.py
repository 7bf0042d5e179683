"""Tools for tests: fresh stores on both databases, a clock to turn by hand, and a checker of what a store holds.

Add to the `conftest.py` at the top of your tests:

    pytest_plugins = ("txnstore.testing.plugin",)
"""

from __future__ import annotations
