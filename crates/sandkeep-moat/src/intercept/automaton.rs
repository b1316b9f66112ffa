//! Looks for many texts at once, one byte after the other, and takes as long for each byte whatever
//! it is: how long a search takes must not tell how much of a text was found.

use std::collections::VecDeque;

use zeroize::Zeroize;

/// Which secrets a text belongs to: one bit for each.
pub type Owners = u64;

/// A text that is sought.
#[derive(Debug)]
pub struct Needle<'a> {
    pub text: &'a [u8],
    pub owners: Owners,
    /// From this many bytes on its beginning gives something away.
    pub telling: usize,
}

/// Where the search is. The first number is where it begins.
pub type State = u32;

/// For each state and each kind of byte the next state. Upper and lower case are the same.
pub struct Automaton {
    next: Vec<State>,
    /// The kind of each byte.
    kinds: [u8; 256],
    /// The same, with bytes left out that stand between the letters of a text that was broken up.
    squeezed: [u8; 256],
    /// Of each state: whose text has begun and is not over.
    begun: Vec<Owners>,
    /// States from here on stay for ever: a text was found.
    found: State,
    width: u32,
}

/// A kind that changes nothing, and one that is in no text.
const SKIPPED: u8 = 0;
const OTHER: u8 = 1;

impl Automaton {
    /// `skipped`: left out everywhere; `squeezed`: left out of squeezed text as well.
    pub fn new(needles: &[Needle<'_>], skipped: &[u8], squeezed: &[u8]) -> Self {
        let mut kinds = [OTHER; 256];
        let mut width = OTHER + 1;
        for byte in needles.iter().flat_map(|needle| needle.text) {
            let byte = usize::from(byte.to_ascii_lowercase());
            if kinds[byte] == OTHER {
                kinds[byte] = width;
                width = width.saturating_add(1);
            }
        }
        for upper in b'A'..=b'Z' {
            kinds[usize::from(upper)] = kinds[usize::from(upper.to_ascii_lowercase())];
        }
        for byte in skipped {
            kinds[usize::from(*byte)] = SKIPPED;
        }
        let mut squeezed_kinds = kinds;
        for byte in squeezed {
            squeezed_kinds[usize::from(*byte)] = SKIPPED;
        }
        let mut tree = Tree::new(usize::from(width));
        for needle in needles {
            let kinds = needle.text.iter().map(|byte| kinds[usize::from(*byte)]);
            tree.plant(kinds, needle);
        }
        tree.into_automaton(kinds, squeezed_kinds)
    }

    pub fn step(&self, state: &mut State, byte: u8) {
        *state = self.go(*state, self.kinds[usize::from(byte)]);
    }

    pub fn step_squeezed(&self, state: &mut State, byte: u8) {
        *state = self.go(*state, self.squeezed[usize::from(byte)]);
    }

    fn go(&self, state: State, kind: u8) -> State {
        // All states and kinds are in the table.
        self.next[state as usize + usize::from(kind)]
    }

    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        (self.next.len() * size_of::<State>()) + (self.begun.len() * size_of::<Owners>())
    }

    pub const fn is_found(&self, state: State) -> bool {
        state >= self.found
    }

    /// Whose text stands half at the end of what was seen.
    pub fn begun(&self, state: State) -> Owners {
        let at = state / self.width;
        self.begun.get(at as usize).copied().unwrap_or_default()
    }
}

impl Drop for Automaton {
    fn drop(&mut self) {
        self.next.zeroize();
        self.kinds.zeroize();
        self.squeezed.zeroize();
    }
}

/// The texts by their beginnings.
struct Tree {
    width: usize,
    next: Vec<State>,
    begun: Vec<Owners>,
    ends: Vec<bool>,
}

impl Tree {
    fn new(width: usize) -> Self {
        let mut tree = Self {
            width,
            next: Vec::new(),
            begun: Vec::new(),
            ends: Vec::new(),
        };
        tree.sprout();
        tree
    }

    fn sprout(&mut self) -> usize {
        self.next.resize(self.next.len() + self.width, 0);
        self.begun.push(0);
        self.ends.push(false);
        self.ends.len() - 1
    }

    fn plant(&mut self, kinds: impl Iterator<Item = u8>, needle: &Needle<'_>) {
        let mut at = 0;
        // What is left out of what is looked through must be left out here.
        let kinds = kinds.filter(|kind| *kind != SKIPPED);
        for (depth, kind) in kinds.enumerate() {
            let place = at * self.width + usize::from(kind);
            at = match self.next[place] {
                0 => {
                    let fresh = self.sprout();
                    self.next[place] = number(fresh);
                    fresh
                }
                known => known as usize,
            };
            if depth + 1 >= needle.telling {
                self.begun[at] |= needle.owners;
            }
        }
        self.ends[at] = at != 0;
    }

    /// Fills in where to go on when a text turns out to be another one. States are numbered anew:
    /// by where their row begins, with all that found something at the end.
    fn into_automaton(mut self, kinds: [u8; 256], squeezed: [u8; 256]) -> Automaton {
        let mut instead = vec![0_usize; self.ends.len()];
        let mut wait = VecDeque::from([0_usize]);
        while let Some(at) = wait.pop_front() {
            let other = instead[at];
            self.begun[at] |= self.begun[other];
            self.ends[at] |= self.ends[other];
            for kind in usize::from(OTHER)..self.width {
                let place = at * self.width + kind;
                let of_other = self.next[other * self.width + kind] as usize;
                match self.next[place] as usize {
                    0 if at != 0 => self.next[place] = number(of_other),
                    0 => {}
                    child => {
                        instead[child] = if at == 0 { 0 } else { of_other };
                        wait.push_back(child);
                    }
                }
            }
        }
        // One state for all that is found: nothing after it matters.
        let mut numbers = vec![0; self.ends.len()];
        let mut rows = 0;
        for (at, ends) in self.ends.iter().enumerate() {
            if !ends {
                numbers[at] = number(rows * self.width);
                rows += 1;
            }
        }
        let found = number(rows * self.width);
        for (at, ends) in self.ends.iter().enumerate() {
            if *ends {
                numbers[at] = found;
            }
        }
        let mut next = Vec::with_capacity((rows + 1) * self.width);
        let mut begun = Vec::with_capacity(rows + 1);
        for (at, row) in self.next.chunks_exact(self.width).enumerate() {
            if self.ends[at] {
                continue;
            }
            next.push(numbers[at]);
            let go = row[usize::from(OTHER)..].iter();
            next.extend(go.map(|to| numbers[*to as usize]));
            begun.push(self.begun[at]);
        }
        next.resize(next.len() + self.width, found);
        begun.push(0);
        Automaton {
            next,
            kinds,
            squeezed,
            begun,
            found,
            width: number(self.width),
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.next.zeroize();
    }
}

/// Tables are far smaller than four thousand million: texts are cut to windows before.
fn number(at: usize) -> State {
    State::try_from(at).unwrap_or(State::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn automaton(texts: &[&str]) -> Automaton {
        let needles: Vec<_> = texts
            .iter()
            .enumerate()
            .map(|(at, text)| Needle {
                text: text.as_bytes(),
                owners: 1 << at,
                telling: 3,
            })
            .collect();
        Automaton::new(&needles, b"\0", b" -")
    }

    /// The slow and plain way.
    fn expected(texts: &[&str], seen: &str) -> Option<Owners> {
        let seen = seen.to_lowercase();
        if texts.iter().any(|text| seen.contains(&text.to_lowercase())) {
            return None;
        }
        let begun =
            |text: &str| (3..text.len()).any(|at| seen.ends_with(&text[..at].to_lowercase()));
        let owners = texts.iter().enumerate().filter(|(_, text)| begun(text));
        Some(owners.map(|(at, _)| 1 << at).sum())
    }

    #[test]
    fn finds_what_the_plain_way_finds() {
        let texts = ["abcabd", "bcabca", "cccc", "aBBa", "abcabcabx"];
        let automaton = automaton(&texts);
        let mut chance = 1_u32;
        for _ in 0..2000 {
            let (mut state, mut seen) = (0, String::new());
            for _ in 0..30 {
                chance = chance.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let byte = b"abcABCdx"[(chance >> 24) as usize % 8];
                seen.push(char::from(byte));
                automaton.step(&mut state, byte);
                match expected(&texts, &seen) {
                    Some(begun) => {
                        assert!(!automaton.is_found(state), "{seen}");
                        assert_eq!(automaton.begun(state), begun, "{seen}");
                    }
                    None => assert!(automaton.is_found(state), "{seen}"),
                }
            }
        }
    }

    #[test]
    fn what_is_left_out_changes_nothing() {
        let automaton = automaton(&["secret"]);
        let (mut plain, mut squeezed) = (0, 0);
        for byte in b"S\0e-c r--et" {
            automaton.step(&mut plain, *byte);
            automaton.step_squeezed(&mut squeezed, *byte);
        }
        assert!(!automaton.is_found(plain));
        assert!(automaton.is_found(squeezed));
    }
}
