"""A worker's load as metrics: pools and queues as they are when asked, steps and preemptions as they are reported."""

from collections.abc import Callable
from typing import Any

from common.engine.messages import LoadReport
from common.metrics import Metrics
from common.rpc.worker_context import WorkerContext

KV_STATES = ("free", "cached", "active", "held")
ROW_STATES = ("free", "cached", "held")


def publish_load(worker: WorkerContext, metrics: Metrics) -> None:
    """Once, when the worker starts. Pools that it does not have are left out."""
    if (language := worker.language) is not None:
        for state in KV_STATES:
            metrics.kv_blocks.labels(state=state).set_function(_field(lambda: language.load, f"{state}_blocks"))
        metrics.queue_depth.labels(queue="sequences").set_function(lambda: language.load.waiting)
        metrics.queue_depth.labels(queue="prompt tokens").set_function(lambda: language.load.pending_prefill_tokens)
        metrics.running_choices.set_function(lambda: language.load.running)
        language.on_load(_Counts(metrics))
    if (vision := worker.vision) is not None:
        for state in ROW_STATES:
            metrics.embedding_rows.labels(state=state).set_function(_field(lambda: vision.load, f"{state}_rows"))
        metrics.queue_depth.labels(queue="images").set_function(lambda: vision.load.pending_images)


def _field(load: Callable[[], Any], name: str) -> Callable[[], float]:
    return lambda: float(getattr(load(), name))


class _Counts:
    """Totals of the engine's reports as counters."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._steps = self._preemptions = 0

    def __call__(self, load: LoadReport) -> None:
        self._metrics.engine_steps.inc(max(0, load.steps - self._steps))
        self._metrics.preemptions.inc(max(0, load.preemptions - self._preemptions))
        self._steps, self._preemptions = load.steps, load.preemptions
