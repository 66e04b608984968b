"""The hot loop of a base model: plan, log, run, commit."""
