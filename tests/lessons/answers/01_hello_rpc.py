# %% process_ids: wrong, asks this process and sends the number | without parentheses
def process_ids(names):
    return {name: rpc.rpc_sync(name, os.getpid()) for name in names}


# %% process_ids: wrong, never waits | somebody has to wait
def process_ids(names):
    return {name: rpc.rpc_async(name, os.getpid) for name in names}


# %% process_ids: wrong, asks the first worker only | not the process of worker2
def process_ids(names):
    return {name: rpc.rpc_sync("worker1", os.getpid) for name in names}


# %% at_once: wrong, one after the other | took turns
def at_once(function, parts, workers):
    return [rpc.rpc_sync(worker, function, (part,)) for worker, part in zip(workers, parts)]


# %% at_once: wrong, waits inside the loop | took turns
def at_once(function, parts, workers):
    return [rpc.rpc_async(worker, function, (part,)).wait() for worker, part in zip(workers, parts)]


# %% at_once: wrong, all on the first worker | they went to
def at_once(function, parts, workers):
    futures = [rpc.rpc_async(workers[0], function, (part,)) for part in parts]
    return [future.wait() for future in futures]


# %% at_once: wrong, returns the receipts | holds futures
def at_once(function, parts, workers):
    return [rpc.rpc_async(worker, function, (part,)) for worker, part in zip(workers, parts)]


# %% patient: wrong, hides every error | that was hidden
def patient(worker, function, seconds, default):
    try:
        return rpc.rpc_sync(worker, function, timeout=seconds)
    except Exception:
        return default


# %% patient: wrong, takes milliseconds for seconds | waited for the slow function
def patient(worker, function, seconds, default):
    try:
        return rpc.rpc_sync(worker, function, timeout=seconds * 1000)
    except rpcbench.RpcTimeoutError:
        return default


# %% patient: wrong, takes 0 for no answer | a result too
def patient(worker, function, seconds, default):
    try:
        return rpc.rpc_sync(worker, function, timeout=seconds) or default
    except rpcbench.RpcTimeoutError:
        return default
