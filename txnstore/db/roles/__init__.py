"""Roles of PostgreSQL: who may do what with the tables, and whose rows."""
