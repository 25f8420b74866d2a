"""The Python client: texts, chats or token ids in, completions out.

    from nano_vllm_grpc import LLM, SamplingParams

    llm = LLM("127.0.0.1:50051")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0]["text"])

The package needs grpcio, protobuf and tqdm, but nothing from the services.
"""

from nano_vllm_grpc.async_llm import AsyncLLM
from nano_vllm_grpc.errors import (
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
from nano_vllm_grpc.llm import LLM
from nano_vllm_grpc.private_stack import PrivateStack
from nano_vllm_grpc.tls import ClientTls as TLS
from nano_vllm_grpc.types import (
    Chat,
    Chunk,
    Completion,
    EngineCapacity,
    GenerateOptions,
    Message,
    ModelInfo,
    Prompt,
    RequestOptions,
    SamplingParams,
    StructuredOutput,
    Timings,
    Usage,
)

__all__ = [
    "LLM",
    "TLS",
    "AsyncLLM",
    "Chat",
    "Chunk",
    "Completion",
    "DeadlineError",
    "EngineCapacity",
    "GenerateOptions",
    "InvalidRequestError",
    "LLMError",
    "Message",
    "ModelInfo",
    "PrivateStack",
    "Prompt",
    "QueueFullError",
    "RequestCancelledError",
    "RequestOptions",
    "SamplingParams",
    "ServerError",
    "StackError",
    "StructuredOutput",
    "Timings",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]
