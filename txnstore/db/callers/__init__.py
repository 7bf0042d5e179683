"""The connections of applications: what txnstore may do on one, and what it refuses."""
