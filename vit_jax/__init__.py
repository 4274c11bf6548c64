"""The Vision Transformer (arXiv:2010.11929) in JAX and Flax: train, fine-tune, check."""

__version__ = "0.1.0"
