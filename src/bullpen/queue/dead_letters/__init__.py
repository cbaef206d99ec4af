"""Finally failed jobs of a queue: their entries, the operations on them, and the stores behind one interface."""
