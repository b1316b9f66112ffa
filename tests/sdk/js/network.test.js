// The network options of the SDK, as far as they need no outside.
import assert from 'node:assert/strict'
import test from 'node:test'
import { ALL_TRAFFIC, Sandbox, SandboxError } from 'e2b'
import { withBox } from './kit.js'

// Connects, sends, and names what came of it.
const TRY = `
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as s:
        s.sendall(b"x" * 64); print("got", s.recv(10))
except OSError as error:
    print(type(error).__name__)
`
const REFUSED = ['ConnectionResetError', 'ConnectionRefusedError', 'BrokenPipeError']

async function attempt(box, host, port) {
  await box.files.write('/tmp/try.py', TRY)
  return (await box.commands.run(`python3 /tmp/try.py ${host} ${port}`)).stdout.trim()
}

async function refused(box, host, port) {
  const seen = await attempt(box, host, port)
  assert.ok(REFUSED.includes(seen), seen)
}

async function detail(box) {
  const answer = await fetch(`${process.env.E2B_API_URL}/sandboxes/${box.sandboxId}`, {
    headers: { 'X-API-Key': process.env.E2B_API_KEY },
  })
  return answer.json()
}

test('no internet is kept', () =>
  withBox(
    async (box) => {
      await refused(box, '192.0.2.1', 443)
      assert.equal(await attempt(box, 'example.org', 443), 'gaierror')
      assert.equal((await detail(box)).allowInternetAccess, false)
    },
    { allowInternetAccess: false },
  ))

test('internet is open when asked for, and what is private stays closed', () =>
  withBox(
    async (box) => {
      assert.equal((await detail(box)).allowInternetAccess, true)
      await refused(box, '10.1.2.3', 443)
      await refused(box, '169.254.170.2', 443)
    },
    { network: { allowOut: ['0.0.0.0/0'] } },
  ))

test('a plain create reaches the same whether internet access is left out or true', () =>
  withBox(
    async (box) => {
      await refused(box, '192.0.2.1', 443)
      assert.equal((await detail(box)).allowInternetAccess, false)
    },
    { allowInternetAccess: true },
  ))

test('names are allowed out of a closed box', () =>
  withBox(
    async (box) => {
      const shown = (await detail(box)).network
      assert.deepEqual(shown.allowOut, ['*.example.org', '192.0.2.7'])
      assert.deepEqual(shown.denyOut, [ALL_TRAFFIC])
      await refused(box, '192.0.2.1', 443)
      assert.equal(await attempt(box, 'example.net', 443), 'gaierror')
    },
    { network: { allowOut: ['*.example.org', '192.0.2.7'], denyOut: [ALL_TRAFFIC] } },
  ))

test('selectors may be functions', () =>
  withBox(
    async (box) => {
      assert.deepEqual((await detail(box)).network.denyOut, [ALL_TRAFFIC])
      await refused(box, '192.0.2.1', 443)
    },
    { network: { denyOut: ({ allTraffic }) => [allTraffic] } },
  ))

for (const network of [
  { allowOut: ['example.org'] },
  { denyOut: ['example.org'] },
  { allowOut: ['*.org'], denyOut: [ALL_TRAFFIC] },
]) {
  test(`what can not be kept is refused: ${JSON.stringify(network)}`, async () => {
    await assert.rejects(Sandbox.create({ network }), SandboxError)
  })
}

test('the network of a running box is replaced', () =>
  withBox(
    async (box) => {
      await box.updateNetwork({ allowOut: ['example.org'], denyOut: [ALL_TRAFFIC] })
      assert.deepEqual((await detail(box)).network.allowOut, ['example.org'])
      await box.updateNetwork({ denyOut: [ALL_TRAFFIC] })
      assert.deepEqual((await detail(box)).network.allowOut, [])
      await assert.rejects(box.updateNetwork({ allowOut: ['example.org'] }), SandboxError)
    },
    { allowInternetAccess: false },
  ))
