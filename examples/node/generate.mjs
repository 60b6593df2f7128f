// Ask over gRPC from Node, and print the answer while it comes. The messages are read from the proto files: no build step.
//
//   cd examples/node && npm ci
//   node generate.mjs "What is the capital of France?" [picture.png]
//
// EPD_ADDRESS: the gateway, by default 127.0.0.1:50051. EPD_API_KEY: a key, where one is needed.
import { readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import grpc from '@grpc/grpc-js'
import loader from '@grpc/proto-loader'

const protos = fileURLToPath(new URL('../../protos', import.meta.url))
const definition = loader.loadSync('epd/v1/generation.proto', { includeDirs: [protos], keepCase: true, enums: String, longs: Number })
const { GenerationService } = grpc.loadPackageDefinition(definition).epd.v1

const [question = 'What is the capital of France?', picture] = process.argv.slice(2)
const content = [{ text: question }]
if (picture) content.unshift({ image: { data: readFileSync(picture) } })
const request = { chat: { messages: [{ role: 'user', content }] }, sampling: { temperature: 0, max_tokens: 16 } }

const metadata = new grpc.Metadata()
if (process.env.EPD_API_KEY) metadata.set('authorization', `Bearer ${process.env.EPD_API_KEY}`)
const client = new GenerationService(process.env.EPD_ADDRESS ?? '127.0.0.1:50051', grpc.credentials.createInsecure())
try {
  let last
  for await (const message of client.Generate(request, metadata, { deadline: Date.now() + 300_000 })) {
    for (const choice of message.choices ?? []) process.stdout.write(choice.text ?? '')
    last = message
  }
  console.log(`\n${last.usage.completion_tokens} tokens, epd trace ${last.accounting.trace_id}`)

  // Leaving early: cancelling stops the work everywhere.
  const call = client.Generate({ ...request, sampling: { max_tokens: 1000, ignore_eos: true } }, metadata)
  try {
    for await (const _ of call) call.cancel()
  } catch (error) {
    if (error.code !== grpc.status.CANCELLED) throw error
    console.log('cancelled')
  }

  // Errors: a status, and the reason of docs/errors.md in the trailing metadata.
  for await (const _ of client.Generate({ ...request, sampling: { temperature: 3 } }, metadata));
} catch (error) {
  if (error.code === undefined) throw error
  console.log(`${grpc.status[error.code]} ${error.metadata.get('epd-reason')} ${error.metadata.get('epd-field')}: ${error.details}`)
  process.exitCode = error.code === grpc.status.INVALID_ARGUMENT ? 0 : 1
} finally {
  client.close()
}
