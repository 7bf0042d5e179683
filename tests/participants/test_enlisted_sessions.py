"""Sessions of SQLAlchemy's that are branches: closed and used again by their owner."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session

from tests.participants.enlisting import *  # noqa: F403 - the fixtures
from tests.participants.enlisting import TIMEOUT, records, topic_of
from txnstore import KafkaException

INSERT = text("INSERT INTO account VALUES (:name, 1)")


@pytest.mark.parametrize("end", ["close", "invalidate"])
def test_what_a_session_does_after_its_owner_has_closed_it_is_its_own(url, producer, tables, name, end):
    engine = create_engine(tables[0].url)
    hooks: list[Session] = []
    with Session(engine) as session:
        producer.begin_transaction()
        producer.enlist(session)
        session.execute(INSERT, {"name": "lost"})
        producer.produce(topic_of(producer), name)
        getattr(session, end)()
        event.listen(session, "before_commit", hooks.append)
        session.execute(INSERT, {"name": name})
        with pytest.raises(KafkaException, match="by its owner") as refused:
            producer.commit_transaction(TIMEOUT)
        assert refused.value.args[0].txn_requires_abort()
        producer.abort_transaction(TIMEOUT)
        assert hooks == []
        session.execute(INSERT, {"name": f"{name} more"})
        session.commit()
        assert hooks == [session]
    engine.dispose()
    assert tables[0].balances() == {name: 1, f"{name} more": 1}
    assert records(url, topic_of(producer)) == []
