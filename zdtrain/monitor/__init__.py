"""Watching a run on the device: conditions on logged values, and what happens in the very step in which they hold.

The public names are in `zdtrain.monitors`.
"""
