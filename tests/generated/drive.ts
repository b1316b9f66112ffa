// Drives a sandbox with the types that openapi-typescript made: `drive.js URL KEY`.
import createClient from 'openapi-fetch'
import type { paths } from './api.js'

const [url, key] = process.argv.slice(2) as [string, string]
const options = { baseUrl: url, headers: { 'X-API-Key': key } }
// A command can answer line by line, too; a client is for one of the types.
const client = createClient<paths, 'application/json'>(options)
const files = createClient<paths>(options)

function got<T>(answer: { data?: T; error?: unknown }): T {
  if (answer.data === undefined) throw new Error(JSON.stringify(answer.error))
  return answer.data
}

const made = got(await client.POST('/v1/sandboxes', { body: { template: 'base' } }))
const at = { path: { id: made.id } }
try {
  for (const cmd of ['echo $((6 * 7))', ['echo', '42']]) {
    const ended = got(await client.POST('/v1/sandboxes/{id}/exec', { params: at, body: { cmd } }))
    if (ended.exit_code !== 0 || ended.stdout !== '42\n') throw new Error(JSON.stringify(ended))
  }
  const bytes = new Uint8Array(2560).map((_, at) => at % 256)
  const file = { ...at, query: { path: '/tmp/data' } }
  got(
    await files.PUT('/v1/sandboxes/{id}/files', {
      params: file,
      // Its types have no word for bytes but text.
      body: bytes as unknown as string,
      bodySerializer: () => bytes,
      headers: { 'Content-Type': 'application/octet-stream' },
    }),
  )
  const read = got(await files.GET('/v1/sandboxes/{id}/files', { params: file, parseAs: 'arrayBuffer' }))
  if (Buffer.compare(Buffer.from(read), Buffer.from(bytes)) !== 0) throw new Error('other bytes came back')
} finally {
  await client.DELETE('/v1/sandboxes/{id}', { params: at })
}
console.log('driven')
