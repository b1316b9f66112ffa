//! The seccomp programs in an image: CRIU installs what is written there.
//!
//! The kernel shows the programs of a thread to its tracer alone, and while a sandbox comes
//! back that is CRIU. So the image is checked before CRIU reads it: every chain of programs in
//! it must begin with those that every sandbox has, byte for byte and in their order. That each
//! thread has at least as many programs is checked afterwards, out of what the kernel says
//! (`verify`).

use super::userns_image::body;
use crate::{
    failure::{Doing, Failure},
    seccomp::Filters,
};
use prost::Message;
use std::{fs, io, path::Path};

const FILE: &str = "seccomp.img";
/// Every image of CRIU begins with two numbers: one for all, one for the kind.
const MAGIC: [u32; 2] = [0x5456_4319, 0x6441_3049];
/// The only flag that does not change what a program decides: it is installed in all threads of
/// a process at once.
const TSYNC: u32 = 1;

#[derive(Clone, PartialEq, Message)]
struct Program {
    #[prost(bytes = "vec", required, tag = "1")]
    filter: Vec<u8>,
    /// The place of the one that was installed before it.
    #[prost(uint32, optional, tag = "2")]
    prev: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    flags: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct Programs {
    #[prost(message, repeated, tag = "1")]
    all: Vec<Program>,
}

/// Refuses an image that would give a thread other programs than every sandbox has.
pub fn check(image: &Path, filters: &Filters) -> Result<(), Failure> {
    let doing = "reading the seccomp programs in the image";
    let bytes = fs::read(image.join(FILE)).doing(doing)?;
    let programs = body(&bytes, MAGIC)
        .and_then(|body| Programs::decode(body).map_err(io::Error::other))
        .doing(doing)?;
    confines(&programs, &filters.bytes()).map_err(|why| Failure {
        doing: format!(
            "the image does not confine its sandbox as this server confines every sandbox: {why}"
        ),
        source: io::ErrorKind::PermissionDenied.into(),
    })
}

fn confines(programs: &Programs, ours: &[Vec<u8>]) -> Result<(), String> {
    let all = &programs.all;
    let mut followed = vec![false; all.len()];
    // How many are installed before each of them.
    let mut depths: Vec<usize> = Vec::with_capacity(all.len());
    for (at, program) in all.iter().enumerate() {
        let depth = match program.prev.map(usize::try_from) {
            None => 0,
            // CRIU writes the older ones first, so there is no way around in a circle.
            Some(Ok(prev)) if prev < at => {
                followed[prev] = true;
                depths[prev] + 1
            }
            Some(_) => return Err(format!("its seccomp program {at} follows none before it")),
        };
        depths.push(depth);
        if let Some(ours) = ours.get(depth)
            && (program.filter != *ours || program.flags.unwrap_or(0) & !TSYNC != 0)
        {
            return Err(format!("its seccomp program {at} is another one"));
        }
    }
    let short = depths
        .iter()
        .zip(&followed)
        .any(|(depth, followed)| !followed && depth + 1 < ours.len());
    if all.is_empty() || short {
        return Err("seccomp programs are missing in it".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(filter: &[u8], prev: Option<u32>) -> Program {
        Program {
            filter: filter.to_vec(),
            prev,
            flags: Some(0),
        }
    }

    fn ours() -> Vec<Vec<u8>> {
        vec![b"first".to_vec(), b"second".to_vec()]
    }

    /// Two chains: one thread has nothing more, another has a program of its own.
    fn whole() -> Programs {
        let all = vec![
            program(b"first", None),
            program(b"second", Some(0)),
            program(b"first", None),
            program(b"second", Some(2)),
            program(b"own", Some(3)),
        ];
        Programs { all }
    }

    #[test]
    fn programs_of_the_sandbox_come_after_ours() {
        confines(&whole(), &ours()).unwrap();
        let mut synced = whole();
        for program in &mut synced.all {
            program.flags = Some(TSYNC);
        }
        confines(&synced, &ours()).unwrap();
    }

    #[test]
    fn an_image_with_other_seccomp_programs_was_restored() {
        type Forge = fn(&mut Vec<Program>);
        let forged: [Forge; 8] = [
            |all| all.clear(),
            |all| all[0].filter = b"allow".to_vec(),
            |all| all[3].filter.push(0),
            |all| all.truncate(3),
            |all| all.swap(0, 1),
            |all| all[1].prev = None,
            |all| all[1].prev = Some(1),
            |all| all[0].flags = Some(4),
        ];
        for (number, forge) in forged.into_iter().enumerate() {
            let mut programs = whole();
            forge(&mut programs.all);
            assert!(confines(&programs, &ours()).is_err(), "forged {number}");
        }
    }

    #[test]
    fn what_criu_writes_is_read() {
        let text = whole().encode_to_vec();
        let mut bytes = Vec::new();
        for number in [MAGIC[0], MAGIC[1], u32::try_from(text.len()).unwrap()] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(text);
        let read = Programs::decode(body(&bytes, MAGIC).unwrap()).unwrap();
        assert_eq!(read, whole());
        assert!(body(&bytes, [MAGIC[0], 0]).is_err());
    }
}
