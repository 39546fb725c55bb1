"""Lines of source code: which of the user's is running, and where classes and methods are defined."""
