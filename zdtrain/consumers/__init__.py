"""Those who read what arrives on the host: the progress bar, and whoever wants the values of every step."""
