//! `serve`: puts the rooms together and opens the door.

use std::{
    future::Future,
    io::{self, IsTerminal, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandkeep_api::ApiState;
use sandkeep_audit::{Audit, AuditConfig};
use sandkeep_gateway::{Gateway, GatewayConfig};
use sandkeep_identity::Issuer;
use sandkeep_keeper::{DenialBell, Keeper, KeeperConfig};
use sandkeep_moat::Profiles;
use sandkeep_model::{Error, Result};
use sandkeep_store::Store;
use sandkeep_vault::Vault;
use sandkeep_ward::Ward;
use sandkeep_ward_container::{ContainerWard, ContainerWardConfig};
use sandkeep_ward_gvisor::{GvisorWard, GvisorWardConfig};
use sandkeep_ward_microvm::{MicrovmWard, MicrovmWardConfig};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::spawn_blocking,
};

use crate::{
    LAUNCHER,
    args::ServeArgs,
    budget::share_out,
    config::Config,
    desk::Desk,
    follow::follow,
    greet::{self, KeyShown},
    logging, meters,
    network::{
        Parts, Room,
        audit::Witness,
        identity::{self, Identities},
        lane::Lane,
        network,
        secrets::{self, Edge},
    },
    notify::notify,
    state::{KeySource, LEDGER, StateDir, require_root},
    tls::Tls,
};

pub async fn serve(args: ServeArgs) -> anyhow::Result<u8> {
    let config = Config::load(args.settings, args.config.as_deref())?;
    logging::start(config.log_level.as_deref(), config.log_format)?;
    require_root("serve")?;
    if let Some(file) = &config.file {
        tracing::info!(file = %file.display(), "settings read");
    }
    sandkeep_vault::release_if_full(&config.state)?;
    let state = StateDir::take(&config.state)?;
    let (key, source) = state.api_key(std::env::var("SANDKEEP_API_KEY").ok())?;
    if source == KeySource::JustMade {
        tracing::info!(file = %config.state.join("api-key").display(), "an API key was made");
    }
    if source == KeySource::Environment {
        tracing::info!(
            file = %config.state.join("api-key").display(),
            "the API key is the one of SANDKEEP_API_KEY; the file is not read"
        );
    }
    let budget = share_out(config.max_connections);
    // Before the boxes are looked after: an address in use should fail at once.
    let listener = bind(&config).await?;
    let tls = match &config.tls {
        Some(settings) => Some(Tls::open(settings, &config.state)?),
        None => None,
    };
    let stop = StopSignals::watch()?;
    let metrics = meters::install()?;

    let secrets = secrets::open(&config.state, config.secrets_key_command.as_deref()).await?;
    let audit = open_audit(&config).await?;
    let issuer = open_issuer(&config, listener.local_addr()?).await?;
    let denials = DenialBell::default();
    let witness = Arc::new(Witness::new(audit.clone(), denials.clone()));
    let identities = Identities::new(Arc::clone(&issuer), audit.clone());
    let lane = Lane::open()?;
    let parts = Parts {
        edge: Edge {
            store: Arc::clone(&secrets),
            tokens: Some(identities.clone()),
            uses: Some(witness.clone()),
        },
        denials,
        witness: Arc::clone(&witness),
        identities: Arc::clone(&identities),
        room: Room {
            connections: budget.box_connections,
            runtime: lane.handle(),
            memory: config.state.join("names"),
        },
    };
    let (keeper, profiles) = open_keeper(&config, &state, parts).await?;
    identities.meet(keeper.finder());
    let (last_call, stopping) = watch::channel(false);
    let follower = tokio::spawn(follow(keeper.clone(), audit.clone(), stopping));
    let key_age = config.identity.key_age;
    let records = tokio::spawn({
        let witness = Arc::clone(&witness);
        async move { tokio::join!(witness.sum_up(), identities.upkeep(key_age)) }
    });
    let sweep = tokio::spawn(secrets::sweep(Arc::clone(&secrets), keeper.clone()));
    let upkeep = tokio::spawn(meters::upkeep(metrics.clone(), audit.clone()));
    let mut api = ApiState::new(
        keeper.clone(),
        key.clone(),
        Arc::new(move || metrics.render()),
        env!("CARGO_PKG_VERSION"),
    );
    let listen = listener.local_addr()?;
    let domain = shown_domain(&config, listen.port());
    api.domain.clone_from(&domain);
    api.tls = config.tls.is_some();
    api.port = Some(listen.port());
    api.profiles = profiles;
    api.secrets = Some(secrets);
    api.issuer = Some(issuer);
    api.audit = Some(audit.clone());
    let streams = api.shutdown.clone();
    let gateway = Gateway::new(
        keeper.clone(),
        GatewayConfig {
            domain: config.domain.clone(),
            api_key: Some(key.clone()),
            ..GatewayConfig::default()
        },
    );
    let desk = Desk {
        gateway,
        api: sandkeep_api::router(api),
        max_connections: budget.api_connections,
        key: key.clone(),
        tls: tls.clone(),
    };

    state.announce(listen)?;
    tracing::info!(%listen, state = %config.state.display(), "ready");
    if let Some(warning) = greet::exposure_warning(listen)
        && tls.is_none()
    {
        tracing::warn!("{warning}");
    }
    notify("READY=1");
    if args.greet {
        let level = keeper.report().await.plain_level;
        // Nobody may be reading; the server runs all the same.
        let mut stdout = io::stdout().lock();
        let key_file = state.key_file();
        let shown = match source {
            _ if stdout.is_terminal() => KeyShown::Text(&key),
            KeySource::Environment => KeyShown::Environment,
            KeySource::File | KeySource::JustMade => KeyShown::File(&key_file),
        };
        let encrypted = match (&tls, &domain) {
            (Some(tls), Some(domain)) => Some(greet::Encrypted {
                domain,
                authority: tls.authority.as_deref(),
                resolves: greet::resolves(domain).await,
            }),
            _ => None,
        };
        let greeting = greet::Greeting {
            listen,
            key: &shown,
            program: &greet::program(),
            level,
            network: config.network.standing,
            encrypted,
            sudo: greet::uses_sudo(),
        };
        let text = greeting.text();
        let _ = stdout.write_all(text.as_bytes());
        let _ = stdout.flush();
    }

    let asked = stop.asked();
    Box::pin(desk.serve(listener, async move {
        asked.await;
        tracing::info!("stopping; boxes go on running and are found again at the next start");
        notify("STOPPING=1");
        streams.cancel();
    }))
    .await;
    keeper.shutdown().await;
    upkeep.abort();
    sweep.abort();
    records.abort();
    witness.finish();
    last_call.send_replace(true);
    // Nothing is left to do about a follower that broke.
    let _ = follower.await;
    if let Err(error) = audit.flush().await {
        tracing::error!(%error, "the end of the audit log is not durable");
    }
    drop((state, lane));
    Ok(0)
}

/// The domain as clients write it. Behind a proxy the proxy's port counts, which is not known
/// here, so it is part of the setting where it is no usual one.
fn shown_domain(config: &Config, port: u16) -> Option<String> {
    let domain = config.domain.as_ref()?;
    if config.tls.is_some() && port != 443 && !domain.contains(':') {
        return Some(format!("{domain}:{port}"));
    }
    Some(domain.clone())
}

async fn open_audit(config: &Config) -> Result<Audit> {
    let dir = config.state.join("audit");
    let settings = AuditConfig {
        segment_bytes: config.audit_file_size.0,
        ..AuditConfig::default()
    };
    spawn_blocking(move || Audit::open_with(&dir, settings))
        .await
        .map_err(|_| Error::internal("opening the audit log was broken off"))?
        .map_err(|error| error.context("opening the audit log"))
}

/// The first key may be an RSA key, which takes its time.
async fn open_issuer(config: &Config, listen: SocketAddr) -> Result<Arc<Issuer>> {
    let (state, settings) = (config.state.clone(), config.identity.clone());
    spawn_blocking(move || identity::open(&state, listen, &settings))
        .await
        .map_err(|_| Error::internal("opening the identity keys was broken off"))?
}

async fn open_keeper(
    config: &Config,
    state: &StateDir,
    parts: Parts,
) -> Result<(Keeper, Arc<Profiles>)> {
    let vault = Vault::open(config.vault()).await?;
    let template = &config.keeper.pool.template;
    let Some(base) = vault.template(template).await? else {
        return Err(
            Error::host_not_ready(format!("the template \"{template}\" is not there yet")).hint(
                format!(
                    "make it with `sandkeep init --state {}`",
                    config.state.display()
                ),
            ),
        );
    };
    let profiles = Profiles::open(&config.state.join("profiles"), Some(base.path))?;
    let store = Store::open(config.state.join(LEDGER)).await?;
    let agent = state.install_agent()?;
    let container = ContainerWard::new(container_config(
        state.path(),
        agent.clone(),
        config.keeper.max_boxes,
    ))?;
    let gvisor = GvisorWard::new(GvisorWardConfig {
        runsc: config.runsc.clone(),
        ..GvisorWardConfig::new(state.path().join("ward-gvisor"), agent.clone())
    })?;
    let machines = if vault.is_read_only() {
        // Nothing can be made there until it is repaired; those that run need it not.
        state.path().join("ward-microvm-machines")
    } else {
        // Beside the images of boxes, which share its blocks.
        vault.pool().await?.path.join("machines")
    };
    let usual = MicrovmWardConfig::new(state.path().join("ward-microvm"), machines, agent);
    let microvm = MicrovmWard::new(MicrovmWardConfig {
        kernel: config.microvm_kernel.clone(),
        qemu: config.microvm_qemu.clone(),
        waiting: config.microvm_waiting,
        warm: config.microvm_warm,
        boot: config.microvm_boot,
        answers: config.microvm_answers.unwrap_or(usual.answers),
        ..usual
    })?;
    let wards: Vec<Arc<dyn Ward>> = vec![container, gvisor, microvm];
    let keeper = KeeperConfig {
        network: network(&config.network, &profiles, parts).await?,
        ..config.keeper.clone()
    };
    let keeper = Keeper::open(keeper, store, vault, wards).await?;
    Ok((keeper, Arc::new(profiles)))
}

fn container_config(state: &Path, agent: PathBuf, most_boxes: usize) -> ContainerWardConfig {
    let mut config = ContainerWardConfig::new(
        state.join("ward-container"),
        agent,
        // Our own program, even after its file was replaced by a newer one.
        PathBuf::from("/proc/self/exe"),
    );
    config.launcher_args = vec![LAUNCHER.to_owned()];
    config.most_boxes = most_boxes;
    config
}

async fn bind(config: &Config) -> Result<TcpListener> {
    TcpListener::bind(config.listen).await.map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::AddrInUse => {
                "another program listens there; stop it or choose another port with --listen"
            }
            io::ErrorKind::AddrNotAvailable => "this machine has no such address; see `ip address`",
            _ => "choose another address with --listen",
        };
        Error::from(error)
            .context(format!("listening on {}", config.listen))
            .hint(hint)
    })
}

/// The first SIGTERM or Ctrl-C asks us to stop well, the second ends us at once.
struct StopSignals(watch::Receiver<bool>);

impl StopSignals {
    fn watch() -> Result<Self> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let (tell, asked) = watch::channel(false);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                if tell.send_replace(true) {
                    // Everything that was acknowledged is in the ledger; ending here loses nothing.
                    std::process::exit(130);
                }
            }
        });
        Ok(Self(asked))
    }

    fn asked(&self) -> impl Future<Output = ()> + use<> {
        let mut asked = self.0.clone();
        async move {
            // The sender lives as long as the process.
            let _ = asked.wait_for(|asked| *asked).await;
        }
    }
}
