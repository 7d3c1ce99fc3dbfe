"""The face for PyTorch: attach a job to a model, accumulate, step."""
