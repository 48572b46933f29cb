"""Starts every rank of a run on this machine, as torchrun does, and reports why the first one failed."""

from penstock.launch.start import launch, relaunch
from penstock.launch.stop import under_torchrun

__all__ = ["launch", "relaunch", "under_torchrun"]
