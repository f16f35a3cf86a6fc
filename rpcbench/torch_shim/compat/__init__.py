"""Names of torch's RPC that no new program needs: of its versions 1.3 and 1.4, of its pickler, and of its old profiler.

`rpcbench.rpc` offers them all the same, and `rpcbench run` binds them to torch's modules; they are loaded on first use.
"""
