//! Requests that are almost right, in ways in which servers differ.

/// The same sequence for the same seed, on every machine.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end.max(1)).unwrap();
        usize::try_from(self.next() % end).unwrap()
    }

    /// True once in so many times.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    pub fn of<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }
}

/// What is sent, and in which pieces.
#[derive(Debug, Clone)]
pub struct Attempt {
    pub bytes: Vec<u8>,
    /// Where it is cut, and how many milliseconds pass there.
    pub pauses: Vec<(usize, u64)>,
    pub half_close: bool,
}

/// Which of the two boxes it is for: names and paths differ, so that what is served tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// `a.test` may be asked anything, `b.test` only `GET /public/*`; both are one address.
    Narrowed,
    /// `o.test` may be asked anything; nothing is said of others at that address.
    ByName,
}

const BEFORE: &[&[u8]] = &[
    b"\r\n",
    b"\n",
    b" ",
    b"\t",
    b"\x0b",
    b"\x0c",
    b"\0",
    b"\r",
    b"\r\n\r\n",
    b"\r\n ",
    b"\n\t",
    b"\r\n\0",
    b"\xef\xbb\xbf",
    b"\x80",
    b"\xff",
    b"\x01",
    b"\x7f",
    b"x\r\n",
    b"x\n",
    b"HTTP/1.1 200 OK\r\n",
    b"PROXY UNKNOWN\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1 80\r\n",
    b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0",
    b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\x01\x01\x01\x01\x01\x01\x01\x01\0\x50\0\x50",
    b"\x16\x03\x01\0\x01",
    b"\x16\x02",
    b"\x80\x2e\x01\x03\x01",
    b"*1\r\n$4\r\nPING\r\n",
    b"SSH-2.0-x\r\n",
    b"EHLO x\r\n",
    b"0032git-upload-pack /me/project.git\0host=git.test\0",
    b"<?xml version='1.0'?>",
    b"AMQP\0\0\x09\x01",
    b"{}\n",
    b"\0\0\0\x08\x04\xd2\x16\x2f",
    b"0\n",
    b"0\r\n\r\n",
    b"5\r\nhello\r\n",
];
const METHODS: &[&[u8]] = &[
    b"GET",
    b"GET",
    b"GET",
    b"get",
    b"Get",
    b"G_T",
    b"GE_T",
    b"_GET",
    b"GET_",
    b"G-T",
    b"G3T",
    b"POST",
    b"HEAD",
    b"OPTIONS",
    b"PUT",
    b"DELETE",
    b"TRACE",
    b"CONNECT",
    b"PROPFIND",
    b"M-SEARCH",
    b"",
    b"G",
    b"GE",
    b"GETT",
    b"<GET",
    b"\"GET",
    b"(GET)",
    b"GET:",
    b"GET,",
    b"G\x80T",
    b"\xffGET",
    b"GET\xff",
    b"GET\0",
    b"SSH-2.0-x",
    b"*1",
    b"*",
    b"0032git-upload-pack",
    b"<?xml",
    b"PRI",
    b"PROXY",
    b"SOURCE",
    b"QUERY",
    b"HTTP/1.1",
];
const BETWEEN: &[&[u8]] = &[
    b" ",
    b" ",
    b" ",
    b" ",
    b"  ",
    b"\t",
    b" \t",
    b"\x0b",
    b"\x0c",
    b"\r",
    b"\0",
    b"\x1c",
    b"\x1d",
    b"\x1e",
    b"\x1f",
    b"\x85",
    b"\xa0",
    b"\xc2\xa0",
    b"\xe2\x80\x83",
    b"\x01",
    b"\x7f",
    b"",
    b"\r ",
    b"\n ",
    b"\r\n ",
];
const PUBLIC: &[&[u8]] = &[
    b"/public/x",
    b"/public/",
    b"/public/..%3b/private",
    b"/public/%c0%ae%c0%ae/private",
    b"/public/%u002e%u002e/private",
    b"/public/../private",
    b"/public/%2e%2e/private",
    b"/public/..;/private",
    b"/public/..;a=b/private",
    b"/public//../private",
    b"/public/..\\private",
    b"/public/..%5cprivate",
    b"/public/%252e%252e/private",
    b"/public/x%00/../private",
    b"/public%2f..%2fprivate",
    b"/public/x#/../../private",
    b"/public/x?/../../private",
    b"/public/.%00./private",
    b"/public/%e0%80%ae./private",
    b"/public/..%20/private",
    b"/public/..%09/private",
    b"/public/;/../private",
    b"/public/x;/../../private",
    b"/public/%ef%bc%8e%ef%bc%8e/private",
    b"/%70ublic/x",
    b"/./public/x",
    b"//public/x",
    b"/public/x/..",
    b"/public/..",
    b"/public/%2e%2E",
    b"/private/..%2fpublic/x",
    b"/private/../public/x",
    b"/public/..//private",
    b"/public/%%32%65%%32%65/private",
];
const PRIVATE: &[&[u8]] = &[
    b"/private",
    b"/private",
    b"/private?\xc3\xa9",
    b"/private\x80",
    b"/private\xff",
    b"/private\x7f",
    b"/private\0",
    b"/private\x01",
    b"/private?x=\x80",
    b"/private#\x80",
    b"\\private",
    b"private",
    b"*",
    b"",
    b"?",
    b"//private",
    b"http://b.test/private",
    b"HTTP://b.test/private",
    b"http://b.test:80/private",
    b"http://a.test/private",
    b"http://x@b.test/private",
    b"http:///private",
    b"http:/private",
    b"https://b.test/private",
    b"b.test:80",
    b"//b.test/private",
    b"/\xe2\x80\xa8private",
    b"/private;x",
    b"/%70rivate",
    b"/private HTTP/1.1",
    b"/ /private",
];
const VERSIONS: &[&[u8]] = &[
    b"HTTP/1.1",
    b"HTTP/1.1",
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/1.2",
    b"HTTP/1.9",
    b"HTTP/2.0",
    b"HTTP/2",
    b"HTTP/3.0",
    b"HTTP/01.1",
    b"HTTP/1.01",
    b"HTTP/1.10",
    b"HTTP/1",
    b"HTTP/1.",
    b"HTTP/",
    b"http/1.1",
    b"Http/1.1",
    b"HTTP/1.1 ",
    b"HTTP/1.1\t",
    b"HTTP/1.1\0",
    b"HTTP/1.1x",
    b"HTTP/1.1\x80",
    b"\x80HTTP/1.1",
    b"HTTP /1.1",
    b"HTTP/ 1.1",
    b"HTTP/+1.1",
    b"HTTP/1,1",
    b"HTTQ/1.1",
    b"ICY",
    b"RTSP/1.0",
    b"SIP/2.0",
    b"",
    b"HTTP/11.1",
    b"HTTP/4294967297.1",
    b"HTTPS/1.1",
    b"x HTTP/1.1",
];
const ENDS: &[&[u8]] = &[
    b"\r\n",
    b"\r\n",
    b"\r\n",
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\r\n",
    b"\0\r\n",
    b" \r\n",
    b"\n\r",
    b"\x85",
    b"\x0b\r\n",
];
const HOSTS: &[&[u8]] = &[
    b"Host: b.test",
    b"Host: b.test",
    b"Host: b.test",
    b"Host: B.TEST",
    b"Host: b.test.",
    b"Host: b.test:80",
    b"Host:b.test",
    b"Host : b.test",
    b"Host:\tb.test",
    b"Host: \tb.test\t",
    b" Host: b.test",
    b"host: b.test",
    b"Host: nowhere.test",
    b"Host: a.test",
    b"Host: o.test",
    b"Host:",
    b"Host: ",
    b"X: y",
    b"Host\0: b.test",
    b"Host: a.test\r\nHost: b.test",
    b"Host: b.test\r\nHost: a.test",
    b"Host: o.test\r\nHost: b.test",
    b"Host: a.test, b.test",
    b"Host: a.test b.test",
    b"Host: a.test\tb.test",
    b"Host: x@b.test",
    b"Host: a.test@b.test",
    b"Host: a.test:80@b.test",
    b"Host: a.test/b.test",
    b"Host: a.test\\b.test",
    b"Host: a.test#b.test",
    b"Host: a.test\0b.test",
    b"Host: a.test\r\n b.test",
    b"Host:\r\n b.test",
    b"Host: a.test\nHost: b.test",
    b"Host: a.test\rHost: b.test",
    b"Host: b\xc2\xadtest",
    b"Host: b\xe3\x80\x82test",
    b"Host: \xef\xbd\x82.test",
    b"Host: b.test\x80",
    b"Host: \x80",
    b"H\xc3\xb6st: x\r\nHost: b.test",
    b"Host: [b.test]",
    b"Host: b.test:",
    b"Host: b.test:x",
    b"Host: 203.0.113.10",
    b"H_ost: x\r\nHost: b.test",
    b"Host;: b.test",
    b"Ho st: b.test",
    b":authority: b.test",
    b"Host= b.test",
];
const EXTRA: &[&[u8]] = &[
    b"", b"", b"", b"", b"X-HTTP-Method-Override: DELETE", b"X_HTTP_Method_Override: DELETE", b"X-Original-URL: /private",
    b"X-Forwarded-Host: nowhere.test", b"x-forwarded_host: nowhere.test", b"X.Original.URL: /private", b"Expect: 100-continue", b"Expect: y", b"Expect: 100-continue, y",
    b"Connection: Content-Length", b"Connection: Host", b"Connection: Transfer-Encoding, close", b"Connection: keep-alive",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
    b"Connection: Upgrade\r\nUpgrade: websocket", b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    b"Connection: Upgrade\r\nUpgrade: TLS/1.0", b"Trailer: X-Original-URL", b"TE: trailers, chunked", b"X: a\r\n b", b"X: a\r\n\tb",
    b"X : y", b"X\t: y", b"\x80: y", b"X: \x80", b"X: \0", b"X: \x01", b": y", b"X", b"X:\n", b"\0", b"X: y\rZ: z", b"X:y\n\n", b"Proxy-Connection: keep-alive",
    b"Range: bytes=0-1", b"Max-Forwards: 0", b"X-Forwarded-Proto: https", b"Cookie: a=b\r\nCookie: c=d",
];
const INNER: &[u8] = b"GET /private HTTP/1.1\r\nHost: b.test\r\n\r\n";
const FRAMING: &[&[u8]] = &[
    b"Content-Length: 40",
    b"Content-Length: 0",
    b"Content-Length: 5",
    b"Content-Length: +40",
    b"Content-Length: 4 0",
    b"Content-Length: 40\r\nContent-Length: 0",
    b"Content-Length: 0\r\nContent-Length: 40",
    b"Content-Length: 0, 40",
    b"Content-Length: 0x28",
    b"Content-Length : 40",
    b"Content-Length:\x0b40",
    b"Content-Length: -1",
    b"Content-Length: 00040",
    b"Content-Length: 40;",
    b"Content_Length: 40",
    b"Content-Length: 18446744073709551656",
    b"Content-Length\0: 40",
    b" Content-Length: 40",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 40",
    b"Content-Length: 40\r\nTransfer-Encoding: chunked",
    b"Content-Length: 0\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: identity, chunked",
    b"Transfer-Encoding:\x0bchunked",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding:\r\n chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x",
    b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: \"chunked\"",
    b"Transfer-Encoding: CHUNKED",
    b"Transfer_Encoding: chunked",
    b"Transfer-Encoding: chunked;x=y",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked\0",
    b"Transfer-Encoding: \x80chunked",
    b"X: y\nTransfer-Encoding: chunked",
];
const CHUNKS: &[&[u8]] = &[
    b"0\r\n\r\n",
    b"0\r\nX-Original-URL: /private\r\n\r\n",
    b"0;x\r\n\r\n",
    b"0\n\n",
    b"00000000000000000000\r\n\r\n",
    b"0x0\r\n\r\n",
    b"0\r\nHost: b.test\r\n\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"5;\nxx\r\nhello\r\n0\r\n\r\n",
    b"-5\r\nhello\r\n0\r\n\r\n",
    b"+0\r\n\r\n",
    b"0 \r\n\r\n",
    b" 0\r\n\r\n",
    b"0\r\n\n",
    b"0\r\r\n\r\n",
    b"5\r\nhelloxx0\r\n\r\n",
    b"ffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    b"0_\r\n\r\n",
    b"\r\n0\r\n\r\n",
];

pub fn attempt(dice: &mut Dice, policy: Policy, http2_only: bool) -> Attempt {
    let mut bytes = match dice.once_in(if http2_only { 2 } else { 24 }) {
        true => http2(dice, policy),
        false => request(dice, policy),
    };
    if dice.once_in(6) {
        let before = dice.of(BEFORE);
        bytes.splice(0..0, before.iter().copied());
    }
    if dice.once_in(4) {
        bytes.extend(request(dice, policy));
    }
    if dice.once_in(3) {
        for _ in 0..=dice.below(3) {
            blur(dice, &mut bytes);
        }
    }
    if dice.once_in(40) {
        bytes.truncate(dice.below(bytes.len()));
    }
    Attempt {
        pauses: pauses(dice, bytes.len()),
        half_close: dice.once_in(3),
        bytes,
    }
}

fn request(dice: &mut Dice, policy: Policy) -> Vec<u8> {
    // Mostly one thing is odd, sometimes several: two oddities often cancel each other.
    let often = 1 + dice.below(5);
    let odd = |dice: &mut Dice| dice.below(6) < often && dice.once_in(3);
    let mut out = Vec::new();
    let pick = |dice: &mut Dice, odd: bool, list: &[&'static [u8]]| match odd {
        true => dice.of(list),
        false => list[0],
    };
    let is_odd = odd(dice);
    out.extend(pick(dice, is_odd, METHODS));
    let is_odd = odd(dice);
    out.extend(pick(dice, is_odd, BETWEEN));
    let targets = match policy {
        Policy::Narrowed if dice.once_in(2) => PUBLIC,
        _ => PRIVATE,
    };
    let is_odd = odd(dice) || dice.once_in(3);
    out.extend(pick(dice, is_odd, targets));
    if dice.once_in(60) {
        out.extend(std::iter::repeat_n(b'x', 1 << dice.below(14)));
    }
    let is_odd = odd(dice);
    let short = dice.once_in(30);
    if !short {
        out.extend(pick(dice, is_odd, BETWEEN));
        let is_odd = odd(dice);
        out.extend(pick(dice, is_odd, VERSIONS));
    }
    let end = match odd(dice) {
        true => dice.of(ENDS),
        false => b"\r\n",
    };
    out.extend(end);
    let host: &[u8] = match (odd(dice), policy) {
        (true, _) => dice.of(HOSTS),
        (false, _) if dice.once_in(4) => b"Host: nowhere.test",
        (false, Policy::ByName) if dice.once_in(8) => b"Host: o.test",
        (false, _) => b"Host: b.test",
    };
    let mut headers: Vec<&[u8]> = vec![host];
    if odd(dice) {
        headers.push(dice.of(EXTRA));
    }
    if dice.below(5) > 0 {
        headers.push(b"Connection: close");
    }
    let framed = odd(dice);
    if framed {
        headers.push(dice.of(FRAMING));
        if dice.once_in(4) {
            headers.push(dice.of(FRAMING));
        }
    }
    if odd(dice) {
        headers.rotate_left(1);
    }
    for header in headers.into_iter().filter(|header| !header.is_empty()) {
        out.extend(header);
        out.extend(end);
    }
    out.extend(end);
    if framed {
        if dice.once_in(2) {
            out.extend(dice.of(CHUNKS));
        }
        out.extend(INNER);
    }
    out
}

/// A preface and one request, with prior knowledge.
fn http2(dice: &mut Dice, policy: Policy) -> Vec<u8> {
    let path: &[u8] = match policy {
        Policy::Narrowed if dice.once_in(2) => dice.of(PUBLIC),
        _ => b"/private",
    };
    http2_for(path)
}

pub fn plain_http2(path: &str) -> Vec<u8> {
    http2_for(path.as_bytes())
}

fn http2_for(path: &[u8]) -> Vec<u8> {
    let mut out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    // GET and http from the table, path and authority as they are.
    let mut block = vec![0x82, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    block.extend(path);
    block.extend([0x01, 6]);
    block.extend(b"b.test");
    out.extend([0, 0, u8::try_from(block.len()).unwrap(), 1, 5, 0, 0, 0, 1]);
    out.extend(block);
    out
}

fn blur(dice: &mut Dice, bytes: &mut Vec<u8>) {
    const SHARP: &[u8] = b"\0\x01\t\n\x0b\x0c\r\x1c\x1f !\"#%&'()*+,-./:;<=>?@[\\]^_`{|}~\x7f\x80\x85\xa0\xc0\xe9\xff";
    if bytes.is_empty() {
        return;
    }
    // The first line is what the decision is made by.
    let end = match dice.once_in(3) {
        true => bytes.len(),
        false => bytes.len().min(40),
    };
    let at = dice.below(end);
    let byte = match dice.once_in(3) {
        true => dice.byte(),
        false => SHARP[dice.below(SHARP.len())],
    };
    match dice.below(5) {
        0 => bytes[at] = byte,
        1 => drop(bytes.remove(at)),
        2 => bytes[at] ^= 1 << dice.below(8),
        3 => bytes.insert(at, bytes[at]),
        _ => bytes.insert(at, byte),
    }
}

fn pauses(dice: &mut Dice, length: usize) -> Vec<(usize, u64)> {
    match dice.below(12) {
        0 => {
            let mut cuts: Vec<_> = (0..=dice.below(3))
                .map(|_| (dice.below(length), 3))
                .collect();
            cuts.sort_unstable();
            cuts
        }
        // Byte by byte.
        1 => (1..length.min(30)).map(|at| (at, 1)).collect(),
        // Later than a client is waited for that lets the server speak first.
        2 => vec![(0, 80)],
        3 if dice.once_in(3) => vec![(dice.below(length.min(30)), 80)],
        // Later than the moat waits at all.
        4 if dice.once_in(12) => vec![(dice.below(length.min(30)), 700)],
        _ => Vec::new(),
    }
}
