"""What a run will take before it runs: costs of models, clusters, predictions. Begin at work.py."""
