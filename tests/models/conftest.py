"""What the models share: a failed assertion in one of them shows what it saw."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.models.model")
