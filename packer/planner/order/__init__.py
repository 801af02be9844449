"""Order: random, sequential or by length, each a pure function of its key, computed in threads."""
