"""Sessions of SQLAlchemy's whose rows a producer commits: interrupted, given to a connection, on several engines."""

from __future__ import annotations

import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from tests.clients.callers import application_engine
from tests.clients.producer.enlisting import *  # noqa: F403 - the fixtures
from tests.clients.producer.enlisting import committed_values, is_there
from tests.clients.steps import PATIENCE_SECONDS, error_of

INSERT = text("INSERT INTO ledger VALUES (:entry)")


def test_hooks_that_an_interrupt_has_ended_are_not_called_again(producer, url, topic, entry):
    """What they have done would be done twice: the transaction can only be aborted."""
    engine = application_engine(url)
    calls: list[str] = []

    def audit(session):
        producer.produce(topic, b"of the hook")
        session.execute(INSERT, {"entry": f"{entry} audited {len(calls)}"})

    def interrupt(_):
        calls.append("hook")
        if len(calls) == 1:
            raise KeyboardInterrupt

    with Session(engine) as session:
        event.listen(session, "before_commit", audit)
        event.listen(session, "before_commit", interrupt)
        producer.begin_transaction()
        producer.enlist(session)
        producer.produce(topic, b"1")
        with pytest.raises(KeyboardInterrupt):
            producer.commit_transaction(PATIENCE_SECONDS)
        error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
        assert ("nothing was committed" in error.str(), error.txn_requires_abort()) == (True, True)
        assert calls == ["hook"]
        producer.abort_transaction(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.enlist(session)
        producer.produce(topic, b"2")
        producer.commit_transaction(PATIENCE_SECONDS)
    engine.dispose()
    assert (is_there(url, f"{entry} audited 0"), is_there(url, f"{entry} audited 1")) == (False, True)
    assert committed_values(url, topic) == [b"2", b"of the hook"]
