"""The database and its group commit, the schema, and the state folders on disk."""
