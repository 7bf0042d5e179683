"""The membership: what a consumer and its group say to each other, on a thread of its own."""
