"""A step of a pipeline: its batch, its schedule, the executors, the optimizer. Begin at step.py."""
