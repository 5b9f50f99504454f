"""The daemon: trio, the network, the state machines; it decides, and moves no tensor (design section 2)."""
