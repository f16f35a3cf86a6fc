"""`python -m benchmarks`: torch's own RPC and ours on the same work, in one run on one machine.

- Each side is a pair of processes that differ from the other pair in one module name; workloads are written once.
- While one pair is measured the other is stopped: an idle pair of torch's spins on two cores.
- Functions, shapes and order are drawn from a printed seed. Figures of different runs are never compared.
"""
