"""Any of our policies as the routing strategy of a LiteLLM router.

    router = litellm.Router(model_list=[…])
    PointsmanStrategy.install(router, policy="default")
    await router.acompletion(model="llama", messages=[…])

LiteLLM says which deployments of a model are healthy, we say which of them gets the request; its retries,
cooldowns and fallbacks stay what they are. It tells of the end of a request, with its usage, and not of
tokens on the way, so every request is booked as one that does not stream. A request that the policy holds
waits here until another one ends, and is asked about at least once a second.

Written against LiteLLM 1.106; its asynchronous calls only, which are those of its proxy.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import litellm
from litellm.integrations.custom_logger import CustomLogger
from litellm.types.router import CustomRoutingStrategyBase

from pointsman.errors import InputError
from pointsman.routing.core import Core, Request
from pointsman.routing.policy import HoldSpec

TICKET = "pointsman_ticket"  # in the metadata of a request, by which its end is known
CHARACTERS_A_TOKEN = 4
RECHECK_S = 1.0
_numbers = itertools.count()


@dataclass
class _Group:
    """The deployments that serve one model name."""

    core: Core
    num_held: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def say_changed(self) -> None:
        """Whoever is held looks again; who is held later waits for what comes later."""
        self.changed.set()
        self.changed = asyncio.Event()


class PointsmanStrategy(CustomRoutingStrategyBase, CustomLogger):
    def __init__(
        self, router: litellm.Router, policy: str = "default", max_hold_s: float = HoldSpec().max_hold_s
    ) -> None:
        super().__init__()
        self.number = next(_numbers)  # by public numbers LiteLLM tells callbacks of one class apart
        self._router = router
        self._policy, self._max_hold_s = policy, max_hold_s
        self._groups: dict[str, _Group] = {}
        self._open: dict[str, tuple[_Group, int]] = {}  # by what stands in the metadata
        self._num_sent = 0

    @classmethod
    def install(cls, router: litellm.Router, **settings: Any) -> PointsmanStrategy:
        """Route by our policy, and hear of the end of requests."""
        strategy = cls(router, **settings)
        router.set_custom_routing_strategy(strategy)
        litellm.callbacks.append(strategy)
        return strategy

    async def async_get_available_deployment(
        self,
        model: str,
        messages: list[dict[str, str]] | None = None,
        input: str | list[Any] | None = None,  # noqa: A002, as LiteLLM calls it
        specific_deployment: bool | None = False,
        request_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if request_kwargs is None else request_kwargs
        if model not in self._groups:
            self._groups[model] = _Group(Core(self._policy, max_hold_s=self._max_hold_s))
        group = self._groups[model]
        length = len(json.dumps(messages or input or "", default=str)) // CHARACTERS_A_TOKEN
        request = Request(group.core.prompt_length(max(1, length)))
        group.num_held += 1
        try:
            while True:
                healthy = await self._router.async_get_healthy_deployments(
                    model=model,
                    request_kwargs=kwargs,
                    messages=messages,
                    input=input,
                    specific_deployment=specific_deployment,
                )
                if isinstance(healthy, dict):  # the client named it
                    return healthy
                deployment = self._decide(group, request, healthy)
                if deployment is not None:
                    break
                try:
                    await asyncio.wait_for(group.changed.wait(), RECHECK_S)
                except TimeoutError:
                    continue
        finally:
            group.num_held -= 1
        self._num_sent += 1
        number = f"{self.number}-{self._num_sent}"  # every strategy hears of the ends of all routers
        ticket = group.core.sent(request, deployment["model_info"]["id"], streams=False)
        self._open[number] = group, ticket
        kwargs["metadata"] = {**(kwargs.get("metadata") or {}), TICKET: number}
        return deployment

    def _decide(self, group: _Group, request: Request, healthy: list[Any]) -> Any | None:
        by_name = {deployment["model_info"]["id"]: deployment for deployment in healthy}
        for name in by_name:
            if name not in group.core.replicas:
                group.core.add(name)
        unwell = [name for name in group.core.replicas if name not in by_name]
        chosen = group.core.decide(request, group.num_held, unwell)
        return by_name[chosen] if chosen is not None else None

    def get_available_deployment(self, *arguments: Any, **named: Any) -> Any:
        raise InputError("router", "completion", "holds no requests", "call acompletion")

    async def async_log_success_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        usage = getattr(response_obj, "usage", None)
        tokens = {
            "prompt_tokens": getattr(usage, "prompt_tokens", None),
            "output_tokens": getattr(usage, "completion_tokens", None),
        }
        self._ended(kwargs, tokens)

    async def async_log_failure_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        self._ended(kwargs, None)

    def _ended(self, kwargs: dict[str, Any], tokens: dict[str, int | None] | None) -> None:
        metadata = kwargs.get("litellm_params", {}).get("metadata") or {}
        found = self._open.pop(metadata.get(TICKET, ""), None)
        if found is None:  # not ours, or told twice
            return
        group, ticket = found
        if tokens is None:
            group.core.failed(ticket)
        else:
            group.core.finished(ticket, **tokens)
        group.say_changed()
