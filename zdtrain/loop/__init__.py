"""Between batches: the epoch and evaluation loops, in place of Lightning's, and all that happens around a step.

`plan` chooses the path of an epoch and makes the step, `feed` brings it batches, `epoch` and `evaluation` run it.
"""
