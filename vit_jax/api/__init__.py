"""vit_jax in Python: models by name, weights that classify, training on arrays."""
