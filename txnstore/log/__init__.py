"""The log: topics, partitions, record batches in and out of them, and what readers may see."""

from __future__ import annotations
