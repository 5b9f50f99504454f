"""Run by an interpreter that has hivemind (`test_hivemind_averager.py`): checks of our code there, one JSON line each.

python -I hivemind_checks.py FOLDER_OF_THE_AVERAGER [FOLDER_WITH_ANOTHER_NUMPY]
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

if len(sys.argv) > 2:
    sys.path.insert(0, sys.argv[2])
warnings.simplefilter("ignore")
_folder = Path(sys.argv[1])
_spec = importlib.util.spec_from_file_location(
    "atoll_averager", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
)
assert _spec is not None
sys.modules["atoll_averager"] = importlib.util.module_from_spec(_spec)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from hivemind.compression import CompressionInfo, Uniform8BitQuantization  # noqa: E402
from hivemind.compression.quantization import Quantization  # noqa: E402
from hivemind.p2p import P2P  # noqa: E402

averager: Any = importlib.import_module("atoll_averager.averager")
guards: Any = importlib.import_module("atoll_averager.guards")
jobs: Any = importlib.import_module("atoll_averager.job")
reducers: Any = importlib.import_module("atoll_averager.reducer")
transport: Any = importlib.import_module("atoll_averager.transport")

NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])
REFUSES = NUMPY >= (2, 4)
"""Whether NumPy refuses to turn an array of one value into an `int`."""
ORIGINAL = {"extract": Quantization.extract, "quantize": Uniform8BitQuantization.quantize}
PEERS, PART, PIECE = 4, 2048, 1024
ELEMENTS = 8 * PART
CODEC = Uniform8BitQuantization()


def refused(work: Callable[[], object], kind: type[Exception]) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def a_message(values: torch.Tensor) -> Any:
    return CODEC.compress(values, CompressionInfo.from_tensor(values))


def a_job(me: int, *, bound: float = 100.0) -> Any:
    return jobs.Job(
        roster="ab" * 20,
        names=tuple(f"peer{index}" for index in range(PEERS)),
        me=me,
        owners=tuple(part % PEERS for part in range(ELEMENTS // PART)),
        weights=((2, (1.0, 2.0, 3.0, 4.0)),),
        largest=(bound,) * PEERS,
        sender_timeout_s=20.0,
        deadline_s=60.0,
    )


class Nothing:
    """A `Report` that keeps what is reduced."""

    def __init__(self) -> None:
        self.means: dict[int, tuple[torch.Tensor, tuple[int, ...] | None]] = {}
        self.were_lost: dict[int, str] = {}

    def delivered(self, piece: Any, sender: int) -> None:
        pass

    def reduced(self, piece: Any, mean: torch.Tensor, senders: tuple[int, ...] | None) -> None:
        self.means[piece.start] = mean.clone(), senders

    def lost(self, sender: int, why: str, *, is_its_fault: bool) -> None:
        self.were_lost[sender] = why

    def refused(self, sender: int, why: str) -> None:
        pass

    def unreached(self, reducer: int, why: str) -> None:
        pass


async def all_reduce() -> tuple[float, float, list[Nothing]]:
    """Four averagers over real `p2pd`s, 8 bits: the share of results that came, the error, what each reduced."""
    torch.manual_seed(1)
    vectors = [torch.randn(ELEMENTS) for _ in range(PEERS)]
    started, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(PEERS):
            directory = Path(folder) / str(index)
            directory.mkdir()
            p2p, process = await transport.start("127.0.0.1", 0, str(directory))
            processes.append(process)
            started.append(averager.RosterAverager(p2p, CODEC))
            await started[-1].serve()
        ids = [str(one.peer_id) for one in started]
        ports = [transport.port_of(one._p2p) for one in started]
        reports = [Nothing() for _ in started]
        shares: list[float] = []

        async def take_part(me: int) -> None:
            # The names in a roster are ids, too.
            job = jobs.Job(**{name: getattr(a_job(me), name) for name in jobs.Job.__slots__} | {"names": tuple(ids)})
            pieces = job.pieces(ELEMENTS, PART, PIECE)
            async with started[me].roster(job, vectors[me], pieces, reports[me]) as runner:
                await everybody.wait()
                for other in range(PEERS):
                    if other != me:
                        await started[me].connect(ids[other], ids[other], [f"/ip4/127.0.0.1/tcp/{ports[other]}"])
                        runner.ready(other)
                container = runner.tensor_part_container
                async for _ in runner:
                    pass
                shares.append(1 - container.failed_size / container.total_size)
                await everybody.wait()

        everybody = asyncio.Barrier(PEERS)
        async with asyncio.timeout(120):
            await asyncio.gather(*(take_part(me) for me in range(PEERS)))
        for one, process in zip(started, processes, strict=True):
            await one._p2p.shutdown()
            await process.wait()
    exact = sum((index + 1.0) * vector for index, vector in enumerate(vectors)) / 10
    errors = [mean - exact[start : start + PIECE] for report in reports for start, (mean, _) in report.means.items()]
    return min(shares), float(torch.cat(errors).norm() / exact.norm()), reports


def upstream_8_bit_fails_where_numpy_refuses_to_convert_an_array() -> None:
    message = a_message(torch.randn(1000))
    if REFUSES:
        assert "only 0-dimensional arrays can be converted to Python scalars" in refused(
            lambda: CODEC.extract(message), TypeError
        )
    else:
        assert torch.isfinite(CODEC.extract(message)).all()


def upstream_8_bit_delivers_a_quarter_of_the_results_there() -> None:
    share, _, reports = asyncio.run(all_reduce())
    senders = {senders for report in reports for _, senders in report.means.values()}
    if REFUSES:
        assert share == 0.25, share
        assert all(whose is None or len(whose) == 1 for whose in senders), senders
    else:
        assert share == 1.0, share


def a_quantised_vector_reads_as_upstream_wrote_it() -> None:
    values = torch.randn(5000) ** 3
    message = a_message(values)
    codes = np.frombuffer(message.buffer[8 + 4 * 256 :], np.uint8)
    codebook = np.frombuffer(message.buffer[8 : 8 + 4 * 256], np.float32)
    guards.install(1 << 20)
    assert np.array_equal(CODEC.extract(message).numpy(), codebook[codes])


def our_encoder_has_upstreams_numbers() -> None:
    if not hasattr(torch, "quantize_per_tensor"):
        return
    for values in (torch.randn(4000), torch.randn(4000) ** 5 * 1e-4, torch.full((300,), 0.25), torch.ones(1)):
        theirs, their_book = ORIGINAL["quantize"](CODEC, values.clone())
        ours, our_book = guards.quantize(CODEC, values.clone())
        apart = ours.astype(int) - theirs.astype(int)
        if values.numel() > 1 and values.std() > 0:
            assert abs(apart).max() <= 1, abs(apart).max()
            assert (apart != 0).mean() < 2e-3, (apart != 0).mean()  # ties of the rounding
        assert np.allclose(our_book[ours], their_book[theirs], atol=float(values.abs().max()) / 20)


def a_vector_of_zeros_and_one_of_equals_come_back() -> None:
    for values in (torch.zeros(300), torch.full((300,), -7.5), torch.ones(1)):
        assert torch.equal(CODEC.extract(a_message(values)), values)


def an_8_bit_message_that_lies_about_itself_is_refused() -> None:
    for change in ({"buffer": b"abc"}, {"buffer": (9).to_bytes(8, "little") + bytes(2000)}, {"size": [1 << 30]}):
        message = a_message(torch.randn(100))
        for name, value in change.items():
            if name == "size":
                del message.size[:]
                message.size.extend(value)
            else:
                setattr(message, name, value)
        refused(lambda message=message: CODEC.extract(message), ValueError)


def with_the_guard_8_bit_delivers_everything() -> None:
    share, error, reports = asyncio.run(all_reduce())
    assert share == 1.0, share
    assert {senders for report in reports for _, senders in report.means.values()} == {(0, 1, 2, 3)}
    assert error < 0.02, error


def a_message_over_the_limit_is_refused_before_it_is_buffered() -> None:
    async def main() -> str:
        reader = asyncio.StreamReader()
        reader.feed_data((1 << 62).to_bytes(8, "big"))
        async with asyncio.timeout(5):
            try:
                await P2P.receive_raw_data(reader)
            except ValueError as error:
                return str(error)
        return ""

    assert "over the limit" in asyncio.run(main())


async def _reduce(feed: Callable[[Any], Any], **settings: Any) -> Nothing:
    report, job = Nothing(), a_job(0, **settings)
    mine = job.mine(job.pieces(ELEMENTS, PART, PIECE))
    reducer = reducers.PieceReducer(job, mine, report.delivered, report.reduced, report.refused)
    async with asyncio.timeout(20):
        await feed(reducer)
    reducer.finalize()
    return report


def a_claimed_weight_counts_for_nothing() -> None:
    async def feed(reducer: Any) -> None:
        await asyncio.gather(
            *(reducer.accumulate_part(peer, 0, torch.full((PIECE,), float(peer)), weight=1e9) for peer in range(PEERS))
        )

    mean, senders = asyncio.run(_reduce(feed)).means[0]
    assert torch.allclose(mean, torch.full((PIECE,), (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10))
    assert senders == (0, 1, 2, 3)


def what_is_no_piece_is_not_added() -> None:
    odd = {
        "not finite": torch.full((PIECE,), float("nan")),
        "or beyond": torch.full((PIECE,), 101.5),
        "wrong size": torch.ones(1),
        "or type": torch.ones(PIECE, dtype=torch.float64),
    }

    async def feed(reducer: Any) -> None:
        for why, values in odd.items():
            said = ""
            try:
                await reducer.accumulate_part(1, 0, values)
            except reducers.Unwelcome as error:
                said = str(error)
            assert why in said, (why, said)
        reducer.on_sender_failed(1)
        await asyncio.gather(*(reducer.accumulate_part(peer, 0, torch.ones(PIECE)) for peer in (0, 2, 3)))

    mean, senders = asyncio.run(_reduce(feed)).means[0]
    assert torch.equal(mean, torch.ones(PIECE))
    assert senders == (0, 2, 3)


def who_is_lost_between_two_pieces_is_in_the_first_only() -> None:
    async def feed(reducer: Any) -> None:
        await asyncio.gather(*(reducer.accumulate_part(peer, 0, torch.ones(PIECE)) for peer in range(PEERS)))
        reducer.on_sender_failed(2)
        await asyncio.gather(*(reducer.accumulate_part(peer, 1, torch.ones(PIECE)) for peer in (0, 1, 3)))

    means = asyncio.run(_reduce(feed)).means
    assert [senders for _, senders in means.values()] == [(0, 1, 2, 3), (0, 1, 3)]


CHECKS = (
    upstream_8_bit_fails_where_numpy_refuses_to_convert_an_array,
    upstream_8_bit_delivers_a_quarter_of_the_results_there,
    a_quantised_vector_reads_as_upstream_wrote_it,  # from here on with the guards
    our_encoder_has_upstreams_numbers,
    a_vector_of_zeros_and_one_of_equals_come_back,
    an_8_bit_message_that_lies_about_itself_is_refused,
    with_the_guard_8_bit_delivers_everything,
    a_message_over_the_limit_is_refused_before_it_is_buffered,
    a_claimed_weight_counts_for_nothing,
    what_is_no_piece_is_not_added,
    who_is_lost_between_two_pieces_is_in_the_first_only,
)


def main() -> None:
    for check in CHECKS:
        why = ""
        try:
            check()
        except Exception:  # noqa: BLE001 - the test that reads this fails with it
            why = traceback.format_exc()
        sys.stdout.write(json.dumps({"check": check.__name__, "numpy": np.__version__, "why": why}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
