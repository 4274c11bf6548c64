"""Fine-tuning on a user's images: splits, settings, the run and a page of mistakes."""
