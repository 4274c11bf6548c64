"""Fine-tuning on a user's images: their splits, the settings, the run, its mistakes."""
