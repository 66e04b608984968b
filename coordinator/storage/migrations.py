"""The changes from each older format of the database that this version still reads to the next one.

Text only: `database` runs it, in one transaction with the new version's number. Main invariant: a migrated database has
the same tables, indexes and triggers as a new one.
"""

from coordinator.storage.schema import AUDIT, PROBATIONS, TENANT_LIMITS

_WEIGHTS = """
INSERT INTO tenant_limits SELECT tenant_id, 'weight', CAST(weight AS TEXT) FROM tenants WHERE weight != 1.0;
ALTER TABLE tenants DROP COLUMN weight;
"""
"""A weight is one of a tenant's limits."""

MIGRATIONS = {
    5: AUDIT + TENANT_LIMITS + _WEIGHTS + PROBATIONS,
}
"""Schema version to the statements that make the next version of it."""
