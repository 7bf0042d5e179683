"""The producer: records are queued, sent in batches, and committed in transactions."""
