"""Metrics of an engine, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import Step, StepTiming
from shared.telemetry.metrics import RECOVERY_SECONDS, STEP_SECONDS, Histogram, ServiceMetrics

_STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineMetrics(ServiceMetrics):
    """Metrics that the engine updates once per step, and others read from its scheduler."""

    def __init__(self, model: str = "") -> None:
        super().__init__(model)
        self.scheduler: Scheduler | None = None  # set once the workers have connected
        self.serving = False
        self.epochs = 0
        self.recovery = Histogram(RECOVERY_SECONDS)
        self.grammar_compile = Histogram(STEP_SECONDS)
        self.grammar_mask = Histogram(STEP_SECONDS)
        self._step_time = Histogram(STEP_SECONDS)
        self._step_gap = Histogram(STEP_SECONDS)
        self._step_sequences = Histogram(_STEP_SEQUENCES)
        self._step_tokens = Histogram(_STEP_TOKENS)

    def step_answered(self, step: Step, timing: StepTiming) -> None:
        """Counts a step."""
        self._step_time.observe(timing.took_s)
        self._step_gap.observe(timing.gap_s)
        self._step_sequences.observe(len(step.rows) - step.num_drafts)
        self._step_tokens.observe(step.num_tokens)

    def families(self) -> Iterator[Metric]:
        yield self._gauge("engine_ready", "1 while the workers can run steps.", self.serving)
        yield self._counter("epochs", "Times that the workers were configured.", self.epochs)
        if self.scheduler is not None:
            yield from self._scheduler_families(self.scheduler)
        for name, help_text, histogram in (
            ("step_time_seconds", "Time that the workers took for a step.", self._step_time),
            ("step_gap_seconds", "Time that the workers waited for a step.", self._step_gap),
            ("step_sequences", "Sequences in a step.", self._step_sequences),
            ("iteration_tokens_total", "Tokens in a step.", self._step_tokens),
            ("grammar_compile_seconds", "Time until a grammar is ready.", self.grammar_compile),
            ("grammar_mask_seconds", "Time until masks of a step are ready.", self.grammar_mask),
        ):
            yield self._histogram(name, help_text, histogram)
        yield self._recoveries("worker", self.recovery)

    def _scheduler_families(self, scheduler: Scheduler) -> Iterator[Metric]:
        stats, blocks = scheduler.stats, scheduler.blocks
        usage = 1 - blocks.num_free_blocks / blocks.num_blocks
        yield self._gauge("num_requests_running", "Running sequences.", scheduler.num_running)
        yield self._gauge("num_requests_waiting", "Waiting sequences.", scheduler.num_waiting)
        swapped = scheduler.swaps.num_swapped
        yield self._gauge("num_requests_swapped", "Sequences whose blocks are read.", swapped)
        yield self._gauge("cache_dir_blocks", "Blocks in CACHE_DIR.", len(blocks.tier))
        yield self._gauge("num_tokens_waiting", "Waiting tokens.", scheduler.num_waiting_tokens)
        yield self._gauge("kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", usage)
        for name, help_text, count in (
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_prompt_tokens),
            ("prefix_cache_evictions", "Cached blocks evicted to make room.", blocks.num_evictions),
            ("cache_dir_saved_blocks", "Blocks saved to CACHE_DIR.", stats.saved_blocks),
            ("cache_dir_loaded_blocks", "Blocks read from CACHE_DIR.", stats.loaded_blocks),
            ("cache_dir_failed_loads", "Sequences that could not be read.", stats.failed_loads),
            ("num_preemptions", "Preempted sequences.", stats.preemptions),
            ("lost_tokens", "Computed tokens lost with the workers' cache.", stats.lost_tokens),
            ("prompt_tokens", "Tokens of prompts that started to run.", stats.prompt_tokens),
            ("generation_tokens", "Tokens sampled.", stats.sampled_tokens),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", stats.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts accepted.", stats.accepted_tokens),
        ):
            yield self._counter(name, help_text, count)
