"""A schedule run on paper: costs, the timeline, the link to the host, comparison. Begin at simulate.py."""
