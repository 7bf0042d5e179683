"""Spark: a data source for PySpark, batch and streaming, and a Spark of one machine for trying it."""
