"""Continuous batching of everybody's samples on the base model and bank that train: one forward per decode step.

(Being written: step 5 of the pool's side. Please leave this file and tests/numerics/test_sampler*.py to its author.)
"""
