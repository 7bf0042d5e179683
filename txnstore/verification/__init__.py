"""The verification: rules that read a whole store, or a cluster, and name each invariant that does not hold."""

from __future__ import annotations
