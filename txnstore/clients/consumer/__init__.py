"""The consumer: it is assigned partitions, reads them page by page, and commits how far it came."""
