"""This file is the names of branches: which store they belong to, and nothing else that anybody could learn from.

Every role of a server may list all gids.  So one holds a fixed prefix, the identity of the store that coordinates it,
and a random number; neither a transactional id nor a tenant.
"""

from __future__ import annotations

import secrets
from typing import Final

#: Foreign gids do not begin with it.
PREFIX: Final = "txnstore_"
_RANDOM_BYTES: Final = 16


def gid_prefix(store_uuid: str) -> str:
    """Return what the gids of a store begin with, and those of no other."""
    return f"{PREFIX}{store_uuid.replace('-', '')}_"


def new_gid(store_uuid: str) -> str:
    """Return a gid that nobody has used: 74 characters; PostgreSQL takes up to 199."""
    return gid_prefix(store_uuid) + secrets.token_hex(_RANDOM_BYTES)
