"""Pack: samples → micro-batches, one file a packing."""
