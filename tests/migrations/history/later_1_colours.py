"""The first later version of the tables, in tests only: a column, a comment with a percent sign, and an index."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column

from txnstore.db.ddl import String
from txnstore.db.names import StoreName
from txnstore.db.schema import OLDEST_WRITER_VERSION, SCHEMA_VERSION

revision = f"{SCHEMA_VERSION + 1:04}"
down_revision = f"{SCHEMA_VERSION:04}"
branch_labels = None
depends_on = None
oldest_writer_version = OLDEST_WRITER_VERSION


def upgrade():
    schema = op.get_context().opts["store_schema"]
    op.add_column(StoreName("outbox"), Column("colour", String, comment="A colour, 100 % for: tests."), schema=schema)
    op.create_index(StoreName("outbox_colour"), StoreName("outbox"), ["colour"], schema=schema)


def downgrade():
    schema = op.get_context().opts["store_schema"]
    op.drop_index(StoreName("outbox_colour"), StoreName("outbox"), schema=schema)
    op.drop_column(StoreName("outbox"), "colour", schema=schema)
