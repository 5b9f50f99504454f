"""The `config.toml` that `atoll init` writes: every key, commented out, with what it does."""

from __future__ import annotations

from node.artifacts import write_atomically
from node.home import Home

TEMPLATE = """\
# Settings of this node. A flag or an ATOLL_* variable of the same name goes before what stands here.

# run = "tiny"                            # a preset, a TOML file, or a run id; else the run of last time
# join = ["/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW..."]
# listen = ["/ip4/0.0.0.0/tcp/4001"]      # the control plane; a fixed port for a firewall or a router
# data_port = 4002                        # the data channels; 0: any
# announce = ["/dns4/node.example.org/tcp/4001"]
# announce_data = ["node.example.org:4002"]   # only if the router's port is another than data_port
# http = "127.0.0.1:8080"                 # status and Prometheus metrics; "off"
# device = "auto"                         # auto, cpu, cuda, cuda:1, or none: a trainer of yours attaches
# name = "garage"                         # what people call this machine
# threads = 0                             # CPU threads; 0: as the libraries choose
# max_disk = "20GB"                       # results and snapshots; 0: no limit
# hivemind_python = "/opt/hm/bin/python"  # for runs that average by hivemind, if it is not in Atoll's environment
# max_relay = "10MB"                      # a second, for pairs of peers that cannot dial each other; 0: nothing
# allow_function = ["my_package.models:build"]
# log_level = "info"                      # debug, info, warning, error
# log_json = false
"""


def write_template(home: Home) -> None:
    """An existing file stays as it is."""
    if not home.config_file.exists():
        write_atomically(TEMPLATE.encode(), home.config_file)
