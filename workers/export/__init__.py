"""Exports that need the base model's files: merged models, and unembeddings written whole.

Public, found by the client through entry points: `base_models.find_directory`, `merged.write_merged` and
`merged.write_whole_unembedding`. They read an `adapter` and the `base_files`.
"""
