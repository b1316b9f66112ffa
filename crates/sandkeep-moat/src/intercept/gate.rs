//! What may go on to the box, and when. Neither must tell how much of a secret stands at the end
//! of what has come: the box may have chosen those bytes to find out.
//!
//! Always the same number of bytes is held back. When nothing follows for a moment they go, unless
//! a secret may have begun in them: then everything ends, and it is counted (see `standing`).

use std::{
    collections::VecDeque,
    error::Error as StdError,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use tokio::time::{Instant, Sleep, sleep_until};

use super::{
    automaton::Owners,
    frames::{Frames, Part, Unreadable},
    needles::Sought,
    scan::{Reflected, Scanner, may_begin_a_secret},
    standing::Watched,
};

/// What is held back goes after so much silence.
const PAUSE: Duration = Duration::from_millis(10);
/// Heads of frames that are held for so little payload are no conversation.
const MOST_HELD: usize = 1 << 20;

/// What to look for in an answer, and whom to tell.
#[derive(Debug, Clone)]
pub struct Search {
    pub sought: Arc<Sought>,
    pub watched: Arc<Watched>,
}

impl Search {
    /// Whether a secret is in these headers: in a name or a value, or in several together.
    pub fn is_in(&self, headers: &HeaderMap) -> bool {
        let names = headers.keys().map(|name| name.as_str().as_bytes());
        let values = headers.values().map(HeaderValue::as_bytes);
        self.sought.is_in(names) || self.sought.is_in(values)
    }
}

/// Why it does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    Reflected,
    /// It paused where a secret of these may have begun.
    NearMiss(Owners),
    Suspended,
    Unreadable,
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reflected => "the response holds a secret of this sandbox",
            Self::NearMiss(_) => "the response stops where a secret may have begun",
            Self::Suspended => "the secret of this host is suspended for this sandbox",
            Self::Unreadable => "the WebSocket frames of the host cannot be searched",
        })
    }
}

impl StdError for Stop {}

impl From<Reflected> for Stop {
    fn from(_: Reflected) -> Self {
        Self::Reflected
    }
}

impl From<Unreadable> for Stop {
    fn from(_: Unreadable) -> Self {
        Self::Unreadable
    }
}

#[derive(Debug)]
pub struct Gate {
    watched: Arc<Watched>,
    data: Scanner,
    frames: Option<(Frames, Scanner)>,
    hold: Hold,
    clock: Clock,
}

impl Gate {
    pub fn new(search: Search) -> Self {
        Self {
            hold: Hold::new(search.sought.hold),
            data: Scanner::new(search.sought),
            watched: search.watched,
            frames: None,
            clock: Clock::default(),
        }
    }

    /// For what a server sends over a WebSocket.
    pub fn for_frames(search: Search) -> Self {
        let control = Scanner::new(Arc::clone(&search.sought));
        Self {
            frames: Some((Frames::default(), control)),
            ..Self::new(search)
        }
    }

    /// What may go on now that this has come.
    pub fn push(&mut self, mut piece: &[u8]) -> Result<Bytes, Stop> {
        if self.watched.is_suspended() {
            return Err(Stop::Suspended);
        }
        let Some((frames, control)) = &mut self.frames else {
            self.data.push(piece)?;
            self.hold.push(piece, true);
            return Ok(self.hold.all_but_the_last());
        };
        while !piece.is_empty() {
            let (count, part) = frames.next(piece)?;
            let (these, rest) = piece.split_at(count);
            match part {
                Part::Head => {}
                Part::Data => self.data.push(these)?,
                Part::Control => control.push(these)?,
            }
            self.hold.push(these, part == Part::Data);
            piece = rest;
        }
        if self.hold.held() > MOST_HELD {
            return Err(Stop::Unreadable);
        }
        Ok(self.hold.all_but_the_last())
    }

    /// What may go on since nothing follows. Pending as long as it is not time.
    pub fn poll_pause(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes, Stop>> {
        if self.hold.held() == 0 {
            return Poll::Pending;
        }
        ready!(self.clock.poll_silence(context));
        if may_begin_a_secret(&self.hold.raw) {
            ready!(self.clock.poll_turn(context, &self.watched));
        }
        self.clock = Clock::default();
        if self.watched.is_suspended() {
            return Poll::Ready(Err(Stop::Suspended));
        }
        let of_control = self.frames.as_ref().map(|(_, control)| control.begun());
        let begun = self.data.begun() | of_control.unwrap_or_default();
        Poll::Ready(match begun {
            0 => Ok(self.hold.all()),
            owners => Err(Stop::NearMiss(owners)),
        })
    }

    /// What may go on now that nothing more comes: it was no secret.
    pub fn finish(&mut self) -> Bytes {
        self.hold.all()
    }

    pub fn held(&self) -> usize {
        self.hold.held()
    }
}

/// The last bytes, of which those count that could be part of a secret.
#[derive(Debug)]
struct Hold {
    raw: BytesMut,
    /// Which of them count, by turns.
    parts: VecDeque<(usize, bool)>,
    counted: usize,
    least: usize,
}

impl Hold {
    fn new(least: usize) -> Self {
        Self {
            raw: BytesMut::new(),
            parts: VecDeque::new(),
            counted: 0,
            least,
        }
    }

    fn held(&self) -> usize {
        self.raw.len()
    }

    fn push(&mut self, bytes: &[u8], counts: bool) {
        self.raw.extend_from_slice(bytes);
        self.counted += if counts { bytes.len() } else { 0 };
        match self.parts.back_mut() {
            Some((length, same)) if *same == counts => *length += bytes.len(),
            _ => self.parts.push_back((bytes.len(), counts)),
        }
    }

    fn all_but_the_last(&mut self) -> Bytes {
        let mut go = 0;
        while self.counted > self.least {
            let Some((length, counts)) = self.parts.front_mut() else {
                break;
            };
            let count = match counts {
                true => (*length).min(self.counted - self.least),
                false => *length,
            };
            self.counted -= if *counts { count } else { 0 };
            *length -= count;
            go += count;
            if *length == 0 {
                self.parts.pop_front();
            }
        }
        self.raw.split_to(go).freeze()
    }

    fn all(&mut self) -> Bytes {
        self.parts.clear();
        self.counted = 0;
        self.raw.split().freeze()
    }
}

#[derive(Debug, Default)]
struct Clock {
    sleep: Option<Pin<Box<Sleep>>>,
    /// Its silence is over, and it waits for a turn.
    waiting: bool,
}

impl Clock {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.sleep {
            Some(sleep) => sleep.as_mut().poll(context),
            None => Poll::Ready(()),
        }
    }

    /// Counts from the first time it is asked, whatever comes in between.
    fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.waiting {
            return Poll::Ready(());
        }
        if self.sleep.is_none() {
            self.sleep = Some(Box::pin(sleep_until(Instant::now() + PAUSE)));
        }
        self.poll(context)
    }

    fn poll_turn(&mut self, context: &mut Context<'_>, watched: &Watched) -> Poll<()> {
        if !self.waiting {
            self.waiting = true;
            let turn = Instant::from_std(watched.standing.turn());
            self.sleep = Some(Box::pin(sleep_until(turn)));
        }
        self.poll(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use sandkeep_model::{SandboxId, Secret};

    use super::*;
    use crate::intercept::{needles::Needles, standing::Standings};

    const SECRET: &str = "wJalrXUtn-FEMI/K7MDENG_bPx+RfiCYEX";
    const TELLING: usize = 6;

    fn search() -> Search {
        let mut needles = Needles::default();
        needles.of(0);
        needles.add_value(SECRET);
        let standing = Standings::default().of(&SandboxId::random());
        let secret = Secret::new(SECRET);
        assert!(standing.admits("key", &secret, None));
        let mark = standing.mark(&secret);
        Search {
            sought: Arc::new(needles.sought()),
            watched: Arc::new(Watched {
                standing,
                secrets: vec![("key".to_owned(), mark)],
            }),
        }
    }

    /// The sizes in which a stream goes on, and what was held at each time.
    fn shape(mut gate: Gate, stream: &[u8], size: usize) -> Vec<(usize, usize)> {
        let mut sizes: Vec<_> = stream
            .chunks(size)
            .map(|piece| (gate.push(piece).unwrap().len(), gate.held()))
            .collect();
        sizes.push((gate.finish().len(), gate.held()));
        sizes
    }

    /// A WebSocket frame for every few bytes.
    fn framed(text: &[u8]) -> Vec<u8> {
        let frame = |piece: &[u8]| {
            let length = u8::try_from(piece.len()).unwrap();
            [&[0x82, length], piece, &[0x89, 1, b'?']].concat()
        };
        text.chunks(5).flat_map(frame).collect()
    }

    #[test]
    fn sizes_do_not_depend_on_how_much_matches() {
        let before = "x".repeat(700);
        let search = search();
        for right in 0..SECRET.len() {
            let guess = |wrong: &str| {
                let end = wrong.repeat(SECRET.len() - right);
                format!("{before}{}{end}{before}", &SECRET[..right]).into_bytes()
            };
            // The same length, but nothing of it right.
            let wrong = vec![b'~'; guess("~").len()];
            for size in [1, 2, 3, 7, 64, 700, 700 + right.max(1), 5000] {
                let plain = |text: &[u8]| shape(Gate::new(search.clone()), text, size);
                assert_eq!(plain(&guess("~")), plain(&wrong), "{right} right, {size}");
                let frames =
                    |text: &[u8]| shape(Gate::for_frames(search.clone()), &framed(text), size);
                assert_eq!(frames(&guess("~")), frames(&wrong), "{right} right, {size}");
            }
        }
    }

    #[test]
    fn nothing_of_a_secret_went_on_when_it_is_found() {
        for form in [
            SECRET.to_owned(),
            SECRET.bytes().map(|b| format!("&#{b:04};")).collect(),
        ] {
            let text = format!("{}{form}", "-".repeat(1000));
            for size in [1, 10, 100] {
                for frames in [false, true] {
                    let (mut gate, text) = match frames {
                        false => (Gate::new(search()), text.clone().into_bytes()),
                        true => (Gate::for_frames(search()), framed(text.as_bytes())),
                    };
                    let mut gone = Vec::new();
                    let stop = text.chunks(size).find_map(|piece| match gate.push(piece) {
                        Ok(clean) => {
                            gone.extend_from_slice(&clean);
                            None
                        }
                        Err(stop) => Some(stop),
                    });
                    assert_eq!(stop, Some(Stop::Reflected));
                    assert!(
                        !gone.contains(&form.as_bytes()[0]),
                        "{form} {size} {frames}"
                    );
                }
            }
        }
    }

    fn in_time<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
            .block_on(work)
    }

    #[test]
    fn a_pause_lets_all_go_or_ends_it_all() {
        in_time(async {
            let search = search();
            for right in 0..TELLING {
                for frames in [false, true] {
                    let text = format!("data: {}", &SECRET[..right]).into_bytes();
                    let (mut gate, text) = match frames {
                        false => (Gate::new(search.clone()), text),
                        true => (Gate::for_frames(search.clone()), framed(&text)),
                    };
                    assert!(gate.push(&text).unwrap().is_empty());
                    let gone = poll_fn(|context| gate.poll_pause(context)).await;
                    assert_eq!(gone.unwrap(), text);
                    assert_eq!(gate.held(), 0);
                    // The search goes on over it.
                    let rest = &SECRET.as_bytes()[right..];
                    let rest = if frames { framed(rest) } else { rest.to_vec() };
                    assert_eq!(gate.push(&rest), Err(Stop::Reflected));
                }
            }
            for right in TELLING..SECRET.len() {
                let mut gate = Gate::new(search.clone());
                gate.push(&SECRET.as_bytes()[..right]).unwrap();
                let stopped = poll_fn(|context| gate.poll_pause(context)).await;
                assert_eq!(stopped, Err(Stop::NearMiss(1)), "{right}");
            }
        });
    }

    #[test]
    fn a_suspension_ends_what_is_under_way() {
        let search = search();
        let mut gates = [Gate::new(search.clone()), Gate::for_frames(search.clone())];
        for gate in &mut gates {
            gate.push(&framed(b"ping")).unwrap();
        }
        for _ in 0..3 {
            search.watched.near_miss(1);
        }
        in_time(async {
            for gate in &mut gates {
                let stopped = poll_fn(|context| gate.poll_pause(context)).await;
                assert_eq!(stopped, Err(Stop::Suspended));
                assert_eq!(gate.push(b"\x82\x00"), Err(Stop::Suspended));
            }
        });
    }
}
