//! Requests to the private server.

use std::{sync::Arc, time::Duration};

use reqwest::Method;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::{
    fault::{Fault, Result},
    stop::Stop,
};

/// Larger answers are a fault.
const MAX_ANSWER: usize = 64 << 20;

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

#[derive(Debug)]
pub struct Api {
    http: reqwest::Client,
    runtime: Arc<Runtime>,
    stop: Stop,
    pub port: u16,
    pub key: String,
}

impl Api {
    pub fn new(runtime: Arc<Runtime>, stop: Stop, port: u16, key: String) -> Result<Self> {
        let http = reqwest::Client::builder()
            .no_proxy()
            .http1_only()
            .tls_certs_only([])
            .pool_max_idle_per_host(2)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| Fault::Cannot(format!("preparing the HTTP client: {error}")))?;
        Ok(Self {
            http,
            runtime,
            stop,
            port,
            key,
        })
    }

    /// One request, with the key unless `headers` says otherwise.
    pub fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        headers: &[(&str, &str)],
        patience: Duration,
    ) -> Result<Answer> {
        self.stop.check()?;
        self.send(method, path, body, headers, patience)
    }

    /// The same, also after a stop was asked for: to clean up.
    pub fn last_request(&self, method: Method, path: &str, patience: Duration) -> Result<Answer> {
        let request = self
            .http
            .request(method, format!("http://127.0.0.1:{}{path}", self.port))
            .header("x-api-key", &self.key)
            .timeout(patience);
        self.runtime.block_on(read(request))
    }

    fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        headers: &[(&str, &str)],
        patience: Duration,
    ) -> Result<Answer> {
        let mut request = self
            .http
            .request(method, format!("http://127.0.0.1:{}{path}", self.port))
            .timeout(patience);
        if !headers.iter().any(|(name, _)| *name == "x-api-key") {
            request = request.header("x-api-key", &self.key);
        }
        for (name, value) in headers.iter().filter(|(_, value)| !value.is_empty()) {
            request = request.header(*name, *value);
        }
        if let Some(body) = body {
            request = request
                .header("content-type", "application/json")
                .body(body.to_string());
        }
        self.runtime.block_on(async {
            tokio::select! {
                answer = read(request) => answer,
                () = self.stop.rung() => Err(Fault::Stopped),
            }
        })
    }

    /// One request whose JSON answer is wanted; a refusal is a fault.
    pub fn json(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        patience: Duration,
    ) -> Result<Value> {
        let answer = self.request(method, path, body, &[], patience)?;
        if answer.status >= 400 {
            return Err(refusal(&answer));
        }
        if answer.body.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&answer.body)
            .map_err(|error| Fault::Cannot(format!("the server's answer is not JSON: {error}")))
    }
}

async fn read(request: reqwest::RequestBuilder) -> Result<Answer> {
    let broken = |error: reqwest::Error| {
        let mut text = error.to_string();
        let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(&error);
        while let Some(deeper) = cause {
            text = format!("{text}: {deeper}");
            cause = deeper.source();
        }
        Fault::Cannot(format!("asking the server: {text}"))
    };
    let mut response = request.send().await.map_err(broken)?;
    let status = response.status().as_u16();
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(broken)? {
        if body.len() + piece.len() > MAX_ANSWER {
            return Err(Fault::cannot("the server's answer does not end"));
        }
        body.extend_from_slice(&piece);
    }
    Ok(Answer { status, body })
}

fn refusal(answer: &Answer) -> Fault {
    let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let error = body.get("error").unwrap_or(&body);
    let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    let mut message = text("message");
    if message.is_empty() {
        message = answer.text().chars().take(200).collect();
    }
    Fault::Refused {
        status: answer.status,
        message,
    }
}
