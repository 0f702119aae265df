"""The scheduler: which requests run in a step, how many tokens of each, in which blocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from vllm.config import CacheConfig, SchedulerConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.guests import Rest, SchedulerGuest, hooks
from vllm.v1.core.kv_cache_groups import Blocks
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput, SchedulerStats
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import NO_TOKEN, NO_TOKEN_LEFT, FollowingTokens, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, repeats_itself

# Tokens of a step among several in flight. A stage has nothing to do for as long as another one computes the largest
# step, so there are some for each stage; smaller ones than the first number cost more than that, and than the second
# more than a stage that has no step at all.
_SMALL_PART, _LEAST_PART = 256, 64
_PARTS_A_STAGE = 4


class Scheduler:
    """Continuous batching under a token budget, with chunked prefill, prefix caching and preemption.

    A step serves running requests first, in the order of their admission (so a prompt that is prefilled over several
    steps, always the last one admitted, comes after the decodes), then admits waiting ones while slots, budget and
    blocks last. No request is admitted in a step that preempts one: so no request shares a block that a preempted one
    registered in the same step. A preempted request starts again, with what the cache still has of it.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        max_model_len: int,
        make_guests: Callable[[Scheduler], Sequence[SchedulerGuest]] = lambda scheduler: (),
    ) -> None:
        """`make_guests` is called with the scheduler once it has its requests and blocks."""
        if not scheduler_config.enable_chunked_prefill and scheduler_config.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_model_len={max_model_len} when chunked prefill "
                f"is off, got {scheduler_config.max_num_batched_tokens}"
            )
        self.config, self.cache_config = scheduler_config, cache_config
        self._max_running = min(scheduler_config.max_num_seqs, cache_config.num_states or scheduler_config.max_num_seqs)
        self.max_model_len = max_model_len
        self.kv = KVCacheManager(cache_config)
        # Ends that no step gives, such as those of requests that cannot be admitted; taken by the core.
        self.refused: list[EngineCoreOutput] = []
        self.requests: dict[str, Request] = {}
        self._by_priority = scheduler_config.policy == "priority"
        self.waiting = RequestQueue(self._by_priority)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_ended = 0  # requests that ended, for any reason
        self._finished_req_ids: list[str] = []
        self._arrivals = itertools.count()
        self.rest = Rest()  # of guests that wait for something else
        self.use_guests(make_guests(self))

    def use_guests(self, guests: Sequence[SchedulerGuest]) -> None:
        """Call these from now on. No request may be there."""
        self.guests = tuple(guests)
        self.kv.use_guests(guests)
        self._on_queued, self._on_ready = hooks(guests, "queued"), hooks(guests, "ready")
        self._prepares, self._prepared = hooks(guests, "prepares"), hooks(guests, "prepared")
        self._on_next, self._on_admitted = hooks(guests, "next"), hooks(guests, "admitted")
        self._on_waits, self._awaits = hooks(guests, "waits"), hooks(guests, "awaits")
        self._on_preempted, self._on_ended = hooks(guests, "preempted"), hooks(guests, "ended")
        self._on_grow, self._on_fill = hooks(guests, "grow"), hooks(guests, "fill")
        self._shares, self._on_computes = hooks(guests, "share"), hooks(guests, "computes")
        self._on_discarded, self._transfers = hooks(guests, "discarded"), hooks(guests, "transfers")
        self._lets_go, self._counts = hooks(guests, "let_go"), hooks(guests, "counts")
        self._takes_whole_steps = any(guest.takes_whole_steps for guest in guests)
        self._begin_updates, self._on_update = hooks(guests, "begin_update"), hooks(guests, "update")

    def add_request(self, request: Request) -> None:
        """Queue a request. ValueError: the id is in use, the prompt is empty or longer than max_model_len, or
        (VLLMValidationError) the prompt and max_tokens together need more blocks than the pool has."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
        if not 0 < request.num_tokens < self.max_model_len + 1:
            limits = f"the prompt must have 1 to {self.max_model_len} tokens, got {request.num_tokens}"
            raise ValueError(f"request {request.request_id!r}: {limits}")
        # The last generated token is never computed, so it needs no place.
        longest = min(request.num_tokens + max(request.max_tokens, 1) - 1, self.max_model_len)
        capacity = self.kv.capacity(self.config.max_num_batched_tokens)
        if longest > capacity:
            message = (
                f"request {request.request_id!r} may need {longest} tokens of KV cache (prompt {request.num_tokens}, "
                f"max_tokens {request.max_tokens}), but the cache holds {capacity}"
            )
            raise VLLMValidationError(message, "max_tokens", request.max_tokens)
        request.length_limit = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        self.requests[request.request_id] = request
        try:
            for queued in self._on_queued:
                queued(request)
            self._prepare(request, 0)
        except BaseException:
            # A guest refuses it, maybe by code of others.
            self._end(request)
            raise

    def _prepare(self, request: Request, first: int) -> None:
        """Queue a request that no guest prepares any more, from the one of number `first` on of those that do."""
        if any(prepares(request) for prepares in self._prepares[first:]):
            request.status = RequestStatus.PREPARING
        else:
            self._queue(request)

    def _queue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        request.arrival_index = next(self._arrivals)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        self.waiting.add(request)
        for waits in self._on_waits:
            waits(request)

    def queue_prepared(self) -> bool:
        """Queue the requests that can be admitted by now; those that never can be end. False: there are ends to return,
        or all requests are still prepared."""
        for number, prepared in enumerate(self._prepared):
            for request, error in prepared(not self.running and not self.waiting):
                if error is None:
                    self._prepare(request, number + 1)
                else:
                    self._refuse(request, error)
        if self.running or self.waiting or not self.requests:
            return not self.refused
        is_preparing = all(request.status is RequestStatus.PREPARING for request in self.requests.values())
        return not self.refused and (not is_preparing or self.is_transferring)

    @property
    def is_transferring(self) -> bool:
        """Whether steps have to be run even if they are empty."""
        return any(transfers() for transfers in self._transfers)

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests in any state; unknown ids are ignored."""
        aborted_running = False
        for request_id in list(request_ids):
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.WAITING:
                self.waiting.remove(request)
            elif request.status is RequestStatus.RUNNING:
                aborted_running = True
            self._end(request)
        if aborted_running:
            self._drop_finished_from_running()

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False, and nothing done, while requests run, unless these are to begin anew
        (`reset_running_requests`; no step may be in flight)."""
        if reset_running_requests:
            self._begin_anew(list(self.running))
            for let_go in self._lets_go:
                let_go()
        return self.kv.reset_prefix_cache()

    def _begin_anew(self, requests: list[Request]) -> None:
        nothing = SchedulerOutput([], CachedRequestData(), {}, 0, [], [])
        for request in reversed(requests):
            self._preempt(request, nothing)
            self._finished_req_ids.append(request.request_id)

    def stats(self) -> SchedulerStats:
        """Counts for logs and metrics."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preparing=len(self.requests) - len(self.running) - len(self.waiting),
            kv_cache_usage=self.kv.usage,
            num_preemptions=self.num_preemptions,
            **vars(self.kv.stats),
            **{name: value for counts in self._counts for name, value in counts().items()},
        )

    def schedule(self) -> SchedulerOutput:
        """Choose the next step. Its tokens count as computed from now on."""
        self._step_tokens, self._step_requests = self._sizes_of_step()
        step = SchedulerOutput([], CachedRequestData(), {}, 0, self._finished_req_ids, [])
        self._finished_req_ids = []
        self.kv.begin_step(step)
        self._schedule_running(step)
        if not step.preempted_req_ids:
            self._admit_waiting(step)
        self.kv.finish_step()
        for fill in self._on_fill:
            fill(step)
        return step

    def _sizes_of_step(self) -> tuple[int, int]:
        """The most tokens of the next step, and of running requests. Where several steps are in flight, it takes its
        part of what there is to compute, so that the others have as much."""
        most, num_steps = self.config.max_num_batched_tokens, self.config.num_steps_in_flight
        if num_steps == 1:
            return most, len(self.running)
        num_requests = -(-len(self.running) // num_steps)
        if not self.config.enable_chunked_prefill or self._takes_whole_steps:
            return most, num_requests
        known = self.waiting.num_tokens
        known += sum(max(len(request.token_ids) - request.num_computed_tokens, 0) for request in self.running)
        share = -(-known // num_steps)
        part = max(-(-share // _PARTS_A_STAGE), min(share, _SMALL_PART), _LEAST_PART)
        return min(part, max(most // num_steps, 1)), num_requests

    def _schedule_running(self, step: SchedulerOutput) -> None:
        budget, requests_left = self._step_tokens, self._step_requests
        cached, scheduled = step.scheduled_cached_reqs, step.num_scheduled_tokens
        running, grow = self.running, self.kv.grow
        shares, grows, on_computes = self._shares, self._on_grow, self._on_computes
        index = 0
        # Preemption shortens the list during the loop.
        while index < len(running) and budget > 0 and requests_left > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_new = len(request.token_ids) - num_computed
            if request.num_pending_tokens or num_new <= 0:
                num_new = request.num_tokens_to_compute - num_computed
                if num_new <= 0:
                    # Its last step is in flight.
                    index += 1
                    continue
            num_wanted = num_new
            if num_new > budget:
                num_new = budget
            if shares and num_wanted > 1:
                num_new = self._share(request, num_computed, num_new)
                if not num_new:
                    index += 1
                    continue
            others = min(len(running) - index, requests_left) - 1
            grown = self._grow_further(step, request, num_new, budget - others) if grows else None
            if grown is not None:
                num_new, added = grown
            else:
                added = grow(request, num_new)
            if added is None:
                victim = max(running, key=Request.sort_key) if self._by_priority else running[-1]
                position = running.index(victim)
                num_given_back = self._preempt(victim, step)
                budget += num_given_back
                requests_left += num_given_back > 0
                if position < index:
                    index -= 1
                continue
            for computes in on_computes:
                computes(request, num_computed, num_computed + num_new, step)
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(added)
            cached.num_computed_tokens.append(num_computed)
            scheduled[request.request_id] = num_new
            request.num_computed_tokens = num_computed + num_new
            budget -= num_new
            requests_left -= 1
            index += 1
        step.total_num_scheduled_tokens = self._step_tokens - budget

    def _share(self, request: Request, begin: int, num_new: int) -> int:
        for share in self._shares:
            num_new = share(request, begin, num_new)
        return num_new

    def _grow_further(
        self, step: SchedulerOutput, request: Request, num_new: int, room: int
    ) -> tuple[int, Blocks | None] | None:
        """See SchedulerGuest.grow. `room` leaves a token to each request that comes after this one."""
        for grow in self._on_grow:
            grown: tuple[int, Blocks | None] | None = grow(step, request, num_new, room)
            if grown is not None:
                return grown
        return None

    def _preempt(self, victim: Request, step: SchedulerOutput) -> int:
        """Free the victim's slot and blocks; returns the tokens that were scheduled for it in this step."""
        request_id = victim.request_id
        num_scheduled = step.num_scheduled_tokens.pop(request_id, 0)
        if num_scheduled:
            cached = step.scheduled_cached_reqs
            where = cached.req_ids.index(request_id)
            for column in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
                del column[where]  # type: ignore[attr-defined]
            self.kv.forget_step(victim, victim.num_computed_tokens - num_scheduled)
        self.running.remove(victim)
        self.kv.free(victim)
        for preempted in self._on_preempted:
            preempted(victim, step)
        victim.status = RequestStatus.WAITING
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(victim)
        step.preempted_req_ids.append(request_id)
        return num_scheduled

    def _admit_waiting(self, step: SchedulerOutput) -> None:
        passed_over: list[Request] = []
        try:
            self._admit_but(passed_over, step)
        finally:
            for request in passed_over:
                self.waiting.add(request)

    def _admit_but(self, passed_over: list[Request], step: SchedulerOutput) -> None:
        """Admit waiting requests, or move them to `passed_over`: those that the next step can begin further on."""
        budget = self._step_tokens - step.total_num_scheduled_tokens
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            request = self._next_waiting()
            if request is None:
                break
            if not self._make_ready(request):
                continue
            prefix = self.kv.find_prefix(request)
            if any(awaits(request, prefix.num_tokens) for awaits in self._awaits):
                self.waiting.remove(request)
                passed_over.append(request)
                continue
            num_cached = prefix.num_tokens
            num_new = request.num_tokens - num_cached
            if num_new > budget:
                if not self.config.enable_chunked_prefill:
                    break
                num_new = budget
            num_new = self._share(request, num_cached, num_new)
            if not num_new:
                self.waiting.remove(request)
                passed_over.append(request)
                continue
            if not self.kv.admit(request, prefix, num_new):
                break
            self.waiting.remove(request)
            self.running.append(request)
            for admitted in self._on_admitted:
                admitted(request)
            for computes in self._on_computes:
                computes(request, num_cached, num_cached + num_new, step)
            request.status = RequestStatus.RUNNING
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_cached
                request.scheduled_time = time.monotonic()
            request.num_computed_tokens = num_cached + num_new
            step.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=request.request_id,
                    prefill_token_ids=list(request.token_ids),
                    num_prompt_tokens=request.num_prompt_tokens,
                    sampling_params=request.sampling_params,
                    block_ids=self.kv.blocks_of(request.request_id),
                    num_computed_tokens=num_cached,
                    pooling_params=request.pooling_params,
                    next_prompt_row=request.next_prompt_row,
                )
            )
            step.num_scheduled_tokens[request.request_id] = num_new
            budget -= num_new
        step.total_num_scheduled_tokens = self._step_tokens - budget

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Process a step's results: append tokens, end finished requests, slice the readings."""
        outputs: list[EngineCoreOutput] = []
        num_ended_before = self.num_ended
        logprobs = model_runner_output.logprobs
        prompt_logprobs, beam_scores = model_runner_output.prompt_logprobs, model_runner_output.beam_scores
        allowed_mass, following = model_runner_output.allowed_mass, model_runner_output.following
        begun: dict[str, EngineCoreOutput] = {}
        for begin_update in self._begin_updates:
            begun |= begin_update(model_runner_output)
        token_ids = model_runner_output.sampled_token_ids.tolist()
        for index, request_id in enumerate(model_runner_output.req_ids):
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted while the step ran
            token_id = token_ids[index]
            output = (begun.pop(request_id, None) if begun else None) or EngineCoreOutput(request_id, [])
            output.num_cached_tokens, output.scheduled_time = request.num_cached_tokens, request.scheduled_time
            if token_id != NO_TOKEN:
                request.token_ids.append(token_id)
                output.new_token_ids.append(token_id)
            if request.pooling_params is not None:
                output.pooling_output = model_runner_output.pooled[request_id]
            elif request.reads_logprobs:
                row = logprobs[index]
                assert row is not None
                output.logprobs = [*(output.logprobs or ()), row]
                if request_id in beam_scores:
                    output.logprobs.append(beam_scores[request_id])
            if request_id in allowed_mass:
                output.allowed_mass = [*(output.allowed_mass or ()), allowed_mass[request_id]]
            if prompt_logprobs:
                self._add_prompt_logprobs(output, model_runner_output)
            num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
            may_end = request.repetition is not None or token_id in request.end_token_ids
            if may_end or num_output_tokens >= request.length_limit:
                self._check_stop(request, token_id, output)
                if output.finish_reason is not None:
                    self._end(request)
            if request_id in following:
                self._append_following(request, following[request_id], output)
            outputs.append(output)
        for update in self._on_update:
            update(scheduler_output, model_runner_output, outputs)
        outputs += begun.values()
        for request_id in list(prompt_logprobs):
            if request_id in self.requests:
                outputs.append(EngineCoreOutput(request_id, []))
                self._add_prompt_logprobs(outputs[-1], model_runner_output)
        outputs += self._end_failed(model_runner_output)
        if self.num_ended > num_ended_before:
            self._drop_finished_from_running()
        return outputs

    def _append_following(self, request: Request, following: FollowingTokens, output: EngineCoreOutput) -> None:
        """Add the tokens that a step drew after the first one, up to one that ends the request."""
        count = 0
        while count < len(following.token_ids) and output.finish_reason is None:
            request.token_ids.append(following.token_ids[count])
            self._check_stop(request, following.token_ids[count], output)
            count += 1
            if output.finish_reason is not None:
                self._end(request)
        output.new_token_ids += following.token_ids[:count]
        if output.logprobs is not None:
            output.logprobs += following.logprobs[:count]
        if output.allowed_mass is not None:
            output.allowed_mass += following.allowed_mass[:count]
        output.num_accepted = len(following.token_ids)

    def _end_failed(self, step: ModelRunnerOutput) -> Iterator[EngineCoreOutput]:
        """End the requests whose results are errors."""
        for request_id, message in step.errors.items():
            request = self.requests.get(request_id)
            if request is not None:
                output = EngineCoreOutput(request_id, [], finish_reason="error", error=message)
                if request_id in step.exhausted:
                    output.stop_reason = NO_TOKEN_LEFT
                else:
                    # Its keys and values may be as corrupted as its logits.
                    self.kv.forget_broken(request)
                self._end(request)
                yield output

    def _add_prompt_logprobs(self, output: EngineCoreOutput, step: ModelRunnerOutput) -> None:
        """Move the step's readings of the request's prompt to its output."""
        output.prompt_logprobs = step.prompt_logprobs.pop(output.request_id, None)
        if output.prompt_logprobs is not None:
            count = sum(rows.rows.stop - rows.rows.start for rows in output.prompt_logprobs)
            self.requests[output.request_id].note_prompt_rows_read(count)

    def repeat_step(self, scheduler_output: SchedulerOutput) -> None:
        """The step's results do not count: its requests begin anew, with what was cached before it. No other one may be
        in flight."""
        self._forget_step(scheduler_output)
        lost, new = [], {each.req_id for each in scheduler_output.scheduled_new_reqs}
        for request_id, begun_at in scheduler_output.begun_at():
            request = self.requests.get(request_id)
            if request is not None:
                if request_id in new and not request.num_preemptions:
                    # The blocks that it was to begin with may have been lost.
                    request.num_cached_tokens = -1
                self.kv.forget_step(request, begun_at)
                lost.append(request)
        self._begin_anew(lost)

    def _forget_step(self, scheduler_output: SchedulerOutput) -> None:
        self.kv.forget_brought(scheduler_output)
        for discarded in self._on_discarded:
            discarded(scheduler_output)

    def discard_step(self, scheduler_output: SchedulerOutput, stale: Collection[str] = ()) -> list[str]:
        """The step failed: end its requests, except for `stale` ids, which other requests may have now, and forget what
        it was to write. Returns the ids of the ended requests."""
        lost = []
        self._forget_step(scheduler_output)
        for request_id, begun_at in scheduler_output.begun_at():
            request = self.requests.get(request_id)
            if request is None or request_id in stale:
                continue
            self.kv.forget_step(request, begun_at)
            self._end(request)
            lost.append(request_id)
        self._drop_finished_from_running()
        # The workers may not have freed these slots yet; freeing one twice is harmless.
        self._finished_req_ids += scheduler_output.finished_req_ids + scheduler_output.preempted_req_ids
        return lost

    def _check_stop(self, request: Request, token_id: int, output: EngineCoreOutput) -> None:
        """Set the finish reason if the request ends with this token: not before min_tokens, unless it may
        generate nothing but an end, as otherwise none is drawn."""
        if request.num_output_tokens >= request.min_tokens or request.may_end_early:
            if token_id in request.eos_token_ids:
                output.finish_reason = "stop"
                return
            if token_id in request.stop_token_ids:
                output.finish_reason, output.stop_reason = "stop", token_id
                return
        if request.num_output_tokens >= request.length_limit:
            output.finish_reason = "length"
        elif request.num_output_tokens >= request.min_tokens and repeats_itself(
            request.token_ids, request.num_prompt_tokens, request.repetition
        ):
            output.finish_reason, output.stop_reason = "repetition", "repetition_detected"

    def _next_waiting(self) -> Request | None:
        """The next request, or the next whose turn it is."""
        return self._on_next[0](self.waiting) if self._on_next else self.waiting.peek()

    def _make_ready(self, request: Request) -> bool:
        """Whether a request that is to be admitted can be; otherwise it ends."""
        for ready in self._on_ready:
            if (error := ready(request)) is not None:
                self.waiting.remove(request)
                self._refuse(request, error)
                return False
        return True

    def _refuse(self, request: Request, error: str) -> None:
        self._end(request)
        self.refused.append(EngineCoreOutput(request.request_id, [], finish_reason="error", error=error))

    def _end(self, request: Request) -> None:
        for ended in self._on_ended:
            ended(request)
        request.status = RequestStatus.FINISHED
        self.num_ended += 1
        del self.requests[request.request_id]
        self.kv.free(request)
        self._finished_req_ids.append(request.request_id)

    def _drop_finished_from_running(self) -> None:
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
