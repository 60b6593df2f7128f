"""Prometheus as compose configures it, on this machine: the same jobs and interval, other addresses."""

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from common.registry.local_etcd import free_port

CONFIGURATION = Path(__file__).parents[2] / "docker" / "prometheus.yaml"
START_SECONDS = 60.0
END_SECONDS = 15.0
HINT = "make pictures needs a Prometheus server: apt-get install prometheus, or --prometheus FILE of a released binary"


def binary(named: str = "") -> str:
    """Raises SystemExit where there is none."""
    found = shutil.which(named or "prometheus")
    if found is None:
        raise SystemExit(HINT)
    return found


def configuration(targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """docker/prometheus.yaml with these targets (host:port by job) where compose's DNS would name them."""
    found: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    for job in found["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    return found


def scrape_seconds() -> float:
    interval: str = yaml.safe_load(CONFIGURATION.read_text())["global"]["scrape_interval"]
    return float(interval.removesuffix("s"))


class Prometheus:
    """One that runs, by its HTTP API."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False)

    async def _get(self, path: str, **parameters: object) -> Any:
        answer = (await self._http.get(f"/api/v1/{path}", params={k: str(v) for k, v in parameters.items()})).json()
        if answer["status"] != "success":
            raise RuntimeError(f"Prometheus: {answer['error']} ({parameters})")
        return answer["data"]

    async def ready(self) -> bool:
        try:
            return (await self._http.get("/-/ready")).is_success
        except httpx.TransportError:
            return False

    async def scraping(self) -> None:
        """Until every target is scraped. Raises TimeoutError."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                active = (await self._get("targets", state="active"))["activeTargets"]
                if active and all(each["health"] == "up" for each in active):
                    return
                await asyncio.sleep(0.2)

    async def over(
        self, query: str, start: float, end: float, step: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Labels and (Unix time, value) of each series; without values that are none (0/0)."""
        data = await self._get("query_range", query=query, start=start, end=end, step=step)
        series = [(each["metric"], [(at, float(value)) for at, value in each["values"]]) for each in data["result"]]
        return [(labels, [point for point in points if math.isfinite(point[1])]) for labels, points in series]

    async def close(self) -> None:
        await self._http.aclose()


@asynccontextmanager
async def prometheus(program: str, directory: Path, targets: Mapping[str, Sequence[str]]) -> AsyncIterator[Prometheus]:
    """A server with its data in `directory`, which exists. Raises RuntimeError when it does not start."""
    settings, log = directory / "prometheus.json", directory / "prometheus.log"
    settings.write_text(json.dumps(configuration(targets)))  # JSON is YAML, too
    address = f"127.0.0.1:{free_port()}"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(program, f"--config.file={settings}", f"--storage.tsdb.path={directory / 'data'}"),
            f"--web.listen-address={address}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    server = Prometheus(f"http://{address}")
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                if process.returncode is not None:
                    raise RuntimeError(f"Prometheus has ended: {log.read_text()[-2000:]}")
                if await server.ready():
                    break
                await asyncio.sleep(0.2)
        yield server
    finally:
        await server.close()
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
