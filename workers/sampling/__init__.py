"""Continuous batching of samples: sequence slots, key-value blocks, prefill and decode passes, drawing.

Public interface: `sampler.Sampler` and `SamplerLimits`.
"""
