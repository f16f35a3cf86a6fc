# %% everywhere
def everywhere(code, name):
    return cluster.run("all", code, want=[name])[name]


# %% outcomes
def outcomes(code):
    found = {}
    for worker in cluster.workers:
        try:
            cluster.run(worker, code)
        except Exception as error:
            found[worker] = type(error).__name__
        else:
            found[worker] = "fine"
    return found


# %% stubborn
def stubborn(worker, code):
    try:
        return cluster.run(worker, code)
    except rpcbench.WorkerLostError:
        cluster.restart(worker, replay=True)
        return cluster.run(worker, code)


# %% spread
def spread(call, items, workers):
    results = [None] * len(items)
    todo = queue.SimpleQueue()
    for pair in enumerate(items):
        todo.put(pair)

    def serve(worker):
        while True:
            try:
                place, item = todo.get_nowait()
            except queue.Empty:
                return
            results[place] = call(worker, item)

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(serve, workers))
    return results
