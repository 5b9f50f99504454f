"""The status as Prometheus metrics. Names are stable: dashboards rest on them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from node.status import Status


def exposition(status: Status) -> bytes:
    """`status` in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Collector(status))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield InfoMetricFamily(
            "atoll_node",
            "Who this node is.",
            value={
                "peer_id": status.peer_id,
                "version": status.version,
                "run_id": status.run_id or "",
                "name": status.name or "",
                "phase": status.phase,
            },
        )
        gauges: list[tuple[str, str, float | None]] = [
            ("atoll_round", "Round being worked on.", status.round),
            ("atoll_members", "Members alive, this node included.", status.members),
            ("atoll_tokens_per_second", "Training speed of this node.", status.tokens_per_s),
            ("atoll_line_up_bytes_per_second", "Seen to be carried away by this node's line.", status.up_bytes_s),
            ("atoll_line_down_bytes_per_second", "Seen to be brought in by it.", status.down_bytes_s),
            ("atoll_loss", "Newest training loss of this node.", status.loss),
            ("atoll_validation_loss", "Newest validation loss.", status.validation_loss),
            ("atoll_trainer_attached", "1 while a trainer is attached.", status.trainer.attached),
            ("atoll_disk_bytes", "Disk used by parts, snapshots and artifacts of the run.", status.disk_bytes),
            ("atoll_storage_able", "0 while the disk refuses what must be kept.", status.storage_able),
            ("atoll_uptime_seconds", "Age of this daemon.", status.uptime_s),
            ("atoll_carried_tokens", "Trained here and not in a commit yet.", status.work.carried_tokens),
        ]
        if (last := status.last_round) is not None:
            gauges += [
                ("atoll_last_round_seconds", "Length of the newest round.", last.seconds),
                ("atoll_last_round_contributors", "Peers counted in the newest round.", last.contributors),
                ("atoll_last_round_excluded", "Peers not counted in the newest round.", len(last.excluded)),
                ("atoll_last_round_assemble_seconds", "First READY to roster.", last.assemble_s),
                ("atoll_last_round_exchange_seconds", "Roster to last part.", last.exchange_s),
                ("atoll_last_round_commit_seconds", "Last part to applied commit.", last.commit_s),
                ("atoll_last_round_sent_bytes", "Sent in the newest round.", last.bytes_sent),
                ("atoll_last_round_received_bytes", "Received in the newest round.", last.bytes_received),
            ]
        for name, documentation, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(name, documentation, value=float(value))
        resident = GaugeMetricFamily("atoll_resident_bytes", "Resident memory by process.", labels=["process"])
        for process, size in status.resident_bytes.items():
            resident.add_metric([process], size)
        yield resident
        yield CounterMetricFamily("atoll_tokens", "Tokens counted by the run.", value=status.tokens_total)
        work = status.work
        yield CounterMetricFamily(
            "atoll_produced_tokens", "Tokens trained by this node, all lives.", work.produced_tokens
        )
        yield CounterMetricFamily("atoll_counted_tokens", "Tokens of this node's in commits.", work.counted_tokens)
        discarded = CounterMetricFamily("atoll_discarded_tokens", "Trained here and lost.", labels=["reason"])
        for reason, tokens in work.discarded.items():
            discarded.add_metric([reason], tokens)
        yield discarded
        audits = CounterMetricFamily("atoll_audits", "Committed parts recomputed by this node.", labels=["result"])
        for result, count in (
            ("right", status.audits.right),
            ("wrong", status.audits.wrong),
            ("skipped", sum(status.audits.skipped.values())),
        ):
            audits.add_metric([result], count)
        yield audits
        yield CounterMetricFamily("atoll_audit_seconds", "Spent on audits.", value=status.audits.seconds)
        yield CounterMetricFamily(
            "atoll_audit_received_bytes", "Received for audits.", value=status.audits.bytes_received
        )
        reachable = GaugeMetricFamily("atoll_reachable", "Whether peers can dial it: 1 or 0.", labels=["port"])
        for port, yes in (("control", status.reach.control), ("data", status.reach.data)):
            if yes is not None:
                reachable.add_metric([port], float(yes))
        yield reachable
        yield CounterMetricFamily(
            "atoll_relayed_bytes", "Passed on for pairs that cannot dial each other.", value=status.reach.relayed_bytes
        )
        yield GaugeMetricFamily("atoll_relayed_pairs", "Such pairs now.", value=status.reach.relayed_pairs)
        yield GaugeMetricFamily("atoll_caught_peers", "Peers left out for good by evidence.", value=len(status.caught))
        problems = CounterMetricFamily("atoll_problems", "What went wrong and was dealt with.", labels=["reason"])
        for reason, count in status.problems.items():
            problems.add_metric([reason], count)
        yield problems
