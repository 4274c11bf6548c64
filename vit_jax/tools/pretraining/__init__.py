"""Pretraining on a user's photographs without labels: images, settings and the run."""
