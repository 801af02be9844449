"""Choose: which samples a plan takes, within which bounds, and how those that are too long are cut."""
