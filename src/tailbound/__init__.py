"""tailbound: bound both tails of a synchronous PyTorch training step."""
