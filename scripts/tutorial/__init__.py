"""The run of docs/tutorial.md: supervised fine-tuning, then reinforcement, then two tenants at once."""
