"""Layer 2: the protocol between the members of a world, as pure state machines.

An event goes in, effects come out. No machine has a socket, a lock, a thread, a clock or a tensor. A whole member is
a plain value (`node.Node`), so tests run thousands of hard interleavings in one thread. Messages between two members
may arrive in any order and more than once.
"""
