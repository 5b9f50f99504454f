"""The process that keeps the others: memfds, socket pairs, children (design section 2). Standard library only."""
