"""Device memory: how much, by which region or operator, and whether it grows."""
