//! The agent as the init of a virtual machine.
//!
//! [`boot`] runs in the initial file system: drivers, network, a proof that timers tick. Then
//! the machine waits, and is written down by the host as it waits. Whoever wants a box gets a
//! copy, which is given its first order: it draws new random numbers, sets its clock, mounts
//! the disk of the box and goes on in it. A box that is restored later with its memory is told
//! the same by [`attend`].

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::mount::{MountFlags, mount, mount_move};
use rustix::process::{chdir, chroot};
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use sandkeep_agent_api::host::LogLevel;
use sandkeep_agent_api::machine::{
    Answer, DISK, DRIVERS, DRIVERS_DIR, GROUP, MORE_DRIVERS, MOST_ORDER, Order, PORT, READY,
};
use sandkeep_netlink as cable;

use tokio::runtime::Handle;

use crate::State;
use crate::gate::Gate;
use crate::{generation, hold, host, rest};

const BOX: &str = "/box";
const NOBODY: Duration = Duration::from_millis(20);
/// A device may take a moment to get its file.
const DEVICE_LOOKS: u32 = 500;
const DEVICE_PAUSE: Duration = Duration::from_millis(2);
/// A machine whose timer does not tick never comes back from it, and is thrown away.
const PROOF: Duration = Duration::from_millis(100);
/// Free memory is reported to the host in pieces of 2^5 pages (128 KiB) and more: of what files leave
/// behind not all is in pieces of 2 MiB, which is what Linux would wait for.
const REPORTED: &str = "/sys/module/page_reporting/parameters/page_reporting_order";
const REPORTED_ORDER: &str = "5";
/// Forget what was read of a disk.
const FORGET: libc::Ioctl = 0x1261;
/// Credits the bytes as entropy, and draws the kernel's key anew from them.
const ADD_ENTROPY: libc::Ioctl = 0x4008_5203;
const RESEED: libc::Ioctl = 0x5207;

/// The serial port to the host.
#[derive(Debug)]
pub(crate) struct Port(File);

/// From the first instruction of this program to the first order, carried out.
pub(crate) fn boot() -> io::Result<(Port, Order)> {
    first_mounts()?;
    load_all(&DRIVERS)?;
    // Where the kernel can do it. It forgets what it was told before the driver was there.
    let _in_large_pieces = fs::write(REPORTED, REPORTED_ORDER);
    // A box without them is a box; what it can not do its programs will say.
    let _not_all = load_all(&MORE_DRIVERS);
    network()?;
    found(DISK)?;
    let mut port = File::options().read(true).write(true).open(found(PORT)?)?;
    std::thread::sleep(PROOF);
    writeln!(port, "{READY} {}", timer_ticks())?;
    let order = next_order(&mut port)?;
    renew(&order)?;
    enter_box()?;
    rustix::system::sethostname(order.hostname.as_bytes())?;
    Ok((Port(port), order))
}

/// Answers the first order, whose last part is done here, and carries out those that come after
/// a restore, on a thread of its own: the port has no end that a runtime could wait for.
pub(crate) fn attend(
    mut port: Port,
    first: &Order,
    gate: Arc<Gate>,
    state: State,
) -> io::Result<()> {
    // Connections are taken from here on: they wait until they are listened to.
    gate.renew(&first.token);
    answer(&mut port.0, first, settle_in(first, &state), &state)?;
    let runtime = Handle::current();
    runtime.spawn(rest::give_back());
    std::thread::Builder::new()
        .name("orders".to_owned())
        .stack_size(64 << 10)
        .spawn(move || {
            // Whoever the box is told to be may have something to do that takes long.
            let _entered = runtime.enter();
            if let Err(error) = listen(port.0, &gate, &state) {
                let message = format!("the host can not tell this box anything any more: {error}");
                state.log().add(LogLevel::Error, message);
            }
        })
        .map(drop)
}

fn listen(mut port: File, gate: &Gate, state: &State) -> io::Result<()> {
    loop {
        let order = next_order(&mut port)?;
        // The token last: who is let in finds everything done. Programs before names: to make
        // new keys one has to be started.
        let own = || renew(&order).and_then(|()| tell_generation(&order));
        let done = state
            .hold()
            .renew(state, own)
            .and_then(|()| settle_in(&order, state));
        if done.is_ok() {
            // What the box is called is the host's to say later, too.
            let _named = rustix::system::sethostname(order.hostname.as_bytes());
            gate.renew(&order.token);
        }
        answer(&mut port, &order, done, state)?;
    }
}

fn tell_generation(order: &Order) -> io::Result<()> {
    let told = order.introduction.as_ref();
    match told.and_then(|told| told.generation.as_ref()) {
        Some(word) => generation::write(word),
        None => Ok(()),
    }
}

/// What only the agent can do, once it runs in its box.
fn settle_in(order: &Order, state: &State) -> io::Result<()> {
    state.set_limits(&order.limits)?;
    match &order.introduction {
        None => Ok(()),
        Some(introduction) => host::apply(state, introduction.clone())
            .map_err(|error| io::Error::other(error.message)),
    }
}

fn answer(port: &mut File, order: &Order, done: io::Result<()>, state: &State) -> io::Result<()> {
    let error = done.err().map(|error| error.to_string());
    if let Some(error) = &error {
        let message = format!("an order of the host was not carried out: {error}");
        state.log().add(LogLevel::Error, message);
    }
    let answer = Answer {
        number: order.number,
        error,
        oom_kills: state.fence().usage().map_or(0, |usage| usage.oom_kills),
        now_us: Some(clock_us()),
    };
    port.write_all(answer.to_line()?.as_bytes())
}

/// The clock of the machine; it stood still with it.
pub(crate) fn set_clock(timestamp_ms: i64) -> io::Result<()> {
    let now = Timespec {
        tv_sec: timestamp_ms.div_euclid(1000),
        tv_nsec: timestamp_ms.rem_euclid(1000) * 1_000_000,
    };
    clock_settime(ClockId::Realtime, now)?;
    Ok(())
}

/// What the clock of the machine says.
pub(crate) fn clock_us() -> i64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec
        .saturating_mul(1_000_000)
        .saturating_add(now.tv_nsec / 1000)
}

/// Moves the clock of the machine, from where it is.
pub(crate) fn move_clock(forward_us: i64) -> io::Result<()> {
    let then = clock_us().saturating_add(forward_us);
    let then = Timespec {
        tv_sec: then.div_euclid(1_000_000),
        tv_nsec: then.rem_euclid(1_000_000) * 1000,
    };
    clock_settime(ClockId::Realtime, then)?;
    Ok(())
}

/// What must not be the same in two copies of a machine: random numbers first of all.
fn renew(order: &Order) -> io::Result<()> {
    let bytes = order
        .entropy_bytes()
        .ok_or_else(|| io::Error::other("the host sent no random bytes"))?;
    add_entropy(&bytes)?;
    set_clock(order.timestamp_ms)
}

fn add_entropy(bytes: &[u8]) -> io::Result<()> {
    let pool = File::options().write(true).open("/dev/urandom")?;
    let number = |value: usize| {
        i32::try_from(value)
            .map(i32::to_ne_bytes)
            .map_err(io::Error::other)
    };
    let mut request = Vec::with_capacity(8 + bytes.len());
    request.extend_from_slice(&number(bytes.len() * 8)?);
    request.extend_from_slice(&number(bytes.len())?);
    request.extend_from_slice(bytes);
    // SAFETY: the kernel reads two numbers and as many bytes as the second one says from
    // `request`, which lives until the call returns.
    let added = unsafe { libc::ioctl(pool.as_raw_fd(), ADD_ENTROPY, request.as_ptr()) };
    if added != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call takes no argument.
    let reseeded = unsafe { libc::ioctl(pool.as_raw_fd(), RESEED) };
    if reseeded != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn first_mounts() -> io::Result<()> {
    for (kind, place) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        fs::create_dir_all(place)?;
        mounted(kind, place, MountFlags::empty(), None)?;
    }
    Ok(())
}

fn mounted(kind: &str, place: &str, flags: MountFlags, data: Option<&str>) -> io::Result<()> {
    let data = data.map(CString::new).transpose()?;
    mount(kind, place, kind, flags, data.as_deref())
        .map_err(|error| io::Error::other(format!("mounting {kind} on {place}: {error}")))
}

/// Drivers need each other, and which needs which is not the same in every kernel.
fn load_all(drivers: &[&str]) -> io::Result<()> {
    let mut left = drivers.to_vec();
    while !left.is_empty() {
        let (before, mut refused) = (left.len(), Ok(()));
        left.retain(|name| {
            let loaded = load(name);
            let again = loaded.is_err();
            if again {
                refused = loaded;
            }
            again
        });
        if left.len() == before {
            return refused;
        }
    }
    Ok(())
}

/// A driver the kernel has built in is not among ours.
fn load(name: &str) -> io::Result<()> {
    let file = match File::open(format!("{DRIVERS_DIR}/{name}.ko")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    // SAFETY: the descriptor is open and the parameters are a terminated empty string.
    let done = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    match io::Error::last_os_error() {
        _ if done == 0 => Ok(()),
        error if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        error => Err(io::Error::other(format!("loading {name}: {error}"))),
    }
}

fn found(device: &str) -> io::Result<&str> {
    for _ in 0..DEVICE_LOOKS {
        if Path::new(device).exists() {
            return Ok(device);
        }
        std::thread::sleep(DEVICE_PAUSE);
    }
    Err(io::Error::other(format!("there is no {device}")))
}

/// The addresses every box has.
fn network() -> io::Result<()> {
    // Addresses that nobody asked for would be spoken to by nobody.
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/default/addr_gen_mode", "1");
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/default/accept_ra", "0");
    let loopback = cable::index_of("lo")?;
    let device = found(&format!("/sys/class/net/{}", cable::BOX_END))
        .and_then(|_| cable::index_of(cable::BOX_END))?;
    cable::configure(loopback, device, &cable::BOX_SIDE)?;
    // Everybody may ping.
    let _refused = fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647");
    Ok(())
}

/// How often the timer of the first CPU has ticked, for the host's notes.
fn timer_ticks() -> u64 {
    fs::read_to_string("/proc/interrupts")
        .unwrap_or_default()
        .lines()
        .find_map(|line| {
            let ticks = line.trim_start().strip_prefix("LOC:")?;
            ticks.split_ascii_whitespace().next()?.parse().ok()
        })
        .unwrap_or(0)
}

/// Waits for an order. QEMU holds the other end of the port open, so there is no end of it.
fn next_order(port: &mut File) -> io::Result<Order> {
    let mut heard = Vec::new();
    loop {
        let mut part = [0; 4096];
        match port.read(&mut part) {
            // Nobody is at the other end: not for long.
            Ok(0) => {
                heard.clear();
                std::thread::sleep(NOBODY);
            }
            Ok(count) => {
                heard.extend_from_slice(&part[..count]);
                if part[..count].contains(&b'\n')
                    && let Some(order) = Order::last_in(&heard)
                {
                    return Ok(order);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if heard.len() > MOST_ORDER {
            heard.clear();
        }
    }
}

/// The machine was booted with another disk in this place.
fn forget_disk() -> io::Result<()> {
    let disk = File::open(DISK)?;
    // SAFETY: the call takes no argument.
    let forgotten = unsafe { libc::ioctl(disk.as_raw_fd(), FORGET, 0) };
    if forgotten == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// Mounts the disk of the box, takes it for the root, and makes what a Linux system expects.
fn enter_box() -> io::Result<()> {
    fs::create_dir_all(BOX)?;
    forget_disk()?;
    mount(DISK, BOX, "ext4", MountFlags::empty(), None)
        .map_err(|error| io::Error::other(format!("mounting the disk: {error}")))?;
    for place in ["dev", "proc", "sys", "run", "tmp"] {
        fs::create_dir_all(Path::new(BOX).join(place))?;
    }
    for place in ["dev", "proc", "sys"] {
        mount_move(format!("/{place}"), format!("{BOX}/{place}"))?;
    }
    fs::remove_dir_all(DRIVERS_DIR)?;
    chdir(BOX)?;
    mount_move(BOX, "/")?;
    chroot(".")?;
    chdir("/")?;
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    let terminals = Some("mode=620,gid=5,ptmxmode=666");
    for place in ["/dev/pts", "/dev/shm", GROUP_MOUNT] {
        fs::create_dir_all(place)?;
    }
    mounted("devpts", "/dev/pts", MountFlags::NOSUID, terminals)?;
    mounted("tmpfs", "/dev/shm", plain, Some("mode=1777"))?;
    mounted("tmpfs", "/run", plain, Some("mode=755"))?;
    fs::create_dir_all("/run/lock")?;
    for (link, to) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        if let Err(error) = std::os::unix::fs::symlink(to, link)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
    }
    join_group()
}

const GROUP_MOUNT: &str = "/sys/fs/cgroup";

/// Everything of the box is in one group, which has its limits. The root of the hierarchy stays
/// free for programs that make groups of their own.
fn join_group() -> io::Result<()> {
    let quiet = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    // Each program is moved into its group when it is started: in this mode, which not every
    // kernel has, that does not wait for all processors.
    mounted("cgroup2", GROUP_MOUNT, quiet, Some("favordynmods"))
        .or_else(|_| mounted("cgroup2", GROUP_MOUNT, quiet, None))?;
    fs::write(
        format!("{GROUP_MOUNT}/cgroup.subtree_control"),
        "+memory +pids",
    )?;
    fs::create_dir(GROUP)?;
    fs::write(format!("{GROUP}/cgroup.procs"), "1")?;
    hold::prepare(GROUP_MOUNT)
}
