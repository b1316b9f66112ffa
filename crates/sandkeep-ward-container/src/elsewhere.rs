//! Images that another server wrote.
//!
//! CRIU does what an image says with the rights of the host, so that whoever wrote it must be
//! trusted; that is the keeper's to know. Here it is seen to that it is an image at all, and that
//! the processor is one its programs can go on with.

use crate::{
    memory::{NOTE, Note, open_to_the_box},
    start::AGENT,
};
use sandkeep_host::{failure::Doing as _, proc};
use sandkeep_model::{Code, Error, Result};
use std::{
    fmt::Display,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    sync::LazyLock,
};

/// How the names of CRIU's files end, and one that every image has.
const OF_CRIU: &str = ".img";
const INVENTORY: &str = "inventory.img";

/// What programs look for on this architecture to choose how they work, by the names of
/// /proc/cpuinfo. The rest of what stands there is the kernel's own business and differs
/// between kernels on one processor.
#[cfg(target_arch = "x86_64")]
const INSTRUCTIONS: &str = "\
    3dnowprefetch abm adx aes amx_bf16 amx_complex amx_fp16 amx_int8 amx_tile avx avx2 \
    avx512_4fmaps avx512_4vnniw avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni \
    avx512_vp2intersect avx512_vpopcntdq avx512bw avx512cd avx512dq avx512er avx512f avx512ifma \
    avx512pf avx512vbmi avx512vl avx_ifma avx_ne_convert avx_vnni avx_vnni_int16 avx_vnni_int8 \
    bmi1 bmi2 cldemote clflushopt clwb clzero cmpccxadd cx16 erms f16c fma fma4 fsgsbase fsrm \
    gfni hle lahf_lm movbe movdir64b movdiri pclmulqdq pku pni popcnt prefetchiti rdpid rdrand \
    rdseed rdtscp rtm serialize sha_ni sm3 sm4 sse4_1 sse4_2 sse4a ssse3 tbm vaes vpclmulqdq \
    waitpkg wbnoinvd xop xsave xsavec xsaveopt";

/// What programs here may count on. Other architectures list little else.
pub fn instructions() -> Vec<String> {
    static FOUND: LazyLock<Vec<String>> = LazyLock::new(|| {
        let mut found = proc::processor();
        #[cfg(target_arch = "x86_64")]
        found.retain(|name| INSTRUCTIONS.split(' ').any(|known| known == name));
        found
    });
    FOUND.clone()
}

/// Looks at an image before anything else does, and sets the modes of its files as if it had
/// been written here.
pub fn take_in(image: &Path) -> Result<()> {
    let doing = "looking at the image";
    let (mut agent, mut inventory) = (false, false);
    for entry in fs::read_dir(image).doing(doing)? {
        let entry = entry.doing(doing)?;
        let name = entry.file_name();
        let name = name
            .to_str()
            .filter(|name| is_ours(name))
            .ok_or_else(|| no_image(format_args!("{name:?} is none of its files")))?;
        let found = entry.metadata().doing(doing)?;
        if !found.is_file() || found.nlink() != 1 {
            return Err(no_image(format_args!("{name:?} is no plain file")));
        }
        agent |= name == AGENT && found.len() > 0;
        inventory |= name == INVENTORY && found.len() > 0;
        let mode = fs::Permissions::from_mode(0o644);
        fs::set_permissions(entry.path(), mode).doing(doing)?;
    }
    if !agent || !inventory {
        return Err(no_image("it is not whole"));
    }
    let note = Note::read(image).map_err(|error| no_image(error.message))?;
    can_go_on(&note.processor, &instructions())?;
    open_to_the_box(image).doing(doing)?;
    Ok(())
}

/// Whether a file is called as we and CRIU call ours: `pages-1.img`, `tmpfs-dev-73.tar.gz.img`.
fn is_ours(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    match name.strip_suffix(OF_CRIU) {
        Some(stem) => !stem.is_empty() && !stem.starts_with('.') && stem.bytes().all(plain),
        None => name == NOTE || name == AGENT,
    }
}

/// A program that goes on keeps to what it found when it began.
fn can_go_on(before: &[String], here: &[String]) -> Result<()> {
    let missing: Vec<&str> = before
        .iter()
        .filter(|name| !here.contains(name))
        .map(String::as_str)
        .take(10)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::new(
        Code::NotEnforceable,
        format!(
            "programs in the memory may count on what the processor of this host can not do: {}",
            missing.join(", ").escape_debug()
        ),
    ))
}

fn no_image(why: impl Display) -> Error {
    Error::invalid("image", format!("this is no memory of a container: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::fs::symlink, path::PathBuf};
    use tempfile::TempDir;

    fn image() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        fs::create_dir(&image).unwrap();
        let note = format!(r#"{{"listener": 7, "processor": {:?}}}"#, instructions());
        for (name, text) in [
            (NOTE, note.as_str()),
            (AGENT, "program"),
            (INVENTORY, "x"),
            ("tmpfs-dev-73.tar.gz.img", ""),
            ("pages-shmem-9.img", ""),
        ] {
            fs::write(image.join(name), text).unwrap();
            let mode = fs::Permissions::from_mode(0o600);
            fs::set_permissions(image.join(name), mode).unwrap();
        }
        (dir, image)
    }

    #[test]
    fn an_image_is_taken_in_readable_to_its_box() {
        let (_dir, image) = image();
        take_in(&image).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&image), 0o755);
        assert_eq!(mode(&image.join(NOTE)), 0o644);
    }

    #[test]
    fn what_no_server_writes_is_refused_before_it_is_read() {
        type Forge = fn(&Path) -> std::io::Result<()>;
        let forged: [(&str, Forge); 13] = [
            ("none of its files", |at| {
                fs::write(at.join("criu.conf"), "")
            }),
            ("none of its files", |at| fs::write(at.join(".img"), "")),
            ("none of its files", |at| fs::write(at.join("..img"), "")),
            ("none of its files", |at| fs::write(at.join("a b.img"), "")),
            ("no plain file", |at| fs::create_dir(at.join("core-1.img"))),
            ("no plain file", |at| {
                symlink("/etc/shadow", at.join("core-1.img"))
            }),
            ("no plain file", |at| {
                fs::hard_link(at.join(INVENTORY), at.join("core-1.img"))
            }),
            ("no plain file", |at| {
                let mode = rustix::fs::Mode::from_raw_mode(0o600);
                Ok(rustix::fs::mkfifoat(
                    rustix::fs::CWD,
                    at.join("core-1.img"),
                    mode,
                )?)
            }),
            ("not whole", |at| fs::remove_file(at.join(AGENT))),
            ("not whole", |at| fs::write(at.join(INVENTORY), "")),
            ("not ours", |at| fs::write(at.join(NOTE), "{}")),
            ("not ours", |at| {
                fs::write(at.join(NOTE), vec![b' '; 1 << 20])
            }),
            ("flying", |at| {
                fs::write(at.join(NOTE), r#"{"listener": 7, "processor": ["flying"]}"#)
            }),
        ];
        for (words, forge) in forged {
            let (_dir, image) = image();
            forge(&image).unwrap();
            let error = take_in(&image).unwrap_err();
            assert!(error.message.contains(words), "{words}: {error}");
        }
    }

    #[test]
    fn a_lesser_processor_is_told_by_what_it_lacks() {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        let (old, new): (Vec<_>, Vec<_>) = (names(&["avx"]), names(&["avx", "avx2", "adx"]));
        can_go_on(&old, &new).unwrap();
        can_go_on(&[], &old).unwrap();
        let error = can_go_on(&new, &old).unwrap_err();
        assert!(error.message.ends_with("can not do: avx2, adx"), "{error}");
    }
}
