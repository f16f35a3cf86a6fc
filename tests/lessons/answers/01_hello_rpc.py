# %% process_ids: wrong, asks this process and sends the number | without parentheses
# => return {name: rpc.rpc_sync(name, os.getpid()) for name in names}
# %% process_ids: wrong, never waits | There are futures in the dict
# => return {name: rpc.rpc_async(name, os.getpid) for name in names}
# %% process_ids: wrong, references instead of values | There are RRefs in the dict
# => return {name: rpc.remote(name, os.getpid) for name in names}
# %% process_ids: wrong, asks the first worker only | not the process of worker2
# => return {name: rpc.rpc_sync("worker1", os.getpid) for name in names}
# %% process_ids: wrong, asks here | that of this notebook
# => return {name: os.getpid() for name in names}
# %% process_ids: wrong, a list | should be a dict
# => return [rpc.rpc_sync(name, os.getpid) for name in names]
# %% process_ids: wrong, keys and values exchanged | The keys should be the names
# => return {rpc.rpc_sync(name, os.getpid): name for name in names}
# %% process_ids: wrong, all workers whatever the names are | it should ask only these workers
# => return {name: rpc.rpc_sync(name, os.getpid) for name in cluster.workers}
# %% process_ids: wrong, right for names in their order alone | are those of other workers
# => return dict(zip(sorted(names), [rpc.rpc_sync(name, os.getpid) for name in names]))
# %% process_ids: right, in another order
# => return {name: rpc.rpc_sync(name, os.getpid) for name in reversed(names)}
# %% at_once: wrong, a generator of futures, of which each begins when it is asked for | did not run at the same time
# => futures = (rpc.rpc_async(worker, function, (part,)) for worker, part in zip(workers, parts))
# => return [future.wait() for future in futures]
# %% at_once: wrong, all on the first worker | they went to
# => futures = [rpc.rpc_async(workers[0], function, (part,)) for part in parts]
# => return [future.wait() for future in futures]
# %% at_once: wrong, returns references | There are RRefs in the list
# => return [rpc.remote(worker, function, (part,)) for worker, part in zip(workers, parts)]
# %% at_once: wrong, one after the other | did not run at the same time
# => return [rpc.rpc_sync(worker, function, (part,)) for worker, part in zip(workers, parts)]
# %% at_once: wrong, waits inside the loop | did not run at the same time
# => return [rpc.rpc_async(worker, function, (part,)).wait() for worker, part in zip(workers, parts)]
# %% at_once: wrong, returns the futures | There are futures in the list
# => return [rpc.rpc_async(worker, function, (part,)) for worker, part in zip(workers, parts)]
# %% at_once: wrong, in the order in which the calls end | in the order of the parts
# => results = []
# => futures = [rpc.rpc_async(worker, function, (part,)) for worker, part in zip(workers, parts)]
# => for kept in [future.then(lambda done: results.append(done.value())) for future in futures]:
# =>     kept.wait()
# => return results
# %% at_once: right, a generator of results
# [future.wait() for future in futures] => (future.wait() for future in futures)
# %% at_once: wrong, right for two parts | 3 parts should give 3 results
# => one = rpc.rpc_async(workers[0], function, (parts[0],))
# => two = rpc.rpc_async(workers[1], function, (parts[1],))
# => return [one.wait(), two.wait()]
# %% at_once: right, a thread for each call
def at_once(function, parts, workers):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(lambda worker, part: rpc.rpc_sync(worker, function, (part,)), workers, parts))


# %% at_once: wrong, takes a part that is a tuple for the arguments | It is one argument
# => futures = []
# => for part, worker in zip(parts, workers):
# =>     futures.append(rpc.rpc_async(worker, function, part if isinstance(part, tuple) else (part,)))
# => return [future.wait() for future in futures]
# %% at_once: wrong, takes the workers in the order of the cluster | they went to
# => workers = [cluster.workers[place % len(cluster.workers)] for place in range(len(parts))]
# => futures = [rpc.rpc_async(worker, function, (part,)) for worker, part in zip(workers, parts)]
# => return [future.wait() for future in futures]
# %% at_once: wrong, takes equal parts for one | a function that returns the name of its worker
# => futures = {str(part): rpc.rpc_async(worker, function, (part,)) for worker, part in zip(workers, parts)}
# => return [futures[str(part)].wait() for part in parts]
# %% at_once: wrong, one call for each worker's name | 3 parts should give 3 results
# => futures = {worker: rpc.rpc_async(worker, function, (part,)) for worker, part in zip(workers, parts)}
# => return [future.wait() for future in futures.values()]
# %% at_once: wrong, a dict by part | unhashable
# => futures = {part: rpc.rpc_async(worker, function, (part,)) for worker, part in zip(workers, parts)}
# => return [futures[part].wait() for part in parts]
# %% patient: wrong, hides every error | that was hidden
# rpcbench.RpcTimeoutError => Exception
# %% patient: wrong, takes each TimeoutError for that of the call | TimeoutError('the printer does not answer')
# rpcbench.RpcTimeoutError => TimeoutError
# %% patient: wrong, takes milliseconds for seconds | had a deadline of 3600000 seconds
# =seconds => =seconds * 1000
# %% patient: wrong, no deadline | waited for the slow function
# rpc_sync(worker, function, timeout=seconds) => rpc_async(worker, function).wait()
# %% patient: wrong, takes 0 for no answer | has a result too
# seconds) => seconds) or default
# %% patient: wrong, asks again and again with sleeps between | It sleeps for a fixed time
# => future = rpc.rpc_async(worker, function)
# => for _ in range(int(seconds * 100)):
# =>     if future.done():
# =>         return future.wait()
# =>     time.sleep(0.01)
# => return default
# %% patient: wrong, calls once to see whether it is quick and once for the result | was called 2 times
# return rpc => rpc
# -         return default
# +         return default
# +     return rpc.rpc_sync(worker, function)
# %% patient: wrong, runs it here | yours gave 'notebook'
# rpc.rpc_sync(worker, function, timeout=seconds) => function()
# %% patient: right, with a future
# -     try:
# +     future = rpc.rpc_async(worker, function, timeout=seconds)
# +     try:
# return rpc.rpc_sync(worker, function, timeout=seconds) => return future.wait()
# %% patient: wrong, waits to the end and then looks at the clock | waited for the slow function to end
# => begin = time.monotonic()
# => found = rpc.rpc_sync(worker, function)
# => return found if time.monotonic() - begin <= seconds else default
# %% patient: wrong, always sleeps | It sleeps for a fixed time
# => future = rpc.rpc_async(worker, function)
# => time.sleep(seconds)
# => return future.wait() if future.done() else default
# %% patient: wrong, hides lost connections, the function's own among them | raises ConnectionResetError
# rpcbench.RpcTimeoutError => (rpcbench.RpcTimeoutError, ConnectionError)
# %% patient: wrong, a deadline of its own | had a deadline of 1 seconds
# =seconds => =1
# %% patient: wrong, rounds the seconds up | seconds your call had a deadline of 1 seconds
# rpc_sync(worker, function, timeout=seconds) => rpc_async(worker, function, timeout=int(seconds) + 1).wait()
# %% patient: wrong, takes None for no answer | returns None has a result too
# return rpc => found = rpc
# -         return default
# +         found = None
# +     return default if found is None else found
# %% patient: wrong, tries once more when it is late | was called 2 times
# => for _ in range(2):
# =>     try:
# =>         return rpc.rpc_sync(worker, function, timeout=seconds)
# =>     except rpcbench.RpcTimeoutError:
# =>         pass
# => return default
# %% patient: right, counts the seconds itself
def patient(worker, function, seconds, default):
    import threading

    done, future = threading.Event(), rpc.rpc_async(worker, function, timeout=0)
    future.add_done_callback(lambda _: done.set())
    return future.value() if done.wait(seconds) else default


# %% deposit: wrong, returns the balance of now | yours returned 200. That is the balance of now
# return account.answers[request] => return account.balance
# %% deposit: wrong, takes the amount for the request | another request with the same amount
# if request => if amount
# [request] = => [amount] =
# return account.answers[request] => return account.answers[amount]
# %% deposit: wrong, takes the answer 0 for none | request 3 again, which was answered 0
# request not in account.answers => not account.answers.get(request)
# %% deposit: wrong, one list of requests for all accounts | Another account
requests = {}


def deposit(account, request, amount):
    with account.lock:
        if request not in requests:
            account.balance += amount
            requests[request] = account.balance
        return requests[request]


# %% deposit: wrong, no answer to a repeated request | which was answered 150: expected 150, but yours returned None
# -         return account.answers[request]
# +             return account.balance
# +         return None
# %% deposit: wrong, no lock | is used outside of the lock
# => if request not in account.answers:
# =>     account.balance += amount
# =>     account.answers[request] = account.balance
# => return account.answers[request]
# %%% deposit: wrong, pays in each time | It was paid in once more
# if request not in account.answers => with account.lock
# -     return account.answers[request]
# +         return account.balance
# %% deposit: wrong, lets go of the lock between the look and the change | was paid in twice
# => with account.lock:
# =>     if request in account.answers:
# =>         return account.answers[request]
# => with account.lock:
# =>     account.balance += amount
# =>     account.answers[request] = account.balance
# =>     return account.balance
# %%% deposit: wrong, an error for a repeated request | raised ValueError
# -             return account.answers[request]
# -     with account.lock:
# +             raise ValueError("this request was made before")
# %% deposit: right, takes the lock by hand
def deposit(account, request, amount):
    account.lock.acquire()
    try:
        if request in account.answers:
            return account.answers[request]
        account.balance = account.balance + amount
        account.answers[request] = account.balance
        return account.balance
    finally:
        account.lock.release()


# %% deposit: wrong, takes another amount for another request | request 2 once more
# if request => if (request, amount)
# [request] = => [request, amount] =
# return account.answers[request] => return account.answers[request, amount]
# %% deposit: right, a new dict of answers
# answers[request] = account.balance => answers = {**account.answers, request: account.balance}
