"""The doctor: what would bite a store in a database, before it bites."""
