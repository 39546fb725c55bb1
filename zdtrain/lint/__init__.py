"""Reads source files and finds what makes a training step wait or keeps it from being captured.

Standard library only: importing it loads neither torch nor lightning, so it runs in any CI job.
"""
