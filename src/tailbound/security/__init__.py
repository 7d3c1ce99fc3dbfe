"""Cryptography, sans-IO: keys, proofs that a peer knows the secret, sealing."""
