"""The workers as the coordinator sees them: incarnations, liveness, what each one holds."""
