//! `serve`: puts the rooms together and opens the door.

use std::{
    future::Future,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use metrics_exporter_prometheus::PrometheusBuilder;
use sandkeep_api::ApiState;
use sandkeep_gateway::{Gateway, GatewayConfig};
use sandkeep_keeper::{Keeper, KeeperConfig};
use sandkeep_model::{Error, Result};
use sandkeep_store::Store;
use sandkeep_vault::Vault;
use sandkeep_ward::Ward;
use sandkeep_ward_container::{ContainerWard, ContainerWardConfig};
use sandkeep_ward_gvisor::{GvisorWard, GvisorWardConfig};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::{
    LAUNCHER,
    args::ServeArgs,
    config::Config,
    desk::{Desk, room_for_connections},
    greet, logging,
    network::network,
    notify::notify,
    state::{KeySource, StateDir, require_root},
};

pub async fn serve(args: ServeArgs) -> anyhow::Result<u8> {
    let config = Config::load(args.settings, args.config.as_deref())?;
    logging::start(config.log_level.as_deref(), config.log_format)?;
    require_root("serve")?;
    if let Some(file) = &config.file {
        tracing::info!(file = %file.display(), "settings read");
    }
    let state = StateDir::take(&config.state)?;
    let (key, source) = state.api_key(std::env::var("SANDKEEP_API_KEY").ok())?;
    if source == KeySource::JustMade {
        tracing::info!(file = %config.state.join("api-key").display(), "an API key was made");
    }
    let max_connections = room_for_connections(config.max_connections);
    // Before the boxes are looked after: an address in use should fail at once.
    let listener = bind(&config).await?;
    let stop = StopSignals::watch()?;
    let metrics = PrometheusBuilder::new()
        .install_recorder()
        .map_err(|error| Error::internal(format!("starting the metrics: {error}")))?;

    let keeper = open_keeper(&config, &state).await?;
    let upkeep = tokio::spawn({
        let metrics = metrics.clone();
        async move {
            let mut interval = tokio::time::interval(Duration::from_secs(5));
            loop {
                interval.tick().await;
                metrics.run_upkeep();
            }
        }
    });
    let mut api = ApiState::new(
        keeper.clone(),
        key.clone(),
        Arc::new(move || metrics.render()),
        env!("CARGO_PKG_VERSION"),
    );
    api.domain.clone_from(&config.domain);
    let streams = api.shutdown.clone();
    let gateway = Gateway::new(
        keeper.clone(),
        GatewayConfig {
            domain: config.domain.clone(),
            ..GatewayConfig::default()
        },
    );
    let desk = Desk {
        gateway,
        api: sandkeep_api::router(api),
        max_connections,
    };

    let listen = listener.local_addr()?;
    tracing::info!(%listen, state = %config.state.display(), "ready");
    if let Some(warning) = greet::exposure_warning(listen) {
        tracing::warn!("{warning}");
    }
    notify("READY=1");
    if args.greet {
        // Nobody may be reading; the server runs all the same.
        let mut stdout = io::stdout().lock();
        let _ = stdout.write_all(greet::greeting(listen, &key, &greet::program()).as_bytes());
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
    drop(state);
    Ok(0)
}

async fn open_keeper(config: &Config, state: &StateDir) -> Result<Keeper> {
    let vault = Vault::open(config.vault()).await?;
    let template = &config.keeper.pool.template;
    if vault.template(template).await?.is_none() {
        return Err(
            Error::host_not_ready(format!("the template \"{template}\" is not there yet")).hint(
                format!(
                    "make it with `sandkeep init --state {}`",
                    config.state.display()
                ),
            ),
        );
    }
    let store = Store::open(config.state.join("ledger.db")).await?;
    let agent = state.install_agent()?;
    let container = ContainerWard::new(container_config(state.path(), agent.clone()))?;
    let gvisor = GvisorWard::new(GvisorWardConfig::new(
        state.path().join("ward-gvisor"),
        agent,
    ))?;
    let wards: Vec<Arc<dyn Ward>> = vec![container, gvisor];
    let keeper = KeeperConfig {
        network: network(&config.network).await?,
        ..config.keeper.clone()
    };
    Keeper::open(keeper, store, vault, wards).await
}

fn container_config(state: &Path, agent: PathBuf) -> ContainerWardConfig {
    let mut config = ContainerWardConfig::new(
        state.join("ward-container"),
        agent,
        // Our own program, even after its file was replaced by a newer one.
        PathBuf::from("/proc/self/exe"),
    );
    config.launcher_args = vec![LAUNCHER.to_owned()];
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
