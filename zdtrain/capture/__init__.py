"""Recording steps, comparing them with eager ones, and replaying them.

The loop makes a captured step (`captured`, `manual`, `evaluation`) where it would have made an eager one of
`zdtrain.step`, and calls it the same way. The captured step inherits from the eager one: that is what it watches,
records, compares with and falls back to. Nothing in `zdtrain.step` knows of this package.
"""
