"""The third later version of the tables, in tests only: a column that is filled in portions, and an index.

The index fails, after all of the work, where the names of two topics are the same but for their case.
"""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import Column, bindparam, column, func, select, table, update

from txnstore.db.ddl import String
from txnstore.db.names import StoreName
from txnstore.db.schema import SCHEMA_VERSION

revision = f"{SCHEMA_VERSION + 3:04}"
down_revision = f"{SCHEMA_VERSION + 2:04}"
branch_labels = None
depends_on = None
oldest_writer_version = SCHEMA_VERSION + 2

PORTION = 2


def upgrade():
    schema = op.get_context().opts["store_schema"]
    op.add_column(StoreName("topics"), Column("folded_name", String, comment="The name in lower case."), schema=schema)
    topics = table(StoreName("topics"), *map(column, ("topic_id", "name", "folded_name")), schema=schema)
    if context.is_offline_mode():
        op.execute(update(topics).values(folded_name=func.lower(topics.c.name)))
    else:
        fill(op.get_bind(), topics)
    op.create_index(StoreName("topics_folded_name"), StoreName("topics"), ["folded_name"], unique=True, schema=schema)


def fill(connection, topics):
    portion = select(topics.c.topic_id, topics.c.name).where(topics.c.folded_name.is_(None)).limit(PORTION)
    write = update(topics).where(topics.c.topic_id == bindparam("of_topic")).values(folded_name=bindparam("folded"))
    while rows := connection.execute(portion).all():
        connection.execute(write, [{"of_topic": row.topic_id, "folded": row.name.lower()} for row in rows])


def downgrade():
    schema = op.get_context().opts["store_schema"]
    op.drop_index(StoreName("topics_folded_name"), StoreName("topics"), schema=schema)
    op.drop_column(StoreName("topics"), "folded_name", schema=schema)
