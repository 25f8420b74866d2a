"""The model that the APIs serve."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from frontend.generations import Generations
from frontend.http.answers import Answers, answer_form
from frontend.http.background.responses import BackgroundResponses
from frontend.http.errors import ParameterError, unknown_model
from frontend.http.exchange import Request
from frontend.http.formats.tool_format import CALL_MARKS, ToolFormat
from frontend.http.parameters import Parameters, SamplingFields, generate_request, read_body
from frontend.http.prompts import Tools, force_calls
from frontend.pooled import Pooled
from nano_vllm_grpc.pb import frontend_pb2 as pb


@dataclass(frozen=True, slots=True)
class Service:
    """Serves one model.

    Args:
        reports_cached: whether callers learn how many of their prompt tokens were cached.
    """

    generations: Generations
    reports_cached: bool
    background: BackgroundResponses

    @property
    def model(self) -> str:
        return self.generations.facts.name

    @property
    def template(self) -> str:
        return self.generations.tokenizer.chat_template

    def read(self, kind: type[Parameters], request: Request) -> Parameters:
        """Reads the parameters of a request.

        Raises:
            ParameterError: a parameter is unknown, or has a value of the wrong kind.
            HttpError: the request is for another model.
        """
        body = read_body(kind, request.body)
        if body.model is not None and body.model != self.model:
            raise unknown_model(body.model)
        return body

    def usage(self, pooled: Pooled) -> dict[str, Any]:
        """The numbers of tokens of prompts without completions, as in OpenAI's API."""
        found: dict[str, Any] = {
            "prompt_tokens": pooled.prompt_tokens,
            "total_tokens": pooled.prompt_tokens,
        }
        if self.reports_cached:
            found["prompt_tokens_details"] = {"cached_tokens": pooled.cached_prompt_tokens}
        return found

    def chat_request(
        self, fields: SamplingFields, request: Request, chat: pb.Chat, max_tokens: int | None
    ) -> pb.GenerateRequest:
        """A request for the answer to a chat.

        Raises:
            ParameterError: a value is out of range, or two parameters contradict each other.
        """
        message = generate_request(fields)
        message.request_id = request.request_id
        message.chat.CopyFrom(chat)
        if max_tokens is not None:
            message.sampling.max_tokens = max_tokens
        return message

    async def answers(
        self, message: pb.GenerateRequest, tools: Tools, truncate: int | None = None
    ) -> Answers:
        """Submits a chat, whose generation the caller must close.

        Raises:
            ServiceError: a field is wrong, or no engine takes the request.
        """
        form = self.set_tools(message, tools)
        generation = await self.generations.start(message, truncate=truncate)
        return Answers(generation, answer_form(self.generations, generation.request, form))

    def set_tools(self, message: pb.GenerateRequest, tools: Tools) -> ToolFormat | None:
        """Has the answer call tools if it must, and show the marks of calls. Returns their format.

        Raises:
            ParameterError: a call is forced beside another grammar.
        """
        force_calls(message.sampling, tools, self.template)
        form = tools.format(self.template)
        if form and self.generations.tokenizer.is_special(CALL_MARKS[form]):
            message.sampling.skip_special_tokens = False
        return form

    def effort(self, field: str, effort: str | None) -> dict[str, Any]:
        """The variable of the chat template that says how much to reason, if that was given.

        Raises:
            ParameterError: the template has no such variable.
        """
        if effort is None:
            return {}
        if "reasoning_effort" in self.template:
            return {"reasoning_effort": effort}
        if effort == "none":
            return {"enable_thinking": False} if "enable_thinking" in self.template else {}
        raise ParameterError(field, "the model's chat template does not read it")


def now() -> int:
    """The time in seconds since 1970."""
    return int(datetime.now(UTC).timestamp())
