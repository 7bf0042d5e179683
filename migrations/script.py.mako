"""Version ${up_revision} of the tables: ${message}."""

from __future__ import annotations

from alembic import op
${imports if imports else ""}

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}
#: The oldest version of the code that may write to these tables.
oldest_writer_version = 1


def upgrade() -> None:
    """Say what changes."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Undo it."""
    ${downgrades if downgrades else "pass"}
