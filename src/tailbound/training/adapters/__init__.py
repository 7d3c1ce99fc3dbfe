"""Frameworks that own the training loop: each needs one or two changed lines.

``lightning`` and ``huggingface`` (Trainer and Accelerate) register the communication
hook on the DDP module that the framework makes, and keep the loss's denominator right
(``bounded_ddp``). ``fsdp`` reduces across the replicas of a sharded model.
"""
