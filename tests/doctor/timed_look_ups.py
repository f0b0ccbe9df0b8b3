"""Check an address's name next to a DNS server that answers, and next to one that does not.

tests/own_network.py runs it. Printed are the outcomes, and how many queries came for the first, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

from tests.own_network import Dns, set_up
from zslurm.config.spec import ClusterSection
from zslurm.doctor.check import CheckOutcome
from zslurm.doctor.checks import network
from zslurm.hardware.node_sources import NodeTask, Sources

LIMIT_S = 60.0
"""No answer of the server takes that long."""


def outcome() -> CheckOutcome:
    """Check from node0, whose peer is an address: it needs no look-up to be known."""
    cluster = ClusterSection.model_validate({"name": "a", "launcher": "slurm"})
    task = NodeTask(cluster=cluster, peers=("node0", "10.0.2.11"))
    with mock.patch.object(network, "_SLOW_LOOKUP_S", LIMIT_S):
        found = network.reverse_names.run(Sources(task, environ={"SLURMD_NODENAME": "node0"}))
    assert found is not None
    return found


def main() -> None:
    """Print the outcomes."""
    set_up(Path(sys.argv[1]))
    dns = Dns()
    with mock.patch.object(network, "_LOOKUP_LIMIT_S", LIMIT_S):
        answered = outcome()
    queries = dns.queries
    dns.answers = False
    this = sys.modules[__name__]
    with mock.patch.object(network, "_LOOKUP_LIMIT_S", 0.2), mock.patch.object(this, "LIMIT_S", 0.1):
        silent = outcome()
    print(json.dumps({"answered": answered.to_json(), "queries": queries, "silent": silent.to_json()}))


if __name__ == "__main__":
    main()
