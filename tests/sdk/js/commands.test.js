import assert from 'node:assert/strict'
import test from 'node:test'
import { CommandExitError, InvalidArgumentError, NotFoundError, TimeoutError } from 'e2b'
import { waitFor, withBox } from './kit.js'

test('a command and its output', () =>
  withBox(async (box) => {
    const result = await box.commands.run('echo out; echo err >&2')
    assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['out\n', 'err\n', 0])
  }))

test('callbacks', () =>
  withBox(async (box) => {
    let out = ''
    let err = ''
    await box.commands.run('echo one; echo two >&2', { onStdout: (d) => (out += d), onStderr: (d) => (err += d) })
    assert.deepEqual([out, err], ['one\n', 'two\n'])
  }))

test('a failing command rejects with its code', () =>
  withBox(async (box) => {
    await assert.rejects(box.commands.run('echo why >&2; exit 7'), (error) => {
      assert.ok(error instanceof CommandExitError)
      assert.deepEqual([error.exitCode, error.stderr], [7, 'why\n'])
      return true
    })
  }))

test('environment, directory and user', () =>
  withBox(
    async (box) => {
      const run = async (cmd, options) => (await box.commands.run(cmd, options)).stdout
      assert.equal(await run('echo $A $B', { envs: { B: 'command' } }), 'box command\n')
      assert.equal(await run('pwd', { cwd: '/tmp' }), '/tmp\n')
      assert.equal(await run('pwd'), '/home/user\n')
      assert.equal(await run('whoami', { user: 'root' }), 'root\n')
      assert.equal(await run('sudo whoami'), 'root\n')
      await assert.rejects(run('pwd', { cwd: '/not/there' }), InvalidArgumentError)
    },
    { envs: { A: 'box', B: 'box' } },
  ))

test('in the background and waited for', () =>
  withBox(async (box) => {
    const handle = await box.commands.run('echo begun; sleep 0.2; echo done', { background: true })
    const result = await handle.wait()
    assert.equal(result.stdout, 'begun\ndone\n')
  }))

test('list and kill', () =>
  withBox(async (box) => {
    const handle = await box.commands.run('sleep 60', { background: true })
    assert.ok((await box.commands.list()).some((p) => p.pid === handle.pid))
    assert.equal(await box.commands.kill(handle.pid), true)
    await assert.rejects(handle.wait(), CommandExitError)
    await waitFor(async () => !(await box.commands.list()).some((p) => p.pid === handle.pid), 'it leaves the list')
    assert.equal(await box.commands.kill(999_999), false)
  }))

test('stdin', () =>
  withBox(async (box) => {
    const handle = await box.commands.run('cat', { background: true, stdin: true })
    await box.commands.sendStdin(handle.pid, 'one\n')
    await handle.sendStdin('zwö\n')
    await box.commands.closeStdin(handle.pid)
    assert.equal((await handle.wait()).stdout, 'one\nzwö\n')
  }))

test('reconnecting to a running command', () =>
  withBox(async (box) => {
    const first = await box.commands.run('read line; echo after:$line', { background: true, stdin: true })
    await first.disconnect()
    const again = await box.commands.connect(first.pid)
    await box.commands.sendStdin(first.pid, 'now\n')
    assert.equal((await again.wait()).stdout, 'after:now\n')
  }))

test('disconnecting leaves the command', () =>
  withBox(async (box) => {
    const handle = await box.commands.run('sleep 60', { background: true })
    await handle.disconnect()
    assert.ok((await box.commands.list()).some((p) => p.pid === handle.pid))
  }))

test('connecting to no process', () =>
  withBox(async (box) => {
    await assert.rejects(box.commands.connect(999_999), NotFoundError)
  }))

test('a timeout ends the command', () =>
  withBox(async (box) => {
    await assert.rejects(box.commands.run('sleep 3600', { timeoutMs: 1000 }), TimeoutError)
    await waitFor(
      async () => !(await box.commands.run('ps ax -o args | grep -v grep')).stdout.includes('sleep 3600'),
      'it was ended',
    )
  }))

test('children left behind do not hold the command', () =>
  withBox(async (box) => {
    assert.equal((await box.commands.run('sleep 30 & echo back')).stdout, 'back\n')
  }))

test('large output is whole', () =>
  withBox(async (box) => {
    const lines = (await box.commands.run('seq 1 100000')).stdout.trimEnd().split('\n')
    assert.deepEqual([lines.length, lines.at(-1)], [100_000, '100000'])
  }))

test('many commands at once', () =>
  withBox(async (box) => {
    const results = await Promise.all([...Array(20).keys()].map((n) => box.commands.run(`echo ${n}`)))
    assert.deepEqual(results.map((r) => r.stdout), [...Array(20).keys()].map((n) => `${n}\n`))
  }))

test('the end of the box ends the command with words', () =>
  withBox(async (box) => {
    const handle = await box.commands.run('sleep 60', { background: true })
    const ended = assert.rejects(handle.wait(), TimeoutError)
    await box.kill()
    await ended
  }))
