"""The values that clients take and give: messages, partitions, errors, metadata, serializers."""
