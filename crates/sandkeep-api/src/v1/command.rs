//! A command as clients describe it.

use std::{collections::BTreeMap, fmt, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use sandkeep_agent_api::process::{ProcessConfig, Pty, PtySize, StartRequest};
use sandkeep_model::{Code, Error, Result, check_env};
use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};
use serde_json::json;
use utoipa::ToSchema;

/// A week: whoever wants more can leave the time away.
pub(crate) const MAX_TIMEOUT_MS: u64 = 7 * 24 * 3600 * 1000;
/// The kernel's limit for one argument, its end included.
pub(crate) const MAX_WORD_BYTES: usize = 128 * 1024;
/// Far more than any screen.
pub(crate) const MAX_TTY_SIZE: u32 = 4096;

/// Text for a login shell, or a program with its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Program {
    Shell(String),
    Argv(Vec<String>),
}

impl<'de> Deserialize<'de> for Program {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Program;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("text for the shell or a list of a program and its arguments")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Program, E> {
                Ok(Program::Shell(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Program, A::Error> {
                let mut argv = Vec::new();
                while let Some(word) = list.next_element::<String>()? {
                    argv.push(word);
                }
                Ok(Program::Argv(argv))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// [`Program`], for the description.
fn program() -> impl Into<utoipa::openapi::RefOr<utoipa::openapi::Schema>> {
    use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, Type};

    let text = || ObjectBuilder::new().schema_type(Type::String);
    OneOfBuilder::new()
        .item(text())
        .item(ArrayBuilder::new().items(text()))
        .description(Some(
            "Text is run by `bash -l -c`; a list is a program and its arguments, without a shell.",
        ))
        .examples([json!(["echo", "hello"])])
}

/// A command to run.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExecRequest {
    /// Text is run by `bash -l -c`; a list is a program and its arguments, without a shell.
    #[schema(schema_with = program)]
    pub cmd: Program,
    /// Added to the sandbox's environment.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Where to run it; the user's home when left out.
    #[serde(default)]
    pub cwd: Option<String>,
    /// Who runs it; the sandbox's default user when left out.
    #[serde(default)]
    pub user: Option<String>,
    /// What it reads from its standard input.
    #[serde(default)]
    pub stdin: Option<String>,
    /// The same for bytes that are no text.
    #[serde(default)]
    pub stdin_base64: Option<String>,
    /// It is killed after this many milliseconds; never when left out.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub timeout_ms: Option<u64>,
    /// Let it go on when the client vanishes; otherwise it is killed then.
    #[serde(default)]
    pub detach: bool,
}

/// The first message of an interactive client.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct InteractiveRequest {
    /// What to run; this or `attach`.
    #[serde(default)]
    #[schema(schema_with = program)]
    pub cmd: Option<Program>,
    /// The pid of a command that runs already, as `started` or the list of processes says it.
    /// It is listened to from now on; with it only `tty` and `detach` count.
    #[serde(default)]
    pub attach: Option<u32>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub cwd: Option<String>,
    #[serde(default)]
    pub user: Option<String>,
    /// A terminal of this size; without one, stdout and stderr stay apart.
    #[serde(default)]
    pub tty: Option<TtySize>,
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    /// Let it go on when the client vanishes: unless this is said, one that was started here is
    /// killed then, and one that was attached to goes on.
    #[serde(default)]
    pub detach: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TtySize {
    pub cols: u32,
    pub rows: u32,
}

impl TtySize {
    pub(crate) fn check(self, field: &str) -> Result<()> {
        let good = 1..=MAX_TTY_SIZE;
        if good.contains(&self.cols) && good.contains(&self.rows) {
            return Ok(());
        }
        Err(Error::invalid(
            field,
            format!("{field}: cols and rows must be from 1 to {MAX_TTY_SIZE}"),
        ))
    }
}

/// A command, checked.
#[derive(Debug)]
pub(crate) struct Command {
    pub start: StartRequest,
    pub user: Option<String>,
    pub timeout: Option<Duration>,
    pub stdin: Option<Bytes>,
    pub detach: bool,
}

impl ExecRequest {
    pub(crate) fn check(self) -> Result<Command> {
        let stdin = match (self.stdin, self.stdin_base64) {
            (Some(_), Some(_)) => {
                return Err(Error::invalid(
                    "stdin_base64",
                    "stdin and stdin_base64 are both given",
                ));
            }
            (Some(text), None) => Some(Bytes::from(text)),
            (None, Some(coded)) => {
                Some(Bytes::from(STANDARD.decode(coded).map_err(|_| {
                    Error::invalid("stdin_base64", "stdin_base64 is not base64")
                })?))
            }
            (None, None) => None,
        };
        Ok(Command {
            start: StartRequest {
                process: Some(process(self.cmd, self.env, self.cwd)?),
                pty: None,
                tag: None,
                stdin: Some(stdin.is_some()),
            },
            user: self.user,
            timeout: timeout(self.timeout_ms)?,
            stdin,
            detach: self.detach,
        })
    }
}

impl InteractiveRequest {
    pub(crate) fn check(self) -> Result<Command> {
        if let Some(size) = self.tty {
            size.check("tty")?;
        }
        let pty = self.tty.map(|TtySize { cols, rows }| Pty {
            size: Some(PtySize { cols, rows }),
        });
        Ok(Command {
            start: StartRequest {
                process: Some(process(
                    self.cmd
                        .ok_or_else(|| Error::invalid("cmd", "cmd or attach is missing"))?,
                    self.env,
                    self.cwd,
                )?),
                stdin: if pty.is_some() { None } else { Some(true) },
                pty,
                tag: None,
            },
            user: self.user,
            timeout: timeout(self.timeout_ms)?,
            stdin: None,
            detach: self.detach.unwrap_or(false),
        })
    }
}

fn process(
    program: Program,
    env: BTreeMap<String, String>,
    cwd: Option<String>,
) -> Result<ProcessConfig> {
    check_env(&env)?;
    if cwd.as_deref().is_some_and(|cwd| cwd.contains('\0')) {
        return Err(Error::invalid("cwd", "cwd holds a NUL byte"));
    }
    let (cmd, args) = match program {
        Program::Shell(text) if text.trim().is_empty() => {
            return Err(Error::invalid("cmd", "cmd is empty"));
        }
        Program::Shell(text) => (
            "/bin/bash".to_owned(),
            vec!["-l".to_owned(), "-c".to_owned(), text],
        ),
        Program::Argv(mut argv) => {
            if argv.is_empty() {
                return Err(Error::invalid("cmd", "cmd names no program"));
            }
            (argv.remove(0), argv)
        }
    };
    if let Some(word) = args
        .iter()
        .chain([&cmd])
        .find(|w| w.len() >= MAX_WORD_BYTES)
    {
        return Err(Error::new(
            Code::TooLarge,
            format!(
                "a word of cmd is {} bytes, the kernel's limit is {}",
                word.len(),
                MAX_WORD_BYTES - 1
            ),
        )
        .field("cmd")
        .hint("write it to a file of the box, or give it as stdin"));
    }
    if cmd.is_empty() || cmd.contains('\0') || args.iter().any(|word| word.contains('\0')) {
        return Err(Error::invalid(
            "cmd",
            "cmd is empty or holds a NUL byte, which no command can",
        ));
    }
    Ok(ProcessConfig {
        cmd,
        args,
        envs: env,
        cwd,
    })
}

fn timeout(ms: Option<u64>) -> Result<Option<Duration>> {
    match ms {
        None => Ok(None),
        Some(ms) if (1..=MAX_TIMEOUT_MS).contains(&ms) => Ok(Some(Duration::from_millis(ms))),
        Some(ms) => Err(Error::invalid(
            "timeout_ms",
            format!("timeout_ms is {ms}, it must be from 1 to {MAX_TIMEOUT_MS}"),
        )
        .hint("leave it out for a command without an end")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::parse_json;

    fn exec(json: &str) -> Result<Command> {
        parse_json::<ExecRequest>(json.as_bytes())?.check()
    }

    #[test]
    fn text_goes_to_the_shell_and_a_list_does_not() {
        let process = exec(r#"{"cmd":"a | b"}"#).unwrap().start.process.unwrap();
        assert_eq!(process.cmd, "/bin/bash");
        assert_eq!(process.args, ["-l", "-c", "a | b"]);
        let command = exec(r#"{"cmd":["a","|","b"],"stdin_base64":"/w=="}"#).unwrap();
        let process = command.start.process.unwrap();
        assert_eq!(process.cmd, "a");
        assert_eq!(process.args, ["|", "b"]);
        assert_eq!(command.stdin.unwrap(), vec![0xff]);
        assert_eq!(command.start.stdin, Some(true));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, field) in [
            (r#"{"cmd":[]}"#, "cmd"),
            (r#"{"cmd":" "}"#, "cmd"),
            (r#"{"cmd":["a",1]}"#, "cmd[1]"),
            (r#"{"cmd":7}"#, "cmd"),
            (r#"{"cmd":"a\u0000"}"#, "cmd"),
            ("{}", "cmd"),
            (r#"{"cmd":"a","timeout_ms":0}"#, "timeout_ms"),
            (r#"{"cmd":"a","stdin_base64":"*"}"#, "stdin_base64"),
            (
                r#"{"cmd":"a","stdin":"","stdin_base64":""}"#,
                "stdin_base64",
            ),
            (r#"{"cmd":"a","env":{"A=":""}}"#, "env"),
            (r#"{"cmd":"a","tty":{}}"#, "tty"),
        ] {
            let error = exec(json).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field), "{json}: {error}");
        }
        let error = exec(&format!(r#"{{"cmd":["a","{}"]}}"#, "x".repeat(131_072))).unwrap_err();
        assert_eq!(error.code, Code::TooLarge);
        assert!(error.message.contains("131071"), "{error}");
        let request = br#"{"cmd":"a","tty":{"cols":0,"rows":1}}"#;
        let request = parse_json::<InteractiveRequest>(request).unwrap();
        assert_eq!(request.check().unwrap_err().field.as_deref(), Some("tty"));
    }
}
