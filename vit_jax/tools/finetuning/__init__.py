"""Fine-tuning on images of one's own: their layout, what is chosen for them, the run."""
