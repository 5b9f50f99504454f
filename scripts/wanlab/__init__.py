"""A wide-area network on one Linux machine, for tests and measurements: `from scripts.wanlab.wan import Wan`."""
