//! The kernel of machines and the file system it begins with: the agent and a few drivers.

use sandkeep_agent_api::machine::{DRIVERS, DRIVERS_DIR, MORE_DRIVERS};
use sandkeep_host::failure::Doing as _;
use sandkeep_model::{Error, Result};
use sha2::{Digest as _, Sha256};
use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::config::DEFAULT_KERNELS;

/// A kernel on the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kernel {
    pub image: PathBuf,
    drivers: PathBuf,
}

impl Kernel {
    pub fn find(given: Option<&Path>) -> Option<Self> {
        let in_dir = |dir: &Path| {
            let kernel = Self {
                image: dir.join("vmlinuz"),
                drivers: dir.join("drivers"),
            };
            (kernel.image.is_file() && kernel.drivers.is_dir()).then_some(kernel)
        };
        match given {
            Some(dir) => in_dir(dir),
            None => DEFAULT_KERNELS.iter().map(Path::new).find_map(in_dir),
        }
    }

    /// Tells one kernel from another, drivers included.
    pub fn fingerprint(&self) -> Result<String> {
        let mut all = Sha256::new();
        all.update(read(&self.image)?);
        for name in DRIVERS.into_iter().chain(MORE_DRIVERS) {
            if let Some(driver) = self.driver(name)? {
                all.update(name.as_bytes());
                all.update(driver);
            }
        }
        Ok(hex(&all.finalize()))
    }

    /// The first file system of a machine, in the format the kernel unpacks.
    pub fn first_files(&self, agent: &Path) -> Result<Vec<u8>> {
        let mut archive = Archive::default();
        archive.add("init", 0o100_755, &read(agent)?);
        // Without it the agent would not even begin: a program must have its three streams.
        archive.add("dev", 0o040_755, &[]);
        archive.add_device("dev/null", 0o020_666, (1, 3));
        archive.add(DRIVERS_DIR.trim_start_matches('/'), 0o040_755, &[]);
        for name in DRIVERS.into_iter().chain(MORE_DRIVERS) {
            if let Some(driver) = self.driver(name)? {
                let path = format!("{}/{name}.ko", DRIVERS_DIR.trim_start_matches('/'));
                archive.add(&path, 0o100_644, &driver);
            }
        }
        Ok(archive.end())
    }

    /// What the kernel has built in has no file.
    fn driver(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.drivers.join(format!("{name}.ko"));
        if path.exists() {
            read(&path).map(Some)
        } else {
            Ok(None)
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path)
        .doing(format_args!("reading {}", path.display()))
        .map_err(Error::from)
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A cpio archive ("newc"): numbers in eight hexadecimal digits, everything padded to four.
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    count: u32,
}

impl Archive {
    fn add(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.put(path, mode, (0, 0), content);
    }

    fn add_device(&mut self, path: &str, mode: u32, number: (u32, u32)) {
        self.put(path, mode, number, &[]);
    }

    fn put(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.count += 1;
        let size = u32::try_from(content.len()).expect("files here are far below 4 GiB");
        let name = u32::try_from(path.len() + 1).expect("paths here are short");
        let numbers = [
            self.count, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name, 0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for number in numbers {
            self.bytes
                .extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_files_are_the_agent_and_the_drivers_in_there() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("drivers")).unwrap();
        fs::write(dir.path().join("drivers/virtio_net.ko"), "driver").unwrap();
        fs::write(dir.path().join("vmlinuz"), "kernel").unwrap();
        fs::write(dir.path().join("agent"), "program").unwrap();
        let kernel = Kernel::find(Some(dir.path())).unwrap();
        let files = kernel.first_files(&dir.path().join("agent")).unwrap();
        let text = String::from_utf8(files).unwrap();
        assert!(text.starts_with("070701"));
        assert!(text.contains("init\0") && text.contains("program"));
        assert!(text.contains("drivers/virtio_net.ko\0"));
        assert_eq!(text.len() % 4, 0);
        let before = kernel.fingerprint().unwrap();
        fs::write(dir.path().join("drivers/virtio_net.ko"), "other").unwrap();
        assert_ne!(kernel.fingerprint().unwrap(), before);
        assert_eq!(Kernel::find(Some(&dir.path().join("none"))), None);
    }
}
