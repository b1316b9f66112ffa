//! The key everything is encrypted with, and where it comes from.

use std::{
    io::Read as _,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Command, Stdio},
    sync::mpsc::channel,
    time::Duration,
};

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD},
};
use sandkeep_files::PrivateDir;
use sandkeep_model::{Error, Result};
use zeroize::Zeroizing;

pub(crate) const KEY_BYTES: usize = 32;
/// A key and some white space.
const MAX_TEXT_BYTES: u64 = 1024;
const COMMAND_TIME: Duration = Duration::from_secs(30);

/// Where the key is kept.
#[derive(Debug, Clone)]
pub enum KeySource {
    /// A file of mode 0600 in a directory of mode 0700. Made on first use.
    File(PathBuf),
    /// A program and its arguments, run without a shell: it asks a KMS and prints the key, 32
    /// bytes as hexadecimal digits or base64.
    Command(Vec<String>),
}

/// Wiped when dropped.
pub(crate) type Key = Zeroizing<[u8; KEY_BYTES]>;

impl KeySource {
    /// `may_make`: no secret is stored yet, so a key that is missing can be made. With secrets
    /// there a new key would only hide that the old one is lost.
    pub(crate) fn load(&self, may_make: bool) -> Result<Key> {
        match self {
            Self::File(path) => from_file(path, may_make),
            Self::Command(argv) => {
                let text =
                    run(argv).map_err(|error| error.context("asking for the secrets key"))?;
                decode(&text).ok_or_else(|| {
                    Error::host_not_ready("the key command did not print a key")
                        .hint("it must print 32 bytes as 64 hexadecimal digits or as base64, and nothing else")
                        .retryable(false)
                })
            }
        }
    }
}

fn from_file(path: &std::path::Path, may_make: bool) -> Result<Key> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str()))
    else {
        return Err(Error::invalid(
            "key",
            "the path of the secrets key names no file",
        ));
    };
    let dir = PrivateDir::open(parent)?;
    let text = dir.read_or_make(name, MAX_TEXT_BYTES, || {
        if !may_make {
            return Err(Error::host_not_ready(format!(
                "{} is missing, but secrets encrypted with it are stored",
                path.display()
            ))
            .hint("restore it from a backup, or remove the stored secrets and set them again")
            .retryable(false));
        }
        let mut key: Key = Zeroizing::new([0; KEY_BYTES]);
        aws_lc_rs::rand::fill(key.as_mut())
            .map_err(|_| Error::internal("no randomness for a key"))?;
        Ok(Zeroizing::new((hex(key.as_ref()) + "\n").into_bytes()))
    })?;
    decode(&text).ok_or_else(|| {
        Error::host_not_ready(format!("{} holds no key", path.display()))
            .hint("restore it from a backup; without it the stored secrets can not be read")
            .retryable(false)
    })
}

/// Runs the command with a deadline. Its output is a key, so it is wiped and never shown.
fn run(argv: &[String]) -> Result<Zeroizing<Vec<u8>>> {
    let (program, arguments) = argv
        .split_first()
        .ok_or_else(|| Error::invalid("key", "the key command is empty"))?;
    let fault = |what: &str| {
        Error::host_not_ready(format!("the key command {program} {what}"))
            .hint("run it by hand as the user of the server")
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        // A group of its own: at the deadline its children end with it.
        .process_group(0)
        .spawn()
        .map_err(|error| fault(&format!("could not be started: {error}")))?;
    let (sender, receiver) = channel();
    let output = child.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_TEXT_BYTES as usize + 1));
        let read = output.map(|pipe| pipe.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes));
        // Nobody listens any more after the deadline.
        let _ = sender.send(matches!(read, Some(Ok(_))).then_some(bytes));
    });
    let read = receiver.recv_timeout(COMMAND_TIME);
    if read.is_err()
        && let Some(group) = i32::try_from(child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw)
    {
        // Already gone is fine.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let status = child.wait()?;
    // It has sent, or its pipe was closed by the kill.
    let _ = reader.join();
    match read {
        Err(_) => Err(fault("took longer than 30 seconds")),
        Ok(_) if !status.success() => Err(fault(&format!("failed: {status}"))),
        Ok(None) => Err(fault("could not be read")),
        Ok(Some(bytes)) if bytes.len() as u64 > MAX_TEXT_BYTES => Err(fault("printed too much")),
        Ok(Some(bytes)) => Ok(bytes),
    }
}

fn decode(text: &[u8]) -> Option<Key> {
    let text = std::str::from_utf8(text).ok()?.trim();
    let bytes = if text.len() == 2 * KEY_BYTES {
        unhex(text)?
    } else {
        [STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD]
            .iter()
            .find_map(|engine| engine.decode(text).ok())
            .map(Zeroizing::new)?
    };
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    if bytes.len() != KEY_BYTES {
        return None;
    }
    key.copy_from_slice(&bytes);
    Some(key)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

fn unhex(text: &str) -> Option<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(text.len() / 2));
    for pair in text.as_bytes().chunks(2) {
        let mut byte = 0;
        for digit in pair {
            byte = byte << 4 | u8::try_from(char::from(*digit).to_digit(16)?).ok()?;
        }
        bytes.push(byte);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt as _};

    use super::*;

    fn shell(script: &str) -> KeySource {
        KeySource::Command(vec!["/bin/sh".into(), "-c".into(), script.into()])
    }

    #[test]
    fn a_key_file_is_made_once_and_private() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("keys/secrets.key");
        let source = KeySource::File(path.clone());
        let lost = source.load(false).unwrap_err();
        assert!(lost.message.contains("missing"), "{lost}");
        assert!(!path.exists());
        let key = source.load(true).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(*source.load(true).unwrap(), *key);
        assert_eq!(*source.load(false).unwrap(), *key);
        fs::write(&path, "too short").unwrap();
        assert!(source.load(true).unwrap_err().message.contains("no key"));
    }

    #[test]
    fn a_command_prints_a_key_in_any_usual_form() {
        let bytes: Vec<u8> = (200..232).collect();
        let forms = [
            hex(&bytes),
            hex(&bytes).to_uppercase(),
            STANDARD.encode(&bytes),
            STANDARD_NO_PAD.encode(&bytes),
            URL_SAFE.encode(&bytes),
        ];
        for form in forms {
            let key = shell(&format!("echo ' {form}'")).load(true).unwrap();
            assert_eq!(key.as_ref(), bytes);
        }
    }

    #[test]
    fn a_command_that_fails_is_told_without_its_output() {
        for script in [
            "echo leaked; exit 1",
            "echo leaked",
            "true",
            "head -c 100000 /dev/zero",
            "kill -9 $$",
        ] {
            let error = shell(script).load(true).unwrap_err();
            assert!(!error.to_string().contains("leaked"), "{error}");
        }
        for empty in [vec![], vec!["/does/not/exist".to_owned()]] {
            assert!(KeySource::Command(empty).load(true).is_err());
        }
    }
}
