"""Floor 2: what the members of a world say to each other, as pure machines.

An event goes in, effects come out. No machine has a socket, a lock, a thread, a clock or a tensor; a whole member is
a plain value (`node.Node`), so the hard interleavings are tested by thousands in one thread. Messages of a pair may
arrive in any order and more than once.
"""
