"""Row-level security: which tables it keeps from the role that asks, wholly or in part."""

from __future__ import annotations

from typing import Final

from sqlalchemy import text

# With row-level security and no policy for reading that is this role's, no row is shown.
HIDDEN: Final = text("""
    SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = :schema AND c.relrowsecurity AND pg_catalog.row_security_active(c.oid)
        AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
        AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_policy p, pg_catalog.unnest(p.polroles) AS of_role
            WHERE p.polrelid = c.oid AND p.polcmd IN ('r', '*') AND p.polpermissive
                AND (of_role = 0 OR pg_catalog.pg_has_role(of_role, 'USAGE'))
        )
""")
# A role is shown all rows if one of its policies says `true` and no restrictive one says anything else.  SELECT ... FOR
# UPDATE shows what policies for reading and for changing both show.  A policy without USING adds nothing.
NARROWED: Final = text("""
    WITH applies AS (
        SELECT p.polrelid, p.polcmd, p.polpermissive, pg_catalog.pg_get_expr(p.polqual, p.polrelid) AS shown
        FROM pg_catalog.pg_policy p
        WHERE EXISTS (
            SELECT FROM pg_catalog.unnest(p.polroles) AS of_role
            WHERE of_role = 0 OR pg_catalog.pg_has_role(of_role, 'USAGE')
        )
    )
    SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = :schema AND c.relname = ANY(:names) AND pg_catalog.row_security_active(c.oid)
        AND EXISTS (
            SELECT FROM pg_catalog.unnest(CAST(:commands AS text[])) AS command
            WHERE NOT EXISTS (
                SELECT FROM applies a WHERE a.polrelid = c.oid AND a.polpermissive AND a.shown = 'true'
                    AND (a.polcmd = '*' OR a.polcmd::text = command)
            ) OR EXISTS (
                SELECT FROM applies a WHERE a.polrelid = c.oid AND NOT a.polpermissive AND a.shown <> 'true'
                    AND (a.polcmd = '*' OR a.polcmd::text = command)
            )
        )
    ORDER BY c.relname
""")
