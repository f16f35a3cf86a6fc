# %% process_ids
def process_ids(names):
    return {name: rpc.rpc_sync(name, os.getpid) for name in names}


# %% at_once
def at_once(function, parts, workers):
    futures = [rpc.rpc_async(worker, function, (part,)) for worker, part in zip(workers, parts)]
    return [future.wait() for future in futures]


# %% patient
def patient(worker, function, seconds, default):
    try:
        return rpc.rpc_sync(worker, function, timeout=seconds)
    except rpcbench.RpcTimeoutError:
        return default


# %% deposit
def deposit(account, request, amount):
    with account.lock:
        if request not in account.answers:
            account.balance += amount
            account.answers[request] = account.balance
        return account.answers[request]
