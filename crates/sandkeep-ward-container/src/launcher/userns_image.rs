//! The ids of a box in an image: a copy of a box has others than the box it was.

use super::{
    image::{MAGIC, bad, messages},
    restore::cover,
};
use crate::{
    failure::{Doing, Failure},
    slots::IDS_PER_BOX,
};
use prost::Message;
use std::{fs, io, path::Path};

const KIND: u32 = 0x5547_4906;
const FRESH: &str = "/run/userns.img";

#[derive(Clone, PartialEq, Message)]
struct Extent {
    #[prost(uint32, required, tag = "1")]
    first: u32,
    #[prost(uint32, required, tag = "2")]
    lower_first: u32,
    #[prost(uint32, required, tag = "3")]
    count: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Maps {
    #[prost(message, repeated, tag = "1")]
    uids: Vec<Extent>,
    #[prost(message, repeated, tag = "2")]
    gids: Vec<Extent>,
}

/// Lets whoever reads the image see other ids in it; the image itself stays as it is.
pub fn put_over(image: &Path, first_id: u32) -> Result<(), Failure> {
    let doing = "reading the ids in the image";
    let file = fs::read_dir(image)
        .doing(doing)?
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with("userns-"))
        .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
        .doing(doing)?
        .path();
    let bytes = fs::read(&file).doing(doing)?;
    fs::write(FRESH, moved(&bytes, first_id).doing(doing)?).doing("writing the ids of the box")?;
    cover(FRESH, &file)
}

/// The same image with the ids from `first_id` on.
fn moved(bytes: &[u8], first_id: u32) -> io::Result<Vec<u8>> {
    let [body] = messages(bytes, KIND)?[..] else {
        return Err(bad());
    };
    let mut maps = Maps::decode(body).map_err(|_| bad())?;
    for extents in [&mut maps.uids, &mut maps.gids] {
        match extents.as_mut_slice() {
            [all] if (all.first, all.count) == (0, IDS_PER_BOX) => all.lower_first = first_id,
            _ => return Err(bad()),
        }
    }
    let body = maps.encode_to_vec();
    let length = u32::try_from(body.len()).map_err(|_| bad())?;
    let mut fresh = Vec::new();
    for number in [MAGIC, KIND, length] {
        fresh.extend(number.to_le_bytes());
    }
    fresh.extend(body);
    Ok(fresh)
}

#[cfg(test)]
mod tests {
    use super::{super::image::tests::file, *};

    fn image(first_id: u32, count: u32) -> Vec<u8> {
        let extent = Extent {
            first: 0,
            lower_first: first_id,
            count,
        };
        let maps = Maps {
            uids: vec![extent.clone()],
            gids: vec![extent],
        };
        file(KIND, &[maps.encode_to_vec()])
    }

    #[test]
    fn ids_are_moved_and_nothing_else() {
        let moved_once = moved(&image(0x7000_0000, IDS_PER_BOX), 0x7001_0000).unwrap();
        assert_eq!(moved_once, image(0x7001_0000, IDS_PER_BOX));
    }

    #[test]
    fn a_foreign_map_is_refused() {
        let whole = image(0, IDS_PER_BOX);
        assert!(moved(&image(0, u32::MAX), 1).is_err(), "the whole host");
        assert!(moved(&whole[..whole.len() - 1], 1).is_err());
        assert!(moved(&[], 1).is_err());
        let mut other = whole;
        other[4] ^= 1;
        assert!(moved(&other, 1).is_err());
    }
}
