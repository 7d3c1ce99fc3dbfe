"""Sockets, threads and the clock: the only room that touches the network."""
