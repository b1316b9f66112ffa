//! How the server is told what to do: flags, then `SANDKEEP_*` variables, then the file.
//!
//! One struct serves all three: clap fills it from flags and variables, serde from the file,
//! and what the first leaves out the second may say.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::IpNet;
use sandkeep_identity::SigningAlgorithm;
use sandkeep_keeper::{
    IsolationRule, KeeperConfig, Limiting, NetworkConfig, PoolConfig, check_point_policy,
};
use sandkeep_moat::policy::{AddressGuard, Profile};
use sandkeep_model::{Error, Isolation, IsolationWish, Limits, Result, ServerKey, TemplateName};
use serde::Deserialize;

use crate::{
    DISK_READER,
    auto_rule::AutoRule,
    listed::{Listed, Resolver},
    network::{NetworkSettings, identity::IdentitySettings},
    quantity::{Size, Span},
    tls::{TlsSettings, check_domain},
};

/// Where an installed server keeps its things.
pub const DEFAULT_STATE: &str = "/var/lib/sandkeep";
const SYSTEM_CONFIG: &str = "/etc/sandkeep/sandkeep.toml";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

/// Declares the settings once: the clap argument, the key in the file, and the merge.
macro_rules! settings {
    ($( $(#[$meta:meta])* $name:ident : $kind:ty = $env:literal, )*) => {
        #[derive(Debug, Clone, Default, Deserialize, clap::Args)]
        #[serde(deny_unknown_fields, default)]
        pub struct Settings {
            $( $(#[$meta])* #[arg(long, env = $env, hide_env_values = true)] pub $name: Option<$kind>, )*
        }

        impl Settings {
            /// Takes from `other` what this one leaves open.
            fn or(self, other: Self) -> Self {
                Self { $( $name: self.$name.or(other.$name), )* }
            }

            #[cfg(test)]
            const KEYS: &'static [&'static str] = &[$( stringify!($name), )*];
        }
    };
}

settings! {
    /// Address and port to listen on [default: 127.0.0.1:3000]
    #[arg(value_name = "ADDRESS")]
    listen: SocketAddr = "SANDKEEP_LISTEN",
    /// Directory for everything the server keeps [default: /var/lib/sandkeep]
    #[arg(value_name = "DIR")]
    state: PathBuf = "SANDKEEP_STATE",
    /// A btrfs directory for disks and templates, instead of the server's own file
    #[arg(value_name = "DIR")]
    storage_dir: PathBuf = "SANDKEEP_STORAGE_DIR",
    /// How large that file may grow; it is kept from then on [default: 100GiB, or what fits the
    /// disk. It takes what is used and some GiB ahead]
    #[arg(value_name = "SIZE")]
    storage_size: Size = "SANDKEEP_STORAGE_SIZE",
    /// Run although the disk use of boxes can not be limited on this host
    #[arg(num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    allow_unlimited_disk: bool = "SANDKEEP_ALLOW_UNLIMITED_DISK",
    /// The runsc for the isolation level gvisor
    /// [default: /usr/local/lib/sandkeep/runsc, or the first of the PATH]
    #[arg(value_name = "FILE")]
    runsc: PathBuf = "SANDKEEP_RUNSC",
    /// Directory with the kernel of machines, for the isolation level microvm
    /// [default: /usr/local/lib/sandkeep/kernel, or /usr/share/sandkeep/kernel]
    #[arg(value_name = "DIR")]
    microvm_kernel: PathBuf = "SANDKEEP_MICROVM_KERNEL",
    /// The QEMU for the isolation level microvm, below /usr [default: qemu-system-x86_64-microvm or
    /// qemu-system-x86_64 of the PATH, the first one that does what it will be asked to]
    #[arg(value_name = "FILE")]
    microvm_qemu: PathBuf = "SANDKEEP_MICROVM_QEMU",
    /// How long a machine of the isolation level microvm may boot; three are tried
    /// [default: 40 with KVM, 90 emulated]
    #[arg(value_name = "SECONDS")]
    microvm_boot_seconds: u64 = "SANDKEEP_MICROVM_BOOT_SECONDS",
    /// How long a machine may take for what it is told when a box begins [default: 60]
    #[arg(value_name = "SECONDS")]
    microvm_answer_seconds: u64 = "SANDKEEP_MICROVM_ANSWER_SECONDS",
    /// QEMUs that are started ahead and wait for boxes of the isolation level microvm, for each
    /// of the two machines that were asked for last; 0: none [default: 2]
    #[arg(value_name = "COUNT")]
    microvm_waiting: usize = "SANDKEEP_MICROVM_WAITING",
    /// Whether a machine is warmed up on the disk of each template that boxes of the isolation
    /// level microvm are made from [default: true]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    microvm_warm: bool = "SANDKEEP_MICROVM_WARM",
    /// Domain under which boxes are reached as <port>-<id>.<domain>
    #[arg(value_name = "NAME")]
    domain: String = "SANDKEEP_DOMAIN",
    /// A file with the certificate of this server (PEM, the whole chain): it takes TLS on its port,
    /// and plain HTTP from its own machine only. Read again when it changes
    #[arg(value_name = "FILE")]
    tls_cert: PathBuf = "SANDKEEP_TLS_CERT",
    /// The file with the key of that certificate
    #[arg(value_name = "FILE")]
    tls_key: PathBuf = "SANDKEEP_TLS_KEY",
    /// For trying out: TLS for this domain and all names below it, by an authority made in the state
    /// directory that clients must be told to trust
    #[arg(value_name = "DOMAIN")]
    tls_self_signed: String = "SANDKEEP_TLS_SELF_SIGNED",
    /// Most boxes at once, waiting ones included [default: 2000]
    #[arg(value_name = "COUNT")]
    max_boxes: usize = "SANDKEEP_MAX_BOXES",
    /// Boxes kept started and waiting, so that a create takes milliseconds [default: 3]
    #[arg(value_name = "COUNT")]
    pool_size: usize = "SANDKEEP_POOL_SIZE",
    /// Template of the waiting boxes [default: base]
    #[arg(value_name = "NAME")]
    pool_template: TemplateName = "SANDKEEP_POOL_TEMPLATE",
    /// Isolation level of the waiting boxes [default: auto]
    #[arg(value_name = "LEVEL")]
    pool_isolation: IsolationWish = "SANDKEEP_POOL_ISOLATION",
    /// Isolation level of a sandbox whose create names none: auto, container, gvisor or microvm
    /// [default: auto, the strongest that runs everything well on this host]
    #[arg(value_name = "LEVEL")]
    isolation_default: IsolationWish = "SANDKEEP_ISOLATION_DEFAULT",
    /// Isolation level that every sandbox has at least: less is refused, whoever asks
    /// [default: container]
    #[arg(value_name = "LEVEL")]
    isolation_minimum: Isolation = "SANDKEEP_ISOLATION_MINIMUM",
    /// Longest time a box may be given [default: never, which sets no bound]
    #[arg(value_name = "SPAN")]
    max_lifetime: Span = "SANDKEEP_MAX_LIFETIME",
    /// How long sandboxes may be paused before they are ended; a create may ask for less
    /// [default: never, they stay]
    #[arg(value_name = "SPAN")]
    paused_limit: Span = "SANDKEEP_PAUSED_LIMIT",
    /// How long boxes that are gone stay in the records [default: 7d]
    #[arg(value_name = "SPAN")]
    keep_history: Span = "SANDKEEP_KEEP_HISTORY",
    /// When points are made by themselves of boxes whose create says nothing, for example
    /// before=risky,every=10m,keep=50; `sandkeep auto-points --help` tells all words [default: none]
    #[arg(value_name = "RULE")]
    auto_points: AutoRule = "SANDKEEP_AUTO_POINTS",
    /// Public keys of servers (`sandkeep points key`), comma-separated, whose points are imported
    /// with their memory at the isolation level container, too. Who runs them can then become
    /// root here. [default: none but this one]
    #[arg(value_name = "KEY,…")]
    trusted_servers: Listed<ServerKey> = "SANDKEEP_TRUSTED_SERVERS",
    /// What boxes may reach whose create says nothing: deny, open or package-registries [default: deny]
    #[arg(value_name = "PROFILE")]
    network_default: Profile = "SANDKEEP_NETWORK_DEFAULT",
    /// What template builds may reach: deny, open or package-registries
    /// [default: package-registries, or open where network_default is]
    #[arg(value_name = "PROFILE")]
    build_network_default: Profile = "SANDKEEP_BUILD_NETWORK_DEFAULT",
    /// Private networks that policies may name, comma-separated; else none is ever reached
    #[arg(value_name = "CIDR,…")]
    allow_private: Listed<IpNet> = "SANDKEEP_ALLOW_PRIVATE",
    /// Connections a sandbox may have open at once, whatever its policy says [default: 256]
    #[arg(value_name = "COUNT")]
    sandbox_connections: u32 = "SANDKEEP_SANDBOX_CONNECTIONS",
    /// DNS servers asked for boxes, comma-separated [default: those of this host]
    #[arg(value_name = "ADDRESS,…")]
    dns: Listed<Resolver> = "SANDKEEP_DNS",
    /// A file with certificate authorities (PEM) trusted besides this host's own, where
    /// credentials are added to requests
    #[arg(value_name = "FILE")]
    upstream_ca: PathBuf = "SANDKEEP_UPSTREAM_CA",
    /// A program, with its arguments, that prints the key of the secrets
    /// [default: a file in the state directory]
    #[arg(value_name = "COMMAND")]
    secrets_key_command: String = "SANDKEEP_SECRETS_KEY_COMMAND",
    /// The address under which verifiers of tokens reach this server [default: where it listens]
    #[arg(value_name = "URL")]
    issuer_url: String = "SANDKEEP_ISSUER_URL",
    /// The first part of the subject of tokens: spiffe://<domain>/box/<id> [default: the host of the issuer]
    #[arg(value_name = "NAME")]
    trust_domain: String = "SANDKEEP_TRUST_DOMAIN",
    /// How tokens of boxes are signed: ES256, EdDSA or RS256 [default: ES256]
    #[arg(value_name = "NAME")]
    token_algorithm: SigningAlgorithm = "SANDKEEP_TOKEN_ALGORITHM",
    /// Age at which the key that signs tokens is replaced; never: only by `identity rotate` [default: 30d]
    #[arg(value_name = "SPAN")]
    token_key_age: Span = "SANDKEEP_TOKEN_KEY_AGE",
    /// Size at which the audit log goes on in a new file [default: 64MiB]
    #[arg(value_name = "SIZE")]
    audit_file_size: Size = "SANDKEEP_AUDIT_FILE_SIZE",
    /// Connections served at once; more are answered 503 [default: 20000]
    #[arg(value_name = "COUNT")]
    max_connections: usize = "SANDKEEP_MAX_CONNECTIONS",
    /// Processor of a box that asks for nothing, in thousandths of a core [default: 2000]
    #[arg(value_name = "MILLIS")]
    default_cpu_millis: u32 = "SANDKEEP_DEFAULT_CPU_MILLIS",
    /// Memory of a box that asks for nothing [default: 1GiB]
    #[arg(value_name = "SIZE")]
    default_memory: Size = "SANDKEEP_DEFAULT_MEMORY",
    /// Processes and threads of a box that asks for nothing [default: 1024]
    #[arg(value_name = "COUNT")]
    default_pids: u32 = "SANDKEEP_DEFAULT_PIDS",
    /// Disk of a box that asks for nothing [default: 10GiB]
    #[arg(value_name = "SIZE")]
    default_disk: Size = "SANDKEEP_DEFAULT_DISK",
    /// Most processor a box may ask for [default: all cores of the host]
    #[arg(value_name = "MILLIS")]
    max_cpu_millis: u32 = "SANDKEEP_MAX_CPU_MILLIS",
    /// Most memory a box may ask for [default: the memory of the host]
    #[arg(value_name = "SIZE")]
    max_memory: Size = "SANDKEEP_MAX_MEMORY",
    /// Most processes and threads a box may ask for [default: 16384]
    #[arg(value_name = "COUNT")]
    max_pids: u32 = "SANDKEEP_MAX_PIDS",
    /// Most disk a box may ask for [default: the size of the storage]
    #[arg(value_name = "SIZE")]
    max_disk: Size = "SANDKEEP_MAX_DISK",
    /// What is logged: error, warn, info, debug, trace, or a tracing filter [default: info]
    #[arg(value_name = "FILTER")]
    log_level: String = "SANDKEEP_LOG_LEVEL",
    /// How log lines look [default: text]
    #[arg(value_name = "FORMAT")]
    log_format: LogFormat = "SANDKEEP_LOG_FORMAT",
}

/// Everything decided.
#[derive(Debug, Clone)]
pub struct Config {
    pub listen: SocketAddr,
    pub state: PathBuf,
    pub storage_dir: Option<PathBuf>,
    /// `None`: as it was told before.
    pub storage_size: Option<Size>,
    pub allow_unlimited_disk: bool,
    pub runsc: Option<PathBuf>,
    pub microvm_kernel: Option<PathBuf>,
    pub microvm_qemu: Option<PathBuf>,
    pub microvm_boot: Option<Duration>,
    pub microvm_answers: Option<Duration>,
    pub microvm_waiting: usize,
    pub microvm_warm: bool,
    pub domain: Option<String>,
    pub tls: Option<TlsSettings>,
    pub max_connections: usize,
    pub log_level: Option<String>,
    pub log_format: LogFormat,
    pub keeper: KeeperConfig,
    pub network: NetworkSettings,
    pub identity: IdentitySettings,
    pub audit_file_size: Size,
    /// Prints the key of the secrets; without it the key is a file of the state directory.
    pub secrets_key_command: Option<String>,
    /// The file that was read, for the log.
    pub file: Option<PathBuf>,
}

impl Config {
    /// `given` holds flags and variables already; `file` is what `--config` named.
    pub fn load(given: Settings, file: Option<&Path>) -> Result<Self> {
        let state = given.state.clone().unwrap_or_else(|| DEFAULT_STATE.into());
        let found = match file {
            Some(path) => Some(path.to_owned()),
            None => [state.join("sandkeep.toml"), SYSTEM_CONFIG.into()]
                .into_iter()
                .find(|path| path.exists()),
        };
        let settings = match &found {
            Some(path) => given.or(read_file(path)?),
            None => given,
        };
        Self::decide(settings, found)
    }

    fn decide(settings: Settings, file: Option<PathBuf>) -> Result<Self> {
        let state = absolute(
            settings
                .state
                .as_deref()
                .unwrap_or(Path::new(DEFAULT_STATE)),
        )?;
        let storage_size = settings.storage_size;
        let kept = || sandkeep_vault::kept_size(&state).map(Size);
        let most_disk = storage_size.or_else(kept).unwrap_or(Size::gib(100));
        let limits = limiting(&settings, most_disk)?;
        let isolation = isolation(&settings)?;
        let tls = tls(&settings)?;
        let template = match settings.pool_template {
            Some(name) => name,
            None => "base".parse()?,
        };
        let keep_history = settings.keep_history.unwrap_or(Span::Seconds(7 * 86_400));
        let points = settings.auto_points.map(|rule| rule.0);
        if let Some(points) = &points {
            check_point_policy(points)?;
        }
        Ok(Self {
            listen: settings
                .listen
                .unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 3000))),
            state,
            storage_dir: settings.storage_dir.as_deref().map(absolute).transpose()?,
            storage_size,
            allow_unlimited_disk: settings.allow_unlimited_disk.unwrap_or(false),
            runsc: settings.runsc.as_deref().map(absolute).transpose()?,
            microvm_kernel: settings.microvm_kernel,
            microvm_qemu: settings.microvm_qemu.as_deref().map(absolute).transpose()?,
            microvm_boot: settings.microvm_boot_seconds.map(Duration::from_secs),
            microvm_answers: settings.microvm_answer_seconds.map(Duration::from_secs),
            microvm_waiting: settings.microvm_waiting.unwrap_or(2),
            microvm_warm: settings.microvm_warm.unwrap_or(true),
            domain: match &tls {
                Some(TlsSettings::SelfSigned { domain }) => Some(domain.clone()),
                _ => settings.domain,
            },
            tls,
            max_connections: settings.max_connections.unwrap_or(20_000),
            log_level: settings.log_level,
            log_format: settings.log_format.unwrap_or(LogFormat::Text),
            keeper: KeeperConfig {
                limits,
                pool: PoolConfig {
                    size: settings.pool_size.unwrap_or(3),
                    template,
                    isolation: settings.pool_isolation.unwrap_or_default(),
                },
                isolation,
                max_boxes: settings.max_boxes.unwrap_or(2000),
                max_lifetime: settings.max_lifetime.and_then(Span::duration),
                paused_limit: settings.paused_limit.and_then(Span::duration),
                keep_history: keep_history
                    .duration()
                    .unwrap_or(Duration::from_secs(100 * 365 * 86_400)),
                // Made when the host has been looked at.
                network: NetworkConfig::default(),
                points,
                trusted_servers: settings
                    .trusted_servers
                    .map_or_else(Vec::new, |list| list.0),
            },
            identity: IdentitySettings {
                url: settings.issuer_url.map(|url| url.parse()).transpose()?,
                trust_domain: settings.trust_domain.map(|name| name.parse()).transpose()?,
                algorithm: settings.token_algorithm.unwrap_or_default(),
                key_age: settings
                    .token_key_age
                    .unwrap_or(Span::Seconds(30 * 86_400))
                    .duration(),
            },
            audit_file_size: Size(audit_file_size(settings.audit_file_size)?),
            network: NetworkSettings {
                standing: settings.network_default.unwrap_or(Profile::AirGapped),
                builds: settings.build_network_default,
                allow_private: opened(settings.allow_private)?,
                connections: settings.sandbox_connections.unwrap_or(256),
                dns: settings.dns.map_or_else(Vec::new, |list| list.0),
                upstream_ca: settings.upstream_ca,
            },
            secrets_key_command: settings.secrets_key_command,
            file,
        })
    }

    pub fn vault(&self) -> sandkeep_vault::VaultConfig {
        sandkeep_vault::VaultConfig {
            state_dir: self.state.clone(),
            pool_dir: self.storage_dir.clone(),
            pool_size_bytes: self.storage_size.map(|size| size.0),
            allow_unlimited_disk: self.allow_unlimited_disk,
            disk_reader: Some(sandkeep_vault::DiskReader {
                program: PathBuf::from("/proc/self/exe"),
                args: vec![DISK_READER.to_owned()],
            }),
        }
    }
}

/// A default below the minimum would refuse every plain create, a pool below it would stay empty.
fn isolation(settings: &Settings) -> Result<IsolationRule> {
    let rule = IsolationRule {
        default: settings.isolation_default.unwrap_or_default(),
        minimum: settings.isolation_minimum,
    };
    for (name, wish) in [
        ("isolation_default", Some(rule.default)),
        ("pool_isolation", settings.pool_isolation),
    ] {
        if let (Some(IsolationWish::Level(level)), Some(minimum)) = (wish, rule.minimum)
            && level < minimum
        {
            return Err(Error::invalid(
                name,
                format!("{name} is {level}, but isolation_minimum is {minimum}"),
            )
            .hint(format!(
                "set {name} to {minimum} or stronger, or leave it out"
            )));
        }
    }
    Ok(rule)
}

fn tls(settings: &Settings) -> Result<Option<TlsSettings>> {
    let wrong = |field: &str, what: &str, hint: &str| Err(Error::invalid(field, what).hint(hint));
    match (
        &settings.tls_cert,
        &settings.tls_key,
        &settings.tls_self_signed,
    ) {
        (None, None, None) => Ok(None),
        (Some(cert), Some(key), None) => Ok(Some(TlsSettings::Files {
            cert: absolute(cert)?,
            key: absolute(key)?,
        })),
        (None, None, Some(domain)) => {
            check_domain(domain)?;
            if settings.domain.as_ref().is_some_and(|own| own != domain) {
                return wrong(
                    "tls_self_signed",
                    "domain and tls_self_signed name two domains",
                    "leave domain out, or name the same",
                );
            }
            Ok(Some(TlsSettings::SelfSigned {
                domain: domain.clone(),
            }))
        }
        (_, _, Some(_)) => wrong(
            "tls_self_signed",
            "tls_self_signed makes a certificate, and tls_cert or tls_key names one",
            "use one of the two",
        ),
        (Some(_), None, None) => wrong(
            "tls_key",
            "tls_cert has no tls_key beside it",
            "name the key of the certificate with --tls-key",
        ),
        (None, Some(_), None) => wrong(
            "tls_cert",
            "tls_key has no tls_cert beside it",
            "name the certificate of the key with --tls-cert",
        ),
    }
}

/// Opening what stays closed all the same is a mistake better said now.
fn opened(wish: Option<Listed<IpNet>>) -> Result<Vec<IpNet>> {
    let list = wish.map_or_else(Vec::new, |list| list.0);
    for net in &list {
        if let Some(kind) = AddressGuard::never_opens(net) {
            let found = format!(
                "{net} is {}, which no sandbox can reach whatever is set",
                kind.words()
            );
            return Err(Error::invalid("allow_private", found)
                .hint("name private or reserved ranges only, for example 10.20.0.0/16"));
        }
    }
    Ok(list)
}

/// A file holds some entries at least, and is read in one piece by those who look after it.
fn audit_file_size(wish: Option<Size>) -> Result<u64> {
    let (least, most) = (64 << 10, 16 << 30);
    match wish {
        None => Ok(64 << 20),
        Some(Size(bytes)) if (least..=most).contains(&bytes) => Ok(bytes),
        Some(_) => Err(Error::invalid(
            "audit_file_size",
            "a file of the audit log has 64 KiB to 16 GiB",
        )),
    }
}

fn limiting(settings: &Settings, storage_size: Size) -> Result<Limiting> {
    let host = Limits::default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = Limits {
        cpu_millis: settings
            .max_cpu_millis
            .unwrap_or_else(|| u32::try_from(cores).unwrap_or(1024).saturating_mul(1000)),
        memory_mib: settings
            .max_memory
            .map_or_else(|| host_memory_mib().unwrap_or(1 << 20), Size::mib),
        pids: settings.max_pids.unwrap_or(16_384),
        disk_mib: settings.max_disk.unwrap_or(storage_size).mib(),
        open_files: 1_048_576,
    };
    // A small host must not refuse the boxes that ask for nothing.
    let default = Limits {
        cpu_millis: settings
            .default_cpu_millis
            .unwrap_or(host.cpu_millis.min(most.cpu_millis)),
        memory_mib: settings
            .default_memory
            .map_or(host.memory_mib.min(most.memory_mib), Size::mib),
        pids: settings.default_pids.unwrap_or(host.pids.min(most.pids)),
        disk_mib: settings
            .default_disk
            .map_or(host.disk_mib.min(most.disk_mib), Size::mib),
        open_files: host.open_files,
    };
    // Defaults beyond the maximum would make every plain create fail: better said now.
    sandkeep_model::LimitsWish::default()
        .resolve(&default, &most)
        .map_err(|error| {
            error
                .context("the default limits of boxes do not fit the largest ones allowed")
                .hint("lower the `default_*` settings or raise the `max_*` ones")
        })?;
    Ok(Limiting { default, most })
}

fn host_memory_mib() -> Option<u64> {
    sandkeep_host::proc::memory("MemTotal").map(|bytes| bytes >> 20)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path)
        .map_err(|error| Error::from(error).context(format!("the path {}", path.display())))
}

fn read_file(path: &Path) -> Result<Settings> {
    let named = || format!("reading the settings in {}", path.display());
    let text =
        std::fs::read_to_string(path).map_err(|error| Error::from(error).context(named()))?;
    toml::from_str(&text).map_err(|error| {
        // The parser's text shows the line and what is wrong with it.
        Error::invalid("config", error.to_string())
            .context(named())
            .hint("`sandkeep serve --help` lists the settings; keys in the file are written with _ for -")
    })
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    fn flags(words: &[&str]) -> Settings {
        let command = Settings::augment_args(clap::Command::new("t").no_binary_name(true));
        let matches = command.try_get_matches_from(words).unwrap();
        Settings::from_arg_matches(&matches).unwrap()
    }

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sandkeep.toml");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let (_dir, path) =
            file("listen = \"127.0.0.1:4000\"\nmax_boxes = 7\nkeep_history = \"1h\"\n");
        let config = Config::load(flags(&["--listen", "127.0.0.1:5000"]), Some(&path)).unwrap();
        assert_eq!(config.listen.port(), 5000);
        assert_eq!(config.keeper.max_boxes, 7);
        assert_eq!(config.keeper.keep_history, Duration::from_secs(3600));
        assert_eq!(config.max_connections, 20_000);
    }

    #[test]
    fn every_setting_has_a_flag_and_a_variable_of_its_name() {
        let command = Settings::augment_args(clap::Command::new("t"));
        for key in Settings::KEYS {
            let flag = key.replace('_', "-");
            let argument = command
                .get_arguments()
                .find(|argument| argument.get_long() == Some(&flag))
                .unwrap_or_else(|| panic!("--{flag} is missing"));
            let variable = argument.get_env().and_then(|name| name.to_str());
            assert_eq!(
                variable,
                Some(format!("SANDKEEP_{}", key.to_uppercase()).as_str())
            );
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        let (_dir, path) = file("listen = \"127.0.0.1:4000\"\nlisten_port = 3\n");
        let error = Config::load(Settings::default(), Some(&path)).unwrap_err();
        assert!(error.message.contains("line 2"), "{}", error.message);
        assert!(error.message.contains("listen_port"), "{}", error.message);
    }

    #[test]
    fn a_missing_file_that_was_named_is_an_error() {
        assert!(Config::load(Settings::default(), Some(Path::new("/nonexistent.toml"))).is_err());
    }

    #[test]
    fn the_file_in_the_state_directory_is_found() {
        let (dir, path) = file("pool_size = 0\n");
        let settings = Settings {
            state: Some(dir.path().to_owned()),
            ..Settings::default()
        };
        let config = Config::load(settings, None).unwrap();
        assert_eq!(config.file, Some(path));
        assert_eq!(config.keeper.pool.size, 0);
    }

    #[test]
    fn defaults_beyond_the_maximum_are_refused_at_once() {
        let settings = flags(&["--default-memory", "2GiB", "--max-memory", "1GiB"]);
        let error = Config::load(settings, Some(&file("").1)).unwrap_err();
        assert!(error.message.contains("memory"), "{error}");
    }

    #[test]
    fn trusted_servers_are_keys() {
        let key = ServerKey::new([7; ServerKey::BYTES]);
        let (_dir, path) = file(&format!("trusted_servers = [\"{key}\"]\n"));
        let config = Config::load(Settings::default(), Some(&path)).unwrap();
        assert_eq!(config.keeper.trusted_servers, [key]);
        let settings = flags(&["--trusted-servers", &format!("{key},{key}")]);
        let config = Config::load(settings, Some(&path)).unwrap();
        assert_eq!(config.keeper.trusted_servers, [key, key]);

        let (_dir, path) = file("\ntrusted_servers = [\"keep.example.org\"]\n");
        let error = Config::load(Settings::default(), Some(&path)).unwrap_err();
        assert!(error.message.contains("line 2"), "{error}");
        assert!(error.message.contains("keep.example.org"), "{error}");
        assert!(error.message.contains("sandkeep points key"), "{error}");
    }

    #[test]
    fn sizes_may_be_numbers_or_texts_in_the_file() {
        let (_dir, path) = file("storage_size = 2147483648\nmax_memory = \"3GiB\"\n");
        let config = Config::load(Settings::default(), Some(&path)).unwrap();
        assert_eq!(config.storage_size, Some(Size::gib(2)));
        assert_eq!(config.keeper.limits.most.memory_mib, 3072);
    }
}
