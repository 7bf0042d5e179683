"""The clients for asyncio: the same calls as coroutines."""
