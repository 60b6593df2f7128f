"""What the default vision-language model knows, asked through the mesh: pictures of combinations that it never saw.

Exact match of the whole answer, by kind of question; the same questions about blank pictures; and the best that can be
had without seeing (majority guess). A picture's questions follow each other: all but the first find its prefix cached.

    python -m bench accuracy [--pictures 500] [--seed 1] [--kinds background,count,colour,shape] [--concurrency 12]
"""

import argparse
import asyncio
import io
from collections import Counter, defaultdict
from typing import Any

from rich.progress import Progress

from bench.mesh import BenchMesh
from bench.report import save, show
from common.models.catalog import DEFAULT_VISION_MODEL
from common.models.fetch import find_model
from common.models.pictures import KINDS, Picture, Question, blank, heldout
from epd.v1 import generation_pb2

AIMS = {"background": 0.93, "colour": 0.80, "shape": 0.80, "count": 0.75}
MAX_TOKENS = 16
TIMEOUT_SECONDS = 600.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(AIMS), help=f"some of {', '.join(KINDS)}; one question of each")
    parser.add_argument("--concurrency", type=int, default=12)


async def ask(mesh: BenchMesh, image: bytes, question: str) -> str:
    request = generation_pb2.GenerateRequest()
    message = request.chat.messages.add(role="user")
    message.content.add(image=generation_pb2.Image(data=image))
    message.content.add(text=question)
    request.sampling.temperature = 0
    request.sampling.max_tokens = MAX_TOKENS
    text = ""
    async for response in mesh.stub.Generate(request, timeout=TIMEOUT_SECONDS):
        text += "".join(choice.text for choice in response.choices)
    return text.strip()


async def ask_all(
    mesh: BenchMesh, asked: list[tuple[Picture, list[Question]]], lines: int
) -> list[tuple[Question, str]]:
    """(question, answer), a picture at a time in each of the lines."""
    answers: list[tuple[Question, str]] = []
    todo = iter(asked)
    with Progress(transient=True) as progress:
        task = progress.add_task("pictures", total=len(asked))

        async def line() -> None:
            for picture, questions in todo:
                image = picture.png()
                for question in questions:
                    answers.append((question, await ask(mesh, image, question.text)))
                progress.advance(task)

        await asyncio.gather(*(line() for _ in range(lines)))
    return answers


def by_kind(answers: list[tuple[Question, str]]) -> dict[str, float]:
    """Share of exact matches of each kind."""
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for question, answer in answers:
        right[question.kind].append(answer == question.answer)
    return {kind: sum(found) / len(found) for kind, found in right.items()}


def majority(questions: list[Question]) -> dict[str, float]:
    """What whoever does not see the pictures gets right of each kind at most: the commonest answer to each wording."""
    counts: defaultdict[str, defaultdict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for question in questions:
        counts[question.kind][question.text][question.answer] += 1
    return {
        kind: sum(max(found.values()) for found in texts.values()) / sum(found.total() for found in texts.values())
        for kind, texts in counts.items()
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    pictures = heldout(options.pictures, options.seed)
    kinds = options.kinds.split(",")
    asked = [
        (
            picture,
            list({question.kind: question for question in picture.questions() if question.kind in kinds}.values()),
        )
        for picture in pictures
    ]
    questions = [question for _, mine in asked for question in mine]
    file = io.BytesIO()
    blank(pictures[0]).save(file, "PNG")
    grey = file.getvalue()
    async with BenchMesh(str(find_model(DEFAULT_VISION_MODEL)), ("encode", "prefill", "decode")) as mesh:
        real = await ask_all(mesh, asked, options.concurrency)
        # One blank picture, so one answer to each wording.
        texts = sorted({question.text for question in questions})
        said = dict(zip(texts, await asyncio.gather(*(ask(mesh, grey, text) for text in texts)), strict=True))
    blanked = [(question, said[question.text]) for question in questions]
    return {
        "pictures": len(pictures),
        "questions": Counter(question.kind for question in questions),
        "real": by_kind(real),
        "blank": by_kind(blanked),
        "majority": majority(questions),
    }


def run(options: argparse.Namespace) -> None:
    result = asyncio.run(measure(options))
    rows = []
    for kind in result["real"]:
        real, empty, guess = (result[name].get(kind, 0.0) for name in ("real", "blank", "majority"))
        aim = f"{AIMS[kind]:.2f}" if kind in AIMS else ""
        rows.append([kind, str(result["questions"][kind]), f"{real:.3f}", aim, f"{empty:.3f}", f"{guess:.3f}"])
    show(
        f"{DEFAULT_VISION_MODEL} on {result['pictures']} held-out pictures, through the mesh",
        ["question", "asked", "right", "aim", "blank picture", "majority guess"],
        rows,
        "aim of a blank picture: at most the majority guess + 0.05",
    )
    print(f"saved {save('accuracy', result)}")
