"""Workers that a router sends requests to without a model behind them: they answer at once, and keep what came."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web


class StandInWorker:
    """``requests``: bodies of /generate, in the order in which they came."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.url = ""

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def generate(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        return web.json_response({"text": "x", "output_ids": [1], "meta_info": {"id": self.url}})


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[StandInWorker]:
    one = StandInWorker()
    app = web.Application()
    app.router.add_get("/health", one.health)
    app.router.add_post("/generate", one.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield one
    finally:
        await runner.cleanup()
