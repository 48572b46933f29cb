"""Which layers go into which stage: by weights, multiply-adds, activations. Begin at partition.py."""
