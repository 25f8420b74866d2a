"""The Python client: texts, chats or token ids in, completions out.

    from frontend.client import LLM, SamplingParams

    llm = LLM("127.0.0.1:50051")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0]["text"])

Needs grpcio, protobuf and tqdm, but nothing from the services.
"""

from frontend.client.async_llm import AsyncLLM
from frontend.client.errors import (
    DeadlineError,
    InvalidRequestError,
    LLMError,
    QueueFullError,
    RequestCancelledError,
    ServerError,
    StackError,
    UnauthenticatedError,
    UnavailableError,
)
from frontend.client.llm import LLM
from frontend.client.private_stack import PrivateStack
from frontend.client.types import (
    Chat,
    Chunk,
    Completion,
    EngineCapacity,
    Message,
    ModelInfo,
    Prompt,
    SamplingParams,
    StructuredOutput,
    Timings,
    Usage,
)
from shared.tls import ClientTls as TLS

__all__ = [
    "LLM",
    "TLS",
    "AsyncLLM",
    "Chat",
    "Chunk",
    "Completion",
    "DeadlineError",
    "EngineCapacity",
    "InvalidRequestError",
    "LLMError",
    "Message",
    "ModelInfo",
    "PrivateStack",
    "Prompt",
    "QueueFullError",
    "RequestCancelledError",
    "SamplingParams",
    "ServerError",
    "StackError",
    "StructuredOutput",
    "Timings",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]
