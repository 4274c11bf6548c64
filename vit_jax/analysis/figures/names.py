"""Names of the figures, by what they are made from."""

OF_WEIGHTS = ("filters", "posemb")
OF_SETS = ("distance", "norms", "cka")
OF_IMAGES = ("attention", "rollout", "relevance")
NAMES = (*OF_WEIGHTS, *OF_SETS, *OF_IMAGES)
