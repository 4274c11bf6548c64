"""What a model has learned: arrays from its weights and from images, and their figures."""
