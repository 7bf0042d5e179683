"""The short texts that stand for a transaction outside of the store; neither is a secret.

A token lets other processes join an open transaction: it holds what it is called and who began it.  A prepared state
is what an application keeps of a transaction in its own database (KIP-939).  The holder of either still needs the
database's URL and its credentials.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final, Self

from txnstore.db.store import Store
from txnstore.errors import InvalidRequest
from txnstore.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, ProducerIdentity

_PREFIX: Final = b"txnstore.transaction.1:"
_KINDS: Final = [str, str, int, int]


@dataclass(frozen=True, slots=True)
class TransactionToken:
    """An open transaction, as other processes are told of it."""

    store_uuid: str
    transactional_id: str
    transaction: ProducerIdentity
    """The producer that began it, with the epoch of its records."""

    def __bytes__(self) -> bytes:
        """Return the token as it is handed on."""
        producer = self.transaction
        content = [self.store_uuid, self.transactional_id, producer.producer_id, producer.epoch]
        return _PREFIX + json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, token: bytes) -> Self:
        """Return what `bytes` made a token of.

        Raises:
            InvalidRequest: it is not such a token.
        """
        try:
            content = json.loads(token[len(_PREFIX) :]) if token.startswith(_PREFIX) else None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, list) or [type(part) for part in content] != _KINDS:
            raise InvalidRequest("this is not a token of a transaction: transaction_token() returns one")
        store_uuid, transactional_id, producer_id, epoch = content
        return cls(store_uuid, transactional_id, ProducerIdentity(producer_id, epoch))

    def check_store(self, store: Store) -> None:
        """Return if the transaction is one of this store.

        Raises:
            InvalidRequest: it is not.
        """
        if store.store_uuid != self.store_uuid:
            raise InvalidRequest(
                f"the transaction of {self.transactional_id[:80]!r} is in another database than {store.url};"
                " bootstrap.servers of a writer is that of the transaction's producer"
            )


@dataclass(frozen=True, slots=True)
class PreparedTxnState:
    """A transaction that an application remembers in its own database: KIP-939's PreparedTxnState."""

    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH

    def __post_init__(self) -> None:
        """Accept both numbers or neither.

        Raises:
            InvalidRequest: one of them is negative and they are not both -1.
        """
        is_empty = (self.producer_id, self.epoch) == (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
        if not is_empty and (self.producer_id < 0 or self.epoch < 0):
            raise InvalidRequest("a prepared transaction has a producer id and an epoch, or neither")

    def __str__(self) -> str:
        """Return "pid:epoch", or "" without a transaction."""
        return f"{self.producer_id}:{self.epoch}" if self.producer_id != NO_PRODUCER_ID else ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what `str` made a text of.

        Raises:
            InvalidRequest: the text is not of that form.
        """
        if text == "":
            return cls()
        match = re.fullmatch(r"(-?[0-9]{1,19}):(-?[0-9]{1,5})", text, re.ASCII)
        if match is None:
            raise InvalidRequest('a prepared transaction is written "producer id:epoch", or is empty')
        return cls(int(match[1]), int(match[2]))
