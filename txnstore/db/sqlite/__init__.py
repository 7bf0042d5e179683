"""SQLite's side of the seam: connections, checkpoints, wakeups, and its text of the view."""
