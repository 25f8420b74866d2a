"""Uses the generated stubs without the client library: python examples/plain_grpc.py [HOST:PORT]"""

import sys

import grpc

from nano_vllm_grpc.pb import frontend_pb2, frontend_pb2_grpc

with grpc.insecure_channel(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as channel:
    stub = frontend_pb2_grpc.InferenceServiceStub(channel)
    request = frontend_pb2.GenerateRequest(text="Once upon a time")
    request.sampling.max_tokens = 64
    for response in stub.GenerateStream(request):
        print(response.text, end="", flush=True)
