"""One step, run eagerly: its hooks, what it logs, accumulation windows and the loss scaler.

The loop calls it for every batch; `zdtrain.capture` inherits from it to record the same step and replay it.
"""
