//! Deleted files that are open, with a CRIU that is not ours.
//!
//! It brings them back for a moment at the path they had, and follows links of the sandbox on
//! the way, some of it with the rights of the host. Ours does not. So a sandbox that holds any
//! stays in memory with such a CRIU, and no image that has any is given to it.

use super::image::all;
use crate::failure::{Doing, Failure};
use prost::Message;
use std::path::Path;

const REMAPS: (&str, u32) = ("remap-fpath.img", 0x5913_3954);
const FILES: (&str, u32) = ("files.img", 0x5630_3138);
/// A file of a process that has ended: nothing is made for it.
const OF_A_PROCESS: i32 = 2;

#[derive(Clone, PartialEq, Message)]
struct Remap {
    #[prost(uint32, required, tag = "1")]
    file: u32,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Named {
    #[prost(string, required, tag = "6")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(uint32, required, tag = "2")]
    id: u32,
    #[prost(message, optional, tag = "3")]
    regular: Option<Named>,
}

/// The path of a deleted file that CRIU would bring back, if there is any.
pub fn any(image: &Path) -> Result<Option<String>, Failure> {
    let doing = "reading the deleted files in the image";
    let remaps: Vec<Remap> = all(&image.join(REMAPS.0), REMAPS.1).doing(doing)?;
    let Some(first) = remaps.iter().find(|remap| remap.kind != Some(OF_A_PROCESS)) else {
        return Ok(None);
    };
    let entries: Vec<Entry> = all(&image.join(FILES.0), FILES.1).doing(doing)?;
    let name = entries
        .into_iter()
        .find(|entry| entry.id == first.file)
        .and_then(|entry| entry.regular)
        .map(|regular| regular.name);
    Ok(Some(name.unwrap_or_else(|| "a file".to_owned())))
}

/// Why such a CRIU cannot bring the sandbox back.
pub fn why(path: &str) -> String {
    format!(
        "a process holds a deleted file open ({}), and this CRIU is not built to bring such a \
         file back without following links of the sandbox",
        path.escape_debug()
    )
}

#[cfg(test)]
mod tests {
    use super::{super::image::tests::file, *};
    use std::fs;

    #[test]
    fn deleted_files_are_found_by_their_path() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(any(dir.path()).unwrap(), None);
        let write = |kinds: &[Option<i32>]| {
            let remaps: Vec<_> = kinds
                .iter()
                .map(|kind| {
                    Remap {
                        file: 7,
                        kind: *kind,
                    }
                    .encode_to_vec()
                })
                .collect();
            fs::write(dir.path().join(REMAPS.0), file(REMAPS.1, &remaps)).unwrap();
        };
        let entries: Vec<_> = [(3, "/tmp/other"), (7, "/tmp/gone")]
            .map(|(id, name)| {
                let regular = Some(Named {
                    name: name.to_owned(),
                });
                Entry { id, regular }.encode_to_vec()
            })
            .to_vec();
        fs::write(dir.path().join(FILES.0), file(FILES.1, &entries)).unwrap();
        write(&[Some(OF_A_PROCESS)]);
        assert_eq!(any(dir.path()).unwrap(), None);
        for kind in [Some(0), Some(1), None] {
            write(&[Some(OF_A_PROCESS), kind]);
            assert_eq!(any(dir.path()).unwrap().as_deref(), Some("/tmp/gone"));
        }
    }
}
