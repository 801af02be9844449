"""Compose: micro-batches → steps that are each like the whole epoch, on ranks that work alike."""
