"""Training one adapter: sequence numbers, passes, batches, losses of the user's own.

Public interface: `sequence.AdapterSequence`, `passes`, `custom_loss`.
"""
