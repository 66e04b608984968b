"""Operations and their states, adapter logs, sessions, payloads, admission and the in-flight table."""
