"""Cost of a training step on devices that are not here."""
