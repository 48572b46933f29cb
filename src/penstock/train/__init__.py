"""`penstock train`: from a config to a trained model. Begin at run.py."""
