"""Averages of fine-tuned networks."""
