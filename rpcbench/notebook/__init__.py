"""Floor 8: cells on workers as a notebook has them: magics, and handles of cells that run on."""
