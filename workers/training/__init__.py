"""Training: runs a batch's items on the adapters' rows, in packed passes and steps.

Public, for the engine: `items.ItemRunner`, and its parts `passes.PassRunner`, `steps.StepRunner`,
`copies.AdapterCopies`, `prefetch.Prefetch`. For trials also `memory`, `packing.Request` and `optim`.
"""
