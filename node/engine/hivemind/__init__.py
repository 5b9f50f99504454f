"""The engine `hivemind`: hivemind's averager over the roster, in a process of its own (design section 10).

    HivemindEngine ─ HivemindExchange ─ AveragerProcess ═ socket, two vectors in shared memory ═ `averager` ─ p2pd

`averager` is the only code here that imports hivemind, and it imports nothing else of ours: it runs in whichever
interpreter has hivemind. The rest is the engine process that runs every engine.
"""
