"""The list of databases that a client is given: cut into URLs, each with a name for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from txnstore.db.cluster.membership import label_of_address
from txnstore.db.store import Store
from txnstore.db.url import DatabaseUrl, parse_url
from txnstore.errors import InvalidUrl, StoreUnavailable, TxnStoreError, WrongCluster

# A comma may stand within a URL (several hosts, a file's name): what follows one that parts two begins with a scheme.
_BETWEEN: Final = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+]*://)")


@dataclass(slots=True, eq=False)
class Address:
    """One URL of the list."""

    text: str
    url: DatabaseUrl
    label: str
    database_id: int | None = None
    """The member that it leads to; None: nobody has looked."""

    def __repr__(self) -> str:
        """Return the label: the text may hold a password."""
        return f"Address({self.label!r})"


def split_urls(text: str) -> list[str]:
    """Return the URLs of a comma-separated list; a comma within a URL parts nothing."""
    return [url.strip() for url in _BETWEEN.split(text)]


def addresses_of(urls: Iterable[str]) -> list[Address]:
    """Return the URLs with their labels.

    Raises:
        InvalidUrl: one cannot be understood, or there is none.
        WrongCluster: two are the same.
    """
    addresses: list[Address] = []
    for number, text in enumerate(urls, 1):
        try:
            url = parse_url(text)
        except InvalidUrl as error:
            raise (error if number == 1 else InvalidUrl(f"URL {number} of the list: {error}")) from None
        label = label_of_address(url)
        if any(other.url.url == url.url for other in addresses):
            raise WrongCluster(f"two URLs of the list are the same: that of the database {label!r}")
        addresses.append(Address(text, url, label))
    if not addresses:
        raise InvalidUrl("the list of database URLs is empty")
    return addresses


def check_not_listed(present: Collection[str], store_uuid: str, label: str) -> None:
    """Refuse a database that another URL of the list has led to.

    Raises:
        WrongCluster: its identity is among those that are `present`.
    """
    if store_uuid in present:
        raise WrongCluster(f"two URLs of the list lead to the database {label!r}, or to a copy of it")


def open_address(open_: Callable[[str, bool], Store], address: Address, *, create: bool) -> Store:
    """Open the database behind an address, whatever it is.

    Raises:
        TxnStoreError: it cannot be reached or refuses; the text has its label, and nothing else of its URL.
    """
    try:
        return open_(address.text, create)
    except StoreUnavailable:
        raise StoreUnavailable(f"the database {address.label!r} cannot be reached; nothing was changed") from None
    except TxnStoreError as error:
        told = str(error).replace(str(address.url), repr(address.label))
        raise type(error)(f"the database {address.label!r}: {told}") from None
