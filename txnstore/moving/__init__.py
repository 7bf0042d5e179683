"""The moving of stores to other databases, and of topics into files and back."""

from __future__ import annotations
