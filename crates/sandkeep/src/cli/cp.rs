//! `cp`: files by the files API, directories as a tar stream through a command.

use std::{
    fs::Permissions,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use futures_util::StreamExt;
use http::Method;
use sandkeep_model::{Error, Result};
use tokio::sync::mpsc;

use super::{
    client::Client,
    exec::quiet,
    output::{Output, clean},
    session::{Exited, Request, Session, Told},
};
use crate::args::CpArgs;

/// One end of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// `-`
    Standard,
    Local(PathBuf),
    /// `BOX:PATH`; an empty path is the home directory.
    Remote {
        sandbox: String,
        path: String,
    },
}

impl Place {
    /// A colon makes a box, unless a slash or dot before it says that a file here is meant.
    pub fn parse(text: &str) -> Self {
        if text == "-" {
            return Self::Standard;
        }
        if let Some((sandbox, path)) = text.split_once(':') {
            let plain = !sandbox.is_empty() && !sandbox.contains(['/', '.']);
            if plain {
                return Self::Remote {
                    sandbox: sandbox.to_owned(),
                    path: path.to_owned(),
                };
            }
        }
        Self::Local(PathBuf::from(text))
    }
}

/// A path in a box.
struct Remote<'a> {
    client: &'a Client,
    sandbox: String,
    path: String,
    user: Option<String>,
}

pub async fn cp(client: &Client, output: Output, args: CpArgs) -> anyhow::Result<u8> {
    let (source, target) = (Place::parse(&args.source), Place::parse(&args.target));
    let remote = async |sandbox: &str, path: String| -> Result<Remote> {
        Ok(Remote {
            client,
            sandbox: client.find(sandbox).await?,
            path,
            user: args.user.clone(),
        })
    };
    match (source, target) {
        (Place::Remote { sandbox, path }, Place::Standard) => {
            remote(&sandbox, path).await?.to_stdout().await?;
        }
        (Place::Remote { sandbox, path }, Place::Local(local)) => {
            let left = remote(&sandbox, path).await?.download(&local).await?;
            left.tell(output)?;
        }
        (Place::Standard, Place::Remote { sandbox, path }) => {
            remote(&sandbox, path).await?.put_stdin().await?;
        }
        (Place::Local(local), Place::Remote { sandbox, path }) => {
            let left = remote(&sandbox, path).await?.upload(&local).await?;
            left.tell(output)?;
        }
        (Place::Remote { .. }, Place::Remote { .. }) => {
            return Err(wrong("copying from sandbox to sandbox is not possible")
                .hint("copy out, and in through a pipe: sandkeep cp SANDBOX:PATH - | sandkeep cp - OTHER:PATH")
                .into());
        }
        _ => {
            return Err(wrong("neither side is in a box")
                .hint("write the path in a box as BOX:PATH")
                .into());
        }
    }
    if output.json {
        output.json(&serde_json::json!({"copied": true}))?;
    }
    Ok(0)
}

const UNPACK: &str = "mkdir -p -- \"$1\" && exec tar -xf - -C \"$1\"";

/// What the archive of a directory begins with on standard output: a comment, which every tar
/// reads over. Other archives on standard input are files like all files.
fn directory_mark() -> Vec<u8> {
    const COMMENT: &[u8] = b"30 comment=sandkeep directory\n";
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::XGlobalHeader);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(COMMENT.len() as u64);
    header.set_cksum();
    let mut mark = header.as_bytes().to_vec();
    mark.extend_from_slice(COMMENT);
    mark.resize(2 * header.as_bytes().len(), 0);
    mark
}

fn wrong(message: &str) -> Error {
    Error::invalid("path", message)
}

impl Remote<'_> {
    fn shell(&self, script: &str, arguments: &[&str]) -> Request {
        let mut cmd = vec![
            "/bin/sh".to_owned(),
            "-c".to_owned(),
            script.to_owned(),
            "sh".to_owned(),
        ];
        cmd.extend(arguments.iter().map(|&text| text.to_owned()));
        Request {
            cmd,
            user: self.user.clone(),
            ..Request::default()
        }
    }

    /// The path for commands: they start in the home directory, so an empty one is `.`.
    fn command_path(&self) -> &str {
        if self.path.is_empty() {
            "."
        } else {
            &self.path
        }
    }

    async fn is_directory(&self) -> Result<bool> {
        let request = self.shell("[ -d \"$1\" ]", &[self.command_path()]);
        let (code, _) = quiet(self.client, &self.sandbox, &request).await?;
        Ok(code == 0)
    }

    fn files(&self, method: Method, path: &str) -> Result<reqwest::RequestBuilder> {
        let request = self
            .client
            .request(method, &["sandboxes", &self.sandbox, "files"])?
            .query(&[("path", path)]);
        Ok(match &self.user {
            Some(user) => request.query(&[("user", user)]),
            None => request,
        })
    }

    /// The path a file called `name` gets here: below, if this is a directory.
    async fn file_path(&self, name: &str) -> Result<String> {
        if self.path.is_empty() {
            return Ok(name.to_owned());
        }
        if self.path.ends_with('/') || self.is_directory().await? {
            return Ok(format!("{}/{name}", self.path.trim_end_matches('/')));
        }
        Ok(self.path.clone())
    }

    async fn put_stdin(&self) -> Result<()> {
        let (head, rest) = tokio::task::spawn_blocking(|| {
            let mut stdin = io::stdin();
            let mut head = Vec::new();
            let most = u64::try_from(directory_mark().len()).unwrap_or_default();
            let read = (&mut stdin).take(most).read_to_end(&mut head);
            read.map(|_| (head, stdin))
        })
        .await
        .map_err(|error| Error::internal(format!("reading standard input: {error}")))?
        .map_err(|error| Error::from(error).context("reading standard input"))?;
        if head == directory_mark() {
            return self.put_directory(rest).await;
        }
        if self.path.is_empty() || self.path.ends_with('/') {
            return Err(wrong("standard input has no name; give one after SANDBOX:"));
        }
        let body = reqwest::Body::wrap_stream(chunks(io::Cursor::new(head).chain(rest)));
        self.put(&self.path, body).await
    }

    /// What `cp SANDBOX:DIR -` wrote: the path becomes that directory.
    async fn put_directory(&self, archive: impl Read + Send + 'static) -> Result<()> {
        let request = self.shell(UNPACK, &[self.command_path()]);
        let mut session = Session::start(self.client, &self.sandbox, &request).await?;
        let input = session.input();
        let feeding = tokio::spawn(async move {
            let mut archive = std::pin::pin!(chunks(archive));
            while let Some(chunk) = archive.next().await {
                if input.bytes(chunk?).await.is_err() {
                    break;
                }
            }
            let _ = input.close().await;
            Ok::<_, io::Error>(())
        });
        finish(&mut session, |_| Ok(())).await?;
        match feeding.await {
            Ok(fed) => fed.map_err(|error| Error::from(error).context("reading standard input")),
            Err(error) => Err(Error::internal(format!("reading standard input: {error}"))),
        }
    }

    async fn put(&self, path: &str, body: reqwest::Body) -> Result<()> {
        let request = self.files(Method::PUT, path)?.body(body);
        self.client.send(request).await.map(drop)
    }

    /// With its mode, which the files API has no word for.
    async fn upload_file(&self, local: &Path, name: &str, mode: u32) -> Result<Left> {
        let path = self.file_path(name).await?;
        let file = std::fs::File::open(local).map_err(|error| at(local, error))?;
        self.put(&path, reqwest::Body::wrap_stream(chunks(file)))
            .await?;
        let plain = format!("{:o}", mode & PLAIN_MODE);
        let request = self.shell("exec chmod -- \"$1\" \"$2\"", &[&plain, &path]);
        let (code, said) = quiet(self.client, &self.sandbox, &request).await?;
        if code != 0 {
            let said = clean(said.trim());
            return Err(Error::internal(format!(
                "{path} is copied, but its mode cannot be set to {plain}: {said}"
            )));
        }
        let mut left = Left::default();
        left.mode(&path, mode);
        Ok(left)
    }

    async fn upload(&self, local: &Path) -> Result<Left> {
        let found = std::fs::metadata(local).map_err(|error| at(local, error))?;
        let name = name_of(local)?;
        if found.is_file() {
            return self.upload_file(local, &name, found.mode()).await;
        }
        if !found.is_dir() {
            return Err(at(
                local,
                io::Error::other("not a file or directory; cp copies nothing else"),
            ));
        }
        // Into a directory that is there under its own name; else it becomes the new one.
        let below = self.path.is_empty() || self.path.ends_with('/') || self.is_directory().await?;
        let (directory, prefix) = if below {
            (self.command_path(), name.as_str())
        } else {
            (self.command_path(), ".")
        };
        let request = self.shell(UNPACK, &[directory]);
        let mut session = Session::start(self.client, &self.sandbox, &request).await?;
        let input = session.input();
        let packing = pack(local.to_owned(), prefix.to_owned());
        let feeding = tokio::spawn(async move {
            let mut packed = packing.chunks;
            while let Some(chunk) = packed.recv().await {
                if input.bytes(chunk).await.is_err() {
                    break;
                }
            }
            drop(packed);
            let _ = input.close().await;
            packing.done.await
        });
        let ended = finish(&mut session, |_| Ok(())).await;
        let packed = feeding
            .await
            .map_err(|error| Error::internal(format!("packing: {error}")))?;
        // The box's complaint comes first: ours may only be that it stopped listening.
        ended?;
        match packed {
            Ok(result) => result.map_err(|error| at(local, error)),
            Err(_) => Err(Error::internal("packing was broken off")),
        }
    }

    /// The mode of the file, and `None` where there is no stat.
    async fn mode(&self) -> Result<Option<u32>> {
        let request = self.shell("exec stat -L -c %a -- \"$1\"", &[self.command_path()]);
        let (code, said) = quiet(self.client, &self.sandbox, &request).await?;
        Ok((code == 0)
            .then(|| u32::from_str_radix(said.trim(), 8).ok())
            .flatten())
    }

    async fn to_stdout(&self) -> anyhow::Result<()> {
        let mut write = |bytes: &[u8]| io::stdout().lock().write_all(bytes);
        if self.is_directory().await? {
            // So that `cp -` at the other end knows it for what it is.
            write(&directory_mark())?;
            self.unpack_stream(".", &mut write).await?;
        } else {
            self.get(&mut write).await?;
        }
        io::stdout().flush()?;
        Ok(())
    }

    async fn download(&self, local: &Path) -> anyhow::Result<Left> {
        let name = name_in_box(self.command_path());
        if self.is_directory().await? {
            let target = if local.is_dir() {
                local.join(name.ok_or_else(|| {
                    wrong("the directory has no name of its own; name the target")
                })?)
            } else {
                local.to_owned()
            };
            return self.download_directory(&target).await;
        }
        let target = if local.is_dir() {
            local.join(name.ok_or_else(|| wrong("the path in the box names no file"))?)
        } else {
            local.to_owned()
        };
        let mut file = None;
        let mut write = |bytes: &[u8]| {
            // Only what exists in the box makes a file here.
            let file = match &mut file {
                Some(file) => file,
                None => file.insert(std::fs::File::create(&target)?),
            };
            file.write_all(bytes)
        };
        self.get(&mut write).await?;
        write(&[]).map_err(|error| at(&target, error))?;
        let mut left = Left::default();
        // `-` or a device takes bytes and has a mode of its own.
        if let (Some(file), Some(mode)) = (file, self.mode().await?)
            && file.metadata()?.is_file()
        {
            file.set_permissions(Permissions::from_mode(mode & PLAIN_MODE))
                .map_err(|error| at(&target, error))?;
            left.mode(&target.display().to_string(), mode);
        }
        Ok(left)
    }

    async fn get(&self, write: &mut impl FnMut(&[u8]) -> io::Result<()>) -> anyhow::Result<()> {
        let request = self.files(Method::GET, self.command_path())?;
        let mut stream = self.client.send(request).await?.bytes_stream();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|error| {
                Error::internal(format!("the file broke off: {}", error.without_url()))
            })?;
            write(&chunk)?;
        }
        Ok(())
    }

    async fn unpack_stream(
        &self,
        what: &str,
        write: &mut impl FnMut(&[u8]) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        let request = self.shell(
            "exec tar -cf - -C \"$1\" -- \"$2\"",
            &[self.command_path(), what],
        );
        let mut session = Session::start(self.client, &self.sandbox, &request).await?;
        let _ = session.input().close().await;
        finish(&mut session, write).await?;
        Ok(())
    }

    async fn download_directory(&self, target: &Path) -> anyhow::Result<Left> {
        std::fs::create_dir_all(target).map_err(|error| at(target, error))?;
        let (sender, receiver) = std::sync::mpsc::sync_channel::<Bytes>(16);
        let unpacking = {
            let target = target.to_owned();
            std::thread::spawn(move || unpack(Received::new(receiver), &target))
        };
        let mut write = |bytes: &[u8]| {
            // When unpacking failed, its own error is the one to tell.
            sender
                .send(Bytes::copy_from_slice(bytes))
                .map_err(|_| io::Error::from(io::ErrorKind::ConnectionAborted))
        };
        let streamed = self.unpack_stream(".", &mut write).await;
        drop(sender);
        let unpacked = unpacking
            .join()
            .map_err(|_| Error::internal("unpacking was broken off"))?;
        let left = unpacked.map_err(|error| at(target, error))?;
        streamed?;
        Ok(left)
    }
}

/// Follows a command to its end; its complaint is the error when it fails.
async fn finish(
    session: &mut Session,
    mut stdout: impl FnMut(&[u8]) -> io::Result<()>,
) -> Result<()> {
    const MOST: usize = 4096;
    let mut complaint = Vec::new();
    loop {
        match session.next().await? {
            Told::Started(_) => {}
            Told::Stdout(bytes) => stdout(&bytes)?,
            Told::Stderr(bytes) => {
                let room = MOST.saturating_sub(complaint.len());
                complaint.extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
            Told::Exited(exited) if exited.code == 0 => return Ok(()),
            Told::Exited(Exited { code, .. }) => {
                let said = clean(String::from_utf8_lossy(&complaint).trim());
                return Err(Error::internal(format!(
                    "tar in the box ended with {code}: {said}"
                )));
            }
        }
    }
}

/// What a mode keeps on its way.
const PLAIN_MODE: u32 = 0o777;

/// What was not copied.
#[derive(Debug, Default, PartialEq, Eq)]
struct Left {
    /// Neither files, directories nor links.
    kinds: Vec<String>,
    /// Files that came without a setuid, setgid or sticky bit they have.
    modes: Vec<String>,
}

impl Left {
    fn mode(&mut self, path: &str, mode: u32) {
        if mode & 0o7000 != 0 {
            self.modes.push(path.to_owned());
        }
    }

    fn kind(&mut self, path: &str) {
        self.kinds.push(path.to_owned());
    }

    fn tell(&self, output: Output) -> io::Result<()> {
        for (what, paths) in [
            (
                "not copied, neither a file, directory nor link",
                &self.kinds,
            ),
            (
                "copied without its setuid, setgid and sticky bits",
                &self.modes,
            ),
        ] {
            for path in paths {
                output.warn(&format!("{what}: {path}"))?;
            }
        }
        Ok(())
    }
}

struct Packing {
    chunks: mpsc::Receiver<Bytes>,
    done: tokio::sync::oneshot::Receiver<io::Result<Left>>,
}

/// Packs a directory in a thread of its own.
fn pack(directory: PathBuf, prefix: String) -> Packing {
    let (sender, chunks) = mpsc::channel(16);
    let (tell, done) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let result = (|| {
            let writer = io::BufWriter::with_capacity(64 * 1024, Sent(sender));
            let mut archive = tar::Builder::new(writer);
            archive.follow_symlinks(false);
            let mut left = Left::default();
            add(&mut archive, &directory, Path::new(&prefix), &mut left)?;
            archive.into_inner()?.flush()?;
            Ok(left)
        })();
        let _ = tell.send(result);
    });
    Packing { chunks, done }
}

/// Packs a directory and what is below it: files, directories and links, with their plain modes.
fn add<W: Write>(
    archive: &mut tar::Builder<W>,
    directory: &Path,
    name: &Path,
    left: &mut Left,
) -> io::Result<()> {
    archive.append_dir(name, directory)?;
    let mut entries = std::fs::read_dir(directory)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), name.join(entry.file_name()));
        let found = std::fs::symlink_metadata(&path)?;
        let kind = found.file_type();
        if kind.is_dir() {
            add(archive, &path, &name, left)?;
        } else if kind.is_symlink() {
            archive.append_path_with_name(&path, &name)?;
        } else if kind.is_file() {
            left.mode(&path.display().to_string(), found.mode());
            let mut header = tar::Header::new_gnu();
            header.set_metadata(&found);
            header.set_mode(found.mode() & PLAIN_MODE);
            // It may grow meanwhile; the header has told its size.
            let file = std::fs::File::open(&path)?.take(found.len());
            archive.append_data(&mut header, &name, file)?;
        } else {
            left.kind(&path.display().to_string());
        }
    }
    Ok(())
}

struct Sent(mpsc::Sender<Bytes>);

impl Write for Sent {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .blocking_send(Bytes::copy_from_slice(bytes))
            .map_err(|_| io::Error::from(io::ErrorKind::ConnectionAborted))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The archive was written in a box, so nothing in it is trusted: entries stay below the
/// target, get our owner and no special bits, and devices are left out.
fn unpack(reader: impl Read, target: &Path) -> io::Result<Left> {
    let mut left = Left::default();
    let mut archive = tar::Archive::new(reader);
    archive.set_preserve_permissions(false);
    archive.set_preserve_ownerships(false);
    archive.set_unpack_xattrs(false);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        if kind.is_dir() || kind.is_file() || kind.is_symlink() || kind.is_hard_link() {
            if kind.is_file() {
                let mode = entry.header().mode().unwrap_or(0);
                left.mode(&entry.path()?.display().to_string(), mode);
            }
            entry.unpack_in(target)?;
        } else {
            left.kind(&entry.path()?.display().to_string());
        }
    }
    Ok(left)
}

struct Received {
    chunks: std::sync::mpsc::Receiver<Bytes>,
    current: Bytes,
}

impl Received {
    const fn new(chunks: std::sync::mpsc::Receiver<Bytes>) -> Self {
        Self {
            chunks,
            current: Bytes::new(),
        }
    }
}

impl Read for Received {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.chunks.recv() {
                Ok(chunk) => self.current = chunk,
                Err(_) => return Ok(0),
            }
        }
        let count = buffer.len().min(self.current.len());
        buffer[..count].copy_from_slice(&self.current.split_to(count));
        Ok(count)
    }
}

/// Reads in a thread of its own, as a stream for a request's body.
pub(super) fn chunks(
    mut reader: impl Read + Send + 'static,
) -> impl futures_util::Stream<Item = io::Result<Bytes>> + Send {
    let (sender, receiver) = mpsc::channel(8);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let chunk = match reader.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => Ok(Bytes::copy_from_slice(&buffer[..count])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let failed = chunk.is_err();
            if sender.blocking_send(chunk).is_err() || failed {
                return;
            }
        }
    });
    futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|chunk| (chunk, receiver))
    })
}

pub(super) fn at(path: &Path, error: io::Error) -> Error {
    Error::from(error).context(path.display())
}

fn name_of(local: &Path) -> Result<String> {
    let whole = local.canonicalize().map_err(|error| at(local, error))?;
    whole
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .ok_or_else(|| wrong("the directory to copy has no name"))
}

/// The last part of a path in a box; never anything that leads elsewhere here.
fn name_in_box(path: &str) -> Option<&str> {
    let name = path.trim_end_matches('/').rsplit('/').next()?;
    (!matches!(name, "" | "." | "..") && !name.contains('\0')).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(sandbox: &str, path: &str) -> Place {
        Place::Remote {
            sandbox: sandbox.to_owned(),
            path: path.to_owned(),
        }
    }

    #[test]
    fn places_are_told_apart() {
        assert_eq!(Place::parse("-"), Place::Standard);
        assert_eq!(Place::parse("i4f9:/tmp/a"), remote("i4f9", "/tmp/a"));
        assert_eq!(Place::parse("i4f9:"), remote("i4f9", ""));
        assert_eq!(Place::parse("i4f9:a:b"), remote("i4f9", "a:b"));
        for local in ["a", "./a:b", "/x:y", "..", ":a", "dir/i4f9:x"] {
            assert_eq!(Place::parse(local), Place::Local(local.into()), "{local}");
        }
    }

    #[test]
    fn names_from_a_box_never_lead_elsewhere() {
        assert_eq!(name_in_box("/var/log/app.log"), Some("app.log"));
        assert_eq!(name_in_box("dir/"), Some("dir"));
        for bad in ["", "/", ".", "..", "/a/.."] {
            assert_eq!(name_in_box(bad), None, "{bad}");
        }
    }

    fn archive(build: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        build(&mut builder);
        builder.into_inner().unwrap()
    }

    fn entry(
        builder: &mut tar::Builder<Vec<u8>>,
        name: &[u8],
        kind: tar::EntryType,
        link: Option<&str>,
    ) {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.set_entry_type(kind);
        header.set_mode(0o4777);
        header.set_size(0);
        if let Some(link) = link {
            header.set_link_name(link).unwrap();
        }
        header.set_cksum();
        builder.append(&header, io::empty()).unwrap();
    }

    #[test]
    fn a_hostile_archive_writes_nothing_outside() {
        let outer = tempfile::tempdir().unwrap();
        let target = outer.path().join("target");
        std::fs::create_dir(&target).unwrap();
        let bytes = archive(|builder| {
            entry(builder, b"../escaped", tar::EntryType::Regular, None);
            entry(builder, b"way", tar::EntryType::Symlink, Some(".."));
            entry(builder, b"way/through", tar::EntryType::Regular, None);
            entry(builder, b"null", tar::EntryType::Char, None);
        });
        let _ = unpack(bytes.as_slice(), &target);
        let names: Vec<_> = std::fs::read_dir(outer.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names, ["target"]);
        assert!(!target.join("null").exists());
    }

    #[test]
    fn the_mark_of_a_directory_is_a_comment_to_every_tar() {
        let mark = directory_mark();
        assert_eq!(mark.len(), 1024);
        let length = mark[512..].iter().position(|&byte| byte == 0).unwrap();
        assert!(mark[512..].starts_with(length.to_string().as_bytes()));
        let bytes = archive(|builder| entry(builder, b"tool", tar::EntryType::Regular, None));
        let target = tempfile::tempdir().unwrap();
        unpack([mark, bytes].concat().as_slice(), target.path()).unwrap();
        assert!(target.path().join("tool").exists());
    }

    #[test]
    fn special_bits_do_not_come_out_of_a_box() {
        let target = tempfile::tempdir().unwrap();
        let bytes = archive(|builder| entry(builder, b"tool", tar::EntryType::Regular, None));
        unpack(bytes.as_slice(), target.path()).unwrap();
        let mode = std::fs::metadata(target.path().join("tool"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7000, 0);
    }
}
