# %% insist: wrong, makes a call again after a timeout | After RpcTimeoutError the call was made again
# -         except rpcbench.ConnectionLostError as error:
# +         except rpcbench.RpcTimeoutError:
# +             pass
# +         except rpcbench.ConnectionLostError as error:
# %% insist: wrong, makes a call again after a death | After WorkerLostError the call was made again
# -         except rpcbench.ConnectionLostError as error:
# +         except rpcbench.WorkerLostError:
# +             continue
# +         except rpcbench.ConnectionLostError as error:
# %% insist: wrong, gives up after ten | was lost 18 times
# => for _ in range(10):
# =>     try:
# =>         return call()
# =>     except rpcbench.ConnectionLostError as error:
# =>         if error.maybe_executed:
# =>             raise
# => return None
# %%% insist: wrong, five tries | was lost 18 times
# 10 => 5
# %%% insist: wrong, takes a false result for a loss | A call that went well returned 0
# 10 => 20
# -             return call()
# +             if value := call():
# +                 return value
# %%% insist: wrong, gives up after thirty | was lost 40 times
# 10 => 30
# %% insist: wrong, tries once | It was given up
# => return call()
# %% insist: wrong, tries twice | was lost three times
# => try:
# =>     return call()
# => except rpcbench.ConnectionLostError as error:
# =>     if error.maybe_executed:
# =>         raise
# =>     return call()
# %% insist: wrong, makes again what may have run | may run twice
# => while True:
# =>     try:
# =>         return call()
# =>     except rpcbench.ConnectionLostError:
# =>         pass
# %% insist: wrong, keeps quiet about what may have run | the caller is not told
# raise => return None
# %% insist: wrong, takes every error for a loss | That is no lost message
# rpcbench.ConnectionLostError => Exception
# if error.maybe_executed: => if getattr(error, "maybe_executed", False):
# %% insist: wrong, returns the error | the caller is not told
# raise => return str(error)
# %% insist: wrong, upside down | It was given up
# if error => if not error
# %% insist: wrong, makes it once more to be sure | it was made
# -             return call()
# +             call()
# +             return call()
# %% insist: wrong, makes every call again that has not run | ended with UnknownWorkerError, and it was made 2 times
# ConnectionLostError => RpcError
# %% lamport: wrong, counts each member's events only | yours gave [1, 2, 3, 1]
# => counters, found = {}, []
# => for _, member, _ in events:
# =>     counters[member] = counters.get(member, 0) + 1
# =>     found.append(counters[member])
# => return found
# %% lamport: wrong, carries the sender's counter of now | yours gave [1, 2, 3, 4]
# carried, => sender,
# = carried[message] => = counters[sender[message]]
# carried[message] = counters[member] => sender[message] = member
# %% lamport: wrong, forgets the 1 of a receive | the numbers are
# -         seen = carried[message] if what == "receive" else 0
# -         counters[member] = max(counters.get(member, 0), seen) + 1
# +         own = counters.get(member, 0) + 1
# +         counters[member] = max(own, carried[message]) if what == "receive" else own
# %% lamport: wrong, goes back with an old message | the numbers are [1, 1, 2, 3, 4]
# -         seen = carried[message] if what == "receive" else 0
# -         counters[member] = max(counters.get(member, 0), seen) + 1
# +         counters[member] = (carried[message] if what == "receive" else counters.get(member, 0)) + 1
# %% lamport: wrong, begins with 0 | the numbers are [1, 2, 1]
# "receive" else 0 => "receive" else -1
# member, 0 => member, -1
# %% lamport: wrong, a set | should be a list
# => return {number for number, _ in enumerate(events, 1)}
# %% lamport: wrong, one counter for all | the numbers are [1, 2, 1]
# => return [number for number, _ in enumerate(events, 1)]
# %% lamport: wrong, the counters at the end | events need as many numbers
# carried, found = {}, {}, [] => carried = {}, {}
# -         found.append(counters[member])
# -     return found
# +     return list(counters.values())
# %% once: wrong, runs each time | ran the function again
class Once:
    def __init__(self, function):
        self.function = function

    def call(self, ticket, *args):
        return self.function(*args)


# %%% once: wrong, one at a time | a call with another ticket waits
# function = function => function, self.answers, self.lock = function, {}, threading.Lock()
# -         return self.function(*args)
# +         with self.lock:
# +             if ticket not in self.answers:
# +                 self.answers[ticket] = rpc.Future()
# +                 try:
# +                     self.answers[ticket].set_result(self.function(*args))
# +                 except Exception as error:
# +                     self.answers[ticket].set_exception(error)
# +         return self.answers[ticket].wait()
# %%% once: wrong, no lock | A lock is missing
# function = function => function, self.answers = function, {}
# -         return self.function(*args)
# +         if ticket in self.answers:
# +             return self.answers[ticket].wait()
# +         answer = self.answers[ticket] = rpc.Future()
# +         try:
# +             answer.set_result(self.function(*args))
# +         except Exception as error:
# +             answer.set_exception(error)
# +         return answer.wait()
# %% once: wrong, None for no answer | That is an answer, too
class Once:
    def __init__(self, function):
        self.function, self.answers = function, {}

    def call(self, ticket, *args):
        if self.answers.get(ticket) is None:
            self.answers[ticket] = self.function(*args)
        return self.answers[ticket]


# %%% once: wrong, forgets errors | An error is an answer, too
# self.answers.get(ticket) is None => ticket not in self.answers
# %%% once: wrong, the arguments for a ticket | Another ticket
# self.answers.get(ticket) is None => args not in self.answers
# [ticket] = => [args] =
# [ticket] => [args]
# %% once: wrong, no answer after an error | waits for ever
# -             try:
# -                 answer.set_result(self.function(*args))
# -             except Exception as error:
# -                 answer.set_exception(error)
# +             answer.set_result(self.function(*args))
# %% once: wrong, two at the same time | the function ran twice
class Once:
    def __init__(self, function):
        self.function, self.answers = function, {}

    def call(self, ticket, *args):
        if ticket not in self.answers:
            try:
                self.answers[ticket] = True, self.function(*args)
            except Exception as error:
                self.answers[ticket] = False, error
        well, answer = self.answers[ticket]
        if well:
            return answer
        raise answer


# %%% once: wrong, tickets of all functions together | share their tickets
# - class Once:
# + class Once:
# +     answers = {}
# +
# function, self.answers = function, {} => function = function
# %%% once: wrong, does not wait for the first | It should wait
# answers = function, {} => answers, self.lock = function, {}, threading.Lock()
# -         if ticket not in self.answers:
# +         with self.lock:
# +             first = ticket not in self.answers
# +             self.answers.setdefault(ticket, None)
# +         if first:
# -                 self.answers[ticket] = False, error
# +                 self.answers[ticket] = False, error
# +         if self.answers[ticket] is None:
# +             return None
# %% once: wrong, takes the arguments for a part of the ticket | The ticket alone
# ticket, *args => *order
# = ticket => = order
# ticket, rpc => order, rpc
# function(*args) => function(*order[1:])
# %% once: wrong, looks before it takes the lock | A lock is missing
# -         with self.lock:
# -             first = ticket not in self.answers
# -             answer = self.answers.setdefault(ticket, rpc.Future())
# +         first = ticket not in self.answers
# -         if first:
# +         if first:
# +             with self.lock:
# +                 self.answers[ticket] = rpc.Future()
# answer.set_result => self.answers[ticket].set_result
# answer.set_exception => self.answers[ticket].set_exception
# answer. => self.answers[ticket].
# %% once: wrong, takes an error that was returned for one that was raised | returned an error as its value
class Once:
    def __init__(self, function):
        self.function, self.answers, self.locks, self.lock = function, {}, {}, threading.Lock()

    def call(self, ticket, *args):
        with self.lock:
            own = self.locks.setdefault(ticket, threading.Lock())
        with own:
            if ticket not in self.answers:
                try:
                    self.answers[ticket] = self.function(*args)
                except Exception as error:
                    self.answers[ticket] = error
        answer = self.answers[ticket]
        if isinstance(answer, Exception):
            raise answer
        return answer


# %%% once: right, a lock for each ticket
# = self.function => = True, self.function
# = error => = False, error
# answer = => well, answer =
# isinstance(answer, Exception) => not well
