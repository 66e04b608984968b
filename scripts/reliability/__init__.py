"""Proofs of durability: simulation, chaos, guards."""
