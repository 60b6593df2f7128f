"""`make compose-test`: builds the image, runs the mesh in containers, and looks whether it does what it has to.

Images that cannot be pulled are replaced: the base image by one out of Debian's packages, etcd by the one in our own
image, the collector and Jaeger by a receiver of OTLP; Prometheus and Grafana are left out, what configures them is
checked. Ends with 1 when a check has failed.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil

from tests.compose import changes, checks, daemon, images, static, tls, wheels
from tests.compose.command import ROOT, CommandFailed, works
from tests.compose.project import FILES, OURS, Project
from tests.compose.report import Report
from tests.compose.traffic import Client

NAME = "epd-compose-test"
BUILD_SECONDS = 3600.0
NEEDED_BYTES = 12 << 30  # of memory: two workers of each role, and a third
SCALES = {"gateway": 1, "encode": 2, "prefill": 2, "decode": 2}
Files = list[str | Path]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make compose-test", description=__doc__)
    parser.add_argument("--own-daemon", action="store_true", help="install and run a Docker daemon for this test alone")
    parser.add_argument("--work", type=Path, default=ROOT / ".run" / "compose", help="where images and wheels are kept")
    parser.add_argument("--no-tls", action="store_true", help="leave out the mesh with compose.tls.yaml")
    parser.add_argument("--keep", action="store_true", help="leave the volumes, with the models, for the next run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending containers and daemon
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if not options.own_daemon and not daemon.answers():
        print(daemon.ADVICE, file=sys.stderr)
        return 2
    if psutil.virtual_memory().available < NEEDED_BYTES:
        print(f"compose-test needs {NEEDED_BYTES >> 30} GiB of free memory", file=sys.stderr)
        return 2
    try:
        with daemon.own_daemon(work) if options.own_daemon else contextlib.nullcontext():
            report = asyncio.run(test(work, with_tls=not options.no_tls, keep=options.keep))
    except CommandFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    print(f"\n{report.table()}")
    return 1 if report.failed else 0


async def test(work: Path, *, with_tls: bool, keep: bool) -> Report:
    report = Report()
    await look_at_files(report, work)
    with contextlib.ExitStack() as stack:
        files, environ = prepare(work, stack)
        project = Project(NAME, files, environ)
        project.down(volumes=False)  # what a run that was broken off has left
        await report.check("image builds", functools.partial(build, project))
        await report.check("image size", checks.image_size)
        try:
            if not report.failed:
                await run_mesh(report, project)
            project.down(volumes=False)
            if with_tls and not report.failed:
                project = Project(NAME, tls_files(files), environ)
                await run_with_tls(report, project, work)
        finally:
            if report.failed:
                (work / "containers.log").write_text(project.compose("logs", "--no-color"))
                print(f"what containers said: {work / 'containers.log'}", file=sys.stderr)
            try:
                project.down(volumes=not keep)
            except CommandFailed as failure:  # must not hide why we are here
                print(failure, file=sys.stderr)
    return report


def prepare(work: Path, stack: contextlib.ExitStack) -> tuple[Files, dict[str, str]]:
    """Files and environment for compose, by what can be had. What the stack closes is needed for building."""
    environ: dict[str, str] = {}
    files: Files = ["compose.yaml"]
    if not works("docker", "buildx", "version"):
        environ["DOCKER_BUILDKIT"] = "0"
    base, release = images.base_image()
    foreign = {service["image"] for service in Project(NAME, files, {}).config()["services"].values()} - {OURS}
    if all(images.can_be_had(image) for image in sorted(foreign)):
        replaced: Files = []
    else:
        print("images that are not ours cannot be pulled: they are replaced", flush=True)
        replaced = ["docker/compose.local.yaml", FILES / "uncollected.yaml"]
    files += [*replaced, FILES / "test.yaml"]
    own_base = work / "own-base"  # a mark: an image made earlier is no pulled one
    if own_base.exists() or not images.can_be_had(base):
        if not images.can_be_had(base):
            images.make_base(base, release, work)
        own_base.touch()
        wheels.fill(work / "wheels")
        files.append(FILES / "wheels.yaml")
        options = stack.enter_context(wheels.served(work / "wheels"))
        environ |= {"PIP_OPTIONS": options, "WHEELS": str(work / "wheels"), "DOCKER_BUILDKIT": "0"}
    return files, environ


def tls_files(files: Files) -> Files:
    """compose.tls.yaml comes before what the test lays over everything."""
    at = files.index(FILES / "test.yaml")
    return [*files[:at], "compose.tls.yaml", *files[at:]]


async def build(project: Project) -> str:
    project.compose("build", "model", seconds=BUILD_SECONDS)
    return "docker/Dockerfile"


async def look_at_files(report: Report, work: Path) -> None:
    await report.check("compose files", static.compose_files)
    await report.check("Dockerfile", functools.partial(static.dockerfile, work))
    await report.check("Prometheus' files", static.prometheus_files)
    await report.check("Grafana's files", static.grafana_files)
    await report.check("collector's file", static.collector_file)


async def run_mesh(report: Report, project: Project) -> None:
    await report.check("health", lambda: checks.all_healthy(project, SCALES))
    if report.failed:
        return
    await report.check("confinement", lambda: checks.confined(project))
    client = Client(project)
    await client.connect(project.address("gateway", 50051))
    try:
        await report.check("chat over HTTP, Generate over gRPC", lambda: checks.answers_http(client))
        await report.check("a question about a picture", lambda: checks.answers_about_pictures(client))
        await report.check("one trace over all hops", lambda: checks.one_trace_over_all_hops(client))
        await report.check("bytes by shm", lambda: checks.bytes_go_by("shm", client))
        await report.check("metrics", lambda: checks.metrics_where_prometheus_looks(project, SCALES))
        await report.check("a decode worker dies", lambda: changes.a_killed_container(project, client))
        await report.check("docker kill of a prefill worker", lambda: changes.an_operators_kill(project, client))
        await report.check("restart of etcd", lambda: changes.etcd_starts_again(project, client))
        await report.check("decode 2 → 3", lambda: changes.scaled_up(project, client))
        await report.check("decode 3 → 2", lambda: changes.scaled_down(project, client))
    finally:
        await client.channel.close()
    await report.check("stop", lambda: changes.ended(project))


async def run_with_tls(report: Report, project: Project, work: Path) -> None:
    epd = shutil.which("epd", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert epd is not None
    scales = dict.fromkeys(SCALES, 1)
    await report.check("TLS: health", lambda: checks.all_healthy(project, scales))
    if report.failed:
        return
    await report.check("TLS: answers", lambda: tls.answers_by_tls(project, epd, work))
    await report.check("TLS: bytes by gRPC", lambda: checks.bytes_go_by("grpc", Client(project)))
    await report.check("TLS: etcd", lambda: tls.etcd_wants_a_certificate(project))


if __name__ == "__main__":
    sys.exit(main())
