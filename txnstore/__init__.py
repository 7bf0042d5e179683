"""txnstore: Kafka's transactional log inside the SQL database that an application already has."""

from __future__ import annotations
