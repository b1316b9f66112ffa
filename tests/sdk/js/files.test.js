import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import test from 'node:test'
import { FileNotFoundError, FileType, InvalidArgumentError, NotFoundError } from 'e2b'
import { withBox } from './kit.js'

test('text', () =>
  withBox(async (box) => {
    const info = await box.files.write('notes.txt', 'hällo\n')
    assert.equal(info.path, '/home/user/notes.txt')
    assert.equal(await box.files.read('notes.txt'), 'hällo\n')
  }))

test('bytes, blobs and streams', () =>
  withBox(async (box) => {
    const data = new Uint8Array(300_000).map((_, n) => n % 251)
    await box.files.write('/tmp/a', data.buffer)
    await box.files.write('/tmp/b', new Blob([data]))
    await box.files.write('/tmp/c', new Blob([data]).stream())
    for (const path of ['/tmp/a', '/tmp/b', '/tmp/c']) {
      assert.deepEqual(await box.files.read(path, { format: 'bytes' }), data)
    }
    const chunks = []
    for await (const chunk of await box.files.read('/tmp/a', { format: 'stream' })) chunks.push(chunk)
    assert.deepEqual(Buffer.concat(chunks), Buffer.from(data))
  }))

test('an empty file', () =>
  withBox(async (box) => {
    await box.files.write('empty', '')
    assert.equal(await box.files.read('empty'), '')
  }))

test('a hundred megabytes both ways', () =>
  withBox(async (box) => {
    const data = Buffer.alloc(100 * 1024 * 1024)
    for (let n = 0; n < data.length; n += 4096) data.writeUInt32LE(n, n)
    const digest = createHash('sha256').update(data).digest('hex')
    await box.files.write('/home/user/big.bin', new Blob([data]))
    assert.equal((await box.commands.run('sha256sum big.bin')).stdout.split(' ')[0], digest)
    const back = await box.files.read('/home/user/big.bin', { format: 'bytes' })
    assert.equal(createHash('sha256').update(back).digest('hex'), digest)
  }))

test('overwriting makes shorter', () =>
  withBox(async (box) => {
    await box.files.write('a', 'a long text')
    await box.files.write('a', 'short')
    assert.equal(await box.files.read('a'), 'short')
  }))

test('many files in one call', () =>
  withBox(async (box) => {
    const entries = [...Array(10).keys()].map((n) => ({ path: `/tmp/many/${n}`, data: `file ${n}` }))
    const written = await box.files.write(entries)
    assert.deepEqual(written.map((w) => w.path), entries.map((e) => e.path))
    assert.equal(await box.files.read('/tmp/many/7'), 'file 7')
  }))

test('parents are made and owned', () =>
  withBox(async (box) => {
    await box.files.write('one/two/three', 'x')
    assert.equal((await box.commands.run('stat -c %U one one/two one/two/three')).stdout, 'user\nuser\nuser\n')
  }))

test('awkward names', () =>
  withBox(async (box) => {
    for (const name of ['sp ace', 'ümläut', `quote'"`, 'per%20cent', 'a+b&c=d?']) {
      await box.files.write(`/tmp/odd/${name}`, name)
      assert.equal(await box.files.read(`/tmp/odd/${name}`), name)
    }
    assert.equal((await box.files.list('/tmp/odd')).length, 5)
  }))

test('list, depth, types', () =>
  withBox(async (box) => {
    await box.commands.run('mkdir -p /tmp/tree/a/b; printf 12345 > /tmp/tree/f; touch /tmp/tree/a/b/g; ln -s f /tmp/tree/l')
    const flat = await box.files.list('/tmp/tree')
    assert.deepEqual(flat.map((e) => e.name).sort(), ['a', 'f', 'l'])
    const file = flat.find((e) => e.name === 'f')
    assert.deepEqual([file.type, file.size, file.owner], [FileType.FILE, 5, 'user'])
    assert.equal(flat.find((e) => e.name === 'l').symlinkTarget, '/tmp/tree/f')
    assert.equal((await box.files.list('/tmp/tree', { depth: 3 })).length, 5)
    await assert.rejects(box.files.list('/nope'), NotFoundError)
  }))

test('exists, info, mkdir, rename, remove', () =>
  withBox(async (box) => {
    assert.equal(await box.files.exists('/tmp/x'), false)
    assert.equal(await box.files.makeDir('/tmp/x/y'), true)
    assert.equal(await box.files.makeDir('/tmp/x/y'), false)
    await box.files.write('/tmp/x/y/f', 'abc')
    assert.equal((await box.files.getInfo('/tmp/x/y/f')).size, 3)
    assert.equal((await box.files.rename('/tmp/x/y/f', '/tmp/x/z/g')).path, '/tmp/x/z/g')
    assert.equal(await box.files.exists('/tmp/x/y/f'), false)
    await box.files.remove('/tmp/x')
    assert.equal(await box.files.exists('/tmp/x'), false)
    await assert.rejects(box.files.rename('/tmp/none', '/tmp/other'), NotFoundError)
  }))

test('what cannot be read', () =>
  withBox(async (box) => {
    await assert.rejects(box.files.read('/no/such/file'), FileNotFoundError)
    await assert.rejects(box.files.read('/tmp'), InvalidArgumentError)
  }))

test('signed urls', () =>
  withBox(async (box) => {
    const form = new FormData()
    form.append('file', new Blob(['by url']), 'signed.txt')
    const up = await fetch(await box.uploadUrl('/tmp/signed.txt'), { method: 'POST', body: form })
    assert.equal(up.status, 200)
    const down = await fetch(await box.downloadUrl('/tmp/signed.txt', { useSignatureExpiration: 60 }))
    assert.equal(await down.text(), 'by url')
    const foreign = (await box.downloadUrl('/tmp/signed.txt')).replace('signed', 'other')
    assert.ok([401, 404].includes((await fetch(foreign)).status))
  }))

test('metadata', () =>
  withBox(async (box) => {
    await box.files.write('tagged', 'x', { metadata: { owner: 'me' } })
    assert.deepEqual((await box.files.getInfo('tagged')).metadata, { owner: 'me' })
  }))
