"""The changes from each older format of the database that this version still reads to the next one.

Text only: `database` runs it, in one transaction with the new version's number. Main invariant: a migrated database has
the same tables, indexes and triggers as a new one.
"""

from coordinator.storage.schema import AUDIT

MIGRATIONS = {
    5: AUDIT,
}
"""Schema version to the statements that make the next version of it."""
