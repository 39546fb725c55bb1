"""The rules of the linter, by what they are about; `zdtrain.lint.rules.registry` has them all."""
