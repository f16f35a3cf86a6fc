"""Floor 8: cells on workers: magics, the relay of their output, and how their errors look in a notebook."""
