# %% insist
def insist(call):
    while True:
        try:
            return call()
        except rpcbench.ConnectionLostError as error:
            if error.maybe_executed:
                raise
