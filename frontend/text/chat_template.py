"""Renders conversations with a model's own chat template, and rejects parts it would ignore."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from jinja2 import meta, nodes

from frontend.text.conversation import Conversation, with_short_ids, with_tools_in_text
from shared.errors import InvalidArgumentError

# Every template renders these roles, or fails with a reason.
_PLAIN_ROLES = ("system", "user", "assistant")
_OTHER_ROLES = ("developer", "tool")
_PAIR_ROLES = ("query", "document")  # of a reranker's template for sentence-transformers
_PROBE = "a probe's content"
# The prompt that Qwen3-Reranker was trained with (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B).
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class ChatTemplate:
    """The chat template of a transformers tokenizer, which renders it in a sandbox."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Variables that a request sets with its own fields, or that no client may set.
        arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {"messages", *arguments, *tokenizer.special_tokens_map}
        self._understood: dict[str, _Understood] = {}  # by template: a model may have several

    def render(self, conversation: Conversation) -> str:
        """Renders a conversation, up to where the assistant's answer begins.

        Raises:
            InvalidArgumentError: the template rejects it, or would ignore a part of it.
        """
        if not self._tokenizer.chat_template:
            raise InvalidArgumentError("chat", "this model has no chat template")
        template = ""
        try:
            template = self._tokenizer.get_chat_template(tools=conversation.tools)
            if template not in self._understood:
                self._understood[template] = self._understand(template)
            understood = self._understood[template]
            _check(conversation, understood)
            messages, tools = conversation.messages, conversation.tools
            if understood.tools_in_message:
                messages, tools = with_tools_in_text(messages, tools), None
            if "[TOOL_CALLS]" in template:
                messages = with_short_ids(messages)
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                continue_final_message=conversation.continue_final_message,
                add_generation_prompt=not conversation.continue_final_message,
                tokenize=False,
                **conversation.template_kwargs,
            )
        except InvalidArgumentError:
            raise
        except Exception as error:  # a template is code: it may raise anything
            if conversation.continue_final_message and isinstance(error, ValueError):
                raise InvalidArgumentError(
                    "chat.continue_final_message",
                    "the model's chat template changes the content of the last message",
                ) from error
            # A reason spelled out in the template is safe to repeat. One made from the chat is not.
            spelled_out = str(error) and str(error) in template
            reason = f": {error}" if spelled_out else ""
            raise InvalidArgumentError("chat", f"the chat template failed{reason}") from error
        return text

    def render_pair(self, query: str, document: str, instruction: str) -> str:
        """Renders the question whether a document is relevant to a query, for a model that answers
        without thinking. A template that names the roles of both renders them as messages. Others
        render Qwen3-Reranker's prompt, within the user's message if they have no system message.

        Args:
            instruction: what makes a document relevant; if empty, the default of the prompt.

        Raises:
            InvalidArgumentError: there is no template, or it fails, or it leaves a part out.
        """
        task = f"<Instruct>: {instruction or _INSTRUCTION}"
        user = f"{task}\n<Query>: {query}\n<Document>: {document}"
        system = [("system", instruction)] if instruction else []
        reads_thinking = "enable_thinking" in str(self._tokenizer.chat_template)
        kwargs = {"enable_thinking": False} if reads_thinking else {}
        incomplete = InvalidArgumentError("chat", "the chat template leaves out parts of it")
        failure = incomplete
        for messages in (
            [*system, ("query", query), ("document", document)],
            [("system", _JUDGE), ("user", user)],
            [("user", f"{_JUDGE}\n{user}")],
        ):
            chat = [{"role": role, "content": content} for role, content in messages]
            conversation = Conversation(chat, None, kwargs, continue_final_message=False)
            try:
                text = self.render(conversation)
            except InvalidArgumentError as error:
                failure = error
                continue
            if all(content.strip() in text for _, content in messages):
                # The answer begins after the thoughts, which are empty as of Qwen3.
                begun = text.rstrip().endswith("<think>")
                return f"{text.rstrip()}\n\n</think>\n\n" if begun else text
            failure = incomplete
        raise failure

    def _understand(self, template: str) -> _Understood:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        tree = _compile_jinja_template(template).environment.parse(template)
        texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        names = texts | {node.attr for node in tree.find_all(nodes.Getattr)}
        variables = meta.find_undeclared_variables(tree)
        items = {getattr(node.arg, "value", None) for node in tree.find_all(nodes.Getitem)}
        tools_in_message = "tools" in items - variables
        return _Understood(
            roles=_PLAIN_ROLES
            + tuple(r for r in _OTHER_ROLES if r in texts or self._renders(template, r))
            + (_PAIR_ROLES if texts.issuperset(_PAIR_ROLES) else ()),
            takes_tools="tools" in variables or tools_in_message,
            tools_in_message=tools_in_message,
            message_keys=frozenset({"tool_calls", "reasoning_content"} & names)
            | ({"tool_calls"} if tools_in_message else set()),
            kwargs=frozenset(variables - self._reserved),
        )

    def _renders(self, template: str, role: str) -> bool:
        """Whether messages of a role that the template does not name are rendered like others."""
        probe = [{"role": "user", "content": "a"}, {"role": role, "content": _PROBE}]
        try:
            text = self._tokenizer.apply_chat_template(
                probe, chat_template=template, tokenize=False
            )
        except Exception:  # a template may raise anything
            return False
        return _PROBE in text


@dataclass(frozen=True, slots=True)
class _Understood:
    """The inputs that a template takes besides messages with a role and a content."""

    roles: tuple[str, ...]
    takes_tools: bool
    tools_in_message: bool  # as a text, in the system's
    message_keys: frozenset[str]
    kwargs: frozenset[str]


def _check(conversation: Conversation, understood: _Understood) -> None:
    """Rejects parts that the template would silently leave out of the prompt."""
    if conversation.tools and not understood.takes_tools:
        raise InvalidArgumentError("chat.tools", "unknown to the chat template")
    if not conversation.template_kwargs.keys() <= understood.kwargs:
        known = ", ".join(sorted(understood.kwargs)) or "none"
        raise InvalidArgumentError(
            "chat.chat_template_kwargs", f"unknown name; the model's chat template reads {known}"
        )
    for index, message in enumerate(conversation.messages):
        field = f"chat.messages[{index}]"
        if message["role"] not in understood.roles:
            known = ", ".join(understood.roles)
            raise InvalidArgumentError(f"{field}.role", f"unknown; must be one of {known}")
        for key in ("tool_calls", "reasoning_content"):
            if key in message and key not in understood.message_keys:
                raise InvalidArgumentError(f"{field}.{key}", "unknown to the chat template")
