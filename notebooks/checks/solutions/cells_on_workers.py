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
