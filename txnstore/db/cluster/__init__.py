"""The cluster: several databases under one roof, and the catalogue that each has a copy of."""
