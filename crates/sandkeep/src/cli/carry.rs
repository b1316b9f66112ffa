//! `points export` and `points import`.

use std::{
    fs::{self, OpenOptions},
    io::{self, IsTerminal as _, Write},
    path::{Path, PathBuf},
};

use futures_util::StreamExt as _;
use http::Method;
use indicatif::{ProgressBar, ProgressStyle};
use sandkeep_model::{Error, Result, human_bytes};
use serde_json::json;

use super::{
    client::Client,
    cp::at,
    output::{Output, clean},
    template::{is_stdin, send_file},
};

pub async fn export(
    client: &Client,
    output: Output,
    point: &str,
    file: Option<&Path>,
) -> anyhow::Result<u8> {
    let Some(file) = file.filter(|file| !is_stdin(file)) else {
        if io::stdout().is_terminal() {
            return Err(Error::invalid("file", "a point is no text for a terminal")
                .hint("name a file, or send the output into one")
                .into());
        }
        receive(client, point, &mut io::stdout().lock()).await?;
        return Ok(0);
    };
    let mut half = Half::begin(file)?;
    let bytes = receive(client, point, &mut half.out).await?;
    half.finish(file)?;
    if output.json {
        output.json(&json!({ "file": file, "bytes": bytes }))?;
    } else {
        output.line(&clean(&format!(
            "{} ({})",
            file.display(),
            human_bytes(bytes)
        )))?;
    }
    Ok(0)
}

pub async fn import(
    client: &Client,
    output: Output,
    file: &Path,
    files_only: bool,
) -> anyhow::Result<u8> {
    let request = client
        .request(Method::POST, &["points", "import"])?
        .query(&[("files_only", files_only)]);
    let point = send_file(client, request, "point", file).await?;
    if output.json {
        output.json(&point)?;
    } else {
        output.line(&clean(point["id"].as_str().unwrap_or_default()))?;
    }
    Ok(0)
}

/// A file that has its name only when it is whole.
struct Half {
    path: PathBuf,
    out: fs::File,
    whole: bool,
}

impl Half {
    fn begin(file: &Path) -> Result<Self> {
        let mut path = file.as_os_str().to_owned();
        path.push(format!(".{}.part", std::process::id()));
        let path = PathBuf::from(path);
        let made = OpenOptions::new().write(true).create_new(true).open(&path);
        Ok(Self {
            out: made.map_err(|error| at(&path, error))?,
            path,
            whole: false,
        })
    }

    fn finish(mut self, file: &Path) -> Result<()> {
        self.out
            .sync_all()
            .and_then(|()| fs::rename(&self.path, file))
            .map_err(|error| at(file, error))?;
        self.whole = true;
        Ok(())
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        if !self.whole {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// How many bytes it was.
async fn receive(client: &Client, point: &str, out: &mut impl Write) -> Result<u64> {
    let request = client.request(Method::GET, &["points", point, "export"])?;
    let answer = client.send(request).await?;
    let bar = spinner();
    let mut pieces = answer.bytes_stream();
    let mut bytes = 0_u64;
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|_| {
            Error::internal("the export was broken off; what was received is not whole")
                .hint("the server's log tells more; try again")
        })?;
        out.write_all(&piece)
            .map_err(|error| Error::from(error).context("writing the file"))?;
        bytes += piece.len() as u64;
        bar.set_position(bytes);
    }
    out.flush()
        .map_err(|error| Error::from(error).context("writing the file"))?;
    bar.finish_and_clear();
    Ok(bytes)
}

/// What it will be when packed nobody knows before.
fn spinner() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {bytes} received, {bytes_per_sec}") {
        bar.set_style(style);
    }
    bar
}
