//! The writing half of an upload: takes the request's bytes in the order they
//! come and puts files on disk. It blocks, so it is driven from blocking
//! threads, one batch at a time.

use super::entry::base_name;
use super::error::FileError;
use super::gzip::Inflate;
use super::metadata::{self, Metadata};
use super::multipart::{Event, Multipart, MultipartError, PartHead};
use super::open::regular_for_writing;
use crate::State;
use crate::users::User;
use bytes::Bytes;
use sandkeep_agent_api::filesystem::WriteInfo;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;

/// A small file is written by one call, so that watchers see one event.
const WRITE_BUFFER_BYTES: usize = 256 * 1024;

/// Where the bytes go.
pub(crate) struct Destination {
    pub(crate) state: State,
    pub(crate) user: User,
    /// The path the query names, if it does.
    pub(crate) path: Option<String>,
    pub(crate) metadata: Metadata,
}

/// The form of the body.
pub(crate) enum Form {
    /// The body is the file.
    Raw,
    Multipart(Box<Multipart>),
}

/// An upload in progress.
pub(crate) struct Upload {
    form: Form,
    inflate: Option<Inflate>,
    files: Files,
}

impl Upload {
    pub(crate) fn new(form: Form, gzip: bool, destination: Destination) -> Self {
        Self {
            form,
            inflate: gzip.then(Inflate::new),
            files: Files {
                destination,
                open: None,
                seen: HashSet::new(),
                written: Vec::new(),
            },
        }
    }

    /// Takes the next bytes of the body.
    pub(crate) fn push(&mut self, batch: &[Bytes]) -> Result<(), FileError> {
        let (form, files) = (&mut self.form, &mut self.files);
        if matches!(form, Form::Raw) && files.open.is_none() {
            files.start(None)?;
        }
        for bytes in batch {
            match &mut self.inflate {
                Some(inflate) => {
                    inflate.push(bytes, bad_gzip, |plain| files.take(form, plain))?;
                }
                None => files.take(form, bytes)?,
            }
        }
        Ok(())
    }

    /// The body is over: what was written.
    pub(crate) fn finish(mut self) -> Result<Vec<WriteInfo>, FileError> {
        if let Some(inflate) = self.inflate.take() {
            let (form, files) = (&mut self.form, &mut self.files);
            inflate.finish(bad_gzip, |plain| files.take(form, plain))?;
        }
        match self.form {
            Form::Raw => self.files.end()?,
            Form::Multipart(parser) => parser.finish()?,
        }
        Ok(self.files.written)
    }
}

/// The files of an upload.
struct Files {
    destination: Destination,
    open: Option<OpenFile>,
    seen: HashSet<PathBuf>,
    written: Vec<WriteInfo>,
}

struct OpenFile {
    path: PathBuf,
    out: BufWriter<File>,
}

impl Files {
    fn take(&mut self, form: &mut Form, plain: &[u8]) -> Result<(), FileError> {
        match form {
            Form::Raw => self.write(plain),
            Form::Multipart(parser) => parser.push(plain, |event| self.on_event(event)),
        }
    }

    fn on_event(&mut self, event: Event<'_>) -> Result<(), FileError> {
        match event {
            Event::Part(head) if head.name == "file" => self.start(Some(head)),
            Event::Part(_) => Ok(()),
            Event::Data(bytes) => self.write(bytes),
            Event::PartEnd => self.end(),
        }
    }

    /// Opens the file that the query or else the part names.
    fn start(&mut self, part: Option<PartHead>) -> Result<(), FileError> {
        let destination = &self.destination;
        let named = destination
            .path
            .clone()
            .filter(|path| !path.is_empty())
            .or_else(|| part.and_then(|head| head.filename))
            .filter(|path| !path.is_empty())
            .ok_or_else(|| {
                FileError::bad_request(
                    "no path: give it in the query, or as the file name of each multipart part",
                )
            })?;
        let path = destination
            .state
            .resolve(&named, &destination.user)
            .map_err(|error| FileError::bad_request(error.message))?;
        if !self.seen.insert(path.clone()) {
            return Err(FileError::bad_request(format!(
                "you cannot upload multiple files to the same path '{}' in one upload request, \
                 only the first specified file was uploaded",
                path.display()
            )));
        }
        let file = regular_for_writing(&path, &destination.user)?;
        // Before the bytes, so that the last event of an upload is a write.
        metadata::replace(file.as_fd(), &destination.metadata)
            .map_err(|error| FileError::from_os("set metadata of", &path, error))?;
        self.open = Some(OpenFile {
            path,
            out: BufWriter::with_capacity(WRITE_BUFFER_BYTES, file),
        });
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        // Parts that are no files are skipped.
        let Some(open) = &mut self.open else {
            return Ok(());
        };
        open.out
            .write_all(bytes)
            .map_err(|error| FileError::from_io("write", &open.path, &error))
    }

    fn end(&mut self) -> Result<(), FileError> {
        let Some(mut open) = self.open.take() else {
            return Ok(());
        };
        open.out
            .flush()
            .map_err(|error| FileError::from_io("write", &open.path, &error))?;
        self.written.push(WriteInfo {
            name: base_name(&open.path),
            path: open.path.to_string_lossy().into_owned(),
            file_type: "file".to_owned(),
            metadata: self.destination.metadata.clone(),
        });
        Ok(())
    }
}

impl From<MultipartError> for FileError {
    fn from(error: MultipartError) -> Self {
        Self::bad_request(format!("error parsing multipart form: {error}"))
    }
}

fn bad_gzip(error: &io::Error) -> FileError {
    FileError::bad_request(format!("the body is not a whole gzip stream: {error}"))
}
