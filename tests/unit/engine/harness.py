"""An engine without process, thread or socket: steps are taken by the test."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import common.engine.messages as msg
from common.engine.core import EngineCore
from common.engine.embedding_pool import create_embedding_pool
from common.engine.executor import Batch, Executor
from common.engine.grammars import load_grammars
from common.engine.loop import load_executor
from common.engine.settings import EngineSettings, TimedModel
from common.engine.wire import Launch
from common.models.config import embedding_layout, kv_layout
from common.process import readable
from common.sampling import ChoiceTokens, SamplingParams
from common.transfer.pool_memory import PoolMemory

MIN_GAP = 1e-3  # of the reference's best two logits; below it float noise may decide, and the prompt proves nothing
STEP_LIMIT = 5000
INSTANT = TimedModel(base_seconds=0, seconds_per_prefill_token=0, seconds_per_decode=0, vocab_size=512, max_context=512)


class Harness:
    """Records every event; `tokens[seq][choice]`, `reasons[seq][choice]`, `failed[seq]` hold what a client would
    see."""

    def __init__(self, **settings: Any) -> None:
        settings = {"num_blocks": 64, "dtype": "float32", "executor": "timed", "timed": INSTANT, **settings}
        self.settings = EngineSettings(**settings)
        layout = kv_layout(self.settings)
        self.memory = PoolMemory.create(layout.num_layers, self.settings.num_blocks, layout.unit_bytes)
        self.embedding_layout = embedding_layout(self.settings)
        self.embeddings = create_embedding_pool(self.settings, self.embedding_layout)
        launch = Launch(self.settings, layout, self.embedding_layout)
        self.executor = load_executor(launch, self.memory, self.embeddings)
        self.events: list[Any] = []
        self.rings = 0
        self.batches: list[Batch] = []
        self.core = EngineCore(
            self.settings,
            self._recording(),
            self.memory,
            model=layout.model,
            revision=layout.revision,
            emit=self._take,
            ring=self._ring,
            grammars=load_grammars(self.settings, self.executor),
        )
        self.tokens: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.reasons: dict[str, dict[int, str]] = defaultdict(dict)
        self.failed: dict[str, msg.Failed] = {}
        self.done: dict[str, msg.Done] = {}
        self.logprobs: dict[str, list[Any]] = defaultdict(list)

    @classmethod
    def modules(cls, model_dir: Path, **settings: Any) -> "Harness":
        return cls(**{"executor": "modules", "model_dir": str(model_dir), "device": "cpu", **settings})

    def _recording(self) -> Executor:
        real, execute = self.executor, self.executor.execute

        def recorded(batch: Batch, layer_done: Any) -> Any:
            self.batches.append(batch)
            return execute(batch, layer_done)

        real.execute = recorded  # type: ignore[method-assign]
        return real

    def _ring(self) -> None:
        self.rings += 1

    def _take(self, event: Any) -> None:
        self.events.append(event)
        match event:
            case msg.Tokens(items=items):
                for seq, tokens in items:
                    self._count(seq, tokens)
            case msg.Prefilled(seq=seq, first=first):
                for tokens in first:
                    self._count(seq, tokens)
            case msg.Failed(seq=seq):
                self.failed[seq] = event
            case msg.Done(seq=seq):
                assert seq not in self.done
                self.done[seq] = event

    def _count(self, seq: str, tokens: ChoiceTokens) -> None:
        self.tokens[seq][tokens.choice] += tokens.token_ids
        self.logprobs[seq] += tokens.logprobs or []
        if tokens.finish_reason:
            self.reasons[seq][tokens.choice] = tokens.finish_reason

    # --- what a service does ----------------------------------------------------------------------------------------

    def submit(self, seq: str, prompt: Iterable[int], **options: Any) -> None:
        self.core.handle(msg.Submit(seq=seq, prompt=list(prompt), **_with_sampling(options)))

    def reserve(self, seq: str, prompt: Iterable[int], **options: Any) -> None:
        self.core.handle(msg.Reserve(seq=seq, prompt=list(prompt), **_with_sampling(options)))

    def send(self, command: Any) -> None:
        self.core.handle(command)

    def step(self) -> bool:
        return self.core.step()

    def run(self) -> "Harness":
        """Steps until nothing is left to compute."""
        idle = 0
        for _ in range(STEP_LIMIT):
            self._wait_for_grammars()
            idle = 0 if self.step() else idle + 1
            if idle == 2:
                return self
        raise AssertionError("the engine does not come to rest")

    def _wait_for_grammars(self) -> None:
        grammars = self.core.grammars
        while grammars is not None and any(not future.done() for _, future, _ in grammars._waiting):
            readable((grammars.wake,), 10)
            grammars.heard()

    def one(self, prompt: Iterable[int], **options: Any) -> list[int]:
        """The tokens of one request, alone."""
        seq = f"one-{len(self.done)}-{len(self.failed)}"
        self.submit(seq, prompt, **options)
        self.run()
        assert seq not in self.failed, self.failed[seq]
        return self.tokens[seq][0]

    def of(self, kind: type, seq: str | None = None) -> list[Any]:
        return [each for each in self.events if isinstance(each, kind) and seq in (None, getattr(each, "seq", None))]

    def clean(self) -> None:
        """Nothing left: integrity holds and every block is free or cached."""
        assert self.core.check_integrity() == []
        load = self.core.load()
        assert (load.running, load.waiting, load.active_blocks, load.held_blocks) == (0, 0, 0, 0)
        assert load.free_blocks + load.cached_blocks == load.total_blocks


def _with_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a command; those of SamplingParams are gathered. Greedy, 8 tokens, unless told otherwise."""
    names = SamplingParams.__struct_fields__
    sampling = {"temperature": 0.0, "max_tokens": 8, **{name: options.pop(name) for name in names if name in options}}
    return {"sampling": SamplingParams(**sampling), **options}


def disaggregated(
    prefill: Harness, decode: Harness, seq: str, prompt: list[int], *, noise: bool = True, **options: Any
) -> dict[int, list[int]]:
    """Prefill here, copy the blocks by hand, decode there: every choice's tokens."""
    prefill.submit(seq, prompt, publish=True, decode=False, **dict(options))
    prefill.run()
    assert seq not in prefill.failed, prefill.failed[seq]
    decode.reserve(seq, prompt, **dict(options))
    decode.run()
    assert seq not in decode.failed, decode.failed[seq]
    started, prefilled = prefill.of(msg.Started, seq)[0], prefill.of(msg.Prefilled, seq)[0]
    reserved = decode.of(msg.Reserved, seq)[0]
    source, target = started.blocks[reserved.hit_blocks :], reserved.blocks[reserved.hit_blocks :]
    assert len(source) == len(target)
    decode.memory.data[:, target] = prefill.memory.data[:, source]
    decode.send(msg.Commit(seq=seq, first=prefilled.first))
    prefill.send(msg.Release(seq=seq))
    prefill.run()
    decode.run()
    assert seq not in decode.failed, decode.failed[seq]
    return {index: tokens + decode.tokens[seq][index] for index, tokens in prefill.tokens[seq].items()}


class Reference:
    """transformers' own generate: float32, greedy, one unpadded prompt at a time, generation_config overridden."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.vocab_size = self.model.config.vocab_size
        self._known: dict[tuple, list[int]] = {}

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """A random prompt without special tokens."""
        generator = torch.Generator().manual_seed(1000 * length + seed)
        return torch.randint(3, self.vocab_size, (length,), generator=generator).tolist()

    @torch.inference_mode()
    def tokens(self, prompt: list[int], *, max_tokens: int = 8, repetition_penalty: float = 1.0) -> list[int]:
        """Refuses, by AssertionError, a prompt whose best two tokens are ever closer than MIN_GAP."""
        key = (tuple(prompt), max_tokens, repetition_penalty)
        if key not in self._known:
            out = self.model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                num_beams=1,
                max_new_tokens=max_tokens,
                repetition_penalty=repetition_penalty,
                eos_token_id=list(self.eos_token_ids),
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
            best = torch.stack(out.scores)[:, 0].topk(2).values
            gap = float((best[:, 0] - best[:, 1]).min())
            assert gap >= MIN_GAP, f"a near tie ({gap:.1e}): choose another prompt"
            self._known[key] = out.sequences[0, len(prompt) :].tolist()
        return self._known[key]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (int(self.model.config.eos_token_id),)
