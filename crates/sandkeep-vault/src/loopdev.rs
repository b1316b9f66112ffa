//! The loop device under a pool file.
//!
//! Direct I/O matters: with a buffered loop file every page of a box is cached twice, and
//! a box at its memory limit thrashes on the second copy instead of being stopped.

use rustix::fs::{Mode, OFlags};
use sandkeep_model::{Error, Result};
use std::{
    ffi::c_ulong,
    fs::{self, File},
    io,
    mem::size_of,
    os::{
        fd::AsRawFd as _,
        unix::{ffi::OsStringExt as _, fs::MetadataExt as _},
    },
    path::{Path, PathBuf},
};

use crate::{doing::Doing as _, mounts::same_file};

const LOOP_SET_CAPACITY: c_ulong = 0x4C07;
const LOOP_CONFIGURE: c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: c_ulong = 0x4C82;
const FLAG_AUTOCLEAR: u32 = 4;
const FLAG_DIRECT_IO: u32 = 16;
const LOOP_MAJOR: u32 = 7;

/// `struct loop_info64` of `linux/loop.h`.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = {
    assert!(size_of::<LoopInfo>() == 232);
    assert!(size_of::<LoopConfig>() == 304);
};

/// A device with the file behind it. It frees itself when the last user (the mount) ends,
/// so `_open` keeps it alive until it is mounted.
#[derive(Debug)]
pub struct LoopDevice {
    pub path: PathBuf,
    _open: File,
}

impl LoopDevice {
    /// The device that already has this file, or a new one. Two devices on one file would
    /// be two file systems writing over each other.
    pub fn attach(file: &Path) -> Result<Self> {
        if let Some(path) = attached_to(file).doing("looking through the loop devices")? {
            let open = open_rw(&path).doing_to("opening", &path)?;
            // It may have gone between looking and opening: look again now that it is held.
            if backing_file(&path).is_some_and(|backing| same_file(&backing, file)) {
                return Ok(Self { path, _open: open });
            }
        }
        let backing = File::options()
            .read(true)
            .write(true)
            .open(file)
            .doing_to("opening the pool file", file)?;
        match configure_free(&backing, FLAG_AUTOCLEAR | FLAG_DIRECT_IO) {
            Ok(device) => Ok(device),
            // Not every file system can do direct I/O; a buffered pool still works.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                tracing::warn!(
                    file = %file.display(),
                    "no direct I/O on the pool file: boxes at their memory limit may be slow"
                );
                configure_free(&backing, FLAG_AUTOCLEAR).map_err(|error| no_loop(&error))
            }
            Err(error) => Err(no_loop(&error)),
        }
    }

    /// The device passes no discards on. Whoever trims a pool, a timer of the host for one, would
    /// have the disk below take back what the pool was promised.
    pub fn keep_blocks(path: &Path) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            return;
        };
        let setting = format!("/sys/block/{name}/queue/discard_max_bytes");
        if let Err(error) = fs::write(&setting, "0") {
            tracing::debug!(%error, setting, "discards could not be switched off");
        }
    }

    /// Makes the device as large as its file has become.
    pub fn refresh_size(path: &Path) -> Result<()> {
        let device = open_rw(path).doing_to("opening", path)?;
        // SAFETY: the descriptor is open and LOOP_SET_CAPACITY takes no argument.
        let result = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_CAPACITY, 0) };
        if result < 0 {
            return Err(io::Error::last_os_error()).doing_to("resizing", path);
        }
        Ok(())
    }
}

fn no_loop(error: &io::Error) -> Error {
    Error::host_not_ready(format!(
        "no loop device could be had for the pool file: {error}"
    ))
    .hint(
        "load the loop module (`modprobe loop`), free unused devices (`losetup -l`), or give the \
         server a directory on a btrfs file system as its pool",
    )
}

fn open_rw(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// The file behind a loop device.
pub fn backing_file(device: &Path) -> Option<PathBuf> {
    let name = device.file_name()?.to_str()?;
    let mut text = fs::read(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    Some(PathBuf::from(std::ffi::OsString::from_vec(text)))
}

fn attached_to(file: &Path) -> io::Result<Option<PathBuf>> {
    let entries = match fs::read_dir("/sys/block") {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let name = entry?.file_name();
        if !name.to_string_lossy().starts_with("loop") {
            continue;
        }
        let device = Path::new("/dev").join(name);
        if backing_file(&device).is_some_and(|backing| same_file(&backing, file)) {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

fn configure_free(backing: &File, flags: u32) -> io::Result<LoopDevice> {
    let control = open_rw(Path::new("/dev/loop-control"))?;
    // Others may take the device between asking and configuring; then ask again.
    for _ in 0..64 {
        // SAFETY: the descriptor is open and LOOP_CTL_GET_FREE takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        let Ok(number) = u32::try_from(number) else {
            return Err(io::Error::last_os_error());
        };
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = open_or_make_node(&path, number)?;
        let mut config = LoopConfig {
            fd: backing.as_raw_fd().cast_unsigned(),
            block_size: 0,
            info: LoopInfo {
                device: 0,
                inode: 0,
                rdevice: 0,
                offset: 0,
                size_limit: 0,
                number: 0,
                encrypt_type: 0,
                encrypt_key_size: 0,
                flags,
                file_name: [0; 64],
                crypt_name: [0; 64],
                encrypt_key: [0; 32],
                init: [0; 2],
            },
            reserved: [0; 8],
        };
        let name = b"sandkeep pool";
        config.info.file_name[..name.len()].copy_from_slice(name);
        // SAFETY: both descriptors are open and LOOP_CONFIGURE reads a `loop_config`.
        let result = unsafe {
            libc::ioctl(
                device.as_raw_fd(),
                LOOP_CONFIGURE,
                std::ptr::from_mut(&mut config),
            )
        };
        if result == 0 {
            return Ok(LoopDevice {
                path,
                _open: device,
            });
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error);
        }
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY))
}

/// Inside a container `/dev` is often a plain directory in which new nodes do not appear.
fn open_or_make_node(path: &Path, number: u32) -> io::Result<File> {
    match open_rw(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    let made = rustix::fs::mknodat(
        rustix::fs::CWD,
        path,
        rustix::fs::FileType::BlockDevice,
        Mode::RUSR | Mode::WUSR,
        rustix::fs::makedev(LOOP_MAJOR, number),
    );
    match made {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let file = File::from(rustix::fs::open(
        path,
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?);
    if rustix::fs::major(file.metadata()?.rdev()) != LOOP_MAJOR {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    }
    Ok(file)
}
