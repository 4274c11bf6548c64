"""What a training step would cost on machines that are not at hand."""
