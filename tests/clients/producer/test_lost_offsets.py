"""A commit whose answer was lost, and whose records were deleted before it was asked for again."""

from __future__ import annotations

from dataclasses import replace

from txnstore.transactions.coordinator import TransactionCoordinator

PATIENCE_SECONDS = 60.0


def test_records_that_are_gone_when_the_answer_comes_are_delivered_without_an_offset(make_producer, monkeypatch):
    end_transaction = TransactionCoordinator.end_transaction

    def end_and_lose_the_places(self, *arguments, **options):
        return replace(end_transaction(self, *arguments, **options), appended=())

    reports: list[tuple[object, int | None]] = []
    # Its records go with the commit: they linger, and the topic is known.
    producer = make_producer({"transactional.id": "anna", "linger.ms": 10_000})
    producer.init_transactions(PATIENCE_SECONDS)
    with producer.transaction():
        producer.produce("payments", b"41")
    producer.begin_transaction()
    for _ in range(3):
        producer.produce(
            "payments", b"42", on_delivery=lambda error, message: reports.append((error, message.offset()))
        )
    with monkeypatch.context() as patched:
        patched.setattr(TransactionCoordinator, "end_transaction", end_and_lose_the_places)
        producer.commit_transaction(PATIENCE_SECONDS)
    assert reports == [(None, None)] * 3
    with producer.transaction():
        producer.produce(
            "payments", b"43", on_delivery=lambda error, message: reports.append((error, message.offset()))
        )
    assert reports[-1] == (None, 6)
