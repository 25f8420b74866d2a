// Streams a completion, then an answer to a chat with a tool. If the server goes away, it goes on
// after the tokens that it has. In this folder:
//
//     npm ci && npm run build && npm start -- 127.0.0.1:50051

import { randomBytes } from "node:crypto";
import { setTimeout } from "node:timers/promises";
import { credentials, loadPackageDefinition, status, type ServiceError } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import type { ProtoGrpcType } from "./gen/frontend.js";
import type { GenerateRequest } from "./gen/nanovllm/v1/GenerateRequest.js";
import type { GenerateStreamResponse__Output as Chunk } from "./gen/nanovllm/v1/GenerateStreamResponse.js";

const [address = "127.0.0.1:50051"] = process.argv.slice(2);
const proto = new URL("../../../protos/frontend.proto", import.meta.url).pathname;
// The options are those that the types were generated with (package.json).
const definition = loadSync(proto, { longs: String, enums: String, defaults: true, oneofs: true });
const { nanovllm } = loadPackageDefinition(definition) as unknown as ProtoGrpcType;
const client = new nanovllm.v1.InferenceService(address, credentials.createInsecure());

/** Yields a completion's text; a stream that is cut goes on, without a gap or a repetition. */
async function* generate(request: GenerateRequest): AsyncGenerator<string> {
  // With the same seed, the tokens after those received are the same, too.
  const seed = randomBytes(8).readBigUInt64LE().toString();
  const received: number[] = [];
  for (;;) {
    const sampling = { seed, ...request.sampling };
    const call = client.GenerateStream({ ...request, sampling, resumeTokenIds: received });
    try {
      for await (const chunk of call as AsyncIterable<Chunk>) {
        received.push(...chunk.tokenIds);
        yield chunk.text;
      }
      return;
    } catch (error) {
      if ((error as ServiceError).code !== status.UNAVAILABLE) throw error;
      console.error(`\n[the server is away, ${received.length} tokens are here]`);
      await setTimeout(500);
    }
  }
}

async function show(title: string, request: GenerateRequest): Promise<void> {
  console.log(`> ${title}`);
  try {
    for await (const text of generate(request)) process.stdout.write(text);
    console.log();
  } catch (error) {
    // Such as a model that has no tools: INVALID_ARGUMENT, with the field's name.
    const { code, details } = error as ServiceError;
    console.log(`${status[code]}: ${details}`);
  }
}

const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

await show("Once upon a time", { text: "Once upon a time", sampling: { maxTokens: 64 } });
await show("How warm is it in Paris?", {
  chat: {
    messages: [
      { role: "user", content: "How warm is it in Paris?" },
      {
        role: "assistant",
        toolCalls: [{ id: "call_1", function: { name: "get_weather", arguments: '{"city": "Paris"}' } }],
      },
      { role: "tool", toolCallId: "call_1", content: '{"celsius": 21}' },
    ],
    tools: [JSON.stringify(weather)],
  },
  sampling: { maxTokens: 64 },
});
client.close();
