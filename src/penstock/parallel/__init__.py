"""The mesh and its axes other than `pp`: data, context, expert and tensor parallelism."""
