"""Analyses of trained models: arrays from weights and images, and their figures."""

# Names of the figures by input. They stand here so that a command can check its flags
# without importing JAX.
WEIGHT_FIGURES = ("filters", "posemb")
DATASET_FIGURES = ("distance", "norms", "cka")
LAYER_FIGURES = (*DATASET_FIGURES, "attention", "rollout", "relevance")
IMAGE_FIGURES = ("attention", "rollout", "relevance", "windows", "pca")
IMAGE_FIGURES += ("reconstruction",)
FIGURES = (*WEIGHT_FIGURES, *DATASET_FIGURES, *IMAGE_FIGURES)
