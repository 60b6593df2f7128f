"""What a mesh in containers has to do while containers come, go and die."""

import asyncio

from tests.compose.checks import roles
from tests.compose.command import CommandFailed, run
from tests.compose.project import Project, inside, inspected
from tests.compose.traffic import Client

RETURN_SECONDS = 240.0
QUESTIONS = (
    "Write a short story about a fox and a river.",
    "Explain how rain comes about.",
    "Describe the work of a baker.",
    "Tell me about the planets.",
)
_TOKENS = 120  # long enough to be still under way when a command of Docker has done its work
_TRIES = 10  # rounds of requests until one reaches a certain worker


async def a_killed_container(project: Project, client: Client) -> str:
    """A decode worker's processes are killed in mid-answer: all answers are as without, and the container is back.

    Not by `docker kill`: what an operator kills by that, Docker does not start again.
    """
    plain = await client.undisturbed(QUESTIONS, _TOKENS)
    victim = project.containers("decode")[0]
    tasks = await client.begin(QUESTIONS, _TOKENS)
    kill_all(victim.id)
    answers = await asyncio.gather(*tasks)
    assert [answer.tokens for answer in answers] == plain
    resumed = sum(answer.accounting.attempts > 1 for answer in answers)
    assert resumed, "no request was on the killed worker"
    async with asyncio.timeout(RETURN_SECONDS):
        while True:
            state = inspected(victim.id)
            if state["RestartCount"] == 1 and state["State"]["Health"]["Status"] == "healthy":
                break
            await asyncio.sleep(1)
    await reached(client, victim.host)
    return f"{len(plain)} answers as without, {resumed} of them resumed; {victim.name} is back and answers"


def kill_all(container: str) -> None:
    """Every process but docker-init, which then ends as they did."""
    try:
        run("docker", "exec", container, "sh", "-c", "kill -9 -1")
    except CommandFailed as ended:  # the shell itself goes with its container
        if "ended with 137" not in str(ended):
            raise


async def an_operators_kill(project: Project, client: Client) -> str:
    """`docker kill` of a prefill worker: requests go on; `up` starts it again."""
    victim = project.containers("prefill")[0]
    run("docker", "kill", victim.id)
    answers = await asyncio.gather(*(client.chat(f"{question} Be brief.", 8) for question in QUESTIONS))
    assert all(victim.host not in answer.accounting.prefill_worker for answer in answers)
    await asyncio.to_thread(project.up)
    state = inspected(victim.id)["State"]
    assert state["Health"]["Status"] == "healthy"
    return f"{len(answers)} answers without it; `up` has started {victim.name} again"


async def etcd_starts_again(project: Project, client: Client) -> str:
    """It keeps its data in memory: requests go on without it, and every worker writes itself down anew."""
    names = {
        container.host for container in project.containers() if container.service in ("encode", "prefill", "decode")
    }
    (gateway,) = project.containers("gateway")
    restart = asyncio.create_task(asyncio.to_thread(project.compose, "restart", "etcd"))
    answers = [await client.chat(f"{question} In one word.", 8) for question in QUESTIONS]
    await restart
    async with asyncio.timeout(RETURN_SECONDS):
        while True:
            known = registered(gateway.id)
            if all(name in known for name in names):
                break
            await asyncio.sleep(1)
    await client.chat("Are you there?", 8)
    return f"{len(answers)} answers meanwhile; all {len(names)} workers are in it again"


def registered(gateway: str) -> str:
    """What `epd status` says of the registry; empty while it says nothing."""
    try:
        return inside(gateway, "env", "COLUMNS=200", "epd", "status", "--address", "127.0.0.1:50051")
    except CommandFailed:
        return ""


async def scaled_up(project: Project, client: Client) -> str:
    before = {container.id for container in roles(project)}
    await asyncio.to_thread(project.up, "--scale", "decode=3")
    after = {container.id: container for container in roles(project)}
    assert before < after.keys(), "containers were made anew"
    (new,) = (after[id] for id in after.keys() - before)
    assert new.service == "decode"
    took = await reached(client, new.host)
    return f"{new.name} beside the others, which were left alone; number {took} of the requests went to it"


async def scaled_down(project: Project, client: Client) -> str:
    """One of three leaves while all are busy: it finishes or hands over, and nobody notices."""
    plain = await client.undisturbed(QUESTIONS, _TOKENS)
    tasks = await client.begin(QUESTIONS, _TOKENS)
    await asyncio.to_thread(project.up, "--scale", "decode=2")
    assert [answer.tokens for answer in await asyncio.gather(*tasks)] == plain
    assert len(project.containers("decode")) == 2
    return f"{len(plain)} answers as without"


async def ended(project: Project) -> str:
    """SIGTERM ends every role by itself, with 0, well before Docker would kill it."""
    project.compose("stop", seconds=180)
    codes = {container.name: container.exit_code for container in roles(project)}
    assert set(codes.values()) == {0}, codes
    return f"{len(codes)} containers of roles ended with 0"


async def reached(client: Client, host: str) -> int:
    """Asks until the decode worker on that host has answered; the number of requests that took."""
    count = 0
    for attempt in range(_TRIES):
        asked = [f"{question} Part {attempt}." for question in QUESTIONS]
        for answer in await asyncio.gather(*(client.chat(question, 8) for question in asked)):
            count += 1
            if host in answer.accounting.decode_worker:
                return count
    raise AssertionError(f"{count} requests, none of them to {host}")
