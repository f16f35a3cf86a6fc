# %% insist: wrong, tries once | It was given up
def insist(call):
    return call()


# %% insist: wrong, tries twice | was lost three times
def insist(call):
    try:
        return call()
    except rpcbench.ConnectionLostError as error:
        if error.maybe_executed:
            raise
        return call()


# %% insist: wrong, makes again what may have run | may run twice
def insist(call):
    while True:
        try:
            return call()
        except rpcbench.ConnectionLostError:
            pass


# %% insist: wrong, keeps quiet about what may have run | nobody is told
def insist(call):
    while True:
        try:
            return call()
        except rpcbench.ConnectionLostError as error:
            if error.maybe_executed:
                return None


# %% insist: wrong, takes every error for a loss | That is no lost message
def insist(call):
    while True:
        try:
            return call()
        except Exception as error:
            if getattr(error, "maybe_executed", False):
                raise
