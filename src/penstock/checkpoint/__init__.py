"""Checkpoints: complete or absent, readable at any pipeline size and by `from_pretrained`."""

from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint, save_checkpoint

__all__ = ["CheckpointWriter", "load_checkpoint", "save_checkpoint"]
