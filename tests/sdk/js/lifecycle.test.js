import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import test from 'node:test'
import { AuthenticationError, NotFoundError, Sandbox } from 'e2b'
import { waitFor, withBox } from './kit.js'

test('create, ask, kill', async () => {
  const box = await Sandbox.create({ timeoutMs: 60_000 })
  assert.equal(await box.isRunning(), true)
  assert.equal(await box.kill(), true)
  assert.equal(await box.isRunning(), false)
  assert.equal(await box.kill(), false)
})

test('info', () =>
  withBox(
    async (box) => {
      const info = await box.getInfo()
      assert.equal(info.sandboxId, box.sandboxId)
      assert.deepEqual(info.metadata, { who: 'info' })
      assert.equal(info.state, 'running')
    },
    { metadata: { who: 'info' } },
  ))

test('list by metadata, in pages', async () => {
  const metadata = { run: randomUUID(), 'a b': 'c&d/é=+%20' }
  const boxes = []
  try {
    for (let n = 0; n < 3; n++) boxes.push(await Sandbox.create({ metadata }))
    const pages = Sandbox.list({ query: { metadata }, limit: 2 })
    const seen = []
    while (pages.hasNext) seen.push(...(await pages.nextItems()))
    assert.deepEqual(seen.map((s) => s.sandboxId), boxes.map((b) => b.sandboxId).reverse())
    assert.deepEqual(seen[0].metadata, metadata)
  } finally {
    for (const box of boxes) await box.kill()
  }
})

test('set timeout', () =>
  withBox(async (box) => {
    await box.setTimeout(600_000)
    const left = (await box.getInfo()).endAt.getTime() - Date.now()
    assert.ok(left > 500_000 && left <= 601_000)
  }))

test('a box ends when its time is over', () =>
  withBox(async (box) => waitFor(async () => !(await box.isRunning()), 'it ends by itself', 15_000), { timeoutMs: 1000 }))

test('connect', () =>
  withBox(async (box) => {
    await box.files.write('/tmp/mark', 'here')
    const again = await Sandbox.connect(box.sandboxId)
    assert.equal(await again.files.read('/tmp/mark'), 'here')
    await assert.rejects(Sandbox.connect('i00000000000000000000'), NotFoundError)
  }))

test('metrics', () =>
  withBox(async (box) => {
    const metrics = await waitFor(async () => {
      const found = await box.getMetrics()
      return found.length ? found : null
    }, 'a first sample', 30_000)
    assert.ok(metrics[0].cpuCount >= 1 && metrics[0].memTotal > 0)
  }))

test('refusals', async () => {
  await assert.rejects(Sandbox.create('no-such-template'), /no-such-template/)
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
})

test('a port of the box, by header and by host name', () =>
  withBox(async (box) => {
    await box.commands.run('python3 -m http.server 8124 --bind 127.0.0.1 --directory /etc', { background: true })
    const answer = await waitFor(async () => {
      const got = await fetch(`${process.env.E2B_SANDBOX_URL}/hostname`, {
        headers: { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': '8124' },
      })
      return got.status === 200 ? got : null
    }, 'the server in the box answers')
    assert.equal(await answer.text(), await box.files.read('/etc/hostname'))
  }))
