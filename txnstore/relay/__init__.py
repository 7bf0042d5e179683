"""The relay: topics to and from a Kafka cluster, each record once."""
