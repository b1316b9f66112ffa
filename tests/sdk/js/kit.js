// What the tests of the JavaScript SDK share.
import { Sandbox } from 'e2b'

/** Runs `use` with a fresh box, and ends the box. */
export async function withBox(use, options = {}) {
  const box = await Sandbox.create({ timeoutMs: 120_000, ...options })
  try {
    return await use(box)
  } finally {
    await box.kill()
  }
}

/** Waits until `condition` gives something true, and returns it. */
export async function waitFor(condition, what, limitMs = 20_000) {
  const end = Date.now() + limitMs
  while (Date.now() < end) {
    const value = await condition()
    if (value) return value
    await new Promise((next) => setTimeout(next, 20))
  }
  throw new Error(`did not happen within ${limitMs} ms: ${what}`)
}
