"""Measures a running OpenAI-compatible server from outside: idle prompts, batches, prompts that join them,
and requests of all sizes that come and go: what the server's other processes take from its steps shows only
there.

Every probe is a few streamed completions whose lengths we choose (`ignore_eos`); prompts are random token
ids, so that nothing comes from a prefix cache. A probe starts only when the server is quiet: on a shared
server it waits for that, and a probe during which others came is thrown away. At most `max_streams` requests
run at once, and they hold at most half of the KV memory.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from time import monotonic

from pointsman.errors import InputError, reason_of
from pointsman.live.servers import key_header
from pointsman.router.http.address import parse_url
from pointsman.router.http.fetching import FetchError, fetch
from pointsman.router.http.limits import Limits
from pointsman.router.http.upstream import Pool
from pointsman.router.keys import BACKEND_KEY
from pointsman.router.replicas.reports import ScrapedGauges, read_gauges, read_models

LOWEST_ID, HIGHEST_ID = 10, 250  # token ids that any vocabulary has, special ones left out
PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8000, 16000, 32000)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 1024, 4096)
NUM_STEPS = 20  # of a batch that are timed
MIN_APART = 0.5  # share of the timed tokens that came one by one
KV_SHARE = 0.5
MARGIN_TOKENS = 200  # of a sequence, beside its prompt
MIXED_PROMPTS, MIXED_OUTPUTS = (32, 2048), (8, 64)  # tokens, from and to
MIXED_SHARE = 0.08  # of the time to probe with, for one mixture
MIXED_S = (1.5, 8.0)  # the same in seconds, from and to
QUIET_S = 2.0  # how long to wait for others to finish
GET_TIMEOUT_S = 10.0
SILENT_S, SILENT_S_PER_TOKEN = 60.0, 0.01  # without a byte of a completion; more for each prompt token
NOT_THERE = "start the server, or correct the URL"
SEE_LOG = "see its log"
NO_SUCH_SERVER = "name an OpenAI-compatible server"
_EVENT = b'"choices":[{'


@dataclass
class ProbeAnswer:
    sent_at: float
    token_at: list[float] = field(default_factory=list)  # one time for every event with text
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.sent_at


@dataclass(frozen=True)
class Facts:
    """What the server says about itself."""

    model: str
    max_model_tokens: int
    block_size: int | None
    num_blocks: int | None


@dataclass(frozen=True)
class Idle:
    """One prompt on a server that did nothing else."""

    num_prompt: int
    ttft_s: float


@dataclass(frozen=True)
class Decode:
    """A batch that only decodes."""

    num_seqs: int
    mean_context: float
    step_s: float


@dataclass(frozen=True)
class Joined:
    """A prompt put into a decoding batch: when its first token came, how long it held up the others."""

    num_seqs: int
    mean_context: float
    num_prompt: int
    ttft_s: float
    held_up_s: float
    plain_step_s: float
    num_tokens_meanwhile: int  # of a running stream, until the first token


@dataclass(frozen=True)
class Mixed:
    """One answer among others that came and went, of so many clients."""

    num_clients: int
    sent_at: float
    num_prompt: int
    num_tokens: int
    first_token_at: float
    ended_at: float


Probe = Idle | Decode | Joined | Mixed


class Server:
    def __init__(self, url: str) -> None:
        self._address = parse_url(url, "--url")
        if self._address.scheme != "http":
            raise InputError("--url", url, "is not plain http", "probe the server itself, not a proxy")
        self.url = url.rstrip("/")
        self._pool = Pool(self._address, Limits())
        self._asked_tokens = 0  # of the prompts of completions that run
        self._random = random.Random()  # not seeded: the server has the last calibration's prompts cached

    async def facts(self) -> Facts:
        models = read_models(await self._get("/v1/models"))
        if not models:
            raise self._error("names no model in /v1/models", NO_SUCH_SERVER)
        model, said = next(iter(models.items()))
        config = re.search(rb"^vllm:cache_config_info\{(.*)\}", await self._get("/metrics"), re.MULTILINE)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', config.group(1).decode())) if config else {}
        length = said.get("max_model_len") or 4096
        return Facts(model, int(length), _whole(labels, "block_size"), _whole(labels, "num_gpu_blocks"))

    async def gauges(self) -> ScrapedGauges:
        """Requests that run and wait; none where the server does not tell."""
        return read_gauges(await self._get("/metrics")) or ScrapedGauges(0.0, 0.0, 0.0)

    async def _get(self, path: str) -> bytes:
        try:
            answer = await fetch(self._pool, path, GET_TIMEOUT_S, key_header())
        except FetchError as error:
            raise self._error(f"cannot be reached ({reason_of(error)})", NOT_THERE) from None
        if answer.status != 200:
            raise self._refused(f"{path} answers {answer.status}", answer.status, NO_SUCH_SERVER)
        return answer.body

    def _refused(self, problem: str, status: int, remedy: str) -> InputError:
        wants_key = status in (401, 403)
        return self._error(problem, f"set ${BACKEND_KEY} to the key that it wants" if wants_key else remedy)

    def _error(self, problem: str, remedy: str) -> InputError:
        return InputError("--url", self.url, problem, remedy)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_connection(self._address.host, self._address.port, limit=1 << 20)
        except OSError as error:
            raise self._error(f"cannot be reached ({reason_of(error)})", NOT_THERE) from None

    async def ask(
        self,
        model: str,
        num_prompt: int,
        num_output: int,
        on_token: Callable[[ProbeAnswer], None] | None = None,
    ) -> ProbeAnswer:
        """A completion by a client of our own, which notes when tokens came before it looks at them."""
        ids = [self._random.randint(LOWEST_ID, HIGHEST_ID) for _ in range(num_prompt)]
        body = json.dumps(
            {
                "model": model,
                "prompt": ids,
                "max_tokens": num_output,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST {self._address.prefix}/v1/completions HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
        head += f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        self._asked_tokens += num_prompt
        try:
            async with asyncio.timeout(self._silent_s()) as silence:
                return await self._streamed(head.encode() + key_header() + b"\r\n" + body, silence, on_token)
        except TimeoutError:
            raise self._error(f"says nothing for {self._silent_s():g} s of a completion", SEE_LOG) from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise self._error(f"ends a completion early ({reason_of(error)})", SEE_LOG) from None
        finally:
            self._asked_tokens -= num_prompt

    async def _streamed(
        self, request: bytes, silence: asyncio.Timeout, on_token: Callable[[ProbeAnswer], None] | None
    ) -> ProbeAnswer:
        loop = asyncio.get_running_loop()
        reader, writer = await self._connect()
        answer = ProbeAnswer(monotonic())
        writer.write(request)
        try:
            status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
            if status != 200:
                said = (await reader.read(400)).decode(errors="replace")
                raise self._refused(f"a completion fails ({status}: {said})", status, SEE_LOG)
            rest = b""
            while piece := await reader.read(1 << 16):
                now = monotonic()
                silence.reschedule(loop.time() + self._silent_s())
                text = rest + piece
                num_events = text.count(_EVENT)
                if num_events:
                    answer.token_at += [now] * num_events
                    text = text[text.rfind(_EVENT) + len(_EVENT) :]
                    if on_token is not None:
                        on_token(answer)
                rest = text[-4096:]
            counted = re.findall(rb'"completion_tokens": ?(\d+)', rest)
            answer.num_tokens = int(counted[-1]) if counted else len(answer.token_at)
        finally:
            writer.close()
        return answer

    def _silent_s(self) -> float:
        """Longer while prompts are under way, of which a slow server says nothing until they are through."""
        return SILENT_S + SILENT_S_PER_TOKEN * self._asked_tokens


def _are_apart(token_at: Sequence[float]) -> bool:
    """A client that waits for a core reads many tokens at once, and cannot tell when they came."""
    return sum(second > first for first, second in pairwise(token_at)) >= MIN_APART * (len(token_at) - 1)


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """Sizes that are possible, and the largest possible one where some are not."""
    return [size for size in sizes if size <= most] + ([most] if most < sizes[-1] else [])


def _whole(labels: dict[str, str], name: str) -> int | None:
    return int(labels[name]) if labels.get(name, "").isdecimal() else None


@dataclass
class Prober:
    """Runs probes until the time is over: most informative first, then the same again for certainty."""

    server: Server
    facts: Facts
    max_streams: int = 64
    num_disturbed: int = 0  # probes thrown away because others used the server
    num_together: int = 1  # sequences that were seen to run at once
    limit_seqs: int | None = None  # the same, where more were asked for
    probes: list[Probe] = field(default_factory=list)
    _mixed_s: float = MIXED_S[0]

    async def run(self, seconds: float, on_probe: Callable[[float, str], None] | None = None) -> list[Probe]:
        """`on_probe` gets the share of the time that is over and what was done."""
        began_at = monotonic()
        await self._ask(16, 4)  # whatever the server does only once
        plan = self._plan()
        self._mixed_s = min(max(MIXED_SHARE * seconds, MIXED_S[0]), MIXED_S[1])
        number = 0
        while number < len(plan) or monotonic() - began_at < seconds:
            kind, size, context = plan[number % len(plan)]
            if monotonic() - began_at > seconds and number >= len(plan) // 3:
                break
            if kind == "join" and self.limit_seqs is not None and size >= self.limit_seqs:
                number += 1  # the prompt would wait for a seat
                continue
            if await self._is_quiet():
                found = await getattr(self, kind)(size, context)
                if (await self.server.gauges()).running > 0:
                    self.num_disturbed += 1
                else:
                    self.probes += found
            else:
                self.num_disturbed += 1
            number += 1
            if on_probe is not None:
                on_probe(min(1.0, (monotonic() - began_at) / seconds), kind)
        return self.probes

    def _plan(self) -> list[tuple[str, int, int]]:
        """What to do, so that any part of it from the beginning covers all kinds."""
        room = self.facts.max_model_tokens - 300
        prompts, contexts = _up_to(room, PROMPTS), _up_to(room, CONTEXTS)
        batches = [size for size in BATCHES if size <= self.max_streams]
        decodes = [("decode", b, c) for c in contexts for b in batches if self._fits(b, c)]
        joins = [
            ("join", b, c) for b in batches[:: max(1, len(batches) // 4)] for c in prompts if self._fits(b, c)
        ]
        idles = [("idle", size, 0) for size in prompts]
        order = random.Random(2)
        for some in (idles, decodes, joins):
            order.shuffle(some)
        every = [one for some in zip_longest(idles, decodes, joins) for one in some if one is not None]
        for number, size in enumerate(batches[::-2]):
            longest = min(MIXED_PROMPTS[1], room, self._room(size))
            if longest >= MIXED_PROMPTS[0]:
                every.insert(min(17 + 12 * number, len(every)), ("mixed", size, longest))
        # The largest batch comes first: it shows how many sequences the server runs at once.
        return [("decode", batches[-1], contexts[0]), *every]

    def _fits(self, num_seqs: int, context: int) -> bool:
        return context <= self._room(num_seqs)

    def _room(self, num_seqs: int) -> int:
        """The longest prompt that so many sequences may have."""
        if self.facts.num_blocks is None or self.facts.block_size is None:
            return self.facts.max_model_tokens
        return int(KV_SHARE * self.facts.num_blocks * self.facts.block_size / num_seqs) - MARGIN_TOKENS

    async def _is_quiet(self) -> bool:
        end = monotonic() + QUIET_S
        while (gauges := await self.server.gauges()).running + gauges.waiting > 0:
            if monotonic() > end:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _ask(
        self, num_prompt: int, num_output: int, on_token: Callable[[ProbeAnswer], None] | None = None
    ) -> ProbeAnswer:
        return await self.server.ask(self.facts.model, num_prompt, num_output, on_token)

    async def idle(self, num_prompt: int, _: int) -> Sequence[Probe]:
        answer = await self._ask(num_prompt, 2)
        return [Idle(num_prompt, answer.ttft_s)]

    async def decode(self, num_seqs: int, context: int) -> Sequence[Probe]:
        # The first stream is ahead of the last by the steps that take the prompts in.
        num_output = NUM_STEPS + 8 + num_seqs // 2
        answers = await asyncio.gather(*(self._ask(context, num_output) for _ in range(num_seqs)))
        all_began = max(answer.token_at[0] for answer in answers)
        one_ended = min(answer.token_at[-1] for answer in answers)
        longest = max(answers, key=lambda answer: answer.token_at[0])
        steps = [at for at in longest.token_at if all_began <= at <= one_ended]
        together = max(
            sum(other.token_at[0] <= one.token_at[0] <= other.token_at[-1] for other in answers)
            for one in answers
        )
        self.num_together = max(self.num_together, together)
        # With long prompts, the first answer may end before the last one begins, whatever the limit.
        if together < num_seqs and context == CONTEXTS[0]:
            self.limit_seqs = together
        if len(steps) < 6 or not _are_apart(steps):
            return []
        # Tokens may come several at once: the mean over the whole stretch is right, single gaps are not.
        middle = (steps[0] + steps[-1]) / 2
        held = [context + sum(at <= middle for at in answer.token_at) for answer in answers]
        step_s = (steps[-1] - steps[1]) / (len(steps) - 2)
        return [Decode(num_seqs, statistics.mean(held), step_s)]

    async def mixed(self, num_clients: int, longest: int) -> Sequence[Probe]:
        """So many clients with requests of all sizes, who think for about as long as an answer takes."""
        dice, end = random.Random(), monotonic() + self._mixed_s
        num_clients = min(num_clients, self.limit_seqs or num_clients)
        found: list[Probe] = []

        def drawn(least: int, most: int) -> int:
            return round(math.exp(dice.uniform(math.log(least), math.log(most))))

        async def client() -> None:
            while monotonic() < end:
                num_prompt = drawn(MIXED_PROMPTS[0], longest)
                answer = await self._ask(num_prompt, drawn(*MIXED_OUTPUTS))
                times = answer.token_at[0], answer.token_at[-1]
                found.append(Mixed(num_clients, answer.sent_at, num_prompt, answer.num_tokens, *times))
                await asyncio.sleep(dice.expovariate(1.0) * (times[1] - answer.sent_at))

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return found

    async def join(self, num_seqs: int, num_prompt: int) -> Sequence[Probe]:
        """The running streams are told to go on for long, and are given up once the prompt is through."""
        context, num_output = 128, self.facts.max_model_tokens - 140
        seen: list[float] = []

        def note(answer: ProbeAnswer) -> None:
            seen.extend(answer.token_at[len(seen) :])

        watched = asyncio.create_task(self._ask(context, num_output, note))
        others = [asyncio.create_task(self._ask(context, num_output)) for _ in range(num_seqs - 1)]
        running = [watched, *others]
        try:
            while len(seen) < 16 + num_seqs // 4 and not watched.done():
                await asyncio.sleep(0.003)
            before = len(seen)
            plain = [second - first for first, second in pairwise(seen[-11:])]
            is_clear = len(plain) == 10 and _are_apart(seen[-11:])
            answer = await self._ask(num_prompt, 1)
            wanted = len(seen) + 6
            while len(seen) < wanted and not watched.done():
                await asyncio.sleep(0.003)
            if watched.done() or not is_clear:
                return []
            plain_s = (seen[before - 1] - seen[before - 11]) / 10
            after = [at for at in seen[before - 1 :] if at <= answer.token_at[0] + 4 * plain_s]
            held_up_s = after[-1] - after[0] - (len(after) - 1) * plain_s
            meanwhile = sum(answer.sent_at < at <= answer.token_at[0] for at in seen)
            mean_context = context + before + len(after) / 2
            return [Joined(num_seqs, mean_context, num_prompt, answer.ttft_s, held_up_s, plain_s, meanwhile)]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._is_quiet()
