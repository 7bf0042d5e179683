"""The membership of a consumer: what it and its group tell each other, on a thread of its own."""
