"""The trainer: PyTorch, the public library (`node.attach`), and the loop that we ship on top of it."""
