"""Floor 0: the words every other floor speaks: errors, ids, events, futures, configuration. No I/O."""
