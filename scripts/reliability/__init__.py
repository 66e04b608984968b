"""Proofs of durability: the simulation, the chaos run, and the removal of guards."""
