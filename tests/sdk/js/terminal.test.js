import assert from 'node:assert/strict'
import test from 'node:test'
import { waitFor, withBox } from './kit.js'

async function withTerminal(use, options = {}) {
  await withBox(async (box) => {
    let output = ''
    const decoder = new TextDecoder()
    const handle = await box.pty.create({
      cols: 80,
      rows: 24,
      onData: (data) => {
        output += decoder.decode(data, { stream: true })
      },
      ...options,
    })
    handle.wait().catch(() => {})
    await use({
      box,
      handle,
      type: (text) => box.pty.sendInput(handle.pid, new TextEncoder().encode(text)),
      expect: (text) => waitFor(() => output.includes(text), `${text} in the terminal`),
    })
  })
}

test('a shell answers', () =>
  withTerminal(async ({ type, expect }) => {
    await type('echo $((40+2))-answer\n')
    await expect('42-answer')
  }))

test('resize', () =>
  withTerminal(async ({ box, handle, type, expect }) => {
    await type('stty size\n')
    await expect('24 80')
    await box.pty.resize(handle.pid, { cols: 132, rows: 50 })
    await type('stty size\n')
    await expect('50 132')
  }))

test('ctrl-c interrupts', () =>
  withTerminal(async ({ box, type, expect }) => {
    await type('sleep 600\n')
    await waitFor(
      async () => (await box.commands.run('ps ax -o args | grep -v grep')).stdout.includes('sleep 600'),
      'the shell runs it',
    )
    await type('\x03')
    await type('echo after-$((1+1))\n')
    await expect('after-2')
  }))

test('kill', () =>
  withTerminal(async ({ box, handle }) => {
    assert.equal(await box.pty.kill(handle.pid), true)
    await waitFor(async () => (await box.pty.kill(handle.pid)) === false, 'it is gone')
  }))

test('user, directory and environment', () =>
  withTerminal(
    async ({ type, expect }) => {
      await type('echo $(whoami)-$(pwd)-$WORD\n')
      await expect('root-/tmp-given')
    },
    { user: 'root', cwd: '/tmp', envs: { WORD: 'given' } },
  ))
