"""The configuration of clients: keys, their values, and the rules between them."""
