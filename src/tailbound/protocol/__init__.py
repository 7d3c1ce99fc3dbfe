"""The protocol core, sans-IO: bytes and times go in, bytes and events come out.

No socket, thread, clock, randomness or torch in this folder; ``now`` (seconds,
monotonic) is an argument everywhere. From the bottom up::

    events     what the machines report upwards, and the names of things
    wire       bytes: the datagram header, the control messages
    chunks     how a bucket is cut, and in which order its chunks leave
    pacing     how many bytes may be on the way
    gather     the parts of an all-gather
    headers    a round's headers, written and checked a batch at a time
    sender, receiver   one bucket over one lossy link (spec N4, N5)
    intake     datagrams sorted by their fate
    session    meeting: handshake, metadata, UDP reachability (spec N1)
    plan       what all ranks agreed on: buckets, sizes, the bound
    link       one connection as an endpoint sees it
    server_rounds, worker_round   the two parts of an all-reduce (spec N6, N7)
    endpoint   one process: its links, what comes in and goes out
    server, worker   the endpoint of each role

docs/protocol.md shows the transition tables.
"""
