"""The admin client: topics, configurations, groups, offsets, records and transactions, as operators change them."""
