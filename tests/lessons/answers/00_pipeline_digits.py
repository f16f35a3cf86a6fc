# %% busy: wrong, the operations of all workers | which counts the operations of all workers
# rows if row["worker"] == worker => rows
# %% busy: wrong, the step as one worker sees it | from its own first operation to its own last one
# => own = [row for row in rows if row["worker"] == worker]
# => lasted = max(row["end"] for row in own) - min(row["begin"] for row in own)
# => return sum(row["end"] - row["begin"] for row in own) / lasted
# %% busy: wrong, the idle share | its idle share
# return sum => return 1 - sum
# %% busy: wrong, as if the step began at 0 | as if the step began at 0
# => return sum(row["end"] - row["begin"] for row in rows if row["worker"] == worker) / max(row["end"] for row in rows)
# %% busy: wrong, the share of all work | a share of the work of all workers
# => work = sum(row["end"] - row["begin"] for row in rows)
# => return sum(row["end"] - row["begin"] for row in rows if row["worker"] == worker) / work
# %% busy: wrong, forwards only | is busy for
# => lasted = max(row["end"] for row in rows) - min(row["begin"] for row in rows)
# => forwards = [row for row in rows if row["worker"] == worker and row["op"] == "F"]
# => return sum(row["end"] - row["begin"] for row in forwards) / lasted
# %% busy: wrong, takes the rows to be in order | as if the first row began the step
# max(row["end"] for row in rows) - min(row["begin"] for row in rows) => rows[-1]["end"] - rows[0]["begin"]
# %% busy: wrong, per cent | per cent. The step
# return sum => return 100 * sum
# %% busy: wrong, throws rows away | has changed `rows`
# => lasted = max(row["end"] for row in rows) - min(row["begin"] for row in rows)
# => own = 0.0
# => while rows:
# =>     row = rows.pop()
# =>     if row["worker"] == worker:
# =>         own += row["end"] - row["begin"]
# => return own / lasted
# %% busy: wrong, another name of a column | raised KeyError: 'start', in your line
# => return sum(row["end"] - row["start"] for row in rows)
# %% busy: wrong, counts operations | is busy for
# => return sum(row["worker"] == worker for row in rows) / len(rows)
# %% busy: wrong, seconds | the seconds, not a share
# => return sum(row["end"] - row["begin"] for row in rows if row["worker"] == worker)
# %% busy: wrong, the step begins with what ends first | is busy for 7.5 of 8 s
# => rows = sorted(rows, key=lambda row: row["end"])
# => own = sum(row["end"] - row["begin"] for row in rows if row["worker"] == worker)
# => return own / (rows[-1]["end"] - rows[0]["begin"])
# %%% busy: wrong, the step ends with what begins last | is busy for 7.5 of 8 s
# : row["end"] => : row["begin"]
# %% busy: wrong, takes the stage for the worker | is busy for 3.5 of 7.25 s
# ["worker"] == worker => ["stage"] == worker - 1
# %% longest_wait: wrong, the names the other way round | the names the other way round
def longest_wait(rows, worker):
    from itertools import pairwise

    own = sorted((row for row in rows if row["worker"] == worker), key=lambda row: row["begin"])
    return max(
        (b["begin"] - a["end"], f"{b['op']}{b['microbatch']}", f"{a['op']}{a['microbatch']}") for a, b in pairwise(own)
    )


# %% longest_wait: wrong, in the order of micro-batches | waits longest between
def longest_wait(rows, worker):
    from itertools import pairwise

    own = sorted((row for row in rows if row["worker"] == worker), key=lambda row: (row["microbatch"], row["begin"]))
    return max(
        (b["begin"] - a["end"], f"{a['op']}{a['microbatch']}", f"{b['op']}{b['microbatch']}") for a, b in pairwise(own)
    )


# %% longest_wait: wrong, with the wait before the first operation | waits longest between
def longest_wait(rows, worker):
    from itertools import pairwise

    own = sorted((row for row in rows if row["worker"] == worker), key=lambda row: row["begin"])
    begin = min(row["begin"] for row in rows)
    waits = [(own[0]["begin"] - begin, "", f"{own[0]['op']}{own[0]['microbatch']}")]
    waits += [
        (b["begin"] - a["end"], f"{a['op']}{a['microbatch']}", f"{b['op']}{b['microbatch']}") for a, b in pairwise(own)
    ]
    return max(waits)


# %% longest_wait: wrong, seconds alone | Three values are wanted
def longest_wait(rows, worker):
    from itertools import pairwise

    own = sorted((row for row in rows if row["worker"] == worker), key=lambda row: row["begin"])
    return max(b["begin"] - a["end"] for a, b in pairwise(own))


# %%% longest_wait: wrong, the first wait | waits longest between
# -     return max(b["begin"] - a["end"] for a, b in pairwise(own))
# +     a, b = next((a, b) for a, b in pairwise(own) if b["begin"] > a["end"])
# +     return b["begin"] - a["end"], f"{a['op']}{a['microbatch']}", f"{b['op']}{b['microbatch']}"
# %%% longest_wait: wrong, letters without numbers | names that are no operations of this worker
# b["begin"] - a["end"] => (b["begin"] - a["end"], a["op"], b["op"])
# %%% longest_wait: wrong, from begin to begin | to the begin of the next
# -     return max(b["begin"] - a["end"] for a, b in pairwise(own))
# +     return max(
# +         (b["begin"] - a["begin"], f"{a['op']}{a['microbatch']}", f"{b['op']}{b['microbatch']}")
# +         for a, b in pairwise(own)
# +     )
# %% longest_wait: wrong, all workers | waits longest between
def longest_wait(rows, worker):
    from itertools import pairwise

    own = sorted(rows, key=lambda row: row["begin"])
    return max(
        (b["begin"] - a["end"], f"{a['op']}{a['microbatch']}", f"{b['op']}{b['microbatch']}") for a, b in pairwise(own)
    )


# %%% longest_wait: wrong, sorts the rows of the caller | has changed `rows`
# -     own = sorted(rows, key=lambda row: row["begin"])
# +     rows.sort(key=lambda row: row["begin"])
# +     own = [row for row in rows if row["worker"] == worker]
# %%% longest_wait: wrong, takes the stage for the worker | waits longest between F1 and B0
# rows, key => (row for row in rows if row["stage"] == worker - 1), key
# %%% longest_wait: wrong, the rows as they stand | as if the rows stood in order of time
# sorted(rows, key=lambda row: row["begin"]) => [row for row in rows if row["worker"] == worker]
