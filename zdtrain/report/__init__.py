"""Runs as a page to read and as pictures; works from run folders alone, without torch and lightning."""

from zdtrain.report.page import render_page

__all__ = ["render_page"]
