"""This file is what ends a relay: errors whose text is for the operator, without secrets and payloads."""

from __future__ import annotations


class RelayFailed(Exception):
    """The relay cannot go on; what it has copied so far is copied once."""

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        """With `may_pass`, the same relay may be started again as it is: what was in the way may be gone."""
        super().__init__(message)
        self.may_pass = may_pass


class RelayFenced(RelayFailed):
    """Another relay of the same name has taken over."""


class KafkaUnavailable(Exception):
    """The Kafka cluster did not do what it was asked for, and may do so later; nothing is known of what it did."""
