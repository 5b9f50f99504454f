"""What peers must agree on: pure functions and state machines (docs/design.md, docs/protocol.md).

Nothing in this package opens a socket, reads a clock, touches a file or starts a thread. Time and randomness are
passed in, so a test can run hundreds of peers in one thread under a virtual clock.
"""
