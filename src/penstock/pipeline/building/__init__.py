"""From options and a model to stages that are ready to run. Begin at build_plan.py."""
