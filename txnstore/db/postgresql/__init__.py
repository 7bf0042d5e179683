"""PostgreSQL's side of the seam: its connections, wakeups, prepared transactions, and its text of the view."""
