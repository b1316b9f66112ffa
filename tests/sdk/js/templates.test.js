import assert from 'node:assert/strict'
import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { randomBytes } from 'node:crypto'
import test from 'node:test'
import { Sandbox, Template, waitForPort } from 'e2b'

const name = () => `js-${randomBytes(4).toString('hex')}`

/** Deletes a template by the call the SDK uses for snapshots. */
const remove = (template) =>
  fetch(`${process.env.E2B_API_URL}/templates/${template}`, {
    method: 'DELETE',
    headers: { 'X-API-KEY': process.env.E2B_API_KEY },
  })

test('a template is built and used', async () => {
  const context = await mkdtemp(join(tmpdir(), 'sandkeep-'))
  const template = name()
  try {
    await mkdir(join(context, 'app'))
    await writeFile(join(context, 'app', 'note'), 'from the context')
    const recipe = Template({ fileContextPath: context })
      .fromTemplate('base')
      .copy('app', '/home/user/app')
      .setEnvs({ MODE: 'built' })
      .setWorkdir('/home/user/app')
      .runCmd('cat note > ../copied && echo $MODE > ../mode')
      .setStartCmd('python3 -m http.server 8090', waitForPort(8090))
    const lines = []
    const info = await Template.build(recipe, template, {
      memoryMB: 512,
      onBuildLogs: (line) => lines.push(line.message),
    })
    assert.equal(info.templateId, template)
    assert.ok(lines.some((line) => line.includes('COPY app')), lines.join('\n'))
    assert.equal(await Template.exists(template), true)
    const box = await Sandbox.create(template, { timeoutMs: 60_000 })
    try {
      assert.equal(await box.files.read('/home/user/copied'), 'from the context')
      const ran = await box.commands.run('pwd; echo $MODE; curl -sS --max-time 30 http://127.0.0.1:8090/note')
      assert.equal(ran.stdout, '/home/user/app\nbuilt\nfrom the context')
    } finally {
      await box.kill()
    }
    await Template.assignTags(`${template}:default`, ['v1'])
    assert.deepEqual((await Template.getTags(template)).map(({ tag }) => tag).sort(), ['default', 'v1'])
  } finally {
    await remove(template)
    await rm(context, { recursive: true })
  }
  assert.equal(await Template.exists(template), false)
})

test('a failure says what went wrong', async () => {
  const template = name()
  const recipe = Template().fromTemplate('base').runCmd('echo words; exit 4')
  await assert.rejects(Template.build(recipe, template), /exit status 4/)
  const image = Template().fromImage('registry.example/none:1')
  await assert.rejects(Template.build(image, template), /template import none-1/)
})
