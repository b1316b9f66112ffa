import assert from 'node:assert/strict'
import test from 'node:test'
import { Sandbox } from 'e2b'
import { waitFor, withBox } from './kit.js'

test('pause and connect', () =>
  withBox(async (box) => {
    await box.files.write('/home/user/note', 'kept')
    await box.pause()
    assert.equal(await box.isRunning(), false)
    assert.equal((await box.getInfo()).state, 'paused')
    const same = await Sandbox.connect(box.sandboxId, { timeoutMs: 120_000 })
    assert.equal(same.sandboxId, box.sandboxId)
    assert.equal(await same.files.read('/home/user/note'), 'kept')
    assert.equal((await same.getInfo()).state, 'running')
  }))

test('a timeout may pause, and traffic wakes', () =>
  withBox(
    async (box) => {
      await waitFor(async () => (await box.getInfo()).state === 'paused', 'it pauses', 60_000)
      assert.equal((await box.commands.run('echo awake')).stdout, 'awake\n')
    },
    { timeoutMs: 2_000, lifecycle: { onTimeout: 'pause', autoResume: true } },
  ))

test('a snapshot is a template', () =>
  withBox(async (box) => {
    await box.files.write('/home/user/note', 'then')
    const { snapshotId } = await box.createSnapshot()
    await box.files.write('/home/user/note', 'now')
    const again = await Sandbox.create(snapshotId, { timeoutMs: 60_000 })
    try {
      assert.equal(await again.files.read('/home/user/note'), 'then')
    } finally {
      await again.kill()
    }
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), false)
  }))
