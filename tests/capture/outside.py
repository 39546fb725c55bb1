"""A module of the user's, with a number that is another one later."""

weight = 1.0
