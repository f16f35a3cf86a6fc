# %% everywhere: wrong, does not look into the dict of variables | The keys should be the workers
# => return cluster.run("all", code, want=[name])
# %% everywhere: wrong, asks one worker | The keys should be the workers
# => return {"worker1": cluster.run("worker1", code, want=[name])[name]}
# %% everywhere: wrong, takes the value of the cell | what a cell ends with that only assigns
# => return cluster.run("all", code)
# %% everywhere: wrong, runs it here | The cell has run in this notebook
# => space = {}
# => exec(code, space)
# => return dict.fromkeys(cluster.workers, space[name])
# %% everywhere: wrong, one worker's value for all | A cell that finds the process number gives
# => return dict.fromkeys(cluster.workers, cluster.run("worker1", code, want=[name])[name])
# %% everywhere: wrong, does not run the cell | raised
# => return {worker: cluster.run(worker, name + "_") for worker in cluster.workers}
# %% everywhere: wrong, runs the cell twice | The cell ran 2 times
# => cluster.run("all", code)
# => return {worker: cluster.run(worker, code, want=[name])[name] for worker in cluster.workers}
# %%% everywhere: wrong, a list | should be a dict
# {worker: cluster.run(worker, code, want=[name])[name] for worker in cluster.workers} => cluster.gather(name, "list")
# %%% everywhere: right, reads the variables afterwards
# .run(worker, code, want=[name]) => [worker]
# %% everywhere: wrong, leaves out values that count as false | The keys should be the workers
# => found = cluster.run("all", code, want=[name])[name]
# => return {worker: value for worker, value in found.items() if value}
# %% everywhere: wrong, puts the name behind the last line | is part of the comment
# => return cluster.run("all", code + "; " + name)
# %% everywhere: wrong, takes an empty list for none | An empty list is a value, too
# => found = cluster.run("all", code, want=[name])[name]
# => return {worker: value or None for worker, value in found.items()}
# %% everywhere: right, the name on a line of its own
# => return cluster.run("all", code + "\n" + name)
# %% outcomes: wrong, one error for all | Each worker has an outcome of its own
# => try:
# =>     cluster.run("all", code)
# => except Exception as error:
# =>     return dict.fromkeys(cluster.workers, type(error).__name__)
# => return dict.fromkeys(cluster.workers, "fine")
# %% outcomes: wrong, knows one error | raised ZeroDivisionError
# Exception as error => KeyError
# type(error).__name__ => "KeyError"
# %% outcomes: wrong, ends at the first error | 'worker2': 'ZeroDivisionError'}, and yours gave
# => found = dict.fromkeys(cluster.workers, "fine")
# => try:
# =>     for worker in cluster.workers:
# =>         cluster.run(worker, code)
# => except Exception as error:
# =>     found[worker] = type(error).__name__
# => return found
# %% outcomes: wrong, keeps only the failures | The keys should be the workers
# -         else:
# -             found[worker] = "fine"
# %% outcomes: wrong, tries all at once first | The cell ran 2 times
# -     found = {}
# +     try:
# +         cluster.run("all", code)
# +     except Exception:
# +         pass
# +     found = {}
# %% outcomes: wrong, after an error each worker once more | A cell that fails ran 2 times on worker1
# - def outcomes(code):
# + def outcomes(code):
# +     try:
# +         cluster.run("all", code)
# +         return dict.fromkeys(cluster.workers, "fine")
# +     except Exception:
# +         pass
# %% outcomes: right, from the last worker to the first
# => found = {}
# => for worker in reversed(cluster.workers):
# =>     try:
# =>         cluster.run(worker, code)
# =>         found[worker] = "fine"
# =>     except Exception as error:
# =>         found[worker] = error.__class__.__name__
# => return found
# %%% outcomes: wrong, the errors themselves | The values should be texts
# reversed(cluster.workers) => cluster.workers
# error.__class__.__name__ => error
# %%% outcomes: wrong, the text of the error | not its text
# found = {} => found = dict.fromkeys(cluster.workers, "fine")
# reversed(cluster.workers) => cluster.workers
# -             found[worker] = "fine"
# error.__class__.__name__ => str(error).splitlines()[0]
# %%% outcomes: wrong, knows three errors | raised IndexError
# reversed(cluster.workers) => cluster.workers
# Exception => (KeyError, ValueError, ZeroDivisionError)
# error.__class__ => type(error)
# %% stubborn: wrong, gives up | it was not started again
# => return cluster.run(worker, code)
# %% stubborn: wrong, starts it without its past | nothing of what the old one held
# worker, replay=True => worker
# %% stubborn: wrong, does not run the cell again | the cell should be run again
# => try:
# =>     return cluster.run(worker, code)
# => except rpcbench.WorkerLostError:
# =>     cluster.restart(worker, replay=True)
# %%% stubborn: wrong, hides the errors of the cell | that was hidden
# -         cluster.restart(worker, replay=True)
# +         cluster.restart(worker, replay=True)
# +         return cluster.run(worker, code)
# +     except Exception as error:
# +         return error
# %%% stubborn: wrong, runs the cell once more when all is well | The cell ran 2 times on worker1
# return cluster => cluster
# -         cluster.restart(worker, replay=True)
# +         cluster.restart(worker, replay=True)
# +     return cluster.run(worker, code)
# %%% stubborn: wrong, tries a cell with an error again | A cell that fails ran 2 times on worker1
# -         cluster.restart(worker, replay=True)
# +         cluster.restart(worker, replay=True)
# +     except Exception:
# +         pass
# +     return cluster.run(worker, code)
# %% stubborn: wrong, once for the deed and once for the value | died once, and the cell ran 3 times
# -         cluster.restart(worker, replay=True)
# +         cluster.restart(worker, replay=True)
# +         cluster.run(worker, code)
# %% stubborn: wrong, starts it again whatever it was | though it had not died
# rpcbench.WorkerLostError => Exception
# %% stubborn: wrong, does not start it again | it was not started again
# -         cluster.restart(worker, replay=True)
# %% stubborn: wrong, tries for ever | not twice
# => while True:
# =>     try:
# =>         return cluster.run(worker, code)
# =>     except rpcbench.WorkerLostError:
# =>         cluster.restart(worker, replay=True)
# %% spread: wrong, one item after the other | had not begun
# => return [call(workers[place % len(workers)], item) for place, item in enumerate(items)]
# %% spread: wrong, a fixed share for each worker | had not begun
def spread(call, items, workers):
    def serve(start):
        return [call(workers[start], item) for item in items[start :: len(workers)]]

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        shares = list(pool.map(serve, range(len(workers))))
    results = [None] * len(items)
    for start, share in enumerate(shares):
        results[start :: len(workers)] = share
    return results


# %% spread: wrong, in rounds | had not begun
# => results = []
# => with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
# =>     for start in range(0, len(items), len(workers)):
# =>         results += pool.map(call, workers, items[start : start + len(workers)])
# => return results
# %% spread: wrong, all items at once | while it was busy
# => chosen = [workers[place % len(workers)] for place in range(len(items))]
# => with concurrent.futures.ThreadPoolExecutor(max(1, len(items))) as pool:
# =>     return list(pool.map(call, chosen, items))
# %% spread: wrong, each worker does all items | each item needs one
# => with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
# =>     return next(pool.map(lambda worker: [call(worker, item) for item in items], workers))
# %% spread: right, one iterator for all threads
def spread(call, items, workers):
    import threading

    results, errors, todo, lock = {}, [], enumerate(items), threading.Lock()

    def serve(worker):
        while True:
            with lock:
                place, item = next(todo, (None, None))
            if place is None:
                return
            try:
                results[place] = call(worker, item)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(items))]


# %% spread: wrong, does not ask the pool for its results | that was hidden
# list(pool.map(serve, workers)) => pool.map(serve, workers)
# %% spread: wrong, equal items once | each item needs one
def spread(call, items, workers):
    todo, results = iter(dict.fromkeys(items)), {}

    def serve(worker):
        for item in todo:
            results[item] = call(worker, item)

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(serve, workers))
    return [results[item] for item in items]


# %%% spread: wrong, a dict by item | unhashable
# dict.fromkeys(items) => items
# %%% spread: wrong, equal items have one result | in the order of the items; yours are
# dict.fromkeys(items) => items
# [item] = => [str(item)] =
# [item] => [str(item)]
# %%% spread: wrong, results as they come | in the order of the items
# todo, results = iter(dict.fromkeys(items)), {} => results, todo = [], iter(items)
# [item] = call(worker, item) => .append(call(worker, item))
# [results[item] for item in items] => results
# %%% spread: wrong, takes None for the end | each item needs one
# -     todo, results = iter(dict.fromkeys(items)), {}
# +     results, todo = {}, queue.SimpleQueue()
# +     for item in [*items, *[None] * len(workers)]:
# +         todo.put(item)
# for item in todo => while (item := todo.get()) is not None
# [item] = => [id(item)] =
# [item] => .get(id(item))
# %% spread: wrong, two workers only | worker3 had nothing to do
def spread(call, items, workers):
    results = [None] * len(items)
    todo = iter([*enumerate(items)])

    def serve(worker):
        for place, item in todo:
            results[place] = call(worker, item)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(serve, workers))
    return results


# %%% spread: wrong, the workers of the cluster | had nothing to do
# 2 => len(cluster.workers)
# serve, workers => serve, cluster.workers
# %%% spread: wrong, names of its own for the workers | there was a call for 'worker
# 2 => len(workers)
# serve, workers => serve, [f"worker{number + 1}" for number in range(len(workers))]
# %%% spread: wrong, empties the list of the caller | have changed
# -     results = [None] * len(items)
# -     todo = iter([*enumerate(items)])
# +     import threading
# +
# +     results, lock = [None] * len(items), threading.Lock()
# -         for place, item in todo:
# +         while True:
# +             with lock:
# +                 if not items:
# +                     return
# +                 place, item = len(results) - len(items), items.pop(0)
# 2 => len(workers)
# %% spread: wrong, from the last item to the first | It was not the next one
# -     todo = queue.SimpleQueue()
# -     for pair in enumerate(items):
# -         todo.put(pair)
# +     todo = [*enumerate(items)]
# get_nowait => pop
# queue.Empty => IndexError
