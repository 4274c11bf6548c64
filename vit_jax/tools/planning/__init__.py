"""Cost of a training step on TPU slices that are not at hand."""
