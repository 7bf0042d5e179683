"""The outbox in the log: rows that callers committed, and the sequencer that makes records of them."""
