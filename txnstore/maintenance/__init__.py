"""The maintenance: what has to be done again and again, by anybody and any number of processes at once."""

from __future__ import annotations
