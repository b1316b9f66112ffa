//! The generation of the sandbox: a word that is another one in every copy of it.
//!
//! Programs that keep random numbers or anything else that no two sandboxes may share read it, or
//! wait for a change of it with inotify. The file stays the same file and is written over in one
//! piece, so an open descriptor and a mapping of it tell, too.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use sandkeep_agent_api::host::{GENERATION_DIR, GENERATION_FILE};

/// 128 bits in hexadecimal.
const LENGTH: usize = 32;

pub(crate) fn write(generation: &str) -> io::Result<()> {
    write_in(Path::new(GENERATION_DIR), generation)
}

fn write_in(dir: &Path, generation: &str) -> io::Result<()> {
    let plain = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if generation.len() != LENGTH || !generation.bytes().all(plain) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a generation is 32 hexadecimal digits",
        ));
    }
    match DirBuilder::new().mode(0o755).create(dir) {
        Ok(()) => fs::set_permissions(dir, fs::Permissions::from_mode(0o755))?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    let path = dir.join(GENERATION_FILE);
    let line = format!("{generation}\n");
    let mut file = match open(&path) {
        Ok(file) if is_ours(&file)? => file,
        // Something else was put into its place.
        Ok(_) => anew(&path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => anew(&path)?,
        Err(_) => anew(&path)?,
    };
    let mut before = String::new();
    let same = file.read_to_string(&mut before).is_ok() && before == line;
    if same {
        // Whoever watches it is to hear of copies alone.
        return Ok(());
    }
    file.write_all_at(line.as_bytes(), 0)?;
    if before.len() > line.len() {
        file.set_len(line.len() as u64)?;
    }
    Ok(())
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
}

fn anew(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(path)?;
    file.set_permissions(fs::Permissions::from_mode(0o644))?;
    Ok(file)
}

fn is_ours(file: &File) -> io::Result<bool> {
    let meta = file.metadata()?;
    Ok(meta.is_file() && meta.nlink() == 1 && meta.mode() & 0o7777 == 0o644)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "0123456789abcdef0123456789abcdef";
    const TWO: &str = "fedcba9876543210fedcba9876543210";

    #[test]
    fn the_file_stays_the_same_file_and_tells_the_last_generation() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("sandkeep");
        write_in(&dir, ONE).unwrap();
        let path = dir.join(GENERATION_FILE);
        let mut open = File::open(&path).unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        write_in(&dir, TWO).unwrap();
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        assert_eq!(text, format!("{TWO}\n"));
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.ino(), meta.mode() & 0o777), (inode, 0o644));
    }

    #[test]
    fn a_link_in_its_place_is_not_followed() {
        let base = tempfile::tempdir().unwrap();
        let (dir, other) = (base.path().join("sandkeep"), base.path().join("other"));
        write_in(&dir, ONE).unwrap();
        let path = dir.join(GENERATION_FILE);
        fs::write(&other, "kept").unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        write_in(&dir, TWO).unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "kept");
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{TWO}\n"));
    }

    #[test]
    fn only_a_generation_is_written() {
        let base = tempfile::tempdir().unwrap();
        for bad in ["", "x", &ONE.to_uppercase(), &format!("{ONE}0")] {
            assert!(write_in(base.path(), bad).is_err(), "{bad}");
        }
    }
}
