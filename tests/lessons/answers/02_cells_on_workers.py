# %% everywhere: wrong, does not look into the dict of variables | The keys should be the workers
def everywhere(code, name):
    return cluster.run("all", code, want=[name])


# %% everywhere: wrong, asks one worker | The keys should be the workers
def everywhere(code, name):
    return {"worker1": cluster.run("worker1", code, want=[name])[name]}


# %% everywhere: wrong, takes the value of the cell | what a cell ends with that only assigns
def everywhere(code, name):
    return cluster.run("all", code)


# %% everywhere: wrong, runs it here | The cell has run in this notebook
def everywhere(code, name):
    space = {}
    exec(code, space)
    return dict.fromkeys(cluster.workers, space[name])


# %% outcomes: wrong, one error for all | 'worker1': 'fine', 'worker2': 'KeyError'
def outcomes(code):
    try:
        cluster.run("all", code)
    except Exception as error:
        return dict.fromkeys(cluster.workers, type(error).__name__)
    return dict.fromkeys(cluster.workers, "fine")


# %% outcomes: wrong, knows one error | raised ZeroDivisionError
def outcomes(code):
    found = {}
    for worker in cluster.workers:
        try:
            cluster.run(worker, code)
        except KeyError:
            found[worker] = "KeyError"
        else:
            found[worker] = "fine"
    return found


# %% outcomes: wrong, the errors themselves | The values should be texts
def outcomes(code):
    found = {}
    for worker in cluster.workers:
        try:
            cluster.run(worker, code)
            found[worker] = "fine"
        except Exception as error:
            found[worker] = error
    return found


# %% stubborn: wrong, gives up | that was the end of it
def stubborn(worker, code):
    return cluster.run(worker, code)


# %% stubborn: wrong, starts it without its past | nothing of what the old one held
def stubborn(worker, code):
    try:
        return cluster.run(worker, code)
    except rpcbench.WorkerLostError:
        cluster.restart(worker)
        return cluster.run(worker, code)


# %% stubborn: wrong, does not run the cell again | the cell should be run again
def stubborn(worker, code):
    try:
        return cluster.run(worker, code)
    except rpcbench.WorkerLostError:
        cluster.restart(worker, replay=True)


# %% stubborn: wrong, starts it again whatever it was | though it had not died
def stubborn(worker, code):
    try:
        return cluster.run(worker, code)
    except Exception:
        cluster.restart(worker, replay=True)
        return cluster.run(worker, code)
