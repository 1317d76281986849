"""One request at a time: a bounded queue before the model.

A Laneformer is built to answer one request as fast as the machine can, so requests are not batched: they are answered
in the order in which they came, each with the whole machine. `Job`s are made, awaited and cancelled in the event loop;
the model runs in one other thread, always the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from model.decode import Answers, Generation, Sampling

log = logging.getLogger("model.serve")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What to generate."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stops: list[str]


class QueueFull(Exception):
    """As many requests wait as may; retry_seconds is when to ask again."""

    def __init__(self, waiting: int, retry_seconds: int):
        super().__init__(f"{waiting} requests are waiting, as many as may; ask again in {retry_seconds} s")
        self.retry_seconds = retry_seconds


class Job:
    """One request on its way through the queue; made in the event loop, where it is awaited or cancelled."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self.future: Future[Generation] = Future()  # replaced by the executor's
        self._text = ""
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def cancel(self) -> None:
        """Leave the queue, or stop after the token that is being made. Harmless after the end."""
        self._cancelled = True
        self.future.cancel()

    async def texts(self) -> AsyncIterator[str]:
        """The text so far, whenever there is more."""
        while not self.future.done():
            await self._news.wait()
            self._news.clear()
            yield self._text

    async def result(self) -> Generation:
        """What was generated. Raises what the model raised."""
        return await asyncio.wrap_future(self.future)

    def hear(self, texts: list[str]) -> bool:
        """Take the text so far, in the model's thread; returns whether to stop."""
        self._text = texts[0]
        self.tell()
        return self._cancelled

    def tell(self) -> None:
        """Wake whoever awaits the job, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._news.set)


class OneAtATime:
    """The queue, and the thread of the model. Use it as a context manager: its end cancels all requests.

    `failure` is what the model died of, if it did; then `on_failure` is called, in the model's thread. A ValueError is
    no such thing: that is how the model refuses one request.
    """

    def __init__(self, generate: Answers, waiting_limit: int):
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._generate = generate
        self._limit = waiting_limit
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._jobs: set[Job] = set()
        self._last_seconds = 0.0

    @property
    def waiting(self) -> int:
        """Requests that wait, besides the one that is being answered."""
        return max(0, len(self._jobs) - 1)

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def submit(self, ask: Ask) -> Job:
        """Put a request in the queue. Raises QueueFull."""
        if len(self._jobs) > self._limit:
            raise QueueFull(self.waiting, retry_seconds=math.ceil(min(60, max(1, self._last_seconds))))
        job = Job(ask)
        self._jobs.add(job)
        job.future = self._executor.submit(self._answer, job)
        job.future.add_done_callback(lambda future: self._end(job, future))
        return job

    def _answer(self, job: Job) -> Generation:
        begin = time.monotonic()
        (generation,), timing = self._generate(
            [job.ask.prompt],
            max_new_tokens=job.ask.max_new_tokens,
            sampling=job.ask.sampling,
            stops=job.ask.stops,
            on_token=job.hear,
        )
        self._last_seconds = time.monotonic() - begin
        log.info(
            "%s: %d prompt tokens, %d new, first after %.3f s, then %.1f tokens/s",
            generation.end_reason,
            generation.prompt_tokens,
            len(generation.tokens),
            timing.seconds_to_first_token,
            timing.tokens_per_second,
        )
        return generation

    def _end(self, job: Job, future: Future[Generation]) -> None:
        self._jobs.discard(job)
        job.tell()
        if not future.cancelled() and not isinstance(error := future.exception(), ValueError | None):
            log.error("the model failed: %s", error)
            self.failure = error
            self.on_failure()

    def cancel_all(self) -> None:
        """Cancel all requests, the one under way after the token that is being made."""
        for job in list(self._jobs):
            job.cancel()

    def __enter__(self) -> OneAtATime:
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel all requests and wait for the model's thread."""
        self.cancel_all()
        self._executor.shutdown(wait=True)
