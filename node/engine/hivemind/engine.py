"""The engine that averages by hivemind. All but the way up of an exchange is `Engine`'s."""

from __future__ import annotations

import trio

from node.engine import api
from node.engine.engine import Engine, Say
from node.engine.exchange import Exchange
from node.engine.hivemind.environment import why_missing
from node.engine.hivemind.exchange import HivemindExchange
from node.engine.hivemind.process import AveragerGone, AveragerProcess, AveragerSettings
from node.engine.outbox import OutboxReader
from node.memory import AVERAGER_BYTES_PER_PARAMETER, memory_shortage

NOT_REPEATABLE = "hivemind adds contributions in the order in which they come: no sum can be repeated"


class HivemindEngine(Engine):
    def __init__(self, request: api.Open, memory: tuple[int, ...], nursery: trio.Nursery, say: Say) -> None:
        if why := why_missing(request.averager_python):
            raise ValueError(why)
        shortage = memory_shortage(AVERAGER_BYTES_PER_PARAMETER * request.elements)
        if shortage is not None:
            raise ValueError(f"hivemind's vectors do not fit: {shortage}; free memory, or choose a smaller model")
        super().__init__(request, memory, nursery, say)
        settings = AveragerSettings(
            python=request.averager_python,
            host=request.listen_host,
            port=request.listen_port + 1 if request.listen_port else 0,
            directory=self._directory / "averager",
        )
        self._averager_scope = trio.CancelScope()
        self._averager = AveragerProcess(settings, self._geometry)

    async def open(self) -> int:
        self._averager.start()
        self._nursery.start_soon(self._keep_averager)
        try:
            await self._averager.ready()
        except AveragerGone as error:
            raise ValueError(str(error)) from error
        return await super().open()

    async def _keep_averager(self) -> None:
        with self._averager_scope:
            await self._averager.run()

    def close(self) -> None:
        self._averager_scope.cancel()
        self._averager.close()
        super().close()

    def _make_exchange(self, request: api.Exchange, outbox: OutboxReader | None) -> Exchange:
        return HivemindExchange(request, tools=self._tools(), outbox=outbox, averager=self._averager)

    async def _recompute(self, request: api.Recompute) -> api.Answer:
        return api.Recomputed(id=request.id, verdict="unknown", why=NOT_REPEATABLE, bytes_received=0)
