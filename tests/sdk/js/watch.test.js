import assert from 'node:assert/strict'
import test from 'node:test'
import { FilesystemEventType, InvalidArgumentError, NotFoundError } from 'e2b'
import { waitFor, withBox } from './kit.js'

async function withWatch(options, use) {
  await withBox(async (box) => {
    await box.files.makeDir('/tmp/w')
    const events = []
    const handle = await box.files.watchDir('/tmp/w', (event) => void events.push(event), options)
    const expect = (type, name) =>
      waitFor(() => events.find((e) => e.type === type && e.name === name), `${type} ${name}, seen ${JSON.stringify(events)}`)
    await use({ box, events, handle, expect })
    await handle.stop()
  })
}

test('a write', () =>
  withWatch({}, async ({ box, events, expect }) => {
    await box.files.write('/tmp/w/new', 'x')
    await expect(FilesystemEventType.WRITE, 'new')
    assert.equal(events[0].type, FilesystemEventType.CREATE)
  }))

test('every kind', () =>
  withWatch({}, async ({ box, expect }) => {
    await box.commands.run('cd /tmp/w; echo 1 > a; chmod 600 a; mv a b; rm b')
    await expect(FilesystemEventType.CREATE, 'a')
    await expect(FilesystemEventType.CHMOD, 'a')
    await expect(FilesystemEventType.RENAME, 'a')
    await expect(FilesystemEventType.REMOVE, 'b')
  }))

test('recursive, also into new directories', () =>
  withWatch({ recursive: true }, async ({ box, expect }) => {
    await box.commands.run('mkdir -p /tmp/w/fresh/inner && echo x > /tmp/w/fresh/inner/two')
    await expect(FilesystemEventType.CREATE, 'fresh/inner/two')
  }))

test('events with entries', () =>
  withWatch({ includeEntry: true }, async ({ box, expect }) => {
    await box.files.write('/tmp/w/sized', '12345')
    const event = await expect(FilesystemEventType.WRITE, 'sized')
    assert.equal(event.entry.path, '/tmp/w/sized')
  }))

test('what cannot be watched', () =>
  withBox(async (box) => {
    await assert.rejects(box.files.watchDir('/no/such/place', () => {}), NotFoundError)
    await assert.rejects(box.files.watchDir('/etc/hostname', () => {}), InvalidArgumentError)
  }))

test('a watch has an end', () =>
  withBox(async (box) => {
    let ended = false
    await box.files.watchDir('/tmp', () => {}, { timeoutMs: 500, onExit: () => void (ended = true) })
    await waitFor(() => ended, 'the watch ends by itself')
  }))
